"""Exchanges for any wanted tokens, their mirror, and the two-level form. All ranks in memory, no messages."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError
from magi_attention.mask import builders
from magi_attention.plan.check import deliver
from magi_attention.plan.exchange import exchange_for_wanted_tokens
from magi_attention.plan.types import DispatchPlan, Exchange, Int32Array, Int64Array
from magi_attention.testing.masks import random_mask
from tests.plan.plans import contiguous_dispatch, dispatch_of, overlap, plan_all, random_dispatch, remote_steps


def expand(ranges: Int32Array) -> Int64Array:
    parts = [np.arange(start, end, dtype=np.int64) for start, end in ranges]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def random_ranges(rng: np.random.Generator, total: int) -> Int32Array:
    """Any order, overlaps and empty ranges included."""
    edges = np.sort(rng.integers(0, total + 1, size=(int(rng.integers(0, 6)), 2)), axis=1)
    return edges.astype(np.int32)


def exchanges_of(wanted: list[Int32Array], dispatch: DispatchPlan) -> list[Exchange]:
    return [exchange_for_wanted_tokens(wanted, dispatch, rank) for rank in range(dispatch.cp_size)]


@pytest.mark.parametrize("seed", range(40))
def test_every_rank_receives_what_it_names(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cp_size, total = int(rng.integers(1, 7)), int(rng.integers(0, 200))
    dispatch = random_dispatch(rng, total, cp_size)
    wanted = [random_ranges(rng, total) for _ in range(cp_size)]
    exchanges = exchanges_of(wanted, dispatch)
    arrived = deliver(exchanges, [dispatch.position_ids(rank) for rank in range(cp_size)])
    for rank in range(cp_size):
        assert np.array_equal(arrived[rank], expand(wanted[rank]))
        assert exchanges[rank].num_rows_in == dispatch.rank_tokens[rank] and exchanges[rank].num_rows_out == len(arrived[rank])


@pytest.mark.parametrize("seed", range(20))
def test_transpose_counts_every_receiver_of_a_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cp_size, total = int(rng.integers(1, 6)), int(rng.integers(1, 120))
    dispatch = random_dispatch(rng, total, cp_size)
    wanted = [random_ranges(rng, total) for _ in range(cp_size)]
    reduces = [exchange.transpose() for exchange in exchanges_of(wanted, dispatch)]
    counts = reduce_ones(reduces)
    times_wanted = np.bincount(np.concatenate([expand(ranges) for ranges in wanted]), minlength=total)
    for rank in range(cp_size):
        assert np.array_equal(counts[rank], times_wanted[dispatch.position_ids(rank)])


def reduce_ones(reduces: list[Exchange], sources: list[Int64Array] | None = None) -> list[Int64Array]:
    """Every source row carries a value (1 unless given); arriving values are added into the receiving rows."""
    sources = sources or [np.ones(reduce.num_rows_in, np.int64) for reduce in reduces]
    sums = [np.zeros(reduce.num_rows_out, np.int64) for reduce in reduces]
    payloads = [
        np.split(source[reduce.send_rows], np.cumsum(reduce.send_counts)[:-1]) for reduce, source in zip(reduces, sources, strict=True)
    ]
    for rank, reduce in enumerate(reduces):
        np.add.at(sums[rank], reduce.recv_rows, np.concatenate([payload[rank] for payload in payloads]))
    return sums


def test_own_rows_travel_to_themselves() -> None:
    exchange = exchange_for_wanted_tokens([np.array([[4, 6], [0, 2]], np.int32), np.zeros((0, 2), np.int32)], contiguous_dispatch(8, 2), 0)
    assert exchange.send.tolist() == [[0, 0, 2]] and exchange.recv.tolist() == [[0, 2, 2], [1, 0, 2]]


def test_neighbouring_runs_are_one() -> None:
    # Tokens 0-1 and 4-5 are neighbours at the owner, and rank 1 wants both one after the other.
    dispatch = DispatchPlan(6, 2, 2, np.array([0, 1, 0], np.int32))
    wanted = [np.zeros((0, 2), np.int32), np.array([[0, 2], [4, 6]], np.int32)]
    sender, receiver = exchanges_of(wanted, dispatch)
    assert sender.send.tolist() == [[1, 0, 4]] and receiver.recv.tolist() == [[0, 0, 4]]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ([[[0, 9]], []], ("wanted[0]", "[0, 9)", "8 tokens")),
        ([[], [[-1, 2]]], ("wanted[1]", "[-1, 2)")),
        ([[], [[5, 2]]], ("wanted[1]", "[5, 2)")),
        ([[]], ("1 ranks", "cp_size=2")),
    ],
)
def test_wrong_ranges_are_named(wanted: list[list[list[int]]], words: tuple[str, ...]) -> None:
    arrays = [np.array(ranges, np.int32).reshape(-1, 2) for ranges in wanted]
    with pytest.raises(InputError) as raised:
        exchange_for_wanted_tokens(arrays, contiguous_dispatch(8, 2), 0)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_wrong_shape_is_named() -> None:
    with pytest.raises(InputError, match=r"wanted\[1\].*\(3,\)"):
        exchange_for_wanted_tokens([np.zeros((0, 2), np.int32), np.zeros(3, np.int32)], contiguous_dispatch(8, 2), 0)


def test_rank_outside_the_group_is_named() -> None:
    with pytest.raises(InputError, match="cp_rank=2"):
        exchange_for_wanted_tokens([np.zeros((0, 2), np.int32)] * 2, contiguous_dispatch(8, 2), 2)


# ---- two levels ----


@pytest.mark.parametrize(("cp_size", "num_nodes"), [(2, 2), (4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (8, 8)])
def test_rows_cross_once_per_node(cp_size: int, num_nodes: int) -> None:
    """Inter rows are the sum over rows of distinct other nodes that need them, over the whole plan: one node cuts alike."""
    rng = np.random.default_rng(cp_size * 10 + num_nodes)
    node_size = cp_size // num_nodes
    for degree in (1, 3):
        mask = random_mask(rng, 160, 160, max_slices=20)
        dispatch = dispatch_of(rng.integers(0, cp_size, size=20), 8, 160, cp_size)
        plans = plan_all(mask, dispatch, overlap(degree), num_nodes=num_nodes)
        needed = {
            (int(token), rank // node_size)
            for rank, plan in enumerate(plans)
            for step in remote_steps(plan)
            for token in expand(step.k_token_runs)
        }
        owner_node = np.repeat(dispatch.chunk_owner, dispatch.chunk_size)[:160] // node_size
        expected = sum(1 for token, node in needed if owner_node[token] != node)
        crossing = sum(sum(step.hierarchical.inter.send_counts) for plan in plans for step in remote_steps(plan) if step.hierarchical)
        assert crossing == expected > 0
        for rank, plan in enumerate(plans):
            for step in remote_steps(plan):
                assert step.hierarchical is not None
                assert step.hierarchical.inter.send_counts[rank // node_size] == 0, "rows for the own node do not cross"


@pytest.mark.parametrize(("cp_size", "num_nodes"), [(4, 2), (6, 3), (8, 2)])
def test_two_level_reduce_equals_the_flat_one(cp_size: int, num_nodes: int) -> None:
    """Partial rows go back through the relays; each owner's sum is that of the one-level exchange."""
    rng = np.random.default_rng(cp_size)
    node_size = cp_size // num_nodes
    mask, dispatch = builders.sliding_window(128, 128, (None, 9)), dispatch_of(rng.integers(0, cp_size, size=16), 8, 128, cp_size)
    plans = plan_all(mask, dispatch, overlap(2), num_nodes=num_nodes)
    assert len(remote_steps(plans[0])) == 2
    for index in range(len(remote_steps(plans[0]))):
        steps = [remote_steps(plan)[index] for plan in plans]
        partials = [rng.integers(-1000, 1000, size=step.num_keys) for step in steps]
        flat = reduce_ones([step.exchange.transpose() for step in steps if step.exchange], partials)
        forms = [step.hierarchical for step in steps if step.hierarchical]
        local: list[Int64Array] = []
        relay: list[Int64Array] = []
        for first in range(0, cp_size, node_size):
            back = reduce_ones([form.intra.transpose() for form in forms[first : first + node_size]], partials[first : first + node_size])
            for rank, rows in enumerate(back, start=first):
                local.append(rows[: plans[rank].num_local_k])
                relay.append(rows[plans[rank].num_local_k :])
        for member in range(node_size):
            ranks = list(range(member, cp_size, node_size))
            crossed = reduce_ones([forms[rank].inter.transpose() for rank in ranks], [relay[rank] for rank in ranks])
            for rank, rows in zip(ranks, crossed, strict=True):
                assert np.array_equal(local[rank] + rows, flat[rank])


def test_one_node_has_no_two_level_form() -> None:
    plans = plan_all(builders.sliding_window(64, 64, None), contiguous_dispatch(64, 4), DistAttnConfig())
    assert all(step.hierarchical is None for plan in plans for step in plan.forward)
