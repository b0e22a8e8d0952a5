"""`python -m release.gate`: may these files be published? Each needs the result of every cell it claims, for its own hash and this commit.

Reads ci/matrix.yaml, results of ci/run_matrix.py and records of release.record. Publishes nothing; knows no index.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matrix import results
from matrix.cells import Cell, Matrix, load

from release.record import SUFFIX, head, sha256
from release.tag import ROOT

# Kinds of cells that install a wheel. A GPU cell is one of them: without its result no fat wheel is published, whatever else passed.
INSTALLING = ("wheel", "refusal", "surrounding")


@dataclass(frozen=True)
class Verdict:
    """One file: `proofs` are the results it has, `faults` what is missing."""

    path: Path
    proofs: tuple[str, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """Where results lie, and the commit that they must be of."""

    matrix: Matrix
    results: Path
    commit: str

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.results.rglob(f"*{SUFFIX}"))]

    def is_of_commit(self, record: dict[str, Any]) -> bool:
        said = str(record.get("commit", ""))
        return len(said) >= 7 and self.commit.startswith(said)


def name_of_wheel(path: Path, dist: Path) -> str:
    """The name that cells use: "fat", or the label of the index folder a file lies in."""
    parts = path.relative_to(dist).parts
    return parts[1] if len(parts) == 3 and parts[0] == "whl" else "fat"


def cells_of_wheel(matrix: Matrix, name: str) -> list[Cell]:
    """Every tested cell whose checks install this wheel; of the fat one also those that take a part of it away."""
    names = {"fat", "fat-cu13-only"} if name == "fat" else {name}
    return [cell for cell in matrix.cells if cell.kind in INSTALLING and cell.status == "tested" and cell.wheel in names]


def judge_wheel(path: Path, dist: Path, evidence: Evidence) -> Verdict:
    digest, proofs, faults = sha256(path), [], []
    cells = cells_of_wheel(evidence.matrix, name_of_wheel(path, dist))
    if not any(cell.kind == "wheel" for cell in cells):
        faults.append(f"no tested cell of ci/matrix.yaml installs the wheel {name_of_wheel(path, dist)}")
    for cell in cells:
        record = results.read(cell, evidence.results)
        fault = _fault_of(record, digest, evidence)
        (faults if fault else proofs).append(f"{cell.name}: {fault}" if fault else cell.name)
    return Verdict(path, tuple(proofs), tuple(faults))


def _fault_of(record: dict[str, Any] | None, digest: str | None, evidence: Evidence) -> str:
    if record is None:
        return "no result"
    if record["outcome"] != "passed":
        return f"the result is {record['outcome']!r}"
    if not evidence.is_of_commit(record):
        return f"the result is of commit {record.get('commit')}, not of {evidence.commit[:12]}"
    if digest is not None and record.get("wheel", {}).get("sha256") != digest:
        return f"the result is about another file, {record.get('wheel', {}).get('file')}"
    return ""


def judge_other(path: Path, evidence: Evidence) -> Verdict:
    """Conda packages, images, source distributions, wheels of machines that the matrix has no cells for: a record that names the hash."""
    digest = sha256(path)
    fitting = [
        record["name"]
        for record in evidence.records()
        if record["outcome"] == "passed" and evidence.is_of_commit(record) and record["files"].get(path.name) == digest
    ]
    return Verdict(path, tuple(fitting), () if fitting else ("no record of a check of this file at this commit",))


def judge_programs(evidence: Evidence) -> list[str]:
    """Cells that are whole programs: faults of those without a passed result."""
    faults = []
    for cell in evidence.matrix.cells:
        if cell.kind == "program" and cell.status == "tested":
            fault = _fault_of(results.read(cell, evidence.results), None, evidence)
            faults += [f"{cell.name}: {fault}"] if fault else []
    return faults


def judge(files: Iterable[Path], dist: Path, evidence: Evidence) -> list[Verdict]:
    archs = {cell.arch for cell in evidence.matrix.cells if cell.kind == "wheel"}
    return [judge_wheel(path, dist, evidence) if _has_cells(path, archs) else judge_other(path, evidence) for path in files]


def _has_cells(path: Path, archs: set[str]) -> bool:
    return path.suffix == ".whl" and any(path.stem.endswith(arch) for arch in archs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m release.gate", description="Fail unless every file may be published.")
    parser.add_argument(
        "--dist", type=Path, default=ROOT / "dist", help="everything that would be published, as ci/wheels.sh lays wheels out"
    )
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    options = parser.parse_args(arguments)
    evidence = Evidence(load(), options.results, head())
    files = sorted(path for path in options.dist.rglob("*") if path.is_file() and path.name != "index.html")
    faults = [] if files else [f"{options.dist} holds no file"]
    for verdict in judge(files, options.dist, evidence):
        print(f"{'REFUSED' if verdict.faults else 'ok     '} {verdict.path.relative_to(options.dist)}: {len(verdict.proofs)} results")
        faults += [f"{verdict.path.name}: {fault}" for fault in verdict.faults]
    faults += judge_programs(evidence)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    print(f"{len(files)} files, {len(faults)} faults" + ("; nothing is published" if faults else ""))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
