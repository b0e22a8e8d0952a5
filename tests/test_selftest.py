"""The self-test passes here, says FAIL when a result is wrong, and skips with a reason what a machine cannot run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from magi_attention import selftest
from magi_attention import selftest_items as items
from magi_attention.api import flex_flash_attn_func
from magi_attention.mask import AttnMask, builders

CPU = torch.device("cpu")


def run_selftest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "magi_attention.selftest", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def test_everything_passes_on_this_machine(tmp_path: Path) -> None:
    done = run_selftest(tmp_path, "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert not [line for line in lines if line.startswith("FAIL")]
    summary = re.fullmatch(r"PASS: (\d+) passed, 0 failed, (\d+) skipped in [\d.]+ s", lines[-1])
    assert summary and int(summary[1]) == sum(line.startswith("PASS  ") for line in lines) > 40
    assert sum("gloo x 2" in line for line in lines) == len(items.RANK_CHECKS) * len(items.DISTRIBUTED_MASKS)


@pytest.mark.parametrize("num_ranks", [0, 1])
def test_too_few_ranks_skip_the_distributed_checks(num_ranks: int) -> None:
    assert "2 or more" in (selftest.reason_against("gloo", num_ranks, 0) or "")
    assert selftest.reason_against("gloo", 2, 0) is None


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for ranks in ("-1", "100000"):
        done = run_selftest(tmp_path, "--ranks", ranks)
        assert done.returncode == 2 and f"--ranks {ranks}" in done.stderr and "process" in done.stderr


def test_outcomes_are_counted_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> str:
        raise items.Failed("off by one\nsecond line")

    def crash() -> str:
        raise ZeroDivisionError("division by zero")

    named = {"good": lambda: "fine", "bad": fail, "crash": crash, "absent": partial(selftest._skip, "no such device")}
    counts = selftest.run(iter(selftest.Item(name, check) for name, check in named.items()))
    assert counts == {"PASS": 1, "FAIL": 2, "SKIP": 1}
    printed = capsys.readouterr().out
    assert "no such device" in printed and "ZeroDivisionError: division by zero" in printed and "      second line" in printed


def block_mask() -> AttnMask:
    is_visible = np.random.default_rng(0).random((4, 4)) < 0.6
    return builders.block_map(is_visible, 256, 256, 64, 64)


def test_a_slice_that_is_one_column_off_is_noticed() -> None:
    """Case N17: the checker names the first cell that differs, and passes the right mask."""
    mask = block_mask()
    slices = mask.slices.copy()
    slices[0, 3] -= 1
    inputs = items.make_inputs(mask, torch.float32, CPU)

    def result_of(used: AttnMask) -> items.Result:
        out, meta = flex_flash_attn_func(inputs["q"], inputs["k"], inputs["v"], mask=used)
        assert meta.lse is not None
        return items.Result.of(out, meta.lse, inputs["dout"], {name: inputs[name] for name in "qkv"})

    assert 0 < items.judge(result_of(mask), mask, inputs) <= 1
    with pytest.raises(items.Failed, match=r"out\[\d+, \d+, \d+\] is .*, float64 has .*; off by .*, allowed"):
        items.judge(result_of(AttnMask.from_slices(slices, 256, 256)), mask, inputs)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.1])
def test_one_wrong_number_is_noticed(wrong: float) -> None:
    exact = items.Result({"out": torch.zeros(4, 2, 3, dtype=torch.float64), "lse": torch.full((4, 2), -torch.inf, dtype=torch.float64)})
    assert items.compare(exact, exact, exact) == 0
    for name, index in (("out", (2, 1, 0)), ("lse", (3, 1))):
        values = {key: x.clone() for key, x in exact.values.items()}
        values[name][index] = wrong
        with pytest.raises(items.Failed, match=re.escape(f"{name}{list(index)}")):
            items.compare(items.Result(values), exact, exact)
