"""Whether a shared library is all there: the dynamic loader maps a file that was cut off, and the process dies of it when it is read.

Reads the head of the file alone; knows nothing of what is in the library. Layout: System V ABI, chapter 4 (ELF header, program headers).
"""

from __future__ import annotations

import struct
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_LITTLE_64 = b"\x7fELF\x02\x01"


def reason_cut_off(path: Path) -> str:
    """How many bytes of the file are missing, in words; empty when none are, and for a file that no loader here would map.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_LITTLE_64):
            return ""
        _, _, _, _, _, program_at, sections_at, _, _, program_size, num_programs, section_size, num_sections, _ = _HEADER.unpack(head)
        wanted = max(sections_at + section_size * num_sections, program_at + program_size * num_programs)
        file.seek(program_at)
        programs = file.read(program_size * num_programs) if program_size == _PROGRAM_HEADER.size else b""
    for at in range(0, len(programs) - len(programs) % _PROGRAM_HEADER.size, _PROGRAM_HEADER.size):
        _, _, offset, _, _, file_size, _, _ = _PROGRAM_HEADER.unpack_from(programs, at)
        wanted = max(wanted, offset + file_size)
    return f"{path} was cut off: it has {size} of at least {wanted} bytes" if size < wanted else ""
