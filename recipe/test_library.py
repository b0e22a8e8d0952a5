"""Run in the test environment of libmagi-attention: the kernels load without GPU and driver and were compiled for this CUDA.

Knows neither torch nor the Python part of the package, which are not installed there.

    python test_library.py 12.9
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from pathlib import Path


def main(cuda_version: str) -> int:
    package = Path(sysconfig.get_paths()["platlib"], "magi_attention")
    found = sorted(package.rglob("_ffa.so"))
    if len(found) != 1:
        print(f"error: {len(found)} kernel libraries under {package}, must be one: {found}", file=sys.stderr)
        return 1
    library = ctypes.CDLL(str(found[0]))
    library.magi_ffa_build_info.restype = library.magi_ffa_variants.restype = ctypes.c_char_p
    built = dict(part.split("=", 1) for part in library.magi_ffa_build_info().decode().split())
    variants = library.magi_ffa_variants().decode()
    print(f"{found[0]}: nvcc {built['nvcc']}, {built['arch']}, variants {variants}")
    if built["nvcc"].split(".")[0] != cuda_version.split(".")[0]:
        print(f"error: a package for CUDA {cuda_version} with kernels of nvcc {built['nvcc']}", file=sys.stderr)
        return 1
    return 0 if variants else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
