"""The tables of README.md and docs/install.md fit the matrix and its results, and show nothing as supported that did not pass."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs the extra `matrix`: pip install -e '.[matrix]'")
pytest.importorskip("elftools", reason="needs the extra `matrix`: pip install -e '.[matrix]'")

import render_matrix
from matrix import results, tables
from matrix.cells import Cell, load

from tests.rules.tree import ROOT

MATRIX = load()
CELL = next(cell for cell in MATRIX.cells if cell.kind == "wheel" and cell.status == "tested" and cell.torch and cell.torch.cuda)
TAG = "py3-none-manylinux_2_28_x86_64"


def record(cell: Cell = CELL, outcome: str = "passed", tag: str = TAG) -> dict[str, Any]:
    check = {"name": "kernels load", "passed": True, "detail": "", "seconds": 0.1, "values": {"archs": ["sm_90a"]}}
    return {"cell": cell.name, "definition": cell.definition, "outcome": outcome, "wheel": {"tag": tag}, "checks": [check]}


def shown(found: dict[str, Any] | None) -> str:
    return tables.compatibility(MATRIX, lambda cell: found if cell.name == CELL.name else None)


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A folder with the pages and results, to be spoilt."""
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/install.md"):
        shutil.copy(ROOT / page, tmp_path / page)
    shutil.copytree(results.RESULTS, tmp_path / "results")
    return tmp_path


def test_the_pages_fit_the_matrix_and_its_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert render_matrix.main(["--check"]) == 0, capsys.readouterr().out


def test_a_passed_cell_is_shown() -> None:
    line = next(line for line in shown(record()).splitlines() if line.startswith(f"| {CELL.torch.version} |"))  # type: ignore[union-attr]
    assert f"Python {CELL.python}" in line and "sm_90a" in line


@pytest.mark.parametrize(
    "found",
    [
        None,
        record(outcome="failed"),
        record(tag="py3-none-linux_x86_64"),
        record(tag="py3-none-manylinux_2_34_x86_64"),
    ],
    ids=["no result", "failed", "wheel of one machine", "glibc too new"],
)
def test_nothing_else_is_shown_as_supported(found: dict[str, Any] | None) -> None:
    assert "Python 3" not in shown(found) and "sm_" not in shown(found)


def test_a_result_of_another_meaning_is_no_result(tmp_path: Path) -> None:
    results.write(record(), tmp_path)
    assert results.read(CELL, tmp_path) is not None
    results.write({**record(), "definition": "of an older line"}, tmp_path)
    assert results.read(CELL, tmp_path) is None


def test_a_described_cell_is_never_supported() -> None:
    described = [cell for cell in MATRIX.cells if cell.status == "described"]
    assert described and not any(tables.is_supported(cell, record(cell), MATRIX.newest_glibc) for cell in described)


def test_a_changed_table_is_noticed_and_written_again(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = pages / "README.md"
    right = page.read_text()
    page.write_text(right.replace("| 2.11.0 | 13.0 |", "| 2.11.0 | 99.0 |"))
    assert render_matrix.main(["--check"], pages, pages / "results") == 1
    assert "99.0" in capsys.readouterr().out
    assert render_matrix.main([], pages, pages / "results") == 0 and page.read_text() == right


def test_a_removed_result_is_noticed(pages: Path) -> None:
    found = sorted((pages / "results").glob("*.json"))
    assert found, "no cell has a result"
    found[0].unlink()
    assert render_matrix.main(["--check"], pages, pages / "results") == 1


def test_a_result_of_no_cell_is_refused(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pages / "results" / "fat-torch9.json").write_text(json.dumps({}))
    assert render_matrix.main(["--check"], pages, pages / "results") == 1
    assert "results of no cell: fat-torch9.json" in capsys.readouterr().err


def test_a_missing_mark_is_refused(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = pages / "docs" / "install.md"
    page.write_text(page.read_text().replace("<!-- end of refusals -->", ""))
    assert render_matrix.main([], pages, pages / "results") == 1
    assert "end of refusals" in capsys.readouterr().err


def test_results_name_no_folder_of_this_machine() -> None:
    for path in results.RESULTS.glob("*.json"):
        assert not re.search(r'"[^"]*(/work/|/root/|/home/|/tmp/)', path.read_text()), path.name


def test_every_fault_of_the_doctor_has_a_line_in_the_troubleshooting() -> None:
    source = (ROOT / "magi_attention" / "doctor.py").read_text()
    faults = set(re.findall(r'Finding\(\s*"(\w+)"', source))
    section = (ROOT / "docs" / "install.md").read_text().partition("## Troubleshooting")[2].partition("\n## ")[0]
    explained = {name for line in section.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert len(faults) > 15 and faults == explained
