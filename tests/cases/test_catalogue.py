"""The table in README.md and the names of the tests say the same: every case has its tests, every test of a case is in the table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| ([MNDA]\d\d) \| (.*?) \| .*\|$", re.MULTILINE)
ID_IN_NAME = re.compile(r"(?<=_)[mnda]\d\d(?=_|$)")


def table() -> dict[str, list[str]]:
    """id -> "file::test" entries."""
    rows = ROW.findall((TESTS / "cases" / "README.md").read_text(encoding="utf-8"))
    assert len({case for case, _ in rows}) == len(rows), "an id has two rows"
    return {case: re.findall(r"`([^`]+)`", cell) for case, cell in rows}


def cases_by_name() -> dict[str, list[str]]:
    """id -> tests whose names carry it."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for case in ID_IN_NAME.findall(node.name):
                    found.setdefault(case.upper(), []).append(f"{path.relative_to(TESTS).as_posix()}::{node.name}")
    return found


def test_the_table_and_the_names_agree() -> None:
    in_table, by_name = table(), cases_by_name()
    assert len(in_table) == 65, f"{len(in_table)} cases in the table"
    for case, listed in in_table.items():
        assert listed, f"{case} has no test in the table"
        assert len(set(listed)) == len(listed), f"{case} lists a test twice"
        assert set(listed) == set(by_name.get(case, [])), f"{case}: table and names differ by {set(listed) ^ set(by_name.get(case, []))}"
    assert not set(by_name) - set(in_table), f"tests of unknown cases: {sorted(set(by_name) - set(in_table))}"


def test_ids_are_found_in_names() -> None:
    assert ID_IN_NAME.findall("test_m01_m10_n11_poison") == ["m01", "m10", "n11"]
    assert not ID_IN_NAME.findall("test_ma01_x01") and ID_IN_NAME.findall("test_d16") == ["d16"]
