"""Cases about what the host does: plans for any number of ranks (D22), their memory and time (A06, A07), what they say (N15)."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from magi_attention import _native, api
from magi_attention.api import DistAttnConfig
from magi_attention.mask import builders
from magi_attention.plan.build import plan_attention
from magi_attention.plan.check import check_own_plan
from magi_attention.plan.types import RankPlan
from magi_attention.runtime import attention
from magi_attention.testing.workers import RankPool
from tests.api.key_makers import simulated_group
from tests.runtime.harness import Problem, causal, run_on_rank, small

WORLDS = (1, 3, 6, 24, 48, 96, 128, 144, 160, 1024)


# ---- D22: plans for many ranks ----


def plan_for(world: int, rank: int, total: int, borders: list[int] | None = None) -> RankPlan:
    cu_seqlens = borders or [0, total]
    mask = builders.from_cu_seqlens(cu_seqlens, cu_seqlens, causal=True)
    plan = plan_attention(mask, world, rank, DistAttnConfig(), num_heads_q=8, num_heads_kv=2, head_dim=128)
    check_own_plan(mask, plan)
    assert sum(step.num_keys for step in plan.forward[1:]) == plan.rank_recv_rows[rank] == sum(step.num_keys for step in plan.backward[1:])
    return plan


def test_d22_buffers_of_a_fixed_length() -> None:
    """More ranks on the same tokens: a rank's own rows never grow, what it receives never shrinks, both together fit the sequence."""
    total, own, received = 65_536, [], []
    for world in WORLDS:
        plans = [plan_for(world, rank, total) for rank in sorted({0, world // 2, world - 1})]
        own.append(int(plans[0].dispatch_q.rank_tokens.max()))
        received.append(int(plans[0].rank_recv_rows.max()))
        assert (plans[0].dispatch_q.rank_tokens + plans[0].rank_recv_rows).max() <= total
        assert all(np.array_equal(plan.rank_recv_rows, plans[0].rank_recv_rows) for plan in plans)
    assert own == sorted(own, reverse=True) and received == sorted(received), (own, received)


def test_d22_buffers_of_a_fixed_share() -> None:
    """More ranks with 512 tokens each: nothing shrinks; with documents, buffers stay within the longest document's reach."""
    own, received = [], []
    for world in WORLDS:
        plan = plan_for(world, world - 1, 512 * world)
        own.append(int(plan.dispatch_q.rank_tokens.max()))
        received.append(int(plan.rank_recv_rows.max()))
        documents = plan_for(world, world // 2, 512 * world, list(range(0, 512 * world + 1, 512)))
        assert documents.rank_recv_rows.sum() == 0, "documents that fill a rank each need nobody"
    assert own == sorted(own) and received == sorted(received), (own, received)


# ---- A06 and A07: cost on the host ----


def test_a06_a_million_tokens_of_ten_thousand_documents(record_property: Callable[[str, object], None]) -> None:
    """Memory is that of the slices: no T x T, no block map. 50 ms, as the best of several builds on a busy machine, and 64 MiB."""
    edges = np.concatenate([[0], np.sort(np.random.default_rng(0).choice(999_999, 9_999, replace=False)) + 1, [1_000_000]])
    group: Any = simulated_group(8, rank=3)

    def build() -> api.DistAttnKey:
        api.clear_cache()
        return api.magi_attn_varlen_key(edges, edges, 8, 2, 128, 0, group, causal=True)

    resident = resident_growth(build)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        key = build()
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    build()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    record_property("milliseconds", 1e3 * min(seconds))
    record_property("peak_python_bytes", peak_bytes)
    record_property("peak_resident_bytes", resident)
    print(f"A06: {1e3 * min(seconds):.1f} ms, {peak_bytes / 2**20:.1f} MiB of arrays, {resident / 2**20:.1f} MiB resident at the peak")
    assert key.plan.rank_areas.sum() == key.mask.area() and key.num_local_q == key.plan.dispatch_q.rank_tokens[3]
    assert min(seconds) < 0.05 and max(peak_bytes, resident) < 64 * 2**20


def resident_growth(call: Callable[[], Any]) -> int:
    """How far the peak of the process, C++ included, rises over what is resident now."""

    def resident(field: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # the peak starts again from what is resident now
    before = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - before)


def layers_on_rank(rank: int, num_ranks: int, num_layers: int) -> list[float]:
    """Microseconds of this thread's own time per forward call after the first, kernels taken out; planning again would raise."""
    total = 8192
    key = api.magi_attn_varlen_key([0, total], [0, total], 2, 1, 16, 0, None, causal=True, window_size=(127, 0))
    q, k, v = (api.dispatch(torch.randn(total, heads, 16, generator=torch.Generator().manual_seed(heads)), key) for heads in (2, 1, 1))
    api.calc_attn(q, k, v, key)
    in_kernels = 0.0
    kernel = attention.attention_forward

    def timed_kernel(*args: Any, **options: Any) -> None:
        nonlocal in_kernels
        start = time.thread_time()
        kernel(*args, **options)
        in_kernels += time.thread_time() - start

    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("a later layer planned")

    found = []
    with (
        mock.patch.object(attention, "attention_forward", timed_kernel),
        mock.patch.object(attention, "prepare", never),
        mock.patch.object(_native, "run", never),
    ):
        for _ in range(num_layers):
            in_kernels, start = 0.0, time.thread_time()
            api.calc_attn(q, k, v, key)
            found.append(1e6 * (time.thread_time() - start - in_kernels))
    return found


def test_a07_later_layers_cost_little(rank_pool: RankPool, record_property: Callable[[str, object], None]) -> None:
    """48 layers on one key over 8 ranks. The time is recorded; on a CPU it includes packing rows and gloo's calls, so its bound is wide."""
    per_rank = rank_pool.run(8, layers_on_rank, 48, timeout_s=120)
    medians = [float(np.median(times)) for times in per_rank]
    record_property("host_us_per_layer", max(medians))
    print(f"A07: {max(medians):.0f} us per layer call on the slowest of 8 ranks")
    assert all(len(times) == 48 for times in per_rank) and max(medians) < 20_000


# ---- N15: the flag ----


def repeated_on_rank(rank: int, num_ranks: int, problem: Problem, num_runs: int) -> bool:
    runs = [run_on_rank(rank, num_ranks, [problem])[0] for _ in range(num_runs)]
    return all(np.array_equal(run[name], runs[0][name]) for run in runs for name in runs[0])


@pytest.mark.parametrize("deterministic", (True, False))
def test_n15_the_flag_is_in_the_plan_and_the_bits_repeat(rank_pool: RankPool, deterministic: bool) -> None:
    """Rows of dk, dv that gather partials from every rank and from several slices: where atomic sums would vary."""
    config = DistAttnConfig(deterministic=deterministic)
    key = api.magi_attn_varlen_key([0, 1000], [0, 1000], 8, 2, 64, 0, None, causal=True, dist_attn_config=config)
    assert any(reason.startswith("deterministic") for reason in key.plan.reasons) == deterministic
    problem = Problem(causal([1000]), 1000, num_heads_q=8, num_heads_kv=2, head_dim=64, dtype=torch.bfloat16, chunk_size=16, degree=3)
    assert rank_pool.run(4, repeated_on_rank, small(problem, deterministic=deterministic), 5) == [True] * 4
