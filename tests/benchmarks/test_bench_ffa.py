"""The command: selection, progress, budget, recorded failures, gates, and one sentence where there is no CUDA device."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_ffa
from benchmarks.bench_ffa import Session, arguments, measure, run
from benchmarks.ffa_cells import SIZES, Cell
from benchmarks.ffa_check import Problem, draw
from benchmarks.ffa_providers import PROVIDERS, Attend, Provider
from benchmarks.ffa_rows import append_rows, read_rows
from benchmarks.ffa_timing import CudaTimer, HostTimer, repeats_for, summarise
from tests.benchmarks.ffa_rows_made_up import made_up_row

FACTS = {"commit": "0000000", "machine": "here", "torch": "0", "python": "3"}
CELL = Cell("causal", 64, 4, 2, 64)
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def session() -> Session:
    return Session("cpu", HostTimer(), FACTS)


def replaced(name: str, prepare: Any) -> Provider:
    return dataclasses.replace(PROVIDERS["blocked"], name=name, prepare=prepare)


@no_cuda
@pytest.mark.parametrize("argv", [[], ["--host-cost"], ["--providers", "ours,cudnn"]], ids=str)
def test_without_a_cuda_device_it_says_so(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench_ffa.main(argv)
    text = str(caught.value)
    assert "no CUDA device" in text and "\n" not in text


@pytest.mark.parametrize("op", ["fwd", "bwd", "bwd_det"])
def test_a_row_of_the_blocked_path(op: str) -> None:
    row = measure(draw(CELL, "cpu"), PROVIDERS["blocked"], op, session())
    assert row.status == "ok" and row.ms > 0 and row.repeats >= 3 and 0 < row.error_ratio < 1 and not row.note
    assert (row.area, row.key, row.commit) == (
        64 * 65 // 2,
        made_up_row("causal", 64, op, heads="4/2", head_dim=64, provider="blocked").key,
        "0000000",
    )


@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_no_other_path_is_timed_as_ours(op: str) -> None:
    row = measure(draw(CELL, "cpu"), PROVIDERS["ours"], op, session())
    assert row.status == "failed" and "UnsupportedError" in row.note and "ffa" in row.note and row.ms == 0


def _doubled(problem: Problem, op: str) -> Attend:
    attend = PROVIDERS["blocked"].prepare(problem, op)
    return lambda q, k, v: (attend(q, k, v)[0] * 2, None)


def _refused(problem: Problem, op: str) -> Attend:
    raise NotImplementedError("not this one\nand more text")


def _restless(problem: Problem, op: str) -> Attend:
    attend, calls = PROVIDERS["blocked"].prepare(problem, op), iter(range(1000))
    return lambda q, k, v: (_Restless.apply(attend(q, k, v)[0], calls), None)


class _Restless(torch.autograd.Function):
    """Passes everything on, gradients with an error far below the tolerance that differs from call to call."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, calls: Any) -> torch.Tensor:
        ctx.calls = calls
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dout * (1 + 2**-7 * (next(ctx.calls) % 2)), None


def test_wrong_and_failed_rows_are_recorded_and_not_timed() -> None:
    problem = draw(CELL, "cpu")
    wrong = measure(problem, replaced("doubled", _doubled), "fwd", session())
    assert (wrong.status, wrong.ms, wrong.tflops) == ("wrong", 0.0, 0.0) and "out of kv head" in wrong.note and wrong.error_ratio > 1
    failed = measure(problem, replaced("refused", _refused), "bwd", session())
    assert (failed.status, failed.note) == ("failed", "NotImplementedError: not this one")


def test_a_deterministic_backward_must_repeat() -> None:
    row = measure(draw(CELL, "cpu"), replaced("restless", _restless), "bwd_det", session())
    assert row.status == "wrong" and row.note == "two runs differ although deterministic=True"
    assert measure(draw(CELL, "cpu"), replaced("restless", _restless), "bwd", session()).status == "ok"


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**({"flex_sizes": (64,), "csv": None} | changes))


def test_slow_starters_come_last_and_only_at_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    slow = dataclasses.replace(PROVIDERS["blocked"], name="slow", is_slow_to_start=True, has_deterministic=False)
    own, grid = session(), [CELL, dataclasses.replace(CELL, tokens=32)]
    run(grid, [slow, PROVIDERS["blocked"]], ("fwd", "bwd_det"), own, options())
    seen = [(row.provider, row.tokens, row.op) for row in own.rows]
    assert seen == [
        ("blocked", 64, "fwd"),
        ("blocked", 64, "bwd_det"),
        ("blocked", 32, "fwd"),
        ("blocked", 32, "bwd_det"),
        ("slow", 64, "fwd"),
    ]
    assert len(capsys.readouterr().out.splitlines()) == len(seen)


def test_the_budget_leaves_out_and_says_so() -> None:
    own = session()
    own.deadline = 0.0
    run([CELL], [PROVIDERS["blocked"]], ("fwd", "bwd"), own, options())
    assert not own.rows and own.left_out == [f"blocked {op} causal 64 4/2 d64 bfloat16" for op in ("fwd", "bwd")]


def test_rows_are_on_disk_when_they_are_measured(tmp_path: Path) -> None:
    own = session()
    run([CELL], [replaced("refused", _refused), PROVIDERS["blocked"]], ("fwd",), own, options(csv=tmp_path / "rows.csv"))
    assert read_rows(tmp_path / "rows.csv") == own.rows and [row.status for row in own.rows] == ["failed", "ok"]


def test_a_lost_context_ends_the_run_with_its_row_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = made_up_row(status="failed", note="illegal address", ms=0.0)

    def lose(*_: object) -> None:
        raise bench_ffa.ContextLost(row)

    monkeypatch.setattr(bench_ffa, "measure", lose)
    with pytest.raises(SystemExit, match="context is lost"):
        run([CELL], [PROVIDERS["blocked"]], ("fwd", "bwd"), session(), options(csv=tmp_path / "rows.csv"))
    assert read_rows(tmp_path / "rows.csv") == [row]


@pytest.mark.parametrize(("tflops", "code"), [(1000.0, 0), (600.0, 1)])
def test_recorded_rows_can_be_judged_without_a_gpu(tflops: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    append_rows(path, [made_up_row("causal", 8192, op, tflops) for op in ("fwd", "bwd")])
    argv = ["--from", str(path), "--masks", "causal", "--sizes", "8k", "--heads", "48/8", "--gate"]
    assert bench_ffa.main(argv) == code
    printed = capsys.readouterr().out
    assert ("met in all 2 cells" if code == 0 else "MISSED in 1 of 2 cells") in printed and f"{tflops / 728:.2f}" in printed
    assert bench_ffa.main([*argv, "milestone", "deterministic"]) == 1  # nothing measured is not a pass
    assert bench_ffa.main(argv[:-1]) == 0


def test_arguments() -> None:
    args = arguments(["--sizes", "8k,100", "--heads", "48/8,5/5", "--gate"])
    assert (args.sizes, args.heads, args.gate, args.dims) == ((8192, 100), ((48, 8), (5, 5)), [], (128,))
    assert arguments([]).gate is None and arguments([]).sizes == SIZES and arguments(["--gate", "goal"]).gate == ["goal"]


@pytest.mark.parametrize(
    "argv", [["--masks", "cusal"], ["--sizes", "8x"], ["--heads", "48/7"], ["--passes", ""], ["--gate", "none"]], ids=str
)
def test_wrong_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        arguments(argv)
    assert caught.value.code == 2 and argv[0] in capsys.readouterr().err


def test_medians_and_repeats() -> None:
    assert summarise([3.0, 1.0, 2.0]) == pytest.approx((2.0, 80.0, 3))
    assert (repeats_for(1e-6, 200), repeats_for(10.0, 200), repeats_for(1000.0, 200)) == (100, 20, 5)


# ---- on a GPU ----


@pytest.mark.gpu
@needs_cuda
def test_the_timer_agrees_with_a_known_wait() -> None:
    timing = CudaTimer()(lambda: torch.cuda._sleep(2_000_000))  # cycles: 1 ms at 2 GHz
    assert 0.8 < timing.ms < 4.0 and timing.spread_pct < 30


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["cudnn", "sdpa_flash", "flex", "blocked"])
@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_baselines_pass_the_check_on_a_gpu(name: str, op: str) -> None:
    row = measure(draw(Cell("causal", 1024, 8, 2, 64), "cuda"), PROVIDERS[name], op, Session("cuda", CudaTimer(), FACTS))
    assert (row.status, row.note) == ("ok", "") and row.ms > 0


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("mask", ["causal", "varlen_full", "swa_causal", "frame_causal"])
def test_flex_attention_has_our_masks_on_a_gpu(mask: str) -> None:
    row = measure(draw(Cell(mask, 4096, 4, 2, 64), "cuda"), PROVIDERS["flex"], "bwd", Session("cuda", CudaTimer(), FACTS))
    assert (row.status, row.note) == ("ok", "")
