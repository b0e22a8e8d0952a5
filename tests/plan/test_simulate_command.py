"""Simulation as a user types it: text, JSON, pictures, sweep, calibration, and one readable line for every wrong argument."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from magi_attention.plan.__main__ import main
from magi_attention.plan.simulate_sweep import FAMILIES, family_mask

HEADER = "mask,tokens,ranks,heads,direction,milliseconds\n"


def test_text_says_times_exposure_bytes_and_the_slowest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--family", "causal", "--ranks", "16", "--simulate"]) == 0
    printed = capsys.readouterr().out
    for word in ("2 node(s) of h200", "not yet calibrated", "TFLOP/s per GPU", "exposed", "NVLink", "network", "slowest is rank", "a2av"):
        assert word in printed


@pytest.mark.parametrize("family", FAMILIES)
def test_json_and_picture(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "timeline.png"
    words = ["--family", family, "--ranks", "4", "--simulate", "--json", "--plot", str(path), "--machine", "h100-nvlink"]
    assert main(words) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["forward"]["time_us"] < values["backward"]["time_us"] and not values["is_calibrated"]
    assert values["backward"]["nvlink_bytes"] > 0 and values["backward"]["nic_bytes"] == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_a_small_mask_without_rows_has_a_picture(tmp_path: Path) -> None:
    assert main(["--cu-seqlens", "0", "--ranks", "2", "--simulate", "--plot", str(tmp_path / "empty.svg")]) == 0


def test_sweep_has_the_published_figures_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.png"
    words = ["--family", "documents", "--sweep-ranks", "16,1,8", "--tokens-per-gpu", "2048", "--plot", str(path)]
    assert main(words) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["1", "8", "16"], "ascending"
    assert [line.split()[-1] for line in lines[2:5]] == ["-", "458", "428"] and "not measured here" in printed.out
    assert printed.err.count("simulated") == 3, "progress"
    assert path.stat().st_size > 10_000
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["published_magi_attention_varlen_causal_forward"]["64"] == 240


def test_a_thousand_ranks_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    assert main(["--family", "documents", "--sweep-ranks", "1024", "--machine", "h200-nvlink", "--json"]) == 0
    assert time.perf_counter() - start < 60
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["nodes"] == 128 and 0 < row["backward_tflops"] < 540 and 0 < row["forward_tflops"] < 640


def _measured(tmp_path: Path, factor: float) -> Path:
    """A file with the time of one device from the table's rate, times a factor."""
    milliseconds = 4 * 64 * 128 * family_mask("causal", 65_536).area() / 640e9 * factor
    path = tmp_path / "measured.csv"
    path.write_text(f"{HEADER}causal,65536,1,64:8,forward,{milliseconds}\nfull,4096,1,64:8,backward,{10 * 64 * 128 * 4096**2 / 540e9}\n")
    return path


@pytest.mark.parametrize(("factor", "code", "word"), [(1.0, 0, "within"), (1.2, 1, "beyond"), (0.8, 1, "beyond")])
def test_calibration_says_the_worst_row(tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float, code: int, word: str) -> None:
    path = _measured(tmp_path, factor)
    assert main(["--calibrate", str(path)]) == code
    assert word in capsys.readouterr().out.splitlines()[-1]
    assert main(["--calibrate", str(path), "--json"]) == code
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["predicted_over_measured"] == pytest.approx(1 / factor, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "columns mask, tokens, ranks, heads, direction, milliseconds are missing"),
        ("mask,tokens\n", "columns ranks, heads, direction, milliseconds are missing"),
        (HEADER, "no rows"),
        (HEADER + "ring,1,1,8:8,forward,1\n", "line 2: mask='ring'"),
        (HEADER + "full,x,1,8:8,forward,1\n", "line 2"),
        (HEADER + "full,8,1,8,forward,1\n", "line 2"),
        (HEADER + "full,8,1,8:3,forward,1\n", "heads='8:3'"),
        (HEADER + "full,8,1,8:8,sideways,1\n", "direction='sideways'"),
        (HEADER + "full,8,1,8:8,forward,nan\n", "milliseconds must be above 0"),
        (HEADER + "full,8,0,8:8,forward,1\n", "ranks in 1..4096"),
        (HEADER + "full,8\n", "line 2"),
        (HEADER + "full,800,12,8:8,forward,1\n", "ranks=12 do not fill nodes of 8"),
        (HEADER + '"full\0,8,1\n', "line"),
    ],
    ids=range(13),
)
def test_wrong_calibration_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str) -> None:
    path = tmp_path / "measured.csv"
    path.write_text(text)
    assert main(["--calibrate", str(path)]) == 2
    printed = capsys.readouterr().err
    assert told in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--family", "full", "--ranks", "12", "--simulate"], "ranks=12 do not fill nodes of 8"),
        (["--family", "full", "--ranks", "16", "--nodes", "1", "--simulate"], "take at least 2 nodes"),
        (["--family", "full", "--ranks", "16", "--nodes", "3", "--simulate"], "--nodes=3"),
        (["--family", "full", "--ranks", "0", "--simulate"], "--ranks=0"),
        (["--family", "full", "--ranks", "2", "--simulate", "--tokens-per-gpu", "0"], "--tokens-per-gpu=0"),
        (["--family", "full", "--ranks", "4096", "--simulate", "--tokens-per-gpu", "99999999"], "tokens=409599995904"),
        (["--family", "full", "--ranks", "2", "--full"], "--family already says"),
        (["--family", "full", "--ranks", "2", "--tokens-per-gpu", "0"], "tokens=0"),
        (["--cu-seqlens", "0,9", "--sweep-ranks", "2"], "--sweep-ranks needs --family"),
        (["--family", "full", "--sweep-ranks", "2", "--ranks", "2"], "leave out --ranks"),
        (["--family", "full", "--sweep-ranks", "2,x"], "--sweep-ranks"),
        (["--family", "full", "--sweep-ranks", ""], "--sweep-ranks"),
        (["--family", "full", "--sweep-ranks", "8,9999"], "1..4096"),
        (["--family", "full", "--sweep-ranks", "8,20"], "ranks=20"),
        (["--calibrate", "nowhere.csv"], "nowhere.csv"),
        (["--calibrate", "nowhere.csv", "--simulate"], "leave out"),
        (["--family", "full", "--ranks", "2", "--simulate", "--plot", "picture.abc"], ".png, .svg or .pdf"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert told in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "2", "--simulate"], "--family is required"),
        (["--family", "full", "--simulate"], "required: --ranks"),
        (["--family", "full", "--ranks", "2", "--machine", "tpu"], "'tpu'"),
        (["--family", "full", "--ranks", "2", "--mover", "pigeon"], "'pigeon'"),
    ],
)
def test_arguments_that_are_missing_or_unknown(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert told in capsys.readouterr().err
