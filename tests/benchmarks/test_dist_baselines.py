"""Ring, all-gather, Ulysses and calc_attn against the float64 twin on 1, 2 and 4 ranks, and the benchmark that compares them."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import bench_dist
from benchmarks.dist_baselines import METHODS, Heads, LocalAttention, Result, Ring, options_for, ring, shards
from benchmarks.dist_baselines.in_step import InStepTimer
from benchmarks.ffa_cells import Cell
from magi_attention.comm import SINGLE, comm_group
from magi_attention.errors import InputError
from magi_attention.mask import AttnMask, builders
from magi_attention.testing.masks import random_mask, random_slices
from magi_attention.testing.workers import RankPool
from tests.poison import poisoned
from tests.runtime.harness import Problem, as_numpy, assemble, assert_parity, causal, full, reference, small

RANK_COUNTS = (1, 2, 4)
DOUBLE = Problem(causal([61]), 61, head_dim=8, num_heads_q=8, num_heads_kv=4, dtype=torch.float64)
VIDEO = builders.block_causal_video(9, 7, 61)
PROBLEMS = {
    "full": small(DOUBLE, slices=full(64, 64), total_q=64),
    "causal": DOUBLE,
    "documents over ranks": small(DOUBLE, slices=causal([13, 90, 1, 24]), total_q=128),
    "window": small(DOUBLE, slices=causal([61], left=9)),
    "frame causal": small(DOUBLE, slices=VIDEO.slices.tolist()),
    "fewer tokens than ranks": small(DOUBLE, slices=causal([3]), total_q=3),
    "one token": small(DOUBLE, slices=causal([1]), total_q=1),
    "rows and keys unseen": small(DOUBLE, slices=[[5, 20, 30, 41, -100, 100], [50, 61, 0, 2, -100, 100]]),
    "nothing visible": small(DOUBLE, slices=[]),
    "cross": small(DOUBLE, slices=[[0, 50, 0, 23, -40, 3]], total_q=50, total_k=23),
    "cross, one key": small(DOUBLE, slices=full(9, 1), total_q=9, total_k=1),
    "one key head": small(DOUBLE, num_heads_kv=1),
    "two key heads": small(DOUBLE, num_heads_kv=2),
}
Parts = list[dict[str, np.ndarray]]


def heads_of(problem: Problem) -> Heads:
    return Heads(problem.num_heads_q, problem.num_heads_kv, problem.head_dim)


def make(name: str, problem: Problem) -> LocalAttention:
    heads = heads_of(problem)
    return METHODS[name](problem.mask, comm_group(None), heads, options_for(heads))


def run_on_rank(rank: int, num_ranks: int, name: str, problems: Sequence[Problem], number: str | None = None) -> Parts:
    """Forward and two backwards of each problem; the second shows that nothing of the first was consumed."""
    found = []
    for problem in problems:
        method, inputs = make(name, problem), problem.inputs()
        rows_q, rows_k = (torch.from_numpy(rows.copy()) for rows in (method.query_rows, method.key_rows))
        with contextlib.nullcontext() if number is None else poisoned(number):
            result = method.forward(inputs["q"][rows_q], inputs["k"][rows_k], inputs["v"][rows_k])
            method.backward(result, inputs["dout"][rows_q])
            grads = method.backward(result, inputs["dout"][rows_q])
        tensors = {"out": result.out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
        if result.lse is not None:
            tensors["lse"] = result.lse
        arrays = {key: as_numpy(tensor) for key, tensor in tensors.items()}
        found.append({**arrays, "rows_q": method.query_rows, "rows_k": method.key_rows, "rows_area": np.array([method.area])})
    return found


def parts_of(pool: RankPool, num_ranks: int, *arguments: Any) -> list[Parts]:
    """Per problem, per rank."""
    return [list(parts) for parts in zip(*pool.run(num_ranks, run_on_rank, *arguments), strict=True)]


def assert_exact(problem: Problem, parts: Parts, note: str) -> None:
    """Float64 leaves no room: the order of sums is all that may differ."""
    exact, ours = reference(problem), assemble(problem, parts)
    for key in ("out", "dq", "dk", "dv", *(("lse",) if "lse" in ours else ())):
        assert ours[key].shape == exact[key].shape, f"{note} {key}"
        assert torch.allclose(ours[key], exact[key], rtol=1e-11, atol=1e-11), f"{note} {key}"
    assert sum(part["rows_area"][0] for part in parts) == problem.mask.area(), f"{note} area"


# ---- the methods ----


@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
@pytest.mark.parametrize("name", METHODS)
def test_masks_in_float64(rank_pool: RankPool, name: str, num_ranks: int) -> None:
    found = parts_of(rank_pool, num_ranks, name, list(PROBLEMS.values()))
    for (label, problem), parts in zip(PROBLEMS.items(), found, strict=True):
        assert_exact(problem, parts, f"{name}, {label}, on {num_ranks} ranks:")


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("name", METHODS)
def test_fresh_memory_is_never_read(rank_pool: RankPool, name: str, number: str) -> None:
    problems = [PROBLEMS[label] for label in ("causal", "fewer tokens than ranks", "rows and keys unseen", "nothing visible", "cross")]
    for problem, parts in zip(problems, parts_of(rank_pool, 4, name, problems, number), strict=True):
        assert_exact(problem, parts, f"{name} in memory full of {number}:")


@pytest.mark.parametrize("name", METHODS)
def test_narrow_dtypes(rank_pool: RankPool, name: str) -> None:
    base = small(DOUBLE, slices=causal([40, 190]), total_q=230, head_dim=32)
    problems = [small(base, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    problems.append(small(base, dtype=torch.bfloat16, num_heads_kv=2))  # Ulysses sums copies of key heads
    for problem, parts in zip(problems, parts_of(rank_pool, 4, name, problems), strict=True):
        for part in parts:
            del part["rows_area"]
        assert_parity(problem, parts, f"{name}: ")


@pytest.mark.parametrize("name", ["ring", "all_gather", "all_gather_overlap"])
def test_random_masks(rank_pool: RankPool, name: str) -> None:
    rng = np.random.default_rng(3)
    problems = []
    for seed in range(25):
        total_q, total_k = (int(x) for x in rng.integers(1, 70, size=2))
        slices = random_slices(rng, total_q, total_k).tolist()
        problems.append(small(DOUBLE, slices=slices, total_q=total_q, total_k=total_k, num_heads_q=2, num_heads_kv=1, seed=seed))
    for seed, parts in enumerate(parts_of(rank_pool, 4, name, problems)):
        assert_exact(problems[seed], parts, f"{name}, mask {seed}:")


# ---- what Ulysses cannot do ----


def refusal_on_rank(rank: int, num_ranks: int, problem: Problem) -> str:
    try:
        make("ulysses", problem)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("num_heads_q", "num_heads_kv", "words"),
    [(6, 2, ("num_heads_q=6", "4 ranks", "ring")), (24, 6, ("num_heads_kv=6", "4 ranks", "ring")), (8, 2, ()), (4, 1, ())],
)
def test_heads_that_ulysses_refuses(rank_pool: RankPool, num_heads_q: int, num_heads_kv: int, words: tuple[str, ...]) -> None:
    problem = small(DOUBLE, num_heads_q=num_heads_q, num_heads_kv=num_heads_kv)
    texts = rank_pool.run(4, refusal_on_rank, problem)
    assert len(set(texts)) == 1, "every rank says the same"
    assert bool(texts[0]) == bool(words) and all(word in texts[0] for word in words)


# ---- shares and cut masks ----


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("share", [shards.contiguous, shards.zigzag])
def test_shares_have_every_token_once(share: Any, num_ranks: int) -> None:
    for total in (0, 1, 2, 7, 16, 61):
        ranks = share(total, num_ranks)
        rows = [shards.tokens(runs) for runs in ranks]
        assert len(rows) == num_ranks and np.array_equal(np.sort(np.concatenate(rows)), np.arange(total))
        assert all(np.all(np.diff(own) > 0) and len(own) == shards.num_rows(runs) for own, runs in zip(rows, ranks, strict=True))
        assert max(map(len, rows)) - min(map(len, rows)) <= (1 if share is shards.contiguous else 2)


def test_zigzag_pairs_the_first_part_with_the_last() -> None:
    assert shards.zigzag(80, 4) == [((0, 10), (70, 80)), ((10, 20), (60, 70)), ((20, 30), (50, 60)), ((30, 50),)]


def test_part_of_a_mask_is_the_rows_and_columns_of_its_matrix() -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        mask = random_mask(rng, 41, 37)
        q_runs, k_runs = shards.zigzag(41, 3)[int(rng.integers(3))], shards.zigzag(37, 2)[int(rng.integers(2))]
        gap = int(rng.integers(4))  # rows of the key buffer that belong to nobody
        part = shards.part_of(mask, shards.placed(q_runs), shards.placed(k_runs, gap))
        rows, columns = shards.tokens(q_runs), shards.tokens(k_runs)
        local = AttnMask.from_slices(part, len(rows), len(columns) + gap)  # refuses cells that are covered twice
        assert np.array_equal(local.to_dense()[:, gap:], mask.to_dense()[np.ix_(rows, columns)])
        assert not local.to_dense()[:, :gap].any()
        assert shards.area_of(part, len(rows), len(columns) + gap) == local.area()


# ---- the ring overlaps ----


def order_on_rank(rank: int, num_ranks: int) -> list[str]:
    """What the ring does one after another."""
    log: list[str] = []

    def logged(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return function(*args, **kwargs)

        return call

    problem = PROBLEMS["full"]
    method, inputs = make("ring", problem), problem.inputs()
    with pytest.MonkeyPatch.context() as patch:
        for name, short in (("attention_forward_fresh", "kernel"), ("attention_forward", "kernel"), ("attention_backward_fresh", "kernel")):
            patch.setattr(ring, name, logged(short, getattr(ring, name)))
        patch.setattr(ring._Hop, "__init__", logged("start", ring._Hop.__init__))
        patch.setattr(ring._Hop, "wait", logged("wait", ring._Hop.wait))
        q, k, v, dout = (inputs[name][torch.from_numpy(method.query_rows.copy())] for name in ("q", "k", "v", "dout"))
        result = method.forward(q, k, v)
        log.append("backward")
        method.backward(result, dout)
    return log


def test_a_hop_is_in_flight_during_each_kernel_but_the_last(rank_pool: RankPool) -> None:
    forward = "start kernel wait start kernel wait start kernel wait kernel backward"
    first, middle, last = "start kernel wait start", "start kernel wait wait start", "kernel wait start wait"
    for log in rank_pool.run(4, order_on_rank):
        assert " ".join(log) == f"{forward} {first} {middle} {middle} {last}"


# ---- the benchmark ----

SMALL = ["--sizes", "96", "--heads", "4/2", "--head-dim", "16", "--target-ms", "5"]


def drawn(**changes: Any) -> bench_dist.Problem:
    cell = dataclasses.replace(Cell("causal", 48, 4, 2, 16, "float32"), **changes)
    heads = Heads(cell.num_heads_q, cell.num_heads_kv, cell.head_dim)
    return bench_dist.draw(cell, InStepTimer(SINGLE, torch.device("cpu"), 5.0), options_for(heads))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_right_methods_pass_the_gate(dtype: str) -> None:
    problem = drawn(dtype=dtype)
    bench_dist.measure_kernel(problem, ("fwd", "bwd"))
    for row in bench_dist.measure(problem, "ring", METHODS["ring"], ("fwd", "bwd")):
        assert row.status == "ok" and row.ms > 0 and row.repeats >= 5 and row.kernel_tflops > 0 and row.ratio > 0 and row.balance == 1
        assert row.error_ratio <= 1 and row.collectives == "none"


class Spoiled(Ring):
    """Right but for what `spoil` does to (out, dq, dk, dv)."""

    spoil: Any = None

    def forward(self, *tensors: torch.Tensor) -> Result:
        result = super().forward(*tensors)
        return dataclasses.replace(result, out=self.spoil("out", result.out))

    def backward(self, result: Result, dout: torch.Tensor) -> Any:
        return tuple(self.spoil(name, x) for name, x in zip(("dq", "dk", "dv"), super().backward(result, dout), strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("wrong_one", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("how", ["a row", "a number", "all a little"])
def test_wrong_results_are_not_timed(wrong_one: str, how: str, dtype: str) -> None:
    def spoil(name: str, x: torch.Tensor) -> torch.Tensor:
        if name != wrong_one:
            return x
        x = x * 1.1 if how == "all a little" else x.clone()
        if how == "a row":
            x[20, -1] = x[21, -1]
        elif how == "a number":
            x[0, 0, 0] = float("nan")  # of a head that is not compared
        return x

    made = type("Made", (Spoiled,), {"spoil": staticmethod(spoil)})
    for row in bench_dist.measure(drawn(dtype=dtype), "made", made, ("fwd", "bwd")):
        assert row.status == "wrong" and row.error_ratio > 1 and row.ms == 0 and row.note


def test_pairs_that_are_left_out_are_seen() -> None:
    class Short(Ring):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.area -= 1

    (row,) = bench_dist.measure(drawn(), "short", Short, ("fwd",))
    assert row.status == "wrong" and "1175 pairs" in row.note and "1176" in row.note


def test_the_command_on_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    assert bench_dist.main(["--ranks", "2", *SMALL, "--csv", str(path), "--commit", "0123abc"]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = {(mask, op, name) for mask in bench_dist.MASKS for op in ("fwd", "bwd") for name in ("kernel", *METHODS)}
    assert {(row["mask"], row["op"], row["method"]) for row in rows} == wanted and len(rows) == len(wanted)
    assert {row["status"] for row in rows} == {"ok"} and {row["ranks"] for row in rows} == {"2"}
    assert {row["commit"] for row in rows} == {"0123abc"} and all(row["machine"] and row["torch"] for row in rows)
    assert all(float(row["ms"]) > 0 and float(row["balance"]) >= 1 for row in rows)
    assert capfd.readouterr().out.count("best other") == 8


def test_refusals_and_the_budget(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    few = ["--ranks", "2", "--masks", "full", "--heads", "3/3", "--sizes", "64", "--head-dim", "16", "--passes", "fwd", "--target-ms", "5"]
    assert bench_dist.main([*few, "--methods", "ulysses,ring", "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        status = {row["method"]: (row["status"], row["note"]) for row in csv.DictReader(file)}
    assert status["ulysses"][0] == "refused" and "num_heads_q=3" in status["ulysses"][1] and status["ring"][0] == "ok"
    assert bench_dist.main([*few, "--budget-seconds", "-1"]) == 0
    assert "left out for --budget-seconds -1:\n  full 64 3/3" in capfd.readouterr().out


@pytest.mark.parametrize("argv", [["--masks", "diagonal"], ["--methods", "ring,rings"], ["--heads", "4/3"], ["--sizes", "many"]], ids=str)
def test_wrong_arguments_are_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_dist.arguments(argv)
    assert argv[0] in capsys.readouterr().err
