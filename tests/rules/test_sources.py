"""What every source file has and what none has: an opening line, no loose ends, no names that say nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.rules.tree import ROOT, cpp_files, package_files, parsed, python_files, shown

# Brackets, so that this file does not hold what it forbids.
LOOSE_ENDS = re.compile(r"\b(TO[D]O|FIX[M]E|XX[X]|HA[C]K)\b")
EMPTY_WORDS = {"manager", "helper", "helpers", "util", "utils", "misc", "meta", "common"}
# Names the public API of the peer library fixed before us.
FIXED_NAMES = {"AttnForwardMeta", "forward_meta", "common"}


def words_of(name: str) -> set[str]:
    """Lower-case words of a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_every_file_opens_by_saying_what_it_is() -> None:
    silent = [shown(path) for path in python_files() if not ast.get_docstring(parsed(path))]
    silent += [shown(path) for path in cpp_files() if not path.read_text().startswith("//")]
    assert not silent, "no opening docstring or comment (what it is, what it must not know):\n" + "\n".join(silent)


def test_no_loose_ends() -> None:
    found = [
        f"{shown(path)}:{number} {line.strip()}"
        for path in (*python_files(), *cpp_files(), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if LOOSE_ENDS.search(line)
    ]
    assert not found, "\n".join(found)


def test_names_say_something() -> None:
    wrong = []
    for path in package_files():
        names = {path.stem, path.parent.name} - {"__init__"}
        names |= {node.name for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        wrong += [f"{shown(path)}: {name}" for name in sorted(names - FIXED_NAMES) if words_of(name) & EMPTY_WORDS]
    assert not wrong, f"names with {', '.join(sorted(EMPTY_WORDS))} say nothing:\n" + "\n".join(wrong)


def test_the_door_raises_our_errors() -> None:
    """A user meets InputError, UnsupportedError or CommError, which say what to do next."""
    wrong = [
        f"{shown(path)}:{node.lineno} raises {ast.unparse(node.exc.func)}"
        for path in package_files()
        if path.relative_to(ROOT).parts[1] in ("api", "functional", "mask")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if ast.unparse(node.exc.func).split(".")[-1] in ("AssertionError", "Exception", "ValueError", "RuntimeError", "NotImplementedError")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_linter_is_switched_off_for_a_file() -> None:
    switches = re.compile(r"#\s*(ruff:\s*noqa|mypy:\s*ignore-errors|flake8:\s*noqa)|clang-format off")
    wrong = [
        shown(path) for path in (*python_files(), *cpp_files()) if path != Path(__file__).resolve() and switches.search(path.read_text())
    ]
    assert not wrong, f"whole-file exclusions: {wrong}"


def test_words_are_split() -> None:
    assert words_of("PlanManagerV2") == {"plan", "manager", "v"} and words_of("cp_utils") == {"cp", "utils"}
    assert words_of("GPUHelper") == {"gpu", "helper"} and not words_of("metadata") & EMPTY_WORDS
