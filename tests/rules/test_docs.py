"""The documentation tells the truth: its Python runs, its links lead somewhere, its pictures can be redrawn, its names exist.

Every ```python block of a page runs, in order, in one namespace per page. Text that is not to be run is marked ```text.
"""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

import pytest

from tests.rules.tree import ROOT, shown

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """(line of the block's first statement, source)."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(2)) + 1, found[2]) for found in FENCE.finditer(text) if found[1] == "python"]


def links(page: Path) -> list[str]:
    return LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=shown)
def test_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, source in python_blocks(page):
        # Leading newlines make a traceback point at the line of the page.
        exec(compile("\n" * (line - 1) + source, str(page), "exec"), namespace)


def test_the_first_pages_have_examples() -> None:
    assert python_blocks(ROOT / "README.md") and python_blocks(ROOT / "docs" / "index.md")


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_to_files(page: Path) -> None:
    targets = [target.split("#")[0] for target in links(page) if not target.startswith(("https://", "mailto:", "#"))]
    assert not [target for target in targets if target.startswith("http:")], "use https"
    broken = [target for target in targets if not (page.parent / target).exists()]
    assert not broken, f"{shown(page)} links to {broken}, which are not there"
    if ROOT / "docs" in page.parents:
        outside = [target for target in targets if ROOT / "docs" not in (page.parent / target).resolve().parents]
        assert not outside, f"{shown(page)} links out of docs/, which the built site cannot follow: {outside}"


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    missing = [shown(page) for page in PAGES if ROOT / "docs" in page.parents and f"{page.relative_to(ROOT / 'docs')}" not in config]
    assert not missing, f"not in mkdocs.yml: {missing}"


def test_every_picture_is_used_and_redrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "make_figures.py"))["PICTURES"]
    committed = {path.name for path in (ROOT / "docs" / "figures").iterdir()}
    used = {Path(target).name for page in PAGES for target in links(page) if "figures/" in target}
    assert committed == set(drawn) == used
    for name, draw in drawn.items():
        draw(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5_000


def test_every_public_name_is_in_the_reference() -> None:
    """docs/api.md lists what `magi_attention.api` exports: each name has a directive, and no directive names nothing."""
    text = (ROOT / "docs" / "api.md").read_text()
    directives = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    api = importlib.import_module("magi_attention.api")
    documented = {name.rsplit(".", 1)[1] for name in directives}
    assert not set(api.__all__) - documented, f"missing in docs/api.md: {sorted(set(api.__all__) - documented)}"
    for name in directives:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), f"docs/api.md names {name}, which does not exist"
