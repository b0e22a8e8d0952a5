"""What a shared library needs and gives, read from its file. Loads nothing and judges nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection

# Elf64_Sym: name offset, info (binding in the high half), other, section index, value, size.
SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")])
WEAK = 2
HIDDEN_BIT = 0x8000


@dataclass(frozen=True)
class Needed:
    """An undefined symbol. `version` and `library` are empty when the linker recorded none."""

    name: str
    version: str
    library: str
    is_weak: bool


@dataclass(frozen=True)
class Library:
    """One ELF file.

    Attributes:
        soname, libraries: its own name and those it asks the loader for.
        machine: like "x64" or "AArch64".
        needed, defined: undefined symbols, and the names of those it gives to others.
        versions: (library, version) pairs it cannot be loaded without, like ("libc.so.6", "GLIBC_2.28").
    """

    soname: str
    machine: str
    libraries: tuple[str, ...]
    needed: tuple[Needed, ...]
    defined: frozenset[str]
    versions: tuple[tuple[str, str], ...]


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _version_names(elf: ELFFile) -> dict[int, tuple[str, str]]:
    """Index of .gnu.version -> (version, library); the library is empty for versions the file itself defines."""
    names: dict[int, tuple[str, str]] = {}
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for library, versions in section.iter_versions():
                names |= {version["vna_other"]: (version.name, library.name) for version in versions}
        elif isinstance(section, GNUVerDefSection):
            for definition, auxiliaries in section.iter_versions():
                names[definition["vd_ndx"]] = (next(iter(auxiliaries)).name, "")
    return names


def read(path: Path) -> Library:
    """The file's dynamic tables. Symbols are taken as arrays: torch's libraries have hundreds of thousands."""
    with path.open("rb") as stream:
        elf = ELFFile(stream)
        dynamic = next(section for section in elf.iter_sections() if isinstance(section, DynamicSection))
        tags = list(dynamic.iter_tags())
        names = _version_names(elf)
        table = elf.get_section_by_name(".dynstr").data()
        symbols = np.frombuffer(elf.get_section_by_name(".dynsym").data(), SYMBOL)[1:]
        recorded = elf.get_section_by_name(".gnu.version")
        indices = np.frombuffer(recorded.data(), "<u2")[1:] if recorded is not None else np.zeros(len(symbols), "<u2")
        is_undefined = symbols["section"] == 0
        needed = tuple(
            Needed(_text(table, symbol["name"]), *names.get(int(index) & ~HIDDEN_BIT, ("", "")), symbol["info"] >> 4 == WEAK)
            for symbol, index in zip(symbols[is_undefined], indices[is_undefined], strict=True)
        )
        return Library(
            soname=next((tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"), path.name),
            machine=elf.get_machine_arch(),
            libraries=tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
            needed=needed,
            defined=frozenset(_text(table, offset) for offset in symbols["name"][~is_undefined]),
            versions=tuple(sorted((library, version) for version, library in names.values() if library)),
        )
