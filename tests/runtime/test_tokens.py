"""Dispatch, undispatch, roll and positions against the same on the whole tensor."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from magi_attention.errors import InputError
from magi_attention.plan.routes import TokenRoutes
from magi_attention.plan.types import DispatchPlan, frozen_array
from magi_attention.runtime.roll import roll
from magi_attention.runtime.rows import TokenOwners
from magi_attention.runtime.tokens import (
    cu_seqlens_from_positions,
    dispatch,
    document_position_ids,
    local_cu_seqlens,
    position_ids,
    undispatch,
)
from magi_attention.testing.workers import RankPool
from tests.runtime.harness import owners_of

DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64)


def spread(total_tokens: int, chunk_size: int, cp_size: int, seed: int) -> DispatchPlan:
    """Chunks given to ranks at random; some ranks may get none."""
    num_chunks = -(-total_tokens // chunk_size)
    owner = np.random.default_rng(seed).integers(0, cp_size, num_chunks)
    return DispatchPlan(total_tokens, chunk_size, cp_size, frozen_array(owner))  # type: ignore[arg-type]


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-50, 50, tuple(shape), generator=generator)
    return whole > 0 if dtype == torch.bool else whole.abs().to(dtype) if dtype == torch.uint8 else whole.to(dtype)


def round_trips_on_rank(rank: int, num_ranks: int) -> int:
    """D29 and more: identity to the bit for every dtype, any dimension, gradients of all kinds."""
    checked = 0
    for seed, (total, chunk) in enumerate([(23, 3), (1, 4), (0, 1), (40, 40), (64, 1)]):
        plan = spread(total, chunk, num_ranks, seed)
        owners = owners_of(plan, rank)
        mine = torch.from_numpy(plan.position_ids(rank).copy())
        for dtype in DTYPES:
            for shape, dim in (((total,), 0), ((total, 3), 0), ((3, 2, total), -1), ((2, total, 3), 1)):
                whole = numbers(shape, dtype)
                local = dispatch(whole, owners, dim=dim)
                assert torch.equal(local, whole.index_select(dim, mine))
                assert local.is_contiguous()
                back = undispatch(local, owners, dim=dim)
                assert back.dtype == dtype
                assert torch.equal(back, whole)
                checked += 1
    return checked


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 4))
def test_round_trip_is_the_identity(rank_pool: RankPool, num_ranks: int) -> None:
    assert set(rank_pool.run(num_ranks, round_trips_on_rank)) == {5 * len(DTYPES) * 4}


def gradients_on_rank(rank: int, num_ranks: int) -> None:
    plan = spread(29, 4, num_ranks, 7)
    owners = owners_of(plan, rank)
    mine = torch.from_numpy(plan.position_ids(rank).copy())
    whole, weight = (numbers((3, 29, 2), torch.float32, seed) for seed in (1, 2))
    x = whole.clone().requires_grad_()
    local = dispatch(x, owners, dim=1)
    (local * weight.index_select(1, mine)).sum().backward()  # each rank's own loss
    assert torch.equal(x.grad, weight)  # the whole gradient everywhere

    x = whole.clone().requires_grad_()
    (undispatch(dispatch(x, owners, dim=1), owners, dim=1) * weight).sum().backward()  # the same loss on every rank
    assert torch.equal(x.grad, weight)

    y = whole.index_select(1, mine).requires_grad_()
    (undispatch(y, owners, dim=1, is_partial_grad=True) * (weight + rank)).sum().backward()  # parts of one loss
    total = num_ranks * weight + num_ranks * (num_ranks - 1) // 2
    assert torch.equal(y.grad, total.index_select(1, mine))

    # Expanded and transposed gradients, as .sum() and permute give them.
    x = whole.clone().requires_grad_()
    undispatch(dispatch(x, owners, dim=1), owners, dim=1).permute(1, 2, 0).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("num_ranks", (1, 2, 4))
def test_gradients_of_dispatch_and_undispatch(rank_pool: RankPool, num_ranks: int) -> None:
    rank_pool.run(num_ranks, gradients_on_rank)


def padded_on_rank(rank: int, num_ranks: int) -> None:
    """A key that pads 21 tokens to 24."""
    plan = spread(24, 2, num_ranks, 3)
    owners = owners_of(plan, rank, num_tokens=21)
    mine = torch.from_numpy(plan.position_ids(rank).copy())
    whole = numbers((21, 2), torch.float32)
    padded = torch.cat([whole, torch.full((3, 2), 100.0)])
    x = whole.clone().requires_grad_()
    local = dispatch(x, owners, pad_value=100.0)
    assert torch.equal(local, padded[mine])
    back = undispatch(local, owners)
    assert torch.equal(back, whole)
    (back * whole).sum().backward()
    assert torch.equal(x.grad, whole)
    y = padded[mine].requires_grad_()
    (undispatch(y, owners, is_partial_grad=True) * whole).sum().backward()
    assert torch.equal(y.grad, num_ranks * torch.where(mine[:, None] < 21, padded[mine], 0))
    expected = torch.cat([torch.roll(whole, 2, 0), torch.zeros(3, 2)])
    assert torch.equal(roll(local.detach(), 2, owners), expected[mine])


@pytest.mark.parametrize("num_ranks", (1, 3))
def test_padding_never_leaks(rank_pool: RankPool, num_ranks: int) -> None:
    rank_pool.run(num_ranks, padded_on_rank)


def rolled_within(whole: torch.Tensor, shift: int, dim: int, cu_seqlens: Sequence[int], fill: float) -> torch.Tensor:
    """The obvious twin: document by document."""
    rows = whole.movedim(dim, 0)
    result = torch.full_like(rows, fill)
    if rows.requires_grad:
        result = result + 0 * rows  # joined to x in the graph also when nothing moves
    for start, end in itertools.pairwise(cu_seqlens):
        for target in range(start, end):
            if start <= target - shift < end:
                result[target] = rows[target - shift]
    return result.movedim(0, dim)


def rolls_on_rank(rank: int, num_ranks: int, seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        total = int(rng.integers(0, 40))
        plan = spread(total, int(rng.integers(1, 9)), num_ranks, seed)
        owners = owners_of(plan, rank)
        mine = torch.from_numpy(plan.position_ids(rank).copy())
        inner = sorted(rng.integers(0, total + 1, size=int(rng.integers(0, 5))).tolist())
        documents = [0, *inner, total]
        dtype = DTYPES[int(rng.integers(0, len(DTYPES) - 1))]
        shape, dim = [((total, 2), 0), ((2, total), 1), ((total,), -1)][int(rng.integers(0, 3))]
        whole = numbers(shape, dtype, seed)
        local = whole.index_select(dim, mine)
        for shift in (0, 1, -1, int(rng.integers(-100, 100))):
            fill = 0 if dtype in (torch.bool, torch.uint8) else -100
            assert torch.equal(roll(local, shift, owners, dim=dim), torch.roll(whole, shift, dim).index_select(dim, mine))
            ours = roll(local, shift, owners, dim=dim, within_documents=True, cu_seqlens=documents, fill_value=fill)
            assert torch.equal(ours, rolled_within(whole, shift, dim, documents, fill).index_select(dim, mine)), (seed, shift)


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 4))
def test_roll_equals_torch_roll_and_keeps_to_documents(rank_pool: RankPool, num_ranks: int) -> None:
    rank_pool.run(num_ranks, rolls_on_rank, range(25))


def roll_gradients_on_rank(rank: int, num_ranks: int) -> None:
    plan = spread(31, 3, num_ranks, 11)
    owners = owners_of(plan, rank)
    mine = torch.from_numpy(plan.position_ids(rank).copy())
    whole, weight = (numbers((31, 2), torch.float64, seed) for seed in (4, 5))
    documents = [0, 4, 4, 20, 31]
    for shift in (1, -3, 40):
        for options in ({}, {"within_documents": True, "cu_seqlens": torch.tensor(documents), "fill_value": 7.0}):
            x = whole.clone().requires_grad_()
            twin = torch.roll(x, shift, 0) if not options else rolled_within(x, shift, 0, documents, 7.0)
            (twin * weight).sum().backward()
            local = whole[mine].requires_grad_()
            (roll(local, shift, owners, **options) * weight[mine]).sum().backward()
            assert torch.equal(local.grad, x.grad[mine]), (shift, options)


@pytest.mark.parametrize("num_ranks", (1, 3))
def test_gradient_of_roll(rank_pool: RankPool, num_ranks: int) -> None:
    rank_pool.run(num_ranks, roll_gradients_on_rank)


def test_roll_routes_are_kept_and_bounded() -> None:
    owners = owners_of(spread(300, 4, 1, 0), 0)
    x = torch.arange(300)
    first = owners.routes.roll(3)
    assert owners.routes.roll(303) is first  # the same roll, modulo the length
    for shift in range(100):
        roll(x, -shift, owners, within_documents=True)
    assert owners.routes.roll(3) is not first
    assert owners_of(owners.routes.dispatch, 0).routes.roll(3) is owners.routes.roll(3)  # kept by dispatch, not by who asks


def test_a_dispatch_goes_with_its_last_user() -> None:
    """Without a collection: what devices hold of a dispatch and its exchanges goes at once."""
    owners = owners_of(spread(300, 4, 1, 0), 0)
    x = torch.arange(300.0, requires_grad=True)
    (roll(dispatch(x, owners), 3, owners).sum() + undispatch(x, owners).sum()).backward()
    watches = [weakref.ref(owners.routes.dispatch), weakref.ref(owners.routes.roll(3)[0])]
    gc.collect()
    gc.disable()
    try:
        del owners, x
        assert [watch() for watch in watches] == [None, None]
    finally:
        gc.enable()


# ---- positions: no messages, so every rank is looked at from here ----


def every_rank(plan: DispatchPlan) -> list[TokenOwners]:
    return [TokenOwners(TokenRoutes(plan, rank)) for rank in range(plan.cp_size)]


def test_positions() -> None:
    documents = [0, 5, 5, 16, 30]
    in_document = np.concatenate([np.arange(n) for n in np.diff(documents)])
    for cp_size in (1, 3):
        plan = spread(30, 4, cp_size, 2)
        for rank, owners in enumerate(every_rank(plan)):
            tokens = plan.position_ids(rank)
            assert np.array_equal(position_ids(owners).numpy(), tokens)
            assert np.array_equal(document_position_ids(owners, documents).numpy(), in_document[tokens])
            ids = position_ids(owners)
            ids += 1  # the caller's own copy
            assert np.array_equal(position_ids(owners).numpy(), tokens)


def test_local_cu_seqlens_cut_at_gaps_and_documents() -> None:
    assert local_cu_seqlens([0, 1, 2, 6, 7, 8, 9], [0, 8, 20]).tolist() == [0, 3, 5, 7]
    assert local_cu_seqlens(torch.tensor([3]), torch.tensor([0, 20])).tolist() == [0, 1]
    assert local_cu_seqlens(np.zeros(0, np.int64), [0, 20]).tolist() == [0]
    assert local_cu_seqlens(range(4), [0, 0, 1, 1, 2, 4]).tolist() == [0, 1, 2, 4]


def test_cu_seqlens_from_positions() -> None:
    assert cu_seqlens_from_positions([0, 1, 2, 0, 0, 1]).tolist() == [0, 3, 4, 6]
    assert cu_seqlens_from_positions(torch.tensor([[0, 1, 2], [0, 1, 0]])).tolist() == [0, 3, 5, 6]
    assert cu_seqlens_from_positions(np.zeros(0, np.int64)).tolist() == [0]
    with pytest.raises(InputError, match=r"positions\[2\]=3"):
        cu_seqlens_from_positions([0, 1, 3])
    with pytest.raises(InputError, match=r"positions\[0\]=4"):
        cu_seqlens_from_positions([4, 5])


def test_wrong_dimensions_and_lengths_are_named() -> None:
    owners = owners_of(spread(30, 4, 1, 0), 0)
    with pytest.raises(InputError, match="dim=0; the key has 30 tokens"):
        dispatch(torch.zeros(3, 2, 30), owners, dim=0)
    with pytest.raises(InputError, match="dim=3 is not a dimension"):
        dispatch(torch.zeros(3, 2, 30), owners, dim=3)
    with pytest.raises(InputError, match="x_local has shape"):
        undispatch(torch.zeros(29), owners)
    with pytest.raises(InputError, match="x_local"):
        roll(torch.zeros(29), 1, owners)
    with pytest.raises(InputError, match=r"shift=1\.0"):
        roll(torch.zeros(30), 1.0, owners)  # type: ignore[arg-type]
    for bad in ([1, 30], [0, 20, 10], [0, 31], [0.0, 30.0], [[0, 30]]):
        with pytest.raises(InputError, match="cu_seqlens"):
            roll(torch.zeros(30), 1, owners, within_documents=True, cu_seqlens=bad)
