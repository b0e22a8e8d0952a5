"""The planner's command line as a user types it: text, JSON, picture, and one readable line for every wrong argument."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.mask.builders import from_cu_seqlens
from magi_attention.plan.__main__ import main


def test_text_says_balance_traffic_steps_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cu-seqlens", "0,7000,13107", "--window", "1023,0", "--ranks", "8"]) == 0
    printed = capsys.readouterr().out
    for word in ("visible pairs", "largest / mean work", "key rows received", "remote steps", "predicted on h200", "because"):
        assert word in printed


def test_json_counts_equal_the_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("137, 2041\n89\n")
    assert main(["--docs", str(lengths), "--ranks", "3", "--heads", "8:2", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["mask"]["area"] == 2_097_319
    assert values["tokens"]["mean"] * 3 == 2_267
    assert values["recv_rows"]["mean"] == values["send_rows"]["mean"]
    assert values["remote_rows"] >= values["remote_rows_lower_bound"]


def test_mask_file_and_borders_give_the_same_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mask_file = tmp_path / "mask.json"
    mask_file.write_text(from_cu_seqlens([0, 300, 1000], [0, 300, 1000], causal=True).to_json())
    plans = []
    for source in (["--mask", str(mask_file)], ["--cu-seqlens", "0 300 1000"]):
        assert main([*source, "--ranks", "4", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out) | {"plan_ms": 0})
    assert plans[0] == plans[1]


def test_thousands_of_ranks_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cu-seqlens", "0,1000000", "--ranks", "4096", "--nodes", "512", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 4_096


@pytest.mark.parametrize("ranks", ["5", "200"])
def test_picture(tmp_path: Path, ranks: str) -> None:
    path = tmp_path / "plan.png"
    assert main(["--cu-seqlens", "0,7000,13107", "--ranks", ranks, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_an_unbounded_window_may_follow_a_blank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cu-seqlens", "0,10", "--ranks", "2", "--window", "-1,0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mask"]["area"] == 55


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m magi_attention.plan --cu-seqlens 0,1000 --ranks 2 | head -n 1"
    finished = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert finished.stdout.startswith("mask") and not finished.stderr


def test_no_tokens_is_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cu-seqlens", "0", "--ranks", "4"]) == 0
    assert "0 visible pairs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--cu-seqlens", "0,5,3", "--ranks", "2"], "cu_seqlens"),
        (["--cu-seqlens", "0,10", "--ranks", "0"], "--ranks=0"),
        (["--cu-seqlens", "0,10", "--ranks", "4097"], "--ranks=4097"),
        (["--cu-seqlens", "0,10", "--ranks", "6", "--nodes", "4"], "--nodes=4"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--heads", "8"], "--heads"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--heads", "7:2"], "--heads"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--heads", "8:0"], "--heads"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--window", "5"], "--window"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--window=-1,-3"], "window"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--window", "-1,-3"], "window"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--chunk-size", "0"], "chunk_size"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--degree", "0"], "degree"),
        (["--cu-seqlens", "nowhere.txt", "--ranks", "2"], "nowhere.txt"),
        (["--cu-seqlens", "0,a", "--ranks", "2"], "give numbers as 0,A,B"),
        (["--cu-seqlens", "-5", "--ranks", "2"], "starts with -5"),
        (["--cu-seqlens", " ", "--ranks", "2"], "--cu-seqlens is empty"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--heads", "99999999999:1"], "num_heads_q=99999999999"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--head-dim", "99999999999999999999"], "head_dim=99999999999999999999"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--degree", "99999999"], "degree=99999999"),
        (["--docs", "nowhere.txt", "--ranks", "2"], "nowhere.txt"),
        (["--mask", "nowhere.json", "--ranks", "2", "--full"], "--full"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--plot", "/nowhere/plan.png"], "/nowhere"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--plot", "plan.abc"], ".png, .svg or .pdf"),
        (["--cu-seqlens", "0,10", "--ranks", "2", "--plot", "plan"], ".png, .svg or .pdf"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert named in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_document_file_with_words_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("10 twenty 30")
    assert main(["--docs", str(lengths), "--ranks", "2"]) == 2
    assert "twenty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("3 -5", "--docs: length -5 is negative"),
        ("1e3", "--docs: "),
        ("99999999999999999999", "numbers below 2^30"),
    ],
)
def test_wrong_lengths_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    assert main(["--docs", str(path), "--ranks", "2"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"total_q": 8, "total_k": 8, "slices": [[[], [], [], [], "full"]]}',
        '{"total_q": 8, "total_k": 8, "slices": [[0, 8, 0, 8, null, NaN]]}',
        '{"total_q": 8, "total_k": 8, "slices": [[0, 8, 0, 8, "diagonal"]]}',
        '{"total_q": 8, "total_k": 8, "slices": [[0, 8, 0, 8, {}]]}',
        '{"total_q": 8, "total_k": 8, "slices": [[0, 8, 0, 8, "full"], [0, 8, 0, 8, "causal"]]}',
        '{"total_q": 8, "total_k": 8, "slices": {"0": [0, 8, 0, 8, "full"]}}',
        '{"total_q": 8.0, "total_k": 8, "slices": []}',
        '{"total_q": true, "total_k": 8, "slices": []}',
    ],
    ids=range(9),
)
def test_malformed_masks_are_one_line_and_not_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "mask.json"
    path.write_text(text)
    assert main(["--mask", str(path), "--ranks", "2"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
