"""Rows, anchors, ratios and gates of the attention benchmark, on made-up numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.ffa_cells import SIZED_MASKS, SIZES, cells
from benchmarks.ffa_gate import GATES, judge, report
from benchmarks.ffa_rows import ANCHORS_CSV, COLUMNS, ROWS_CSV, Key, append_rows, latest, ratios, read_anchors, read_rows, summary
from tests.benchmarks.ffa_rows_made_up import anchor, made_up_row

# ---- the files ----


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "rows.csv"
    rows = [made_up_row(), made_up_row(op="bwd", status="failed", note='has "quotes", commas')]
    assert read_rows(path) == []
    append_rows(path, rows[:1])
    append_rows(path, rows[1:])
    assert read_rows(path) == rows
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_rows_of_another_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("mask,tokens\ncausal,8\n")
    with pytest.raises(ValueError, match="another version"):
        append_rows(path, [made_up_row()])
    assert path.read_text() == "mask,tokens\ncausal,8\n"
    path.unlink()
    append_rows(path, [made_up_row(status="odd")])
    with pytest.raises(ValueError, match="'odd'"):
        read_rows(path)


def test_committed_rows_can_be_read() -> None:
    for row in read_rows(ROWS_CSV):
        assert row.commit and row.machine and (row.status == "ok") == (row.ms > 0) == (not row.note)


def test_anchors_are_the_recorded_ones() -> None:
    anchors = read_anchors(ANCHORS_CSV)
    assert len(anchors) == 268
    assert {key.provider for key in anchors} == {"FA3", "peer FFA", "cuDNN", "FlexAttention"}
    assert {key.mask for key in anchors} == set(SIZED_MASKS) and {key.tokens for key in anchors} == set(SIZES)
    assert anchors[anchor("full", 1024, "fwd")] == 535 and anchors[anchor("varlen_causal", 65_536, "bwd")] == 548
    assert anchors[anchor("frame_causal", 8192, "bwd", "peer FFA", "16/16")] == 453
    assert not [key for key in anchors if key.mask == "frame_causal" and key.provider == "FA3"]


def test_anchors_are_refused_twice(tmp_path: Path) -> None:
    path = tmp_path / "anchors.csv"
    lines = ANCHORS_CSV.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[-1]]))
    with pytest.raises(ValueError, match="twice"):
        read_anchors(path)


# ---- ratios ----


def test_the_last_row_of_a_key_counts() -> None:
    old, new = made_up_row(tflops=100.0), made_up_row(tflops=0.0, ms=0.0, status="wrong", note="off")
    assert list(latest([old, new]).values()) == [new]


def test_ratios() -> None:
    row = made_up_row(tflops=90.0)
    others = [
        made_up_row(tflops=60.0, provider="cudnn"),
        made_up_row(tflops=120.0, provider="fa4"),
        made_up_row(tflops=500.0, provider="flex", status="wrong", note="off"),
        made_up_row(tflops=500.0, provider="blocked"),
        made_up_row(tflops=500.0, provider="fa3", machine="another"),
        made_up_row(tflops=500.0, provider="sdpa_flash", tokens=4096),
    ]
    found = ratios(row, [row, *others], {anchor(): 100.0, anchor(tokens=4096): 1.0, anchor(provider="peer FFA"): 60.0})
    assert found == ("fa4", 0.75, 0.9, 1.5)
    assert ratios(row, [row], {}) == ("", None, None, None)


def test_a_deterministic_backward_is_held_against_the_default_one() -> None:
    row, other = made_up_row(op="bwd_det", tflops=50.0), made_up_row(op="bwd", tflops=100.0, provider="cudnn")
    assert ratios(row, [row, other], {anchor(op="bwd"): 200.0}) == ("cudnn", 0.5, 0.25, None)


def test_summary_has_a_line_per_row_of_ours() -> None:
    rows = [
        made_up_row(tflops=90.0),
        made_up_row(tflops=60.0, provider="cudnn"),
        made_up_row(op="bwd", status="failed", note="no room", ms=0.0),
    ]
    head, fast, failed = summary(rows, {anchor(): 100.0})
    assert "/FA3" in head and "1.50 cudnn" in fast and fast.split()[-2:] == ["0.90", "-"]
    assert "failed: no room" in failed


# ---- gates ----


def all_at(factor: float) -> list:
    """Rows of ours at `factor` times FA3, and where it has no number times the peer."""
    anchors = read_anchors()
    best = {key._replace(provider="ours"): value for name in ("peer FFA", "FA3") for key, value in anchors.items() if key.provider == name}
    return [made_up_row(key.mask, key.tokens, key.op, value * factor, heads=key.heads) for key, value in best.items()]


def met(gate: str, rows: list, selected: set | None = None) -> bool:
    return report(gate, judge(gate, rows, read_anchors(), selected))[0]


def test_milestone() -> None:
    assert met("milestone", all_at(1.001)) and not met("milestone", all_at(0.999))  # frame_causal must be above the peer
    at_bar = [dataclasses.replace(row, tflops=row.tflops * (1.2 if row.mask == "frame_causal" else 1.0)) for row in all_at(0.9001)]
    assert met("milestone", at_bar)
    low = [dataclasses.replace(row, tflops=row.tflops * (1.2 if row.mask == "frame_causal" else 1.0)) for row in all_at(0.86)]
    verdicts = judge("milestone", low, read_anchors())
    missed = [verdict.text for verdict in verdicts if not verdict.passed]
    assert missed and all(text.startswith("fwd") and "0.90 x FA3" in text and "has 0.860" in text for text in missed)
    assert len(missed) == 5 * 4 * 2  # masks x sizes x head counts, forward alone
    assert len(verdicts) == 5 * 4 * 2 * 2 + 4 * 2 * 2
    assert not met("milestone", all_at(0.84))


def test_short_sizes_do_not_belong_to_the_milestone() -> None:
    rows = [dataclasses.replace(row, tflops=1.0) if row.tokens < 8192 else row for row in all_at(1.001)]
    assert met("milestone", rows) and not met("short", rows) and met("short", all_at(1.0))


def test_goal_asks_for_every_anchor() -> None:
    assert met("goal", all_at(1.3)) and not met("goal", all_at(1.1))  # 1.15 x the peer


def test_what_was_not_measured_or_failed_is_missed() -> None:
    rows = all_at(1.001)
    assert not met("milestone", [row for row in rows if (row.mask, row.tokens) != ("causal", 8192)])
    broken = made_up_row("causal", 8192, status="failed", note="launch", ms=0.0, tflops=0.0)
    is_met, lines = report("milestone", judge("milestone", [*rows, broken], read_anchors()))
    assert not is_met and len(lines) == 2 and "failed: launch" in lines[1]


def test_a_gate_asks_only_for_selected_cells_and_never_passes_on_none() -> None:
    rows = [row for row in all_at(1.001) if row.mask == "causal"]
    assert met("milestone", rows, set(cells(["causal"], SIZES, [(48, 8), (16, 16)], [128], ["bfloat16"])))
    assert not met("milestone", rows, set(cells(["causal"], [1024], [(48, 8)], [128], ["bfloat16"])))
    for gate in GATES:
        assert not met(gate, [])


@pytest.mark.parametrize(("det_ms", "is_met"), [(1.25, True), (1.26, False)])
def test_deterministic_backward(det_ms: float, is_met: bool) -> None:
    rows = [made_up_row(op="bwd", ms=1.0), made_up_row(op="bwd_det", ms=det_ms)]
    assert met("deterministic", rows) is is_met
    assert not met("deterministic", rows[1:]) and not met(
        "deterministic", [*rows, made_up_row(op="bwd", status="wrong", note="off", ms=0.0)]
    )


@pytest.mark.parametrize(("small_ms", "is_met"), [(2.0, True), (2.1, False)])
def test_small_documents_against_tiles(small_ms: float, is_met: bool) -> None:
    rows = [made_up_row("docs_1_4", 37_473, ms=small_ms), made_up_row("docs_1_4_as_tiles", 37_473, ms=1.0)]
    assert met("small", rows) is is_met and not met("small", rows[:1])


def test_keys_of_rows_and_anchors_are_alike() -> None:
    assert made_up_row(provider="FA3").key == anchor() == Key("causal", 8192, "48/8", 128, "bfloat16", "fwd", "FA3")
