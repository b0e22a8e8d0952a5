"""Distributed attention against the float64 twin: masks, options, dtypes, rank counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magi_attention.config import ContiguousDispatchAlg, ZigzagDispatchAlg
from magi_attention.testing.masks import random_slices
from magi_attention.testing.workers import RankPool
from tests.runtime.harness import Problem, assemble, assert_parity, causal, full, reference, run_on_rank, small

RANK_COUNTS = (1, 2, 3, 4)
WINDOWED = causal([13, 90, 1, 24], left=17)


def check(rank_pool: RankPool, num_ranks: int, problems: list[Problem]) -> list[list[dict[str, np.ndarray]]]:
    """Run all problems in one call, compare each with the twin; returns the parts of each problem."""
    per_rank = rank_pool.run(num_ranks, run_on_rank, problems)
    per_problem = [list(parts) for parts in zip(*per_rank, strict=True)]
    for problem, parts in zip(problems, per_problem, strict=True):
        assert_parity(problem, parts, f"{problem}: ")
    return per_problem


def random_problem(seed: int) -> Problem:
    rng = np.random.default_rng(1000 + seed)
    total_q = int(rng.integers(1, 90))
    is_cross = bool(rng.integers(0, 4) == 0)
    total_k = int(rng.integers(1, 90)) if is_cross else None
    heads_kv = int(rng.integers(1, 3))
    return Problem(
        slices=random_slices(rng, total_q, total_k if total_k is not None else total_q).tolist(),
        total_q=total_q,
        total_k=total_k,
        num_heads_q=heads_kv * int(rng.integers(1, 4)),
        num_heads_kv=heads_kv,
        head_dim=8,
        head_dim_v=int(rng.choice([4, 8, 12])),
        dtype=[torch.float32, torch.float64, torch.bfloat16][int(rng.integers(0, 3))],
        sink_layout=[None, None, "sh", "ssh"][int(rng.integers(0, 4))],
        num_sinks=int(rng.integers(1, 3)),
        softcap=float(rng.choice([0.0, 0.0, 3.0])),
        uses_lse=bool(rng.integers(0, 2)),
        seed=seed,
        chunk_size=int(rng.integers(1, 24)),
        degree=[None, 1, 2, 3][int(rng.integers(0, 4))],
        has_overlap=bool(rng.integers(0, 4)),
    )


@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
def test_random_masks(rank_pool: RankPool, num_ranks: int) -> None:
    check(rank_pool, num_ranks, [random_problem(seed) for seed in range(200)])


@pytest.mark.parametrize("num_ranks", (2, 3))
def test_options(rank_pool: RankPool, num_ranks: int) -> None:
    base = Problem(WINDOWED, 128, chunk_size=8, degree=2)
    check(
        rank_pool,
        num_ranks,
        [
            base,
            small(base, num_heads_q=6, num_heads_kv=2, head_dim_v=24),
            small(base, num_heads_q=3, num_heads_kv=3, softmax_scale=1.0),
            small(base, sink_layout="sh", num_sinks=2, uses_lse=True),
            small(base, sink_layout="ssh", num_sinks=3, uses_lse=True),
            small(base, softcap=2.0, sink_layout="sh"),
            small(base, has_overlap=False),
            small(base, degree=5),
            small(base, dtype=torch.float16, head_dim=32),
            small(base, alg=ZigzagDispatchAlg(), chunk_size=None),
            small(base, alg=ContiguousDispatchAlg(), chunk_size=None),
            small(base, slices=[], uses_lse=True),
            small(base, slices=full(128, 40), total_k=40),
            small(base, slices=[[0, 5, 3, 7, -100, 100]], total_q=5, total_k=300),
        ],
    )


def test_sink_gradient_reduction(rank_pool: RankPool) -> None:
    base = Problem(WINDOWED, 128, chunk_size=8, sink_layout="sh", dtype=torch.float64)
    share, total, mean = check_sinks(rank_pool, [small(base, sink_grad_reduce=how) for how in (None, "sum", "avg")])
    assert not np.array_equal(share[0], share[1])  # each rank's own part
    exact = reference(base)["dsink"].numpy()
    for part in (*total, 3 * mean[0], 3 * mean[1], sum(share)):
        assert np.allclose(part, exact, rtol=1e-12, atol=1e-12)


def check_sinks(rank_pool: RankPool, problems: list[Problem]) -> list[list[np.ndarray]]:
    per_rank = rank_pool.run(3, run_on_rank, problems)
    return [[parts[idx]["dsink"] for parts in per_rank] for idx in range(len(problems))]


def test_float64_is_exact_on_any_number_of_ranks(rank_pool: RankPool) -> None:
    problem = Problem(WINDOWED, 128, dtype=torch.float64, chunk_size=8, degree=3, sink_layout="sh", uses_lse=True)
    exact = reference(problem)
    for num_ranks in RANK_COUNTS:
        ours = assemble(problem, [parts[0] for parts in rank_pool.run(num_ranks, run_on_rank, [problem])])
        for name, tensor in ours.items():
            assert torch.allclose(tensor, exact[name], rtol=1e-11, atol=1e-11), f"{name} on {num_ranks} ranks"


def test_equal_bits_from_run_to_run(rank_pool: RankPool) -> None:
    problem = Problem(WINDOWED, 128, dtype=torch.bfloat16, chunk_size=4, degree=3, sink_layout="sh", sink_grad_reduce="sum")
    first = rank_pool.run(4, run_on_rank, [problem] * 3)
    again = rank_pool.run(4, run_on_rank, [problem])
    for rank in range(4):
        for other in (*first[rank][1:], again[rank][0]):
            for name, array in first[rank][0].items():
                assert array.tobytes() == other[name].tobytes(), f"{name} of rank {rank} differs between equal runs"


def test_overlap_only_changes_the_order_of_waiting(rank_pool: RankPool) -> None:
    problem = Problem(WINDOWED, 128, chunk_size=8, degree=1)
    per_rank = rank_pool.run(2, run_on_rank, [problem, small(problem, has_overlap=False)])
    for with_overlap, without in per_rank:
        assert all(with_overlap[name].tobytes() == without[name].tobytes() for name in with_overlap)
