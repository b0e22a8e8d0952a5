"""Builds the C++ solver (always). No GPU, torch or CUDA is needed or looked at."""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent


def solver_sources() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for folder in ("solver", "bindings") for p in (ROOT / "csrc" / folder).glob("*.cpp"))


class BuildSolver(build_ext):
    """A plain shared library (C ABI, loaded with ctypes), so its name carries no Python tag."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class PlainWheel(bdist_wheel):
    """One wheel per platform serves every Python: the library has no Python symbol."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "magi_attention._solver",
            sources=solver_sources(),
            depends=[str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h")],
            include_dirs=["csrc"],
            language="c++",
            # -ffp-contract=off: cost-model doubles must round the same on every machine, every rank plans alone.
            extra_compile_args=["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-ffp-contract=off"],
            extra_link_args=["-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic"],
        )
    ],
    cmdclass={"build_ext": BuildSolver, "bdist_wheel": PlainWheel},
)
