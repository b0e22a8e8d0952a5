"""Looks at an installed wheel, without a GPU: it imports, it is quick, its kernels are those the build was asked for, its record is true.

Run with the Python of the clean environment, from a folder without sources; knows the build only through ci/kernel_build.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kernel_build.library import wanted_sources
from kernel_build.options import read_options
from kernel_build.record import symbol_versions
from kernel_build.toolchain import find_toolchain

import magi_attention

ROOT = Path(__file__).resolve().parents[1]
MAX_IMPORT_SECONDS = 1.5  # beyond torch
TIMED_IMPORT = """
import time, torch
start = time.perf_counter()
import magi_attention.api
print(time.perf_counter() - start)
"""


def wanted_variants() -> tuple[list[str], str]:
    """(names in the order of the list, "") or ([], why there are none)."""
    options = read_options()
    toolchain, why = (None, "") if options.cuda_homes else find_toolchain()
    sources, why = wanted_sources(ROOT, "1" if options.cuda_homes else options.kernels, toolchain, why)
    return ([], why) if sources is None else ([str(variant) for variant in sources.chosen(options.variants)], "")


def faults_of_the_record(folder: Path) -> list[str]:
    """_build.json against the files beside it and against what the loaded libraries say of themselves."""
    info = magi_attention.build_info()
    here = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.so"))
    if sorted(info["libraries"]) != here:
        return [f"_build.json lists {sorted(info['libraries'])}, installed are {here}"]
    faults = [
        f"{name} needs glibc {needed}, _build.json says {entry['glibc']}"
        for name, entry in info["libraries"].items()
        if (needed := symbol_versions(folder / name).get("GLIBC", "2.2.5")) != entry["glibc"]
    ]
    if info["kernels"]["file"] is not None:
        entry = info["libraries"][Path(info["kernels"]["file"]).relative_to(folder).as_posix()]
        for key in ("variants", "archs"):
            if entry[key] != info["kernels"][key]:
                faults.append(f"_build.json says {key} {entry[key]}, the library {info['kernels'][key]}")
    if magi_attention.__version__ not in info["version"]:
        faults.append(f"version {info['version']} of the record, {magi_attention.__version__} of the package")
    return faults


def import_seconds() -> float:
    """The best of three, in processes of their own: a first one writes the bytecode."""
    runs = [subprocess.run([sys.executable, "-c", TIMED_IMPORT], capture_output=True, text=True, check=True) for _ in range(3)]
    return min(float(done.stdout) for done in runs)


def main() -> int:
    folder = Path(magi_attention.__path__[0])
    print("imported", magi_attention.__version__, "from", folder)
    if "site-packages" not in folder.parts:
        print("error: this is a source tree, not an installed wheel", file=sys.stderr)
        return 1
    kernels = magi_attention.build_info()["kernels"]
    wanted, why = wanted_variants()
    faults = faults_of_the_record(folder)
    if kernels["variants"] != wanted:
        faults.append(f"the wheel has the variants {kernels['variants']}, the build was for {wanted}; {kernels['error']}")
    seconds = import_seconds()
    if seconds > MAX_IMPORT_SECONDS:
        faults.append(f"the import takes {seconds:.2f} s beyond torch, the limit is {MAX_IMPORT_SECONDS} s")
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    print(f"compiled kernels: {', '.join(wanted)}" if wanted else f"no compiled kernels: {why}")
    print(f"import magi_attention.api: {seconds:.2f} s beyond torch")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
