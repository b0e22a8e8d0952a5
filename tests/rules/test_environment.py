"""The environment is read in one file, and only two names are read."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "magi_attention"


def _reads_environment(node: ast.AST) -> bool:
    """os.environ, os.getenv, os.putenv, or one of them imported by name."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    return isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in ("environ", "getenv") for a in node.names)


def _names_read(tree: ast.AST) -> set[str]:
    """Constant names in os.environ[...], os.environ.get(...), os.getenv(...); a computed name is reported as such."""
    names = set()
    for node in ast.walk(tree):
        first: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            source = ast.unparse(node.func)
            if source.endswith(("environ.get", "os.getenv", "environ.setdefault", "environ.pop")):
                first = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            first = node.slice
        if first is not None:
            names.add(first.value if isinstance(first, ast.Constant) else f"computed: {ast.unparse(first)}")
    return names


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_environment_names_are_frozen() -> None:
    names = set()
    for path in _sources():
        if "testing" not in path.parts:
            names |= _names_read(ast.parse(path.read_text()))
    assert names == {"MAGI_LOG", "MAGI_CHECK"}, f"the package reads {sorted(names)}; settings belong in magi_attention/config.py"


def test_only_env_py_reads_the_environment() -> None:
    readers = [
        str(path.relative_to(PACKAGE))
        for path in _sources()
        if "testing" not in path.parts and any(_reads_environment(node) for node in ast.walk(ast.parse(path.read_text())))
    ]
    assert readers == ["env.py"], f"{readers} touch os.environ; only magi_attention/env.py may"


def test_native_code_reads_no_environment() -> None:
    csrc = PACKAGE.parent / "csrc"
    readers = [str(p.relative_to(csrc)) for p in csrc.rglob("*") if p.suffix in (".cpp", ".h", ".cu", ".cuh") and "getenv" in p.read_text()]
    assert readers == []
