"""Who may import whom. The table is the design; a change to it is a change of the design, in its own commit."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.rules.tree import ROOT, cpp_files, module_name, package_files, parsed, shown

PACKAGE_NAME = "magi_attention"

BASE = {
    "__init__",
    "_build_record",
    "_ffa_library",
    "_native",
    "_needs_torch",
    "_version",
    "_whole_file",
    "arguments",
    "config",
    "env",
    "errors",
}
TOOLS = {"doctor", "machine_facts", "selftest", "selftest_items"}

# zone -> zones it may import besides itself. "records" is plan/types.py, "exchanges" makes one exchange record from wanted rows
# (dispatch, roll and plans share it), "plan" is everything else in plan/.
MAY_IMPORT = {
    "base": set(),
    "mask": {"base"},
    "common": {"base", "mask"},
    "records": {"base"},
    "exchanges": {"base", "records"},
    "plan": {"base", "mask", "records", "exchanges"},
    "comm": {"base", "records"},
    "kernels": {"base", "records"},
    "runtime": {"base", "records", "exchanges", "comm", "kernels"},
    "api": {"base", "mask", "common", "records", "exchanges", "plan", "comm", "runtime"},
    "functional": {"base", "mask", "common", "api"},
    "integrations": {"api"},  # adapters to model libraries: users of the public door like any other
    "testing": {"base", "mask", "common", "records", "exchanges", "plan", "comm", "kernels", "runtime"},
    "tools": {"base", "mask", "common", "records", "exchanges", "plan", "comm", "kernels", "runtime", "api", "testing"},
}
# Planning runs on machines without a GPU and without torch, for thousands of ranks in one process.
WITHOUT_TORCH = {"base", "mask", "records", "exchanges", "plan"}
# Functions whose result is a tensor: they import torch when called, so importing their file stays free of it.
TORCH_WHEN_CALLED = {("magi_attention.mask.ranges", "to_tensor")}

CPP_MAY_INCLUDE = {
    "base": {"base"},
    "solver": {"base", "solver"},
    "bindings": {"base", "solver", "bindings"},
    "ptx": {"ptx"},
    "attention": {"base", "ptx", "attention"},
}
GENERATED_HEADERS = {"attention": {"magi_variants.inc", "magi_build.inc"}}
FRAMEWORKS = ("Python.h", "torch/", "ATen/", "c10/", "numpy/", "pybind11/", "nanobind/")
KNOW_CUDA = {"ptx", "attention"}


def zone_of(module: str) -> str:
    """Zone of a dotted module of the package."""
    parts = module.split(".")[1:]
    if not parts or parts[0] in BASE:
        return "base"
    if parts[0] in TOOLS or parts == ["plan", "__main__"]:
        return "tools"
    if parts[:2] == ["plan", "types"]:
        return "records"
    if parts in (["plan", "exchange"], ["plan", "routes"]):
        return "exchanges"
    return parts[0]


def imported_modules(path: Path, node: ast.AST) -> list[str]:
    """Modules a statement imports; `from package import name` counts as package.name when that is a module of ours."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, f"{shown(path)}:{node.lineno} relative import; write the full name"
    module = node.module or ""
    children = [f"{module}.{alias.name}" for alias in node.names]
    return [child if is_own_module(child) else module for child in children]


def is_own_module(name: str) -> bool:
    if name.split(".")[0] != PACKAGE_NAME:
        return False
    place = ROOT / Path(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


@pytest.mark.parametrize("path", package_files(), ids=shown)
def test_python_imports_follow_the_table(path: Path) -> None:
    zone = zone_of(module_name(path))
    assert zone in MAY_IMPORT, f"{shown(path)} is in a folder the table does not know; add a row with its reason"
    allowed = MAY_IMPORT[zone] | {zone}
    wrong = []
    for node in ast.walk(parsed(path)):
        for module in imported_modules(path, node):
            if module.split(".")[0] == PACKAGE_NAME and zone_of(module) not in allowed:
                wrong.append(f"{shown(path)}:{node.lineno} ({zone}) imports {module} ({zone_of(module)})")
    assert not wrong, "\n".join([*wrong, f"{zone} may import: {', '.join(sorted(allowed))}"])


@pytest.mark.parametrize("path", package_files(), ids=shown)
def test_no_import_of_ours_inside_a_function(path: Path) -> None:
    """An import hidden in a function dodges a cycle: the code is in the wrong folder."""
    wrong = [
        f"{shown(path)}:{node.lineno} {function.name} imports {module}"
        for function in ast.walk(parsed(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        for module in imported_modules(path, node)
        if module.split(".")[0] == PACKAGE_NAME
    ]
    assert not wrong, "\n".join(wrong)


def walk_without(tree: ast.AST, functions: set[str]) -> list[ast.AST]:
    """Every node of the tree except the bodies of the named functions."""
    if isinstance(tree, ast.FunctionDef) and tree.name in functions:
        return []
    return [tree, *(node for child in ast.iter_child_nodes(tree) for node in walk_without(child, functions))]


def test_planning_never_imports_torch() -> None:
    """Not even inside a function, except where mask data is handed out as a tensor (AttnRanges.to_tensor)."""
    wrong = [
        f"{shown(path)}:{node.lineno}"
        for path in package_files()
        if zone_of(module_name(path)) in WITHOUT_TORCH
        for node in (ast.walk(parsed(path)) if zone_of(module_name(path)) != "mask" else parsed(path).body)
        if any(module.split(".")[0] == "torch" for module in imported_modules(path, node))
    ]
    assert not wrong, "torch is imported where planning must run without it:\n" + "\n".join(wrong)


def test_cpp_includes_follow_the_table() -> None:
    wrong = []
    for path in cpp_files():
        parts = path.relative_to(ROOT).parts
        if parts[0] != "csrc":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.startswith("#include"):
                continue
            header = line.split()[1].strip('"<>')
            is_ours = line.split()[1].startswith('"')
            banned = FRAMEWORKS if parts[1] in KNOW_CUDA else (*FRAMEWORKS, "cuda")
            if header.startswith(banned):
                wrong.append(f"{shown(path)}:{number} includes {header}; native code knows no framework, and only {KNOW_CUDA} know CUDA")
            if is_ours and header in GENERATED_HEADERS.get(parts[1], set()):
                continue
            if is_ours and header.split("/")[0] not in CPP_MAY_INCLUDE.get(parts[1], set()):
                wrong.append(f"{shown(path)}:{number} csrc/{parts[1]} may not include {header}")
    assert not wrong, "\n".join(wrong)


def test_the_checker_sees_a_wrong_import(tmp_path: Path) -> None:
    source = ast.parse("from magi_attention.kernels import attention\nimport magi_attention.comm\nfrom magi_attention import plan")
    seen = [module for node in ast.walk(source) for module in imported_modules(ROOT / "x.py", node)]
    assert {zone_of(module) for module in seen} == {"kernels", "comm", "plan"}
    assert zone_of("magi_attention.plan.types") == "records" and zone_of("magi_attention.plan.build") == "plan"
