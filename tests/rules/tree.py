"""The files of this project, as the rules see them. Knows no rule."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "magi_attention"
PYTHON_FOLDERS = ("magi_attention", "tests", "examples", "benchmarks", "docs", "ci", "docker", "recipe")
CPP_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")


def _is_written_by_hand(path: Path) -> bool:
    return path.name != "_version.py" and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(ROOT).parts)


@functools.cache
def python_files() -> tuple[Path, ...]:
    found = [ROOT / "setup.py", *(path for folder in PYTHON_FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    return tuple(sorted(path for path in found if _is_written_by_hand(path)))


@functools.cache
def package_files() -> tuple[Path, ...]:
    return tuple(path for path in python_files() if PACKAGE in path.parents)


@functools.cache
def cpp_files() -> tuple[Path, ...]:
    found = [path for folder in ("csrc", "tests") for path in (ROOT / folder).rglob("*") if path.suffix in CPP_SUFFIXES]
    return tuple(sorted(path for path in found if _is_written_by_hand(path)))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """magi_attention/plan/types.py -> magi_attention.plan.types; a package by its folder's name."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
