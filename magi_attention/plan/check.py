"""Proof that plans do what the mask says, by other routes than those that made them. Raises PlanError; changes nothing.

Two depths: `check_plans` takes all ranks' plans (tests, small masks), rebuilds every step densely and compares both ends of every
exchange; `check_own_plan` takes one rank's plan of any size and counts cells in closed form (MAGI_CHECK).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from magi_attention import _native
from magi_attention.errors import InputError
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.types import Exchange, Int32Array, Int64Array, RankPlan, StepPlan

_MAX_DENSE_CELLS = 1 << 24
_DIRECTIONS = ("forward", "backward")


class PlanError(AssertionError):
    """A plan breaks one of our invariants; the text names rank, step and the first wrong cell or row."""


def _require(is_true: bool, what: str) -> None:
    if not is_true:
        raise PlanError(what)


# ---- one rank ----


def check_own_plan(mask: AttnMask, plan: RankPlan) -> None:
    """One rank's plan: its steps cover exactly the cells of its query rows, once; its buffers and exchanges are consistent.

    Closed form, no dense matrix: local slices are mapped back to tokens run by run; they share no cell, all their cells are the
    mask's, and their number is that of the mask's cells in the rank's rows.

    Raises:
        PlanError: naming rank, step and what differs.
    """
    for direction in _DIRECTIONS:
        steps: tuple[StepPlan, ...] = getattr(plan, direction)
        _require(len(steps) >= 1, f"rank {plan.cp_rank} {direction}: no local step")
        for index, step in enumerate(steps):
            _check_buffers(plan, step, index, f"rank {plan.cp_rank} {direction} step {index}")
        _check_disjoint_keys(plan, steps, direction)
        _check_cells(mask, plan, steps, direction)
        if plan.backward is plan.forward:
            break


def _check_buffers(plan: RankPlan, step: StepPlan, index: int, where: str) -> None:
    runs = step.k_token_runs.astype(np.int64)
    is_ascending = (runs[:, 0] < runs[:, 1]).all() and (runs[1:, 0] > runs[:-1, 1]).all()
    _require(bool(is_ascending), f"{where}: key runs {runs.tolist()} do not ascend")
    _require(int((runs[:, 1] - runs[:, 0]).sum()) == step.num_keys, f"{where}: num_keys={step.num_keys} is not the length of its runs")
    if index == 0:
        _require(step.exchange is None, f"{where}: the local step has an exchange")
        _require(np.array_equal(runs, plan.dispatch_k.rank_runs[plan.cp_rank]), f"{where}: its keys are not the rank's own")
        return
    if step.exchange is None:
        raise PlanError(f"{where}: a remote step has no exchange")
    exchange = step.exchange
    _require(
        exchange.num_rows_in == plan.num_local_k and exchange.num_rows_out == step.num_keys and exchange.cp_size == plan.cp_size,
        f"{where}: exchange of {exchange.num_rows_in} -> {exchange.num_rows_out} rows for {plan.num_local_k} -> {step.num_keys}",
    )
    for name, send_or_recv, num_rows in (("send", exchange.send, exchange.num_rows_in), ("recv", exchange.recv, exchange.num_rows_out)):
        peers, first, count = send_or_recv.astype(np.int64).T
        is_inside = (peers >= 0) & (peers < plan.cp_size) & (first >= 0) & (count > 0) & (first + count <= num_rows)
        _require(bool(is_inside.all()), f"{where}: {name} run {send_or_recv[~is_inside][:1].tolist()} outside {num_rows} rows")
        _require(bool((np.diff(peers) >= 0).all()), f"{where}: {name} runs are not sorted by peer")
    order = np.argsort(exchange.recv[:, 1], kind="stable")
    peers, first, count = exchange.recv[order].astype(np.int64).T
    expected = np.concatenate([[0], np.cumsum(count)])
    _require(
        np.array_equal(first, expected[:-1]) and int(expected[-1]) == step.num_keys,
        f"{where}: recv runs do not tile the {step.num_keys} rows of the buffer once",
    )


def _check_disjoint_keys(plan: RankPlan, steps: tuple[StepPlan, ...], direction: str) -> None:
    runs = np.concatenate([step.k_token_runs for step in steps]).astype(np.int64)
    owner = np.repeat(np.arange(len(steps)), [len(step.k_token_runs) for step in steps])
    order = np.argsort(runs[:, 0], kind="stable")
    for a, b in itertools.pairwise(order.tolist()):
        _require(
            runs[a, 1] <= runs[b, 0],
            f"rank {plan.cp_rank} {direction}: steps {owner[a]} and {owner[b]} both hold key {runs[b, 0]}",
        )


def _check_cells(mask: AttnMask, plan: RankPlan, steps: tuple[StepPlan, ...], direction: str) -> None:
    q_runs = plan.dispatch_q.rank_runs[plan.cp_rank]
    total = 0
    for index, step in enumerate(steps):
        where = f"rank {plan.cp_rank} {direction} step {index}"
        try:
            fragments = _native.run("globalize", slices=step.slices, q_runs=q_runs, k_runs=step.k_token_runs)["fragments"].reshape(-1, 6)
            AttnMask.from_slices(fragments, plan.dispatch_q.total_tokens, plan.dispatch_k.total_tokens)
        except InputError as error:
            raise PlanError(f"{where}: {error}") from error
        counted = _native.run("seen_cells", fragments=fragments, slices=mask.slices)
        cells, seen = counted["cells"], counted["seen"]
        _require(int(cells.sum()) == step.area, f"{where}: area={step.area}, its slices have {int(cells.sum())} cells")
        wrong = np.flatnonzero(seen != cells)
        if len(wrong):
            raise PlanError(f"{where}: {fragments[wrong[0]].tolist()} has {cells[wrong[0]]} cells, of which the mask has {seen[wrong[0]]}")
        total += int(cells.sum())
    rows = np.array([[start, end, 0, mask.total_k, -(1 << 30), 1 << 30] for start, end in q_runs], np.int32).reshape(-1, 6)
    wanted = int(_native.run("seen_cells", fragments=rows, slices=mask.slices)["seen"].sum())
    _require(
        total == wanted == int(plan.rank_areas[plan.cp_rank]),
        f"rank {plan.cp_rank} {direction}: steps have {total} cells, the mask {wanted} in its rows, "
        f"rank_areas says {int(plan.rank_areas[plan.cp_rank])}",
    )


# ---- all ranks ----


def check_plans(mask: AttnMask, plans: Sequence[RankPlan]) -> None:
    """All ranks' plans of one mask, rank order: every cell is computed once over all ranks and steps, both ends of every
    exchange agree, two-level exchanges deliver the same rows, every rank has the same number of steps.

    Raises:
        PlanError: naming the first cell, rank and step that differ.
    """
    _require([plan.cp_rank for plan in plans] == list(range(plans[0].cp_size)), "plans must be those of all ranks, in rank order")
    for plan in plans:
        check_own_plan(mask, plan)
    for direction in _DIRECTIONS:
        counts = [len(getattr(plan, direction)) for plan in plans]
        _require(len(set(counts)) == 1, f"{direction}: numbers of steps differ between ranks: {counts}")
        for index in range(1, counts[0]):
            _check_both_ends(plans, direction, index)
        _check_totals(plans, direction)
    _require(sum(int(plan.rank_areas[plan.cp_rank]) for plan in plans) == mask.area(), f"ranks' areas do not add up to {mask.area()}")
    if mask.total_q * mask.total_k <= _MAX_DENSE_CELLS:
        for direction in _DIRECTIONS:
            _check_dense(mask, plans, direction)


def _tokens(runs: Int32Array) -> Int64Array:
    parts = [np.arange(start, end, dtype=np.int64) for start, end in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _check_both_ends(plans: Sequence[RankPlan], direction: str, index: int) -> None:
    """What each rank sends to each peer is, row by row, what the peer expects from it."""
    sent: dict[tuple[int, int], Int64Array] = {}
    expected: dict[tuple[int, int], Int64Array] = {}
    for plan in plans:
        step: StepPlan = getattr(plan, direction)[index]
        exchange = step.exchange
        if exchange is None:
            raise PlanError(f"{direction} step {index}: rank {plan.cp_rank} has no exchange")
        own, arriving = plan.dispatch_k.position_ids(plan.cp_rank), _tokens(step.k_token_runs)
        for peer, tokens in enumerate(np.split(own[exchange.send_rows], np.cumsum(exchange.send_counts)[:-1])):
            sent[plan.cp_rank, peer] = tokens
        for peer, tokens in enumerate(np.split(arriving[exchange.recv_rows], np.cumsum(exchange.recv_counts)[:-1])):
            expected[peer, plan.cp_rank] = tokens
        if step.hierarchical is not None:
            _check_two_level(plans, direction, index, plan.cp_rank)
    for (source, target), tokens in sent.items():
        wanted = expected[source, target]
        if not np.array_equal(tokens, wanted):
            raise PlanError(
                f"{direction} step {index}: rank {source} sends {len(tokens)} rows to rank {target}, which expects {len(wanted)}"
                + _first_difference(tokens, wanted)
            )


def _first_difference(tokens: Int64Array, wanted: Int64Array) -> str:
    common = min(len(tokens), len(wanted))
    differs = np.flatnonzero(tokens[:common] != wanted[:common])
    at = int(differs[0]) if len(differs) else common
    return f"; row {at} is token {tokens[at] if at < len(tokens) else None}, expected {wanted[at] if at < len(wanted) else None}"


def deliver(exchanges: Sequence[Exchange], sources: Sequence[Int64Array]) -> list[Int64Array]:
    """Run one exchange of a whole group in memory: values per source row in, values per receive row out (-1 where nothing came)."""
    outputs = [np.full(exchange.num_rows_out, -1, np.int64) for exchange in exchanges]
    payloads = [
        np.split(source[exchange.send_rows], np.cumsum(exchange.send_counts)[:-1])
        for exchange, source in zip(exchanges, sources, strict=True)
    ]
    for rank, exchange in enumerate(exchanges):
        arriving = np.concatenate([payload[rank] for payload in payloads])
        _require(
            tuple(len(payload[rank]) for payload in payloads) == exchange.recv_counts,
            f"member {rank} is sent {[len(payload[rank]) for payload in payloads]} rows, expects {exchange.recv_counts}",
        )
        outputs[rank][exchange.recv_rows] = arriving
    return outputs


def _check_two_level(plans: Sequence[RankPlan], direction: str, index: int, cp_rank: int) -> None:
    """The two-level form brings rank `cp_rank` the rows of its buffer (checked once per node, by its first rank)."""
    node_size = _step(plans[0], direction, index).hierarchical.intra.cp_size  # type: ignore[union-attr]
    node, first = cp_rank // node_size, cp_rank - cp_rank % node_size
    if cp_rank != first:
        return
    where = f"{direction} step {index} node {node}"
    sources = []
    for member in range(node_size):
        same_index = [plan for plan in plans if plan.cp_rank % node_size == member]
        forms = [_step(plan, direction, index).hierarchical for plan in same_index]
        _require(all(form is not None for form in forms), f"{where}: not all ranks have the two-level form")
        own = [plan.dispatch_k.position_ids(plan.cp_rank) for plan in same_index]
        relays = deliver([form.inter for form in forms if form is not None], own)
        _require(len(np.unique(relays[node])) == len(relays[node]), f"{where}: a row crosses to the node twice")
        sources.append(np.concatenate([own[node], relays[node]]))
    members = plans[first : first + node_size]
    intras = [form.intra for plan in members if (form := _step(plan, direction, index).hierarchical) is not None]
    for plan, arrived in zip(members, deliver(intras, sources), strict=True):
        wanted = _tokens(_step(plan, direction, index).k_token_runs)
        if not np.array_equal(arrived, wanted):
            raise PlanError(f"{where}: rank {plan.cp_rank} gets other rows in two levels than in one" + _first_difference(arrived, wanted))


def _step(plan: RankPlan, direction: str, index: int) -> StepPlan:
    step: StepPlan = getattr(plan, direction)[index]
    return step


def _check_totals(plans: Sequence[RankPlan], direction: str) -> None:
    for plan in plans:
        exchanges = [step.exchange for step in getattr(plan, direction) if step.exchange is not None]
        for name, counted, stated in (
            ("receives", sum(sum(exchange.recv_counts) for exchange in exchanges), plan.rank_recv_rows),
            ("sends", sum(sum(exchange.send_counts) for exchange in exchanges), plan.rank_send_rows),
        ):
            _require(
                counted == int(stated[plan.cp_rank]),
                f"rank {plan.cp_rank} {direction}: {name} {counted} rows, the plan states {int(stated[plan.cp_rank])}",
            )
        for name in ("rank_areas", "rank_recv_rows", "rank_send_rows"):
            _require(np.array_equal(getattr(plan, name), getattr(plans[0], name)), f"ranks 0 and {plan.cp_rank} differ in {name}")


def _check_dense(mask: AttnMask, plans: Sequence[RankPlan], direction: str) -> None:
    """How often each cell is computed, counted over all ranks and steps."""
    cover = np.zeros((mask.total_q, mask.total_k), np.int8)
    latest = np.full((mask.total_q, mask.total_k), -1, np.int32)  # rank and step that computed a cell last, for the text
    for plan in plans:
        q_tokens = plan.dispatch_q.position_ids(plan.cp_rank)
        for index, step in enumerate(getattr(plan, direction)):
            rows, columns = np.nonzero(_dense(step.slices, plan.num_local_q, step.num_keys))
            cells = q_tokens[rows], _tokens(step.k_token_runs)[columns]
            np.add.at(cover, cells, 1)
            latest[cells] = plan.cp_rank * 1024 + index
    wrong = np.argwhere(cover != mask.to_dense())
    if len(wrong):
        q, k = (int(value) for value in wrong[0])
        by = f"last by rank {latest[q, k] // 1024} step {latest[q, k] % 1024}" if latest[q, k] >= 0 else "by no rank"
        owner = int(plans[0].dispatch_q.chunk_owner[q // plans[0].dispatch_q.chunk_size])
        raise PlanError(f"{direction}: cell (q {q}, k {k}) is computed {int(cover[q, k])} times, {by}; rank {owner} owns the query")


def _dense(slices: Int32Array, num_rows: int, num_keys: int) -> npt.NDArray[np.int8]:
    """Cover counts of local slices; a doubly covered cell counts twice, which np.nonzero cannot tell, so it is refused here."""
    cover = np.zeros((num_rows, num_keys), np.int8)
    for q_start, q_end, k_start, k_end, lo, hi in slices.tolist():
        distance = np.arange(k_start, k_end)[None, :] - np.arange(q_start, q_end)[:, None]
        cover[q_start:q_end, k_start:k_end] += (lo <= distance) & (distance <= hi)
    _require(bool((cover <= 1).all()), "two local slices of one step share a cell")
    return cover
