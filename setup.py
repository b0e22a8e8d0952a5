"""Builds the C++ solver (always). No GPU, torch or CUDA is needed or looked at."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent

CXX20_PROBE = """
#include <concepts>
#include <span>
template <std::integral T> T first(std::span<const T> values) { return values.empty() ? T{} : values.front(); }
int main() { return first(std::span<const int>{}); }
"""


def solver_sources() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for folder in ("solver", "bindings") for p in (ROOT / "csrc" / folder).glob("*.cpp"))


class BuildSolver(build_ext):
    """A plain shared library (C ABI, loaded with ctypes), so its name carries no Python tag."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extensions(self) -> None:
        self._require_cxx20()
        self._compile_files_side_by_side()
        super().build_extensions()

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
        )
    ],
    cmdclass={"build_ext": BuildSolver, "bdist_wheel": PlainWheel},
)
