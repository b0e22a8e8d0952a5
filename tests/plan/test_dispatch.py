"""Dispatch through its Python door: every chunk owned once, optimal cuts, balance and volume targets, determinism, hostile sizes."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from magi_attention import _native
from magi_attention.config import (
    BSDispatchAlg,
    ContiguousDispatchAlg,
    DispatchAlg,
    DispatchConfig,
    DPDispatchAlg,
    LBDispatchAlg,
    MinHeapDispatchAlg,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
    ZigzagDispatchAlg,
)
from magi_attention.errors import InputError
from magi_attention.mask.slices import UNBOUNDED, AttnMask
from magi_attention.plan.dispatch import dispatch_keys, solve_dispatch
from magi_attention.plan.types import DispatchPlan

ALGORITHMS: list[DispatchAlg] = [
    ContiguousDispatchAlg(),
    SequentialDispatchAlg(),
    ZigzagDispatchAlg(),
    SortedSequentialSelectAlg(),
    MinHeapDispatchAlg(),
    ToppHeapDispatchAlg(),
    ToppHeapDispatchAlg(top_p=1.0),
    LBDispatchAlg(),
    DPDispatchAlg(),
    BSDispatchAlg(),
]
WORLD_SIZES = (1, 3, 6, 24, 48, 96, 128, 144, 160, 1024)
MILLION = 1 << 20


def documents(lengths: list[int] | np.ndarray, window: int | None = None) -> AttnMask:
    ends = np.cumsum(np.asarray(lengths, np.int64))
    starts = ends - lengths
    lo = np.full_like(starts, -UNBOUNDED if window is None else -window)
    total = int(ends[-1]) if len(ends) else 0
    return AttnMask.from_slices(np.stack([starts, ends, starts, ends, lo, np.zeros_like(starts)], axis=1), total, total)


def long_tailed(total: int) -> np.ndarray:
    """Log-normal lengths, median 1,500, sigma 1.2, each at most a quarter of the total; fixed seed."""
    rng = np.random.default_rng(0)
    lengths = []
    left = total
    while left:
        lengths.append(int(min(max(1, rng.lognormal(np.log(1500), 1.2)), total // 4, left)))
        left -= lengths[-1]
    return np.array(lengths)


def random_mask(rng: np.random.Generator, total_q: int, total_k: int) -> AttnMask:
    """Bands in disjoint key columns, so no cell is covered twice."""
    slices = []
    edges = np.sort(rng.integers(0, total_k + 1, rng.integers(0, 6)))
    for k_start, k_end in itertools.pairwise(edges):
        q_start, q_end = np.sort(rng.integers(0, total_q + 1, 2))
        lo, hi = np.sort(rng.integers(-total_q, total_k + 1, 2))
        slices.append([q_start, q_end, k_start, k_end, lo if rng.random() < 0.5 else -UNBOUNDED, hi if rng.random() < 0.5 else UNBOUNDED])
    return AttnMask.from_slices(np.array(slices, np.int32).reshape(-1, 6), total_q, total_k)


def rank_areas(mask: AttnMask, plan: DispatchPlan) -> np.ndarray:
    areas = _native.run("chunk_costs", slices=mask.slices, total_tokens=mask.total_q, chunk_size=plan.chunk_size)["areas"]
    return np.bincount(plan.chunk_owner, weights=areas, minlength=plan.cp_size).astype(np.int64)


def visible(mask: AttnMask) -> np.ndarray:
    i = np.arange(mask.total_q)[:, None]
    j = np.arange(mask.total_k)[None, :]
    seen = np.zeros((mask.total_q, mask.total_k), bool)
    for q_start, q_end, k_start, k_end, lo, hi in mask.slices.tolist():
        seen |= (q_start <= i) & (i < q_end) & (k_start <= j) & (j < k_end) & (lo <= j - i) & (j - i <= hi)
    return seen


def token_owner(plan: DispatchPlan) -> np.ndarray:
    return np.repeat(plan.chunk_owner, plan.chunk_size)[: plan.total_tokens]


def received_rows(mask: AttnMask, q_plan: DispatchPlan, k_plan: DispatchPlan) -> np.ndarray:
    """Per rank, by brute force over cells."""
    seen, q_owner, k_owner = visible(mask), token_owner(q_plan), token_owner(k_plan)
    return np.array([int((seen[q_owner == rank].any(axis=0) & (k_owner != rank)).sum()) for rank in range(q_plan.cp_size)])


def check_plan(plan: DispatchPlan, total: int, cp_size: int) -> None:
    assert plan.total_tokens == total and plan.cp_size == cp_size and plan.chunk_size >= 1
    assert plan.chunk_owner.dtype == np.int32 and not plan.chunk_owner.flags.writeable
    assert len(plan.chunk_owner) == -(-total // plan.chunk_size)
    assert ((plan.chunk_owner >= 0) & (plan.chunk_owner < cp_size)).all()
    runs = np.concatenate(plan.rank_runs)
    runs = runs[np.argsort(runs[:, 0])]
    assert np.array_equal(np.append(runs[:, 0], total), np.insert(runs[:, 1], 0, 0)), "every token has one owner"


@pytest.mark.parametrize("alg", ALGORITHMS, ids=lambda alg: type(alg).__name__)
@pytest.mark.parametrize("cp_size", WORLD_SIZES)
def test_every_token_has_one_owner(alg: DispatchAlg, cp_size: int) -> None:
    rng = np.random.default_rng(cp_size)
    for total in (0, 1, 7, int(rng.integers(1000, 3000))):
        mask = random_mask(rng, total, total)
        for chunk_size in (None, 1, 100):
            plan, reasons = solve_dispatch(mask, cp_size, DispatchConfig(chunk_size=chunk_size, alg=alg))
            check_plan(plan, total, cp_size)
            assert chunk_size in (None, plan.chunk_size)
            assert len(reasons) >= 2 and all(reasons)


@pytest.mark.parametrize("alg", ALGORITHMS, ids=lambda alg: type(alg).__name__)
def test_even_shards_own_the_same_number_of_chunks(alg: DispatchAlg) -> None:
    for cp_size, chunk_size, per_rank in itertools.product((1, 2, 3, 8), (1, 16), (0, 1, 5)):
        mask = documents([cp_size * chunk_size * per_rank])
        for asked in (chunk_size, None):
            plan, _ = solve_dispatch(mask, cp_size, DispatchConfig(chunk_size=asked, alg=alg, uneven_shard=False))
            check_plan(plan, mask.total_q, cp_size)
            assert (plan.rank_tokens == chunk_size * per_rank).all()


def test_plans_do_not_depend_on_slice_order_or_time() -> None:
    rng = np.random.default_rng(3)
    for alg in ALGORITHMS:
        mask = documents(rng.integers(1, 300, 40))
        shuffled = AttnMask.from_slices(rng.permutation(mask.slices), mask.total_q, mask.total_k)
        plans = [solve_dispatch(m, 6, DispatchConfig(alg=alg, chunk_size=32))[0] for m in (mask, mask, shuffled)]
        assert all(np.array_equal(plan.chunk_owner, plans[0].chunk_owner) for plan in plans)


def test_contiguous_cuts_are_optimal() -> None:
    rng = np.random.default_rng(4)
    for _ in range(60):
        total, cp_size = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        mask = random_mask(rng, total, total)
        row_areas = visible(mask).sum(axis=1)
        best = min(
            max(int(part.sum()) for part in np.split(row_areas, cuts))
            for cuts in itertools.combinations_with_replacement(range(total + 1), cp_size - 1)
        )
        for alg in (DPDispatchAlg(), BSDispatchAlg()):
            plan, _ = solve_dispatch(mask, cp_size, DispatchConfig(alg=alg, chunk_size=1))
            assert (np.diff(plan.chunk_owner) >= 0).all()
            assert rank_areas(mask, plan).max() == best


def test_zigzag_and_contiguous_layouts() -> None:
    mask = documents([16])
    plan, _ = solve_dispatch(mask, 4, DispatchConfig(alg=ZigzagDispatchAlg()))
    assert token_owner(plan).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0]
    plan, _ = solve_dispatch(mask, 4, DispatchConfig(alg=ContiguousDispatchAlg()))
    assert token_owner(plan).tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    for total in (1, 5, 2267):
        for alg, max_runs in ((ZigzagDispatchAlg(), 2), (ContiguousDispatchAlg(), 1)):
            plan, _ = solve_dispatch(documents([total]), 3, DispatchConfig(alg=alg))
            check_plan(plan, total, 3)
            assert max(len(runs) for runs in plan.rank_runs) <= max_runs
            assert plan.rank_tokens.max() - plan.rank_tokens.min() <= max(2, total // 30)


@pytest.mark.parametrize("alg", ALGORITHMS, ids=lambda alg: type(alg).__name__)
def test_not_permutable_keeps_token_order(alg: DispatchAlg) -> None:
    plan, _ = solve_dispatch(documents([700, 20, 311]), 4, DispatchConfig(alg=alg), is_permutable=False)
    assert (np.diff(plan.chunk_owner) >= 0).all()


@pytest.mark.parametrize("cp_size", [8, 64, 512])
def test_long_tailed_documents_balance(cp_size: int) -> None:
    mask = documents(long_tailed(MILLION))
    plan, _ = solve_dispatch(mask, cp_size, DispatchConfig())
    areas = rank_areas(mask, plan)
    assert areas.max() * cp_size <= 1.02 * areas.sum()
    assert plan.rank_tokens.max() * cp_size <= 1.06 * MILLION
    heap_runs = sum(len(runs) for runs in solve_dispatch(mask, cp_size, DispatchConfig(alg=LBDispatchAlg()))[0].rank_runs)
    assert sum(len(runs) for runs in plan.rank_runs) < heap_runs, "fewer runs than a heap that looks at areas alone"


@pytest.mark.parametrize("cp_size", [3, 8, 60, 512])
def test_one_causal_document_balances_areas_and_tokens(cp_size: int) -> None:
    mask = documents([MILLION])
    plan, _ = solve_dispatch(mask, cp_size, DispatchConfig())
    areas = rank_areas(mask, plan)
    assert areas.max() * cp_size <= 1.02 * areas.sum()
    assert plan.rank_tokens.max() * cp_size <= 1.05 * MILLION + cp_size * plan.chunk_size


def test_documents_that_match_ranks_move_nothing() -> None:
    for lengths, cp_size in (([256] * 8, 8), ([100] * 4, 4), ([40] * 24, 8), ([567] * 3, 3)):
        mask = documents(lengths)
        plan, _ = solve_dispatch(mask, cp_size, DispatchConfig())
        assert received_rows(mask, plan, plan).sum() == 0, lengths
        assert len(set(rank_areas(mask, plan).tolist())) == 1


def test_short_window_receives_at_most_the_window_at_each_border() -> None:
    mask = documents([8192], window=127)
    plan, _ = solve_dispatch(mask, 8, DispatchConfig())
    rows = received_rows(mask, plan, plan)
    for rank, runs in enumerate(plan.rank_runs):
        assert rows[rank] <= 127 * len(runs)
        assert len(runs) == 1
    areas = rank_areas(mask, plan)
    assert areas.max() * 8 <= 1.02 * areas.sum()


def test_tokens_that_see_nothing_are_spread() -> None:
    mask = AttnMask.from_slices(np.array([[0, 1024, 0, 1024, -UNBOUNDED, 0]], np.int32), 8192, 8192)
    plan, _ = solve_dispatch(mask, 8, DispatchConfig())
    areas = rank_areas(mask, plan)
    assert areas.max() * 8 <= 1.02 * areas.sum()
    assert plan.rank_tokens.max() <= 1.1 * 1024
    empty, _ = solve_dispatch(AttnMask.from_slices(np.zeros((0, 6), np.int32), 4096, 4096), 4, DispatchConfig())
    assert empty.rank_tokens.tolist() == [1024] * 4


def test_seven_tokens_on_two_ranks_split() -> None:
    plan, _ = solve_dispatch(documents([7]), 2, DispatchConfig())
    assert sorted(plan.rank_tokens.tolist()) == [3, 4]


def test_a_single_heavy_row_does_not_cause_tiny_chunks() -> None:
    mask = AttnMask.from_slices(np.array([[0, 1, 0, 65536, -UNBOUNDED, UNBOUNDED]], np.int32), 65536, 65536)
    plan, reasons = solve_dispatch(mask, 8, DispatchConfig())
    assert plan.chunk_size >= 4096
    assert any("does not reach 1.02" in reason for reason in reasons)


def test_keys_of_cross_attention_follow_their_readers() -> None:
    # Query documents of 64 rows read key documents of 48 rows, in reverse order: contiguous keys are all remote.
    q = np.arange(8) * 64
    k = (7 - np.arange(8)) * 48
    slices = np.stack([q, q + 64, k, k + 48, np.full(8, -UNBOUNDED), np.full(8, UNBOUNDED)], axis=1).astype(np.int32)
    mask = AttnMask.from_slices(slices, 512, 384)
    q_plan, _ = solve_dispatch(mask, 8, DispatchConfig(), is_same_source=False)
    k_plan = dispatch_keys(mask, q_plan, DispatchConfig())
    check_plan(k_plan, 384, 8)
    assert received_rows(mask, q_plan, k_plan).sum() == 0
    assert k_plan.rank_tokens.tolist() == [48] * 8
    in_order = dispatch_keys(mask, q_plan, DispatchConfig(), is_permutable=False)
    assert (np.diff(in_order.chunk_owner) >= 0).all()
    assert received_rows(mask, q_plan, in_order).sum() > 0


def test_keys_never_receive_more_than_contiguous_ones() -> None:
    rng = np.random.default_rng(8)
    for _ in range(60):
        total_q, total_k, cp_size = (int(rng.integers(0, high)) for high in (60, 60, 6))
        cp_size += 1
        mask = random_mask(rng, total_q, total_k)
        q_plan, _ = solve_dispatch(mask, cp_size, DispatchConfig(), is_same_source=False)
        k_plan = dispatch_keys(mask, q_plan, DispatchConfig())
        contiguous = dispatch_keys(mask, q_plan, DispatchConfig(), is_permutable=False)
        check_plan(k_plan, total_k, cp_size)
        assert received_rows(mask, q_plan, k_plan).sum() <= received_rows(mask, q_plan, contiguous).sum()
        bound = max(1.05 * total_k / cp_size, -(-len(k_plan.chunk_owner) // cp_size) * k_plan.chunk_size)
        assert k_plan.rank_tokens.max(initial=0) <= bound + k_plan.chunk_size


def test_even_keys_have_equal_shares() -> None:
    mask = AttnMask.from_slices(np.array([[0, 64, 0, 24, -UNBOUNDED, UNBOUNDED], [64, 96, 24, 96, -UNBOUNDED, 0]], np.int32), 96, 96)
    config = DispatchConfig(uneven_shard=False)
    q_plan, _ = solve_dispatch(mask, 4, config, is_same_source=False)
    assert dispatch_keys(mask, q_plan, config).rank_tokens.tolist() == [24] * 4


def test_wrong_shares_are_named() -> None:
    mask = documents([100])
    with pytest.raises(InputError, match=r"total_q=100 .*cp_size \* chunk_size = 128.*pad by 28"):
        solve_dispatch(mask, 4, DispatchConfig(chunk_size=32, uneven_shard=False))
    with pytest.raises(InputError, match="cp_size=0"):
        solve_dispatch(mask, 0, DispatchConfig())
    q_plan, _ = solve_dispatch(mask, 3, DispatchConfig())
    with pytest.raises(InputError, match="total_k=100"):
        dispatch_keys(mask, q_plan, DispatchConfig(uneven_shard=False))


# ---- sizes that once took all memory, or for ever ----

LARGEST = UNBOUNDED - 1
FEW_QUERIES = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from magi_attention.config import DispatchConfig, MinHeapDispatchAlg, ToppHeapDispatchAlg
from magi_attention.mask.slices import UNBOUNDED, AttnMask
from magi_attention.plan.dispatch import solve_dispatch
mask = AttnMask.from_slices([[0, 5, 0, {LARGEST}, -UNBOUNDED, UNBOUNDED]], 5, {LARGEST})
for alg in (MinHeapDispatchAlg(), ToppHeapDispatchAlg()):
    plan, _ = solve_dispatch(mask, 3, DispatchConfig(alg=alg), is_same_source=False)
    print(sorted(plan.rank_tokens.tolist()))
"""


def test_few_queries_on_a_billion_keys_need_no_memory_per_key() -> None:
    """In a process that may not have more than 4 GiB of addresses."""
    done = subprocess.run([sys.executable, "-c", FEW_QUERIES], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["[1, 2, 2]"] * 2, done.stderr


@pytest.mark.timeout(60)
def test_shared_keys_of_two_million_chunks_are_looked_at_in_cells() -> None:
    """The work was quadratic in chunks: minutes here."""
    total = 1 << 28
    mask = AttnMask.from_slices([[0, total, 0, total, -UNBOUNDED, 0]], total, total)
    plan, _ = solve_dispatch(mask, 6, DispatchConfig(alg=ToppHeapDispatchAlg(top_p=1.0), chunk_size=128))
    assert plan.rank_tokens.sum() == total and len(set(plan.chunk_owner.tolist())) == 6


def test_chunks_without_number_and_unknown_algorithms_are_refused() -> None:
    mask = AttnMask.from_slices([[0, LARGEST, 0, LARGEST, -UNBOUNDED, 0]], LARGEST, LARGEST)
    with pytest.raises(InputError, match=r"chunk_size=1 .* 1073741823 chunks.*use chunk_size=128 or more"):
        solve_dispatch(mask, 8, DispatchConfig(chunk_size=1))

    class Mine(DispatchAlg):
        @property
        def name(self) -> str:
            return "mine"

    with pytest.raises(InputError, match=r"unknown name 'mine'.*min_heap"):
        solve_dispatch(documents([100]), 2, DispatchConfig(alg=Mine()))
