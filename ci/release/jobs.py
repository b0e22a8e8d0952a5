"""`python -m release.jobs`: the cells of ci/matrix.yaml as jobs for GitHub Actions, one per environment, on the runner they need.

Prints JSON; runs nothing. The label of our own GPU machines is here and nowhere else.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from matrix.cells import HERE, Cell, Matrix, load

HOSTED = {"x86_64": ["ubuntu-24.04"], "aarch64": ["ubuntu-24.04-arm"]}
# Of programs, which bring their own, and of GPU machines, whose own is used.
DEFAULT_PYTHON = "3.12"
GPU = ["self-hosted", "linux", "x64", "gpu-h200"]


def needs_gpu(cell: Cell) -> bool:
    return cell.options.get("torch") == HERE or "H200" in cell.machine


def jobs(matrix: Matrix, gpu: bool) -> list[dict[str, Any]]:
    """One job per environment: its cells share a download of torch. Described and built cells get none."""
    groups: dict[str, list[Cell]] = {}
    for cell in matrix.cells:
        if cell.status == "tested" and needs_gpu(cell) == gpu:
            groups.setdefault(cell.environment or cell.name, []).append(cell)
    return [
        {
            "name": name,
            "cells": " ".join(cell.name for cell in cells),
            "python": cells[0].python if cells[0].environment else DEFAULT_PYTHON,
            "runner": GPU if gpu else HOSTED[cells[0].arch],
        }
        for name, cells in groups.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m release.jobs", description="Print the jobs of the matrix as JSON.")
    parser.add_argument("kind", choices=("cpu", "gpu"))
    print(json.dumps({"include": jobs(load(), parser.parse_args(arguments).kind == "gpu")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
