"""Says what is in a wheel and whether it is fit to be published: python ci/wheel/inspect_wheel.py WHEEL...

Looked at in the files themselves: the glibc and libstdc++ symbols they need, what they link and export, the GPU programs inside against the
list of variants and against what ci/matrix.yaml advertises, RECORD, metadata and size. Runs nothing from the wheel; needs no GPU.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cubins import CubinError, GpuProgram, embedded_archs, gpu_programs
from elftools.elf.elffile import ELFFile
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from wheel_archive import Wheel, WheelError, read_wheel, wrong_hashes

ROOT = Path(__file__).resolve().parents[2]
# manylinux_2_28 (PEP 600 and auditwheel's policy): the newest symbols that every system of that age has.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
MAY_NEED = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
EXPORTS = "magi_"
MIB = 1 << 20
# One library of all variants is 8 MiB; a wheel that outgrows these wants a look before its users download it.
MAX_LIBRARY_MIB, MAX_WHEEL_MIB = 16, 24
KERNEL_NAME = re.compile(r"\d+(forward|backward)_kernelI\w*?TraitsI(?:\d+)(__nv_bfloat16|__half)Li(\d+)ELb([01])")
DTYPES = {"__nv_bfloat16": "bf16", "__half": "fp16"}


@dataclass(frozen=True)
class Inspected:
    """What was seen and what is wrong with it; both in lines for people."""

    lines: list[str]
    faults: list[str]


def variants_in(programs: list[GpuProgram]) -> set[str]:
    """Names like "forward:bf16:128:0" that have a kernel for them among the GPU programs."""
    found = (KERNEL_NAME.search(kernel) for program in programs for kernel in program.kernels)
    return {f"{name[1]}:{DTYPES[name[2]]}:{name[3]}:{name[4]}" for name in found if name}


def inspect(path: Path, advertised: dict[str, list[str]], variants: set[str]) -> Inspected:
    """Args: advertised: CUDA major -> architectures. variants: the names the wheel must have in each of its kernel libraries."""
    wheel = read_wheel(path)
    build = json.loads(wheel.text("magi_attention/_build.json"))
    size = path.stat().st_size / MIB
    lines = [f"{path.name}: {size:.1f} MiB of at most {MAX_WHEEL_MIB}, for torch {build['torch'] or 'of any supported version'}"]
    faults = [f"{name} and RECORD do not agree" for name in wrong_hashes(path)]
    faults += _metadata_faults(wheel, build)
    if size > MAX_WHEEL_MIB:
        faults.append(f"{size:.1f} MiB is over the budget of {MAX_WHEEL_MIB} MiB")
    libraries = sorted(name for name in wheel.members if name.endswith(".so"))
    if sorted(f"magi_attention/{name}" for name in build["libraries"]) != libraries:
        faults.append(f"_build.json lists {sorted(build['libraries'])}, the wheel has {libraries}")
    for name in libraries:
        seen = _inspect_library(name, wheel.members[name][0], build["libraries"].get(name.partition("/")[2], {}), advertised, variants)
        lines += seen.lines
        faults += [f"{name}: {fault}" for fault in seen.faults]
    return Inspected(lines, faults)


def _metadata_faults(wheel: Wheel, build: dict[str, Any]) -> list[str]:
    faults = []
    if build["version"] != str(wheel.version):
        faults.append(f"_build.json is of version {build['version']}")
    if build["origin"] != "release":
        faults.append(f"its origin is {build['origin']!r}, so it would take any torch; ci/wheels.sh makes published wheels")
    torches = [Requirement(text) for text in wheel.requirements() if canonicalize_name(Requirement(text).name) == "torch"]
    pins = [str(requirement.specifier) for requirement in torches]
    pin = build["torch"]
    wanted = None if pin is None else f"=={pin}" if "+" in pin else f"=={pin}.*"
    if len(pins) != 1 or (wanted is not None and pins != [wanted]) or (wanted is None and "==" in pins[0]):
        faults.append(f"it requires torch {pins}, and its record says {pin}")
    if not any(name.startswith(f"{wheel.dist_info}/") and "LICENSE" in name for name in wheel.members):
        faults.append("it has no LICENSE")
    if not wheel.tags.startswith("py3-none-manylinux"):
        faults.append(f"its tag {wheel.tags} is no manylinux tag")
    return faults


def _inspect_library(name: str, content: bytes, entry: dict[str, Any], advertised: dict[str, list[str]], variants: set[str]) -> Inspected:
    elf = ELFFile(io.BytesIO(content))
    needs, linked, exported = symbol_versions(elf), linked_libraries(elf), exported_names(elf)
    size = len(content) / MIB
    told = ", ".join(f"{family} {'.'.join(map(str, version))}" for family, version in sorted(needs.items()))
    lines = [f"  {name}: {size:.1f} MiB, needs {told}"]
    faults = [f"needs {family}_{'.'.join(map(str, needs[family]))}" for family, newest in NEWEST.items() if needs.get(family, ()) > newest]
    faults += [f"links {library}" for library in linked if not MAY_NEED.fullmatch(library)]
    faults += [f"exports {symbol}" for symbol in exported if not symbol.startswith(EXPORTS)][:3]
    if size > MAX_LIBRARY_MIB:
        faults.append(f"{size:.1f} MiB is over the budget of {MAX_LIBRARY_MIB} MiB")
    if ".".join(map(str, needs.get("GLIBC", (2, 2, 5)))) != entry.get("glibc"):
        faults.append(f"_build.json says glibc {entry.get('glibc')}")
    if "cuda" in entry:
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(content)
            file.flush()
            seen = _inspect_programs(Path(file.name), entry, advertised, variants)
        lines += seen.lines
        faults += seen.faults
    return Inspected(lines, faults)


def _inspect_programs(library: Path, entry: dict[str, Any], advertised: dict[str, list[str]], variants: set[str]) -> Inspected:
    """Case I09: exactly what is advertised is inside, for each architecture, and no head dimension is missing."""
    try:
        programs = gpu_programs(library)
    except CubinError as error:
        return Inspected([], [str(error)])
    archs = embedded_archs(programs)
    found = variants_in(programs)
    kernels = sum(len(program.kernels) for program in programs)
    kibibytes = sum(program.num_bytes for program in programs) // 1024
    assembler = f" with ptxas {entry['ptxas']}" if "ptxas" in entry else ""
    compiler = f"nvcc {entry['cuda']}{assembler}"
    lines = [
        f"    {compiler}: {len(programs)} GPU programs for {', '.join(archs)}, {kernels} kernels, {len(found)} variants, {kibibytes} KiB"
    ]
    wanted = advertised.get(entry["cuda"].split(".")[0], [])
    faults = []
    if list(archs) != sorted(wanted):
        faults.append(f"has code for {', '.join(archs) or 'nothing'}, and {', '.join(wanted) or 'nothing'} is advertised")
    if sorted(archs) != sorted(entry["archs"]):
        faults.append(f"_build.json says {', '.join(entry['archs'])}, the code inside is for {', '.join(archs)}")
    for arch in archs:
        here = variants_in([program for program in programs if program.arch == arch])
        if missing := sorted(variants - here):
            faults.append(f"{arch} lacks {', '.join(missing)}")
        if extra := sorted(here - variants):
            faults.append(f"{arch} has {', '.join(extra)}, which nobody asked for")
    if sorted(entry["variants"]) != sorted(found):
        faults.append(f"_build.json lists {len(entry['variants'])} variants, the code inside has {len(found)}")
    return Inspected(lines, faults)


def symbol_versions(elf: ELFFile) -> dict[str, tuple[int, ...]]:
    """The newest version of each symbol family that must be here: {"GLIBC": (2, 17), ...}."""
    newest: dict[str, tuple[int, ...]] = {}
    section = elf.get_section_by_name(".gnu.version_r")
    for _, needed in section.iter_versions() if section is not None else ():
        for version in needed:
            family, _, number = version.name.rpartition("_")
            if re.fullmatch(r"[\d.]+", number):
                newest[family] = max(newest.get(family, ()), tuple(map(int, number.split("."))))
    return newest


def linked_libraries(elf: ELFFile) -> list[str]:
    section = elf.get_section_by_name(".dynamic")
    return [tag.needed for tag in section.iter_tags() if tag.entry.d_tag == "DT_NEEDED"] if section is not None else []


def exported_names(elf: ELFFile) -> list[str]:
    section = elf.get_section_by_name(".dynsym")
    symbols = section.iter_symbols() if section is not None else ()
    return [s.name for s in symbols if s["st_shndx"] not in ("SHN_UNDEF", "SHN_ABS") and s["st_info"]["bind"] != "STB_LOCAL" and s.name]


def wanted_variants(patterns: str) -> set[str]:
    sys.path.insert(0, str(ROOT / "ci"))
    from kernel_build.library import find_sources

    sources = find_sources(ROOT)
    return set() if sources is None else set(map(str, sources.chosen(patterns)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--variants", default="", help="the filter that the wheels were built with (all variants by default)")
    args = parser.parse_args(arguments)
    matrix = yaml.safe_load((ROOT / "ci" / "matrix.yaml").read_text())
    advertised = {str(major): list(kernels["archs"]) for major, kernels in matrix["kernels"].items()}
    num_faults = 0
    for path in args.wheels:
        try:
            seen = inspect(path, advertised, wanted_variants(args.variants))
        except (WheelError, OSError, KeyError, ValueError) as error:
            seen = Inspected([], [f"cannot be read: {error}"])
        print("\n".join(seen.lines))
        for fault in seen.faults:
            print(f"fault: {path.name}: {fault}", file=sys.stderr)
        num_faults += len(seen.faults)
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
