"""Sizes that keep a file in one reader's head. Raising a limit is a change to this file, in its own commit, with a reason."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

from tests.rules.tree import cpp_files, package_files, parsed, python_files, shown

MAX_PYTHON_LINES = 400
MAX_CPP_LINES = 500
MAX_MEDIAN_LINES = 200
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8

# The signatures that users of the peer library already call (design: the public door); everything else takes a record.
FIXED_SIGNATURES = {
    "flex_flash_attn_func",
    "magi_attn_flex_key",
    "magi_attn_varlen_key",
    "magi_attn_flex_dispatch",
    "magi_attn_varlen_dispatch",
    "make_flex_key_for_new_mask_after_dispatch",
    "make_varlen_key_for_new_mask_after_dispatch",
    "calc_attn",
    # Interfaces between stages, whose arguments are tensors and their scalars.
    "plan_attention",
    "attention_forward",
    "attention_backward",
    "dist_attention",
    "single_device_attention",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(parsed(path)) if isinstance(node, Function)]


def body_lines(function: Function) -> int:
    """Lines from `def` to the end, without the docstring: explaining more is never a reason to split."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def num_parameters(function: Function) -> int:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_python_files_fit() -> None:
    wrong = [f"{shown(path)}: {num_lines(path)} lines" for path in python_files() if num_lines(path) > MAX_PYTHON_LINES]
    assert not wrong, f"over {MAX_PYTHON_LINES} lines, split by subject:\n" + "\n".join(wrong)


def test_cpp_files_fit() -> None:
    wrong = [f"{shown(path)}: {num_lines(path)} lines" for path in cpp_files() if num_lines(path) > MAX_CPP_LINES]
    assert not wrong, f"over {MAX_CPP_LINES} lines, split by subject:\n" + "\n".join(wrong)


def test_the_median_file_is_small() -> None:
    sizes = [num_lines(path) for path in (*package_files(), *cpp_files())]
    assert statistics.median(sizes) <= MAX_MEDIAN_LINES


def test_functions_fit() -> None:
    wrong = [
        f"{shown(path)}:{function.lineno} {function.name}: {body_lines(function)} lines"
        for path in python_files()
        for function in functions(path)
        if body_lines(function) > MAX_FUNCTION_LINES
    ]
    assert not wrong, f"over {MAX_FUNCTION_LINES} lines:\n" + "\n".join(wrong)


def test_public_functions_take_few_parameters() -> None:
    wrong = [
        f"{shown(path)}:{function.lineno} {function.name}: {num_parameters(function)} parameters"
        for path in package_files()
        for function in functions(path)
        if not function.name.startswith("_") and function.name not in FIXED_SIGNATURES and num_parameters(function) > MAX_PARAMETERS
    ]
    assert not wrong, f"over {MAX_PARAMETERS} parameters, pass a record:\n" + "\n".join(wrong)


def test_measures_count_what_they_say() -> None:
    source = 'def f(self, a, /, b, *, c):\n    """One.\n\n    Two.\n    """\n    return a\n'
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert num_parameters(function) == 3 and body_lines(function) == 2
