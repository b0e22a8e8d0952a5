"""From csrc/attention to one library: which sources there are, the generated headers, objects, link, report.

Knows neither setuptools nor where the library is installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_build import record, report
from kernel_build.objects import Built, Say, Unit, compile_all, one_build_at_a_time
from kernel_build.toolchain import Toolchain
from kernel_build.variants import DIRECTIONS, BuildError, Variant, parse_list, select

# What the C library and g++ bring. Anything else (libcuda, libcudart, torch, Python) would tie the library to a machine.
MAY_NEED = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
EXPORT_PREFIX = "magi_ffa_"


@dataclass(frozen=True)
class Sources:
    """The kernel sources of a tree.

    Attributes:
        root: the tree; csrc/ and build/ are in it.
        variants: all of the list.
        plain: files compiled once.
    """

    root: Path
    variants: tuple[Variant, ...]
    plain: tuple[Path, ...]

    @property
    def work_folder(self) -> Path:
        """Objects outlive the tree where MAGI_BUILD_OBJECTS names a folder: a wheel is built from a copy."""
        return Path(os.environ.get("MAGI_BUILD_OBJECTS") or self.root / "build" / "kernels")

    def variant_file(self, direction: str) -> Path:
        return variant_source(self.root, direction)

    def chosen(self, patterns: str) -> tuple[Variant, ...]:
        """Variants that match and whose source is there. Raises BuildError when the filter matches nothing of the list."""
        return tuple(variant for variant in select(self.variants, patterns) if self.variant_file(variant.direction).is_file())


@dataclass(frozen=True)
class Library:
    """A linked library and what the compiler said about its kernels."""

    path: Path
    variants: tuple[Variant, ...]
    reports: dict[str, report.ObjectReport]
    num_compiled: int
    toolchain: Toolchain

    @property
    def record(self) -> dict[str, Any]:
        """What _build.json says about it."""
        return record.kernel_entry(self.path, self.toolchain, self.variants)

    @property
    def faults(self) -> list[str]:
        return report.faults(self.reports)


def variant_source(root: Path, direction: str) -> Path:
    return root / "csrc" / "attention" / "sm90" / f"{direction}_variant.cu"


def find_sources(root: Path) -> Sources | None:
    """None when the tree has no launch.cu, the file that exports the kernels."""
    folder = root / "csrc" / "attention"
    if not (folder / "launch.cu").is_file():
        return None
    listed = parse_list((folder / "variants.txt").read_text(), "csrc/attention/variants.txt")
    per_variant = {variant_source(root, direction) for direction in DIRECTIONS}
    return Sources(root, listed, tuple(sorted(set(folder.rglob("*.cu")) - per_variant)))


def wanted_sources(
    root: Path, wish: str, toolchain: Toolchain | None, why_none: str, *, is_nvcc_here: bool = False
) -> tuple[Sources | None, str]:
    """What an installation builds: (sources, "") or (None, why no kernels are built).

    Args:
        wish: MAGI_BUILD_KERNELS: "" takes kernels where they can be built, "0" none, "1" makes their absence an error.
        toolchain, why_none: what find_toolchain() gave.
        is_nvcc_here: there is one, so its unfitness is an error: whoever has nvcc expects kernels.

    Raises:
        BuildError: "1" where kernels cannot be built, or an nvcc that is too old.
    """
    if wish == "0":
        return None, "MAGI_BUILD_KERNELS=0"
    sources = find_sources(root)
    if wish == "" and is_nvcc_here and toolchain is None:
        raise BuildError(f"{why_none}; point CUDA_HOME at a newer CUDA toolkit, or set MAGI_BUILD_KERNELS=0 to install without kernels")
    why = "this source tree has no csrc/attention/launch.cu" if sources is None else "" if toolchain else why_none
    if why and wish == "1":
        raise BuildError(f"MAGI_BUILD_KERNELS=1, but the CUDA kernels cannot be built: {why}")
    return (None, why) if why else (sources, "")


def build_library(sources: Sources, toolchain: Toolchain, patterns: str, say: Say) -> Library:
    """Compile and link the variants that match `patterns`, and print the resource table.

    Every set of variants has its folder, build/kernels/<key>, with its generated headers and its _ffa.so; objects are shared.

    Raises:
        BuildError: a filter without a match, a source that does not compile or link. Faults of the report are the caller's to judge.
    """
    variants = sources.chosen(patterns)
    absent = [direction for direction in DIRECTIONS if not sources.variant_file(direction).is_file()]
    if absent:
        say(f"no {' and no '.join(absent)} kernels: {', '.join(sources.variant_file(direction).name for direction in absent)} is not there")
    headers = _generated_headers(variants, toolchain)
    folder = sources.work_folder / hashlib.sha256(repr(headers).encode()).hexdigest()[:12]
    with one_build_at_a_time(sources.work_folder, say):
        objects = _compile_objects(sources, variants, folder, headers, toolchain, say)
        library = folder / "_ffa.so"
        _link([built.path for built in objects.values()], library, toolchain)
        _check_binary(library)
        reports = {label: _report_of(label, built) for label, built in objects.items()}
        report.write_csv(reports, _csv_of(sources.root))
    say(report.table(reports))
    num_compiled = sum(not built.was_cached for built in objects.values())
    archs = ", ".join(toolchain.archs)
    say(f"{library}: {len(variants)} variants for {archs}; {num_compiled} objects compiled, {len(objects) - num_compiled} from the cache")
    return Library(library, variants, reports, num_compiled, toolchain)


def _csv_of(root: Path) -> Path:
    folder = root / "build"
    folder.mkdir(exist_ok=True)
    return folder / "kernel_report.csv"


def _compile_objects(
    sources: Sources, variants: Sequence[Variant], folder: Path, headers: dict[str, str], toolchain: Toolchain, say: Say
) -> dict[str, Built]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in headers.items():
        (folder / name).write_text(text)
    units = [Unit(v.file_name, str(v), sources.variant_file(v.direction), v.defines) for v in variants]
    labels = {path: path.relative_to(sources.root / "csrc") for path in sources.plain}
    units += [Unit("_".join(label.with_suffix("").parts), label.as_posix(), path) for path, label in labels.items()]
    return compile_all(tuple(units), (sources.root / "csrc", folder), sources.work_folder / "objects", toolchain, say)


def _report_of(label: str, built: Built) -> report.ObjectReport:
    told = report.parse(label, built.log, built.seconds)
    return report.with_dynamic_shared(told, _tool("nm", "-C", str(built.path))) if told.kernels else told


def _generated_headers(variants: Sequence[Variant], toolchain: Toolchain) -> dict[str, str]:
    """magi_variants.inc, one X-macro line per variant; magi_build.inc, what the library says about itself."""
    archs = ",".join(toolchain.archs)
    lines = [f"MAGI_VARIANT({v.direction}, {v.dtype}, {v.head_dim}, {v.softcap})" for v in variants]
    return {
        "magi_variants.inc": "\n".join(["// Written by the build: the variants that are compiled.", *lines, ""]),
        "magi_build.inc": f'// Written by the build.\n#define MAGI_BUILD_ARCH "{archs}"\n#define MAGI_BUILD_NVCC "{toolchain.version}"\n',
    }


def _link(objects: list[Path], library: Path, toolchain: Toolchain) -> None:
    part = library.with_suffix(".part.so")
    # Hidden visibility leaves the templates of libstdc++ visible; this leaves only ours.
    exports = library.with_name("exports.map")
    exports.write_text(f"{{ global: {EXPORT_PREFIX}*; local: *; }};\n")
    # Named as the linker, run in its folder, finds it: nvcc splits what follows -Xlinker= at blanks, which a path may have.
    script = f"-Xlinker=--version-script={exports.name}"
    command = [toolchain.nvcc, *toolchain.link_flags, script, *(str(path.resolve()) for path in objects), "-o", part.name]
    done = subprocess.run(command, cwd=library.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        part.unlink(missing_ok=True)
        raise BuildError(f"the kernels do not link:\n{' '.join(command)}\n{(done.stdout + done.stderr)[-4000:].rstrip()}")
    part.replace(library)


def _check_binary(library: Path) -> None:
    """The promise of the link flags, looked at in the file: nothing needed but libc and libstdc++, nothing shown but our C ABI."""
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", _tool("readelf", "-dW", str(library)))
    foreign = [name for name in needed if not MAY_NEED.fullmatch(name)]
    if foreign:
        raise BuildError(f"{library} needs {', '.join(foreign)}; kernels may call the CUDA runtime only, which is linked statically")
    exported = [line.split()[-1] for line in _tool("nm", "-D", "--defined-only", str(library)).splitlines() if line.strip()]
    stray = [name for name in exported if not name.startswith(EXPORT_PREFIX)]
    if stray:
        raise BuildError(f"{library} exports {', '.join(stray[:5])}; only {EXPORT_PREFIX}* may be visible (MAGI_EXPORT)")


def _tool(*command: str) -> str:
    """Output of a binutils program; g++ cannot be installed without them."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
