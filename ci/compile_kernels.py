"""Compiles the attention kernels, or some of them, without installing anything: `make kernels ARGS='*:bf16:128:0'`.

Prints registers, spills and shared memory per kernel; exit code 1 when a kernel spills or ptxas gave up on its pipeline.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
from pathlib import Path

from kernel_build import record
from kernel_build.library import Library, build_library, find_sources
from kernel_build.options import read_options
from kernel_build.toolchain import find_toolchain, require_toolchain
from kernel_build.variants import BuildError

ROOT = Path(__file__).resolve().parents[1]


def compile_kernels(root: Path, patterns: str) -> Library:
    sources = find_sources(root)
    if sources is None:
        raise BuildError("csrc/attention/launch.cu is not there, so there is nothing to compile")
    toolchain = dataclasses.replace(require_toolchain(), archs=read_options().archs)
    return build_library(sources, toolchain, patterns, print)


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    from_environment = os.environ.get("MAGI_BUILD_VARIANTS", "")
    parser.add_argument(
        "filter",
        nargs="?",
        default=from_environment,
        help="variants like forward:bf16:128:0, with globs, separated by commas (default: MAGI_BUILD_VARIANTS, or all)",
    )
    parser.add_argument("--inplace", action="store_true", help="also put the library into magi_attention/, where this tree finds it")
    parser.add_argument("--allow-faults", action="store_true", help="print spills and lost pipelines, but fail nothing")
    parser.add_argument("--if-nvcc", action="store_true", help="without an nvcc, say so and succeed")
    args = parser.parse_args(arguments)
    toolchain, why = find_toolchain()
    if args.if_nvcc and toolchain is None:
        print(f"kernels are not compiled: {why}")
        return 0
    try:
        library = compile_kernels(root, args.filter)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for fault in library.faults:
        print(f"fault: {fault}", file=sys.stderr)
    if library.faults and not args.allow_faults:
        return 1
    if args.inplace:
        target = root / "magi_attention" / library.path.name
        # A running process keeps the old file: replaced, not overwritten.
        part = target.with_suffix(".part")
        shutil.copy2(library.path, part)
        part.replace(target)
        record.replace_library(target.parent, target.name, library.record)
        print(f"copied to {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
