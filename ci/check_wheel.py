"""Looks at an installed wheel, without a GPU: the package imports, and the CUDA kernels in it are those the build was asked for.

Run with the Python of the clean environment, from a folder without sources; knows the build only through ci/kernel_build.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kernel_build.library import wanted_sources
from kernel_build.toolchain import find_toolchain

import magi_attention
from magi_attention import _ffa_library

ROOT = Path(__file__).resolve().parents[1]


def wanted_variants() -> tuple[tuple[str, ...], str]:
    """(names in the order of the list, "") or ((), why there are none)."""
    sources, why = wanted_sources(ROOT, os.environ.get("MAGI_BUILD_KERNELS", ""), *find_toolchain())
    if sources is None:
        return (), why
    return tuple(map(str, sources.chosen(os.environ.get("MAGI_BUILD_VARIANTS", "")))), ""


def main() -> int:
    folder = Path(magi_attention.__path__[0])
    print("imported", magi_attention.__version__, "from", folder)
    if "site-packages" not in folder.parts:
        print("error: this is a source tree, not an installed wheel", file=sys.stderr)
        return 1
    wanted, why = wanted_variants()
    found = _ffa_library.compiled_variants()
    if found != wanted:
        print(f"error: the wheel has the variants {found}, the build was for {wanted}; {_ffa_library.load_error()}", file=sys.stderr)
        return 1
    print(f"compiled kernels: {', '.join(found)}; {_ffa_library.build_info()}" if found else f"no compiled kernels: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
