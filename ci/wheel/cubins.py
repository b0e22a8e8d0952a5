"""Lists the GPU programs inside a shared library: architecture and kernels of each cubin. Needs no CUDA tool and no GPU.

The format is nvcc's fatbin container: headers of 16 bytes, each followed by entries of a header and a payload (cubins are ELF files).
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
KERNEL_SECTION = ".text."
# The letter behind the number: a bit in the flags of the entry's header, the same from CUDA 12 to 13.
LETTERS = {1 << 20: "a", 1 << 21: "f"}


class CubinError(Exception):
    """The library cannot be read; the text is one sentence."""


@dataclass(frozen=True)
class GpuProgram:
    """One entry of a fatbin. `arch` is like "sm_90a"; PTX has "compute_90" and no kernels listed."""

    arch: str
    kernels: tuple[str, ...]
    num_bytes: int


def gpu_programs(library: Path) -> list[GpuProgram]:
    """Every entry in the order of the file. Raises CubinError for a compressed cubin, which only cuobjdump can read."""
    with library.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".nv_fatbin")
        data = section.data() if section is not None else b""
    found, at = [], 0
    while at + 16 <= len(data):
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8  # padding between containers
            continue
        found += _entries(data[at + header : at + header + size], library)
        at += header + size
    return found


def _entries(data: bytes, library: Path) -> list[GpuProgram]:
    found, at = [], 0
    while at + 32 <= len(data):
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        number, flags = struct.unpack_from("<I", data, at + 28)[0], struct.unpack_from("<Q", data, at + 40)[0]
        name = f"{number}{''.join(letter for bit, letter in LETTERS.items() if flags & bit)}"
        payload = data[at + header : at + header + size]
        if kind == PTX:
            found.append(GpuProgram(f"compute_{name}", (), size))
        elif kind == CUBIN:
            found.append(_cubin(payload, f"sm_{name}", library))
        at += header + size
    return found


def _cubin(payload: bytes, arch: str, library: Path) -> GpuProgram:
    try:
        elf = ELFFile(io.BytesIO(payload))
    except ELFError:
        raise CubinError(f"{library} has a compressed cubin for {arch}: build with nvcc --no-compress, or ask cuobjdump") from None
    kernels = tuple(section.name[len(KERNEL_SECTION) :] for section in elf.iter_sections() if section.name.startswith(KERNEL_SECTION))
    return GpuProgram(arch, kernels, len(payload))


def embedded_archs(programs: list[GpuProgram]) -> tuple[str, ...]:
    """Like ("sm_90a",); with "compute_90" where there is PTX."""
    return tuple(sorted({program.arch for program in programs}))
