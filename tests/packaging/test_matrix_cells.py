"""ci/matrix.yaml holds what is promised elsewhere, and a matrix that contradicts itself is refused in one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from matrix.cells import MATRIX, MatrixError, load

from magi_attention import doctor
from tests.rules.tree import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def content() -> dict[str, Any]:
    """The file's content, to be spoilt."""
    loaded = yaml.safe_load(MATRIX.read_text())
    assert isinstance(loaded, dict)
    return loaded


def loaded_from(folder: Path, content: dict[str, Any]) -> Any:
    path = folder / "matrix.yaml"
    path.write_text(yaml.safe_dump(content))
    return load(path)


def test_every_change_runs_enough() -> None:
    """Two torches and two Pythons with the wheel for all, one pinned wheel, the refusals, the conda package."""
    subset = [cell for cell in load().cells if cell.subset]
    fat = [cell for cell in subset if cell.kind == "wheel" and cell.wheel == "fat"]
    assert len({cell.torch.version for cell in fat if cell.torch}) >= 2 and len({cell.python for cell in fat}) >= 2
    assert [cell for cell in subset if cell.kind == "wheel" and cell.wheel != "fat"]
    assert {case for cell in subset if cell.kind == "refusal" for case in cell.cases} >= {"I01", "I03", "I24"}
    assert {case for cell in subset for case in cell.cases} >= {"I02", "I05", "I11", "I21", "I25", "I26"}


def test_the_lowest_torch_is_one_that_runs() -> None:
    (declared,) = re.findall(r'"torch>=([\d.]+)"', PYPROJECT)
    assert tuple(map(int, declared.split("."))) == load().oldest_torch == doctor.OLDEST_TORCH


def test_every_declared_python_has_a_cell() -> None:
    declared = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", PYPROJECT))
    assert declared == {cell.python for cell in load().cells if cell.kind == "wheel" and cell.status == "tested"}


def test_every_torch_with_cuda_has_kernels_and_a_folder() -> None:
    matrix = load()
    torches = {cell.torch for cell in matrix.cells if cell.torch and cell.kind == "wheel" and cell.status == "tested"}
    assert all(torch.cuda.split(".")[0] in matrix.kernels for torch in torches if torch.cuda)
    assert {torch.label for torch in torches if torch.label} == set(matrix.labels)
    assert all(torch.label in ("", f"{torch.build}-torch{torch.minor}") for torch in torches)


def test_filters_choose_by_part_glob_and_name() -> None:
    matrix = load()
    names = [cell.name for cell in matrix.cells]
    assert [cell.name for cell in matrix.select(["torch2.10.0+cu128-py3.12"])] == [
        name for name in names if "torch2.10.0+cu128-py3.12" in name
    ]
    assert [cell.name for cell in matrix.select(["fat-*-py3.13"])] == [name for name in names if re.fullmatch(r"fat-.*-py3\.13", name)]
    assert [cell.name for cell in matrix.select(["doctor"])] == ["doctor"]
    with pytest.raises(MatrixError, match=r"no cell of matrix\.yaml matches 'torch9'"):
        matrix.select(["doctor", "torch9"])


def test_a_cell_that_means_something_else_has_another_definition(tmp_path: Path, content: dict[str, Any]) -> None:
    def definition(changed: dict[str, Any]) -> str:
        return next(cell.definition for cell in loaded_from(tmp_path, changed).cells if cell.name == "no-torch")

    before = definition(content)
    line = next(line for line in content["refusals"] if line["name"] == "no-torch")
    line["subset"] = not line["subset"]
    assert definition(content) == before
    line["says"] = ["something else"]
    assert definition(content) != before


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (lambda content: content["refusals"].append(content["refusals"][0]), "two cells are called"),
        (lambda content: content["torch"][0].update(status="probably"), "status 'probably'"),
        (lambda content: content["torch"][0].update(status="described"), "must say what it waits for"),
        (lambda content: content["torch"][3].update(status="described", machine="x"), "cannot be in the subset"),
        (lambda content: content["surroundings"][0].update(torch="2.9.1+cu128"), r"torch '2\.9\.1\+cu128' is none of"),
        (lambda content: content["surroundings"][0].update(wheel="cu999-torch2.11"), "wheel 'cu999-torch2.11' is neither"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, content: dict[str, Any], spoil: Any, sentence: str) -> None:
    spoil(content)
    with pytest.raises(MatrixError, match=sentence):
        loaded_from(tmp_path, content)
