"""`python -m release.licences WHEEL...`: do wheels carry the licences of all that is in them? Reads archives; judges no text."""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path, PurePosixPath

PROJECT = "LICENSE"
# What a file in a package contains besides this project's own code -> the notice that has to go with it.
NOTICES = {"_ffa.so": "licenses/NVIDIA-CUDA-runtime.md"}


def needed_notices(names: list[str]) -> set[str]:
    return {PROJECT} | {notice for name in names if (notice := NOTICES.get(PurePosixPath(name).name)) is not None}


def missing_notices(wheel: Path) -> list[str]:
    """Notices that must be in the wheel's licenses folder (PEP 639) and are not, or are empty."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    return sorted(notice for notice in needed_notices(list(sizes)) if not _has(sizes, notice))


def _has(sizes: dict[str, int], notice: str) -> bool:
    return any(name.endswith(f".dist-info/licenses/{notice}") and size > 0 for name, size in sizes.items())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m release.licences", description="Fail for a wheel without the licences of what is in it."
    )
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    faults = 0
    for wheel in parser.parse_args(arguments).wheels:
        missing = missing_notices(wheel)
        faults += bool(missing)
        print(
            f"{wheel.name}: {'lacks ' + ', '.join(missing) if missing else 'licences complete'}", file=sys.stderr if missing else sys.stdout
        )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
