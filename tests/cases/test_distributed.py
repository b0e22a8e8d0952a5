"""Cases N (numeric) and D (distributed) of the catalogue that are about attention itself, over 1 to 8 ranks. Names start with the case.

Head counts and widths are smaller than the catalogue's defaults where only the mask or the spread of tokens matters.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from magi_attention.api import (
    BSDispatchAlg,
    ContiguousDispatchAlg,
    DPDispatchAlg,
    LBDispatchAlg,
    MinHeapDispatchAlg,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
    ZigzagDispatchAlg,
)
from magi_attention.comm import comm_group
from magi_attention.config import DispatchAlg
from magi_attention.testing.workers import RankPool
from tests.runtime.harness import Problem, assemble, assert_parity, causal, eager, forward_on_rank, full, reference, run_on_rank, small

LIGHT = {"num_heads_q": 2, "num_heads_kv": 1, "head_dim": 32}
DEFAULT = {"num_heads_q": 8, "num_heads_kv": 2, "head_dim": 128, "dtype": torch.bfloat16}  # the catalogue's
ALL_ALGS: tuple[DispatchAlg, ...] = (
    MinHeapDispatchAlg(),
    ToppHeapDispatchAlg(),
    LBDispatchAlg(),
    DPDispatchAlg(),
    BSDispatchAlg(),
    SortedSequentialSelectAlg(),
    SequentialDispatchAlg(),
    ContiguousDispatchAlg(),
    ZigzagDispatchAlg(),
)


def parts_of(rank_pool: RankPool, num_ranks: int, problem: Problem) -> list[dict[str, np.ndarray]]:
    return [found[0] for found in rank_pool.run(num_ranks, run_on_rank, [problem], timeout_s=120)]


def check_on(rank_pool: RankPool, rank_counts: tuple[int, ...], problem: Problem) -> None:
    twins = reference(problem), eager(problem)
    for num_ranks in rank_counts:
        assert_parity(problem, parts_of(rank_pool, num_ranks, problem), twins=twins)


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_n01_natural_logarithm(rank_pool: RankPool, num_ranks: int) -> None:
    problem = Problem(full(8, 8), 8, chunk_size=2, constants=(("q", 0.0), ("k", 0.0)))
    lse = assemble(problem, parts_of(rank_pool, num_ranks, problem))["lse"]
    assert torch.allclose(lse, torch.full_like(lse, math.log(8)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sink_layout", (None, "sh"))
def test_n02_loss_on_lse(rank_pool: RankPool, sink_layout: str | None) -> None:
    """loss = 0.5 * out.sum() + lse.sum()"""
    constants = (("dout", 0.5), ("dlse", 1.0))
    problem = Problem(causal([256]), 256, **DEFAULT, sink_layout=sink_layout, uses_lse=True, constants=constants)
    check_on(rank_pool, (1, 2), problem)


def test_n16_error_does_not_grow_with_ranks(rank_pool: RankPool) -> None:
    problem = Problem(causal([2048]), 2048, num_heads_q=2, num_heads_kv=1, head_dim=64, dtype=torch.bfloat16)
    exact = reference(problem)
    errors = {}
    for num_ranks in (1, 2, 4, 8):
        ours = assemble(problem, parts_of(rank_pool, num_ranks, problem))
        errors[num_ranks] = {name: (ours[name].double() - exact[name]).abs().max().item() for name in ("out", "dq", "dk", "dv")}
    for name, alone in errors[1].items():
        assert errors[8][name] <= 1.5 * alone, f"{name}: {errors}"


@pytest.mark.parametrize("scale", (1.0, 0.0625))
def test_n24_scale_reaches_every_path(rank_pool: RankPool, scale: float) -> None:
    check_on(rank_pool, (1, 2), Problem(causal([100, 28]), 128, **LIGHT, softmax_scale=scale, dtype=torch.bfloat16))


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_n26_sink(rank_pool: RankPool, num_ranks: int) -> None:
    constants = (("q", 0.0), ("k", 0.0), ("v", 1.0), ("dout", 1.0), ("sink", 1.0))
    problem = Problem(full(8, 8), 8, num_heads_q=1, num_heads_kv=1, head_dim=64, chunk_size=2, sink_layout="sh", constants=constants)
    ours = assemble(problem, parts_of(rank_pool, num_ranks, problem))
    assert torch.allclose(ours["lse"], torch.tensor(2.371951), rtol=0, atol=2e-6)
    assert torch.allclose(ours["out"], torch.tensor(0.746388), rtol=0, atol=2e-6)
    assert torch.allclose(ours["dsink"], torch.tensor(8 * -12.114740), rtol=1e-6, atol=0)  # no factor of the number of ranks


def test_n28_sink_window_documents(rank_pool: RankPool) -> None:
    slices = causal([137, 2041, 89], left=127)
    problem = Problem(slices, 2267, **LIGHT, sink_layout="sh", dtype=torch.bfloat16, sink_grad_reduce="sum")
    twins = reference(problem), eager(problem)
    for num_ranks in (1, 2, 4, 8):
        parts = parts_of(rank_pool, num_ranks, problem)
        assert all(np.array_equal(part["dsink"], parts[0]["dsink"]) for part in parts)
        assert_parity(problem, parts, twins=twins)


def test_d03_any_length_without_padding(rank_pool: RankPool) -> None:
    problem = Problem(causal([137, 2041, 89]), 2267, **LIGHT, dtype=torch.bfloat16)
    assert problem.mask.area() == 2_097_319
    check_on(rank_pool, (2, 3, 4, 8), problem)  # assemble also asserts 2,267 rows in all


def test_a03_uneven_shares(rank_pool: RankPool) -> None:
    check_on(rank_pool, (4,), Problem(causal([2999]), 2999, num_heads_q=1, num_heads_kv=1, head_dim=16))


@pytest.mark.parametrize("total", (100, 1, 0))
def test_d05_ranks_without_tokens(rank_pool: RankPool, total: int) -> None:
    problem = Problem(causal([total]), total, **LIGHT, chunk_size=128)
    parts = [found[0] for found in rank_pool.run(8, run_on_rank, [problem], timeout_s=30)]
    assert sum(len(part["out"]) for part in parts) == total
    assert sum(len(part["out"]) > 0 for part in parts) == min(1, total)
    assert_parity(problem, parts)


@pytest.mark.parametrize("num_ranks", (2, 4))
def test_d08_layers_with_other_head_counts(rank_pool: RankPool, num_ranks: int) -> None:
    heads = [(12, 12), (6, 3), (28, 7), (40, 8)]
    layers = [Problem(causal([50, 14]), 64, num_heads_q=q, num_heads_kv=kv, head_dim=8, chunk_size=4) for q, kv in heads]
    for order in (layers, layers[::-1]):
        per_rank = rank_pool.run(num_ranks, run_on_rank, order)
        for layer, parts in zip(order, zip(*per_rank, strict=True), strict=True):
            assert_parity(layer, parts)


@pytest.mark.parametrize("alg", ALL_ALGS, ids=lambda alg: type(alg).__name__)
def test_d18_every_dispatch_policy(rank_pool: RankPool, alg: DispatchAlg) -> None:
    check_on(rank_pool, (2,), Problem(full(128, 128), 128, num_heads_q=1, num_heads_kv=1, head_dim=64, alg=alg))


# ---- several groups, other collectives at the same time ----

CONCURRENT = Problem(causal([40, 24]), 64, num_heads_q=2, num_heads_kv=1, head_dim=8, chunk_size=4, degree=2)


def call_on_group(group: Any, rank: int, size: int, seed: int) -> dict[str, np.ndarray]:
    call = forward_on_rank(small(CONCURRENT, seed=seed), rank, size, group=comm_group(group))
    call.backward()
    return call.arrays()


def two_groups_on_rank(rank: int, num_ranks: int, num_steps: int) -> list[dict[str, np.ndarray]]:
    """Even and odd ranks each work on their own sequence at the same time."""
    groups = [dist.new_group(list(range(first, num_ranks, 2))) for first in (0, 1)]
    return [call_on_group(groups[rank % 2], rank // 2, num_ranks // 2, seed=2 * step + rank % 2) for step in range(num_steps)]


def mesh_on_rank(rank: int, num_ranks: int) -> list[dict[str, np.ndarray]]:
    """cp 2 x tp 4, once with cp outermost and once innermost; every tp rank has its own heads (here: its own seed)."""
    found = []
    for shape, names in (((2, 4), ("cp", "tp")), ((4, 2), ("tp", "cp"))):
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        group, tp_rank = mesh["cp"].get_group(), mesh["tp"].get_local_rank()
        found.append({"tp_rank": np.array(tp_rank), **call_on_group(group, group.rank(), 2, seed=tp_rank)})
    return found


def test_d19_groups_side_by_side(rank_pool: RankPool) -> None:
    num_steps = 50
    per_rank = rank_pool.run(8, two_groups_on_rank, num_steps, timeout_s=120)
    for step in (0, 1, num_steps - 1):
        for parity in (0, 1):
            assert_parity(small(CONCURRENT, seed=2 * step + parity), [per_rank[rank][step] for rank in range(parity, 8, 2)])
    per_rank = rank_pool.run(8, mesh_on_rank, timeout_s=120)
    for idx in (0, 1):
        for tp_rank in range(4):
            parts = [found[idx] for found in per_rank if int(found[idx]["tp_rank"]) == tp_rank]
            assert len(parts) == 2
            assert_parity(small(CONCURRENT, seed=tp_rank), [{k: v for k, v in part.items() if k != "tp_rank"} for part in parts])


def beside_other_traffic_on_rank(rank: int, num_ranks: int, num_steps: int) -> list[dict[str, np.ndarray]]:
    """Our exchanges between an all-gather and an all-reduce of the user that are in flight on another group of the same ranks."""
    other = dist.new_group(list(range(num_ranks)))
    found = []
    for step in range(num_steps):
        weights = torch.full((5000,), float(rank + step))
        gathered = [torch.empty_like(weights) for _ in range(num_ranks)]
        works = [dist.all_gather(gathered, weights, group=other, async_op=True)]
        summed = weights.clone()
        works.append(dist.all_reduce(summed, group=other, async_op=True))
        found.append(call_on_group(dist.group.WORLD, rank, num_ranks, seed=step % 3))
        for work in works:
            work.wait()
        assert all(float(part[0]) == peer + step for peer, part in enumerate(gathered))
        assert float(summed[-1]) == num_ranks * (num_ranks - 1) / 2 + num_ranks * step
    return found


def test_d20_beside_collectives_of_the_user(rank_pool: RankPool) -> None:
    per_rank = rank_pool.run(2, beside_other_traffic_on_rank, 200, timeout_s=120)
    for seed in range(3):
        assert_parity(small(CONCURRENT, seed=seed), [found[seed] for found in per_rank])
        for found in per_rank:  # 1=N at each of the 200 steps: they repeat three problems to the bit
            for step in range(seed, 200, 3):
                assert all(np.array_equal(found[step][name], found[seed][name]) for name in found[seed]), f"step {step}"
