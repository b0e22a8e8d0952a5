"""A12: the support page is what the library does, cell by cell; what it calls unsupported raises."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_support", REPO / "docs" / "make_support.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("one_thread")
def test_a12_the_page_is_what_the_library_does() -> None:
    written, rendered = (REPO / "docs" / "support.md").read_text(), load().render()
    difference = "\n".join(difflib.unified_diff(written.splitlines(), rendered.splitlines(), "docs/support.md", "the library", lineterm=""))
    assert not difference, f"run `make support` and explain the change:\n{difference}"


def test_a_cell_that_fails_the_rule_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    page = load()
    right = page.single_device_attention

    def biased(*args: object, **kwargs: object) -> tuple[object, ...]:
        out, *rest = right(*args, **kwargs)
        return (out * 1.1, *rest)

    monkeypatch.setattr(page, "single_device_attention", biased)
    assert not page.passes(page.masks()["causal"], 32, page.DTYPES["bf16"], {})
