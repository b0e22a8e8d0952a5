"""The table of C++ operations and the names Python runs are the same set."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from magi_attention import _native
from magi_attention.errors import InputError
from tests.rules.tree import ROOT, package_files, parsed, python_files, shown

TABLE = ROOT / "csrc" / "bindings" / "ops.cpp"
HEADER = ROOT / "csrc" / "bindings" / "ops.h"
ENTRY = re.compile(r"\{\s*\"(\w+)\",\s*op_(\w+)\s*\}")


def operations_in_table() -> dict[str, str]:
    return dict(ENTRY.findall(TABLE.read_text()))


def operations_used(files: Iterable[Path]) -> dict[str, str]:
    """Operation name -> where; calls of _native.run with anything but a literal are refused."""
    used = {}
    for path in files:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("_native.run", "native.run"):
                place = f"{shown(path)}:{node.lineno}"
                assert isinstance(node.args[0], ast.Constant), f"{place}: name the operation literally"
                used[str(node.args[0].value)] = place
    return used


def test_python_runs_what_the_table_has() -> None:
    table, used = operations_in_table(), operations_used(package_files())
    missing = {name: place for name, place in used.items() if name not in table}
    assert not missing, f"not in {shown(TABLE)}: {missing}"
    used |= operations_used(path for path in python_files() if path != Path(__file__).resolve())  # a few serve tests only
    assert not set(table) - set(used), f"nothing runs {sorted(set(table) - set(used))}; remove them from {shown(TABLE)}"


def test_table_header_and_functions_agree() -> None:
    table = operations_in_table()
    assert table and all(name == function for name, function in table.items())
    declared = re.findall(r"void op_(\w+)\(", HEADER.read_text())
    assert sorted(declared) == sorted(table)


def test_an_unknown_operation_is_an_input_error() -> None:
    with pytest.raises(InputError, match="no_such_operation"):
        _native.run("no_such_operation", slices=np.zeros(0, np.int32))
