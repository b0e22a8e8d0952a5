"""ci/matrix.yaml as records, refused in one sentence where it contradicts itself. Runs nothing and writes nothing."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
MATRIX = ROOT / "ci" / "matrix.yaml"
STATUSES = ("tested", "built", "described")
HERE = "here"  # torch and Python of the machine itself, not of an environment made for the cell
NO_TORCH = "none"


class MatrixError(Exception):
    """The matrix says something that cannot be; the text is one sentence."""


@dataclass(frozen=True)
class Torch:
    """One torch that environments are made of.

    Attributes:
        version, build: "2.11.0" and "cu130" (or "cpu").
        index: where pip finds it, when that is not the index pip is configured for.
        label: the wheel that names this torch alone; empty when none is published.
    """

    version: str
    build: str
    index: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.version}+{self.build}"

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])

    @property
    def cuda(self) -> str:
        """ "13.0" of cu130; empty for a CPU build."""
        digits = self.build.removeprefix("cu")
        return f"{digits[:-1]}.{digits[-1]}" if digits.isdigit() else ""


@dataclass(frozen=True)
class Cell:
    """One line of the matrix that has a result of its own.

    Attributes:
        name: also the name of its result file.
        kind: wheel, refusal, surrounding or program.
        wheel: "fat", "fat-cu13-only" or a label; empty for programs.
        torch: None for programs, for HERE and for NO_TORCH (`options["torch"]` tells which).
        machine: what the machine must have that the usual one has not.
        options: what only this kind of cell has.
    """

    name: str
    kind: str
    format: str
    arch: str
    python: str
    status: str
    wheel: str = ""
    torch: Torch | None = None
    subset: bool = False
    machine: str = ""
    cases: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def definition(self) -> str:
        """Changes when the meaning of the cell does, so that an old result is not taken for one of the new cell."""
        meaning = {key: value for key, value in asdict(self).items() if key not in ("subset", "status", "cases", "machine")}
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def environment(self) -> str:
        """Cells with one name can share a base environment; empty when the cell needs none."""
        if self.torch is None:
            return f"no-torch-py{self.python}" if self.options.get("torch") == NO_TORCH else ""
        return f"torch{self.torch.name}-py{self.python}"

    @property
    def command(self) -> str:
        """What a person types to get this cell's result."""
        return f"python ci/run_matrix.py {self.name}"


@dataclass(frozen=True)
class Matrix:
    """The whole file. `labels` are the pinned wheels that are published, in order."""

    kernels: dict[str, dict[str, Any]]
    budgets: dict[str, float]
    newest_glibc: str
    cells: tuple[Cell, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.torch.label for cell in self.cells if cell.torch is not None and cell.torch.label))

    @property
    def oldest_torch(self) -> tuple[int, int]:
        """The lowest torch that a cell with status "tested" runs."""
        minors = [cell.torch.minor for cell in self.cells if cell.torch and cell.kind == "wheel" and cell.status == "tested"]
        return min((int(major), int(minor)) for major, minor in (name.split(".") for name in minors))

    def select(self, filters: list[str]) -> list[Cell]:
        """Cells whose name holds one of the filters, or matches it where it has a * or ?. A filter for nothing is an error."""
        chosen: dict[str, Cell] = {}
        for pattern in filters:
            glob = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
            exact = [cell for cell in self.cells if cell.name == pattern]
            found = exact or [cell for cell in self.cells if fnmatch.fnmatchcase(cell.name, glob)]
            if not found:
                raise MatrixError(f"no cell of {MATRIX.name} matches {pattern!r}; --list prints their names")
            chosen |= {cell.name: cell for cell in found}
        return [cell for cell in self.cells if cell.name in chosen]


def _torch_cells(line: dict[str, Any]) -> list[Cell]:
    torch = Torch(line["version"], line["build"], line.get("index", ""), line.get("label", ""))
    cells = []
    for wheel, subset in (("fat", line.get("subset", [])), (torch.label, line.get("pinned_subset", []))):
        prefix = "fat" if wheel == "fat" else "pinned"
        cells += [
            Cell(
                name=f"{prefix}-torch{torch.name}-py{python}",
                kind="wheel",
                format="wheel",
                arch="x86_64",
                python=python,
                status=line.get("status", "tested"),
                wheel=wheel,
                torch=torch,
                subset=python in subset,
                machine=line.get("machine", ""),
                cases=("I02", "I05", "I07"),
            )
            for python in line["pythons"]
            if wheel
        ]
    return cells


def _special_cell(kind: str, line: dict[str, Any], torches: dict[str, Torch]) -> Cell:
    line = dict(line)
    wanted = line["torch"]
    if wanted not in (*torches, HERE, NO_TORCH):
        raise MatrixError(f"{line['name']}: torch {wanted!r} is none of {', '.join(torches)}, {HERE}, {NO_TORCH}")
    shared = {key: line.pop(key) for key in ("name", "wheel", "python")}
    subset, machine, cases = line.pop("subset", False), line.pop("machine", ""), tuple(line.pop("cases", ()))
    return Cell(
        **shared,
        kind=kind,
        format="wheel",
        arch="x86_64",
        status=line.pop("status", "tested"),
        torch=torches.get(wanted),
        subset=subset,
        machine=machine,
        cases=cases,
        options=line,
    )


def _program_cell(line: dict[str, Any]) -> Cell:
    line = dict(line)
    shared = {key: line.pop(key) for key in ("name", "format", "arch", "python")}
    shared |= {"status": line.pop("status", "tested"), "subset": line.pop("subset", False), "machine": line.pop("machine", "")}
    return Cell(**shared, kind="program", cases=tuple(line.pop("cases", ())), options=line)


def _require(cells: list[Cell], labels: set[str]) -> None:
    names = [cell.name for cell in cells]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MatrixError(f"two cells are called {', '.join(twice)}; a result could not tell them apart")
    for cell in cells:
        if cell.status not in STATUSES:
            raise MatrixError(f"{cell.name}: status {cell.status!r} is none of {', '.join(STATUSES)}")
        if cell.status == "described" and not cell.machine:
            raise MatrixError(f"{cell.name} is only described: `machine` must say what it waits for")
        if cell.status != "tested" and cell.subset:
            raise MatrixError(f"{cell.name} is {cell.status}, so it cannot be in the subset that every change runs")
        if cell.kind != "program" and cell.wheel not in (*labels, "fat", "fat-cu13-only"):
            raise MatrixError(f"{cell.name}: wheel {cell.wheel!r} is neither fat, fat-cu13-only nor one of {', '.join(sorted(labels))}")


def load(path: Path = MATRIX) -> Matrix:
    """The matrix, or a MatrixError."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    cells = [cell for line in content["torch"] for cell in _torch_cells(line)]
    torches = {cell.torch.name: cell.torch for cell in cells if cell.torch is not None and not cell.torch.index}
    cells += [_special_cell("refusal", line, torches) for line in content["refusals"]]
    cells += [_special_cell("surrounding", line, torches) for line in content["surroundings"]]
    cells += [_program_cell(line) for line in content["programs"]]
    _require(cells, {cell.torch.label for cell in cells if cell.torch and cell.torch.label})
    return Matrix(content["kernels"], content["budgets"], content["newest_glibc"], tuple(cells))
