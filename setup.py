"""Builds the C++ solver (always) and the CUDA kernels (when there is an nvcc). No GPU or torch is needed or looked at.

MAGI_BUILD_KERNELS     1: no kernels is an error; 0: build none; not set: build them when nvcc is found
MAGI_BUILD_VARIANTS    the variants to build, like "forward:bf16:128:0,backward" (globs; all when not set)
MAX_JOBS               compilers that run at once
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "ci"))  # an isolated build does not look beside setup.py

from kernel_build.library import build_library, wanted_sources  # noqa: E402
from kernel_build.toolchain import find_toolchain, require_toolchain  # noqa: E402
from kernel_build.variants import BuildError  # noqa: E402

KERNELS = "magi_attention._ffa"

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


class BuildLibraries(build_ext):
    """Plain shared libraries (C ABI, loaded with ctypes), so their names carry no Python tag."""

    def run(self) -> None:
        try:
            self.kernels, why = wanted_sources(ROOT, os.environ.get("MAGI_BUILD_KERNELS", ""), *find_toolchain())
        except BuildError as error:
            raise SystemExit(f"error: {error}") from None
        if self.kernels is None:
            say(f"building without CUDA kernels: {why}; bf16 and fp16 attention on GPUs will be refused, on CPUs nothing changes")
            self.extensions = [ext for ext in self.extensions if ext.name != KERNELS]
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extensions(self) -> None:
        # What an earlier build left there would go into the wheel.
        Path(self.get_ext_fullpath(KERNELS)).unlink(missing_ok=True)
        self._require_cxx20()
        self._compile_files_side_by_side()
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        if ext.name != KERNELS:
            super().build_extension(ext)
            return
        assert self.kernels is not None
        try:
            library = build_library(self.kernels, require_toolchain(), os.environ.get("MAGI_BUILD_VARIANTS", ""), say)
        except BuildError as error:
            raise SystemExit(f"error: {error}") from None
        if library.faults:
            faults = "\n  ".join(library.faults)
            raise SystemExit(
                f"these kernels are not fit to be installed:\n  {faults}\nanother nvcc may do better (the release is built with 13.0); "
                "MAGI_BUILD_VARIANTS leaves variants out, MAGI_BUILD_KERNELS=0 all of them"
            )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library.path, target)

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
            with ThreadPoolExecutor() as pool:
                return [name for names in pool.map(lambda source: compile_in_order([source], *args, **options), sources) for name in names]

        self.compiler.compile = compile_all


class PlainWheel(bdist_wheel):
    """One wheel per platform serves every Python: the library has no Python symbol."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "magi_attention._solver",
            sources=solver_sources(),
            depends=sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h")),
            include_dirs=["csrc"],
            language="c++",
            # -ffp-contract=off: cost-model doubles must round the same on every machine, every rank plans alone.
            extra_compile_args=["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-ffp-contract=off"],
            extra_link_args=["-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic"],
        ),
        Extension(KERNELS, sources=[]),  # BuildLibraries finds its sources
    ],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlainWheel},
)
