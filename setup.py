"""Builds the C++ solver (always) and the CUDA kernels (when there is an nvcc). No GPU or torch is needed or looked at.

Options, as `pip install . -C name=value` or as an environment variable:

kernels   MAGI_BUILD_KERNELS   1: no kernels is an error; 0: build none; not set: build them when nvcc is found
variants  MAGI_BUILD_VARIANTS  the variants to build, like "forward:bf16:128:0,backward" (globs; all when not set)
archs     MAGI_BUILD_ARCHS     what the kernels are compiled for; all that they are written for when not set
cuda      MAGI_BUILD_CUDA      CUDA toolkits with colons between: one library for each in _cu12, _cu13, for a wheel for several torches
jobs      MAX_JOBS             compilers that run at once; not set: one per CPU and per 2 GiB of free memory
objects   MAGI_BUILD_OBJECTS   where compiled kernels are kept for the next build (build/kernels when not set)
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "ci"))  # an isolated build does not look beside setup.py

from kernel_build import record  # noqa: E402
from kernel_build.library import Sources, build_library, wanted_sources  # noqa: E402
from kernel_build.machine import jobs_here  # noqa: E402
from kernel_build.options import Options, read_options  # noqa: E402
from kernel_build.toolchain import Toolchain, find_toolchain, has_nvcc, toolchains_of  # noqa: E402
from kernel_build.variants import BuildError  # noqa: E402

PACKAGE = "magi_attention"
KERNEL_FILE = "_ffa.so"

CXX20_PROBE = """
#include <concepts>
#include <span>
template <std::integral T> T first(std::span<const T> values) { return values.empty() ? T{} : values.front(); }
int main() { return first(std::span<const int>{}); }
"""


def solver_sources() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for folder in ("solver", "bindings") for p in (ROOT / "csrc" / folder).glob("*.cpp"))


def say(line: str) -> None:
    print(line, flush=True)


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """What is compiled with which toolkits: file below the package -> toolchain."""

    sources: Sources
    targets: dict[str, Toolchain]


def kernel_work(options: Options) -> KernelWork | None:
    """Looks for everything the kernels need before anything is compiled. Raises BuildError."""
    if options.cuda_homes and options.kernels != "0":
        toolchains = toolchains_of(options.cuda_homes)
        named = {f"_cu{toolchain.major}/{KERNEL_FILE}": toolchain for toolchain in toolchains}
        sources, why = wanted_sources(ROOT, "1", toolchains[0], "")
    else:
        toolchain, why_none = find_toolchain()
        sources, why = wanted_sources(ROOT, options.kernels, toolchain, why_none, is_nvcc_here=has_nvcc())
        named = {KERNEL_FILE: toolchain} if toolchain is not None else {}
    if sources is None:
        say(f"building without CUDA kernels: {why}; bf16 and fp16 attention on GPUs will be refused, on CPUs nothing changes")
        return None
    sources.chosen(options.variants)  # a filter without a match ends here
    return KernelWork(sources, {name: dataclasses.replace(found, archs=options.archs) for name, found in named.items()})


class BuildLibraries(build_ext):
    """Plain shared libraries (C ABI, loaded with ctypes), so their names carry no Python tag."""

    def run(self) -> None:
        try:
            self.options = read_options()
            self.jobs = jobs_here()
            self.work = kernel_work(self.options)
            super().run()
        except BuildError as error:
            raise SystemExit(f"error: {error}") from None

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extensions(self) -> None:
        package = Path(self.build_lib, PACKAGE)
        # What an earlier build left there would go into the wheel.
        for stale in [*package.glob(f"_cu*/{KERNEL_FILE}"), package / KERNEL_FILE, package / record.RECORD_FILE]:
            stale.unlink(missing_ok=True)
        self._require_cxx20()
        self._compile_files_side_by_side()
        super().build_extensions()
        solver = Path(self.get_ext_fullpath(f"{PACKAGE}._solver"))
        libraries = {solver.name: record.entry(solver, compiler=self._compiler_name()), **self._build_kernels(package)}
        version = str(self.distribution.get_version())
        record.write(
            package,
            {"version": version, "revision": record.revision(ROOT, version), "origin": "source", "torch": None, "libraries": libraries},
        )

    def _build_kernels(self, package: Path) -> dict[str, dict[str, Any]]:
        """File below the package -> its entry in the record."""
        made = {}
        for name, toolchain in self.work.targets.items() if self.work is not None else ():
            assert self.work is not None
            library = build_library(self.work.sources, toolchain, self.options.variants, say)
            if library.faults:
                faults = "\n  ".join(library.faults)
                raise SystemExit(
                    f"these kernels are not fit to be installed:\n  {faults}\nanother nvcc may do better (the release is built with 13.0); "
                    "MAGI_BUILD_VARIANTS leaves variants out, MAGI_BUILD_KERNELS=0 all of them"
                )
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library.path, package / name)
            made[name] = library.record
        return made

    def copy_extensions_to_source(self) -> None:
        """For an in-place or editable build; without kernels, those of an earlier build stay."""
        super().copy_extensions_to_source()
        source = Path(self.get_finalized_command("build_py").get_package_dir(PACKAGE))
        for name in [*(self.work.targets if self.work is not None else ()), record.RECORD_FILE]:
            (source / name).parent.mkdir(exist_ok=True)
            part = (source / name).with_suffix(".part")
            shutil.copy2(Path(self.build_lib, PACKAGE, name), part)
            part.replace(source / name)  # a running process keeps the old file

    def _compiler_name(self) -> str:
        try:
            done = subprocess.run([self.compiler.compiler_cxx[0], "--version"], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError, AttributeError, IndexError):
            return "unknown"
        return done.stdout.splitlines()[0]

    def _require_cxx20(self) -> None:
        """One sentence instead of a page of compiler errors."""
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe.cpp")
            probe.write_text(CXX20_PROBE)
            try:
                self.compiler.compile([str(probe)], output_dir=folder, extra_postargs=["-std=c++20"])
            except Exception as error:  # a missing program and a refused flag raise different types in each setuptools
                found = error if isinstance(error, OSError) else "the one found cannot compile the probe, see above"
                raise SystemExit(
                    "magi-attention needs a C++20 compiler to build its planner: install g++ 11 or newer "
                    f"(Debian/Ubuntu: apt-get install g++) or set CXX to one, then install again [{found}]"
                ) from None

    def _compile_files_side_by_side(self) -> None:
        """setuptools compiles the files of one extension one after another; they are independent."""
        compile_in_order = self.compiler.compile

        def compile_all(sources: list[str], *args: object, **options: object) -> list[str]:
            say(f"g++: {len(sources)} files to compile, {self.jobs}, about half a minute")
            with ThreadPoolExecutor(self.jobs.count) as pool:
                return [name for names in pool.map(lambda source: compile_in_order([source], *args, **options), sources) for name in names]

        self.compiler.compile = compile_all


class PlainWheel(bdist_wheel):
    """One wheel per platform serves every Python: the library has no Python symbol."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"{PACKAGE}._solver",
            sources=solver_sources(),
            depends=sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h")),
            include_dirs=["csrc"],
            language="c++",
            # -ffp-contract=off: cost-model doubles must round the same on every machine, every rank plans alone.
            extra_compile_args=["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-ffp-contract=off"],
            # Hidden visibility leaves the templates of libstdc++ visible; the version script leaves only our C interface.
            extra_link_args=["-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic", "-Wl,--version-script=csrc/bindings/exports.map"],
        )
    ],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlainWheel},
)
