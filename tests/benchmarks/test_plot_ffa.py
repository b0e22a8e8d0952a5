"""Pictures and tables from rows: made-up rows in temporary folders, and the committed pages against the committed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plot_ffa
from benchmarks.ffa_cells import SIZED_MASKS, SIZES
from benchmarks.ffa_rows import ROWS_CSV, Row, append_rows, read_anchors, read_rows
from benchmarks.plot_ffa import BEGIN, END, IMAGES, PAGE, README, drawn_masks, page_block, readme_block, replace_block, table
from tests.benchmarks.ffa_rows_made_up import anchor, made_up_row


def rows_of(masks: tuple[str, ...]) -> list[Row]:
    return [
        made_up_row(mask, size, op, 300.0 + size / 1024, provider=name)
        for mask in masks
        for size in SIZES
        for op in ("fwd", "bwd")
        for name in ("ours", "cudnn")
    ]


def test_the_table_says_what_the_rows_say() -> None:
    rows = [
        made_up_row("causal", 1024, "fwd", 99.6),
        made_up_row("causal", 2048, "fwd", 300.0),
        made_up_row("causal", 2048, "bwd", 200.0),
        made_up_row("causal", 4096, "bwd", 0.0, status="wrong", note="off", ms=0.0),
        made_up_row("full", 1024, "fwd", 1.0, head_dim=64),
    ]
    anchors = {anchor("causal", 1024): 100.0, anchor("causal", 2048): 150.0, anchor("causal", 2048, "bwd", "peer FFA"): 100.0}
    head, _, *lines = table(rows, anchors)
    assert head.startswith("| mask | 1k | 2k | 4k |")
    assert lines == ["| causal | 100 / - | 300 / 200 | - / wrong | - | - | - | - | 1.00 to 2.00 | - | - | 2.00 |"]
    assert len(head.split("|")) == len(lines[0].split("|"))


def test_blocks_are_empty_without_rows_of_ours() -> None:
    others = [made_up_row(provider="cudnn"), made_up_row(head_dim=64), made_up_row(status="failed", note="no", ms=0.0)]
    assert drawn_masks(others) == [] and readme_block(others, {}) == page_block(others) == ""


def test_blocks_name_commit_machine_and_pictures() -> None:
    block = readme_block([made_up_row(), made_up_row("full", commit="1111111")], {})
    assert "commit 0000000, 1111111" in block and "made-up machine" in block and f"docs/images/{plot_ffa.OVERVIEW}" in block
    assert page_block([made_up_row(), made_up_row("full")]).count("images/ffa_") == 2


def test_replacing_a_block_keeps_the_rest() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replace_block(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert replace_block(replace_block(page, "new"), "") == f"before\n{BEGIN}\n{END}\nafter\n"
    for broken in ("no markers", f"{END}{BEGIN}", f"{page}{page}"):
        with pytest.raises(ValueError, match="once each"):
            replace_block(broken, "new")


def test_the_command_draws_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page, added = f"# Title\n{BEGIN}\n{END}\n", tmp_path / "added.csv"
    for name, target in (("README", tmp_path / "README.md"), ("PAGE", tmp_path / "page.md")):
        target.write_text(page)
        monkeypatch.setattr(plot_ffa, name, target)
    monkeypatch.setattr(plot_ffa, "IMAGES", tmp_path / "images")
    monkeypatch.setattr(plot_ffa, "ROWS_CSV", tmp_path / "rows.csv")
    rows = [*rows_of(("causal", "frame_causal")), made_up_row("causal", heads="16/16")]
    append_rows(added, rows)
    plot_ffa.main(["--add", str(added)])
    assert "2 masks drawn" in capsys.readouterr().out and read_rows(tmp_path / "rows.csv") == rows
    pictures = {path.name: path.stat().st_size for path in (tmp_path / "images").iterdir()}
    assert set(pictures) == {"ffa_causal.png", "ffa_frame_causal.png", "ffa_overview.png"} and min(pictures.values()) > 10_000
    text = (tmp_path / "README.md").read_text()
    assert text == replace_block(page, readme_block(rows, read_anchors())) and "| causal | 301 / 301 |" in text
    assert "images/ffa_frame_causal.png" in (tmp_path / "page.md").read_text()
    with pytest.raises(SystemExit):
        plot_ffa.main(["--add", str(tmp_path / "nothing.csv")])


def test_recorded_kernels_are_in_the_pictures() -> None:
    lines = plot_ffa.lines_of(rows_of(("causal",)), read_anchors(), "causal", "48/8", "bwd")
    assert set(lines) == {"ours", "cudnn", "FA3", "peer FFA"}
    assert lines["FA3"][0] == (1024, 241.0) and [tokens for tokens, _ in lines["FA3"]] == list(SIZES)
    assert lines["ours"][-1] == (65_536, 364.0)


def test_committed_pages_equal_the_committed_rows() -> None:
    rows = read_rows(ROWS_CSV)
    for page, block in ((README, readme_block(rows, read_anchors())), (PAGE, page_block(rows))):
        text = page.read_text()
        assert text == replace_block(text, block), f"{page.name} is behind {ROWS_CSV.name}: python -m benchmarks.plot_ffa"
    wanted = {f"ffa_{mask}.png" for mask in drawn_masks(rows)} | ({plot_ffa.OVERVIEW} if drawn_masks(rows) else set())
    assert {path.name for path in IMAGES.glob("ffa_*.png")} == wanted
    assert set(drawn_masks(rows)) <= set(SIZED_MASKS)
