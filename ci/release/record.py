"""`python -m release.record NAME FILE...`: says that files passed their checks, by their hashes. Run right after these, in the same job.

For what ci/run_matrix.py writes no result about: conda packages and images of a real runner. release.gate reads it. Checks nothing itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

from release.tag import ROOT

SUFFIX = ".record.json"


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def head(root: Path = ROOT) -> str:
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def write_record(name: str, files: list[Path], folder: Path, commit: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}{SUFFIX}"
    record = {"name": name, "outcome": "passed", "commit": commit, "files": {path.name: sha256(path) for path in files}}
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return target


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m release.record", description="Record that files passed the checks that ran just before."
    )
    parser.add_argument("name", help="like conda-linux-64-cuda130 or image-cu13")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--folder", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    absent = [str(path) for path in options.files if not path.is_file()]
    if absent:
        print(f"error: {', '.join(absent)} is not there; the build before made no such file", file=sys.stderr)
        return 1
    print(write_record(options.name, options.files, options.folder, head()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
