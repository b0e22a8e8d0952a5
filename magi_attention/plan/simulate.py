"""Event simulation of one attention layer on all ranks: when each step computes, what each link carries, who waits. Makes no plan.

Every rank has three streams. Step i begins when attention of step i - 1 is done; then, in this order,

    cast stream     the cast of step i + 1 is issued; it starts when this rank's cast before it has left
    reduce stream   (backward) the reduce of step i - 1 is issued; it starts when this rank's reduce before it has left
    compute stream  attention of step i starts when its rows arrived and, beside a mover that needs multiprocessors, that mover has started

Links are ports: one out and one in per GPU for NVLink, and the same for the network card of each rank. A port serves transfers in the
order in which they start to flow, cast before reduce at equal times: a stream runs its exchanges one after the other anyway, and a next
step's rows must not wait for a gradient that nobody is waiting for. Shared fairly, the last transfer of a busy period would end at the same
time. Inside one exchange a sender serves its receivers in turn, so all of them are done when it is done (or when their own port is).

Between nodes a row crosses once per node, to the rank of the owner's index there, which passes it on; a reduce adds in that rank first
and crosses once it has the sums of its whole node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from magi_attention.errors import InputError
from magi_attention.plan.cost import CostModel, Float64Array
from magi_attention.plan.simulate_links import Links, slowed_end
from magi_attention.plan.simulate_movers import Mover
from magi_attention.plan.simulate_traffic import Traffic
from magi_attention.plan.types import Int64Array

READY, CAST, REDUCE, FORWARD, CROSS, ATTEND = range(6)  # what may happen; the order at equal times


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What happened. S remote steps, R ranks; microseconds from the start of the layer.

    Attributes:
        work_us: float64 [S + 1, R], attention, merge and launch of each step with nothing beside it.
        ready_us, attention_start_us, attention_end_us: float64 [S + 1, R]; ready is the end of the step before.
        cast_us, reduce_us: float64 [S, R, 2], start and end of each rank's own (sending) part; reduce is NaN forward.
        arrival_us: float64 [S, R], when the rows of a step are all there.
        end_us: float64 [R], when a rank has everything: its attention, what it sends, and the gradients that return to it.
        links: what each port carried.
    """

    work_us: Float64Array
    ready_us: Float64Array
    attention_start_us: Float64Array
    attention_end_us: Float64Array
    cast_us: Float64Array
    reduce_us: Float64Array
    arrival_us: Float64Array
    end_us: Float64Array
    links: Links

    @property
    def time_us(self) -> float:
        """The slowest rank: what the group waits for."""
        return float(self.end_us.max())


class _Stream:
    """One kind of exchange on one rank: what was asked for and has not started, and when the last one leaves."""

    def __init__(self) -> None:
        self.free_us = 0.0
        self.is_starting = False
        self.asked: deque[tuple[int, float]] = deque()


def simulate(traffic: Traffic, cost: CostModel, casts: Sequence[Mover], reduces: Sequence[Mover] | None = None) -> Timeline:
    """Runs one direction. Deterministic: equal inputs give equal bits.

    Args:
        traffic: pairs and rows of all ranks.
        cost: rates of pairs, bytes of rows, the network.
        casts: mover of each remote step's cast, S of them.
        reduces: mover of each remote step's reduce, S of them: backward; None: forward.

    Raises:
        InputError: movers that are not one per step, or a plan without overlap.
    """
    for name, movers in (("casts", casts), ("reduces", reduces)):
        if movers is not None and len(movers) != traffic.num_steps:
            raise InputError(f"{name} has {len(movers)} movers; the plan has {traffic.num_steps} remote steps")
    if not cost.is_overlapped:
        raise InputError("the simulation is of overlapped steps; the plan has OverlapConfig(enable=False)")
    run = _Run(traffic, cost, casts, reduces)
    run.finish()
    return run.timeline()


class _Run:
    """State of one simulation; methods named in `finish` are what happens."""

    def __init__(self, traffic: Traffic, cost: CostModel, casts: Sequence[Mover], reduces: Sequence[Mover] | None) -> None:
        steps, ranks = traffic.num_steps, traffic.cp_size
        self.traffic, self.cost, self.movers = traffic, cost, {CAST: casts, REDUCE: reduces or ()}
        self.is_backward = reduces is not None
        self.node_size = ranks // traffic.num_nodes
        self.links = Links(ranks)
        self.hop_us = cost.machine.hop_us * cost.comm_factor
        attention = traffic.areas * cost.pair_us(self.is_backward) + cost.machine.host_us * cost.calc_factor
        self.work = np.asarray(attention, np.float64)
        self.work[1:] += cost.query_merge_us(traffic.tokens)
        self.ready, self.begun, self.ended = (np.full((steps + 1, ranks), np.nan) for _ in range(3))
        self.spans = {kind: np.full((steps, ranks, 2), np.nan) for kind in (CAST, REDUCE)}
        self.missing = np.count_nonzero(traffic.rows, axis=1)  # [S, R], owners whose rows have no arrival time yet
        self.arrival = np.zeros((steps, ranks))
        self.at_relays: dict[tuple[int, int], tuple[Int64Array, Float64Array]] = {}  # (exchange, owner): nodes, arrival at each relay
        self.sums_ready = np.zeros((steps, ranks))  # when a relay has the partial sums of its node
        self.ranks_reduced = np.zeros((steps, traffic.num_nodes), np.int64)
        self.end = np.zeros(ranks)
        self.waiting = [-1] * ranks  # step whose attention waits
        self.streams = {kind: [_Stream() for _ in range(ranks)] for kind in (CAST, REDUCE)}
        self.events: list[tuple[float, int, int, int]] = [(0.0, READY, 0, rank) for rank in range(ranks)]

    def finish(self) -> None:
        happens = {
            READY: self.begin_step,
            CAST: self.run_cast,
            REDUCE: self.run_reduce,
            FORWARD: self.pass_on,
            CROSS: self.cross_sums,
            ATTEND: self.attend,
        }
        while self.events:
            time, kind, index, rank = heappop(self.events)
            happens[kind](time, index, rank)

    def timeline(self) -> Timeline:
        return Timeline(
            work_us=self.work,
            ready_us=self.ready,
            attention_start_us=self.begun,
            attention_end_us=self.ended,
            cast_us=self.spans[CAST],
            reduce_us=self.spans[REDUCE],
            arrival_us=self.arrival,
            end_us=self.end,
            links=self.links,
        )

    # Streams. Exchange x brings the rows of step x + 1, or takes its gradients back.

    def begin_step(self, time: float, step: int, rank: int) -> None:
        if step < self.traffic.num_steps:
            self.ask(CAST, step, rank, time)
        if self.is_backward and step >= 2:
            self.ask(REDUCE, step - 2, rank, time)
        if step > self.traffic.num_steps:  # all attention is done
            self.end[rank] = max(self.end[rank], time)
            return
        self.ready[step, rank] = time
        self.waiting[rank] = step
        self.start_waiting(time, rank)

    def ask(self, kind: int, exchange: int, rank: int, time: float) -> None:
        self.streams[kind][rank].asked.append((exchange, time))
        self.start_next(kind, rank)

    def start_next(self, kind: int, rank: int) -> None:
        stream = self.streams[kind][rank]
        if stream.asked and not stream.is_starting:
            exchange, asked_us = stream.asked.popleft()
            stream.is_starting = True
            heappush(self.events, (max(asked_us, stream.free_us), kind, exchange, rank))

    def leave(self, kind: int, exchange: int, rank: int, span: tuple[float, float]) -> None:
        """An exchange has its times: the stream is free at its end, and attention that waited for its mover may start."""
        self.spans[kind][exchange, rank] = span
        stream = self.streams[kind][rank]
        stream.free_us, stream.is_starting = span[1], False
        self.end[rank] = max(self.end[rank], span[1])
        self.start_next(kind, rank)
        self.start_waiting(span[0], rank)

    def beside(self, step: int, rank: int) -> list[tuple[Mover, Float64Array, bool]]:
        """Exchanges of this rank that run beside attention of a step: mover, times, whether any row moves."""
        found = []
        if step < self.traffic.num_steps:
            found.append((self.movers[CAST][step], self.spans[CAST][step, rank], bool(self.traffic.rows[step, rank].any())))
        if self.is_backward and step >= 2:
            moves = bool(self.traffic.rows[step - 2, :, rank].any())
            found.append((self.movers[REDUCE][step - 2], self.spans[REDUCE][step - 2, rank], moves))
        return found

    def start_waiting(self, time: float, rank: int) -> None:
        """Attention of the step that waits here gets its start, once everything it needs has a time."""
        step = self.waiting[rank]
        if step < 0 or (step and self.missing[step - 1, rank]):
            return
        begin = max(time, float(self.ready[step, rank]), float(self.arrival[step - 1, rank]) if step else 0.0)
        for mover, span, _ in self.beside(step, rank):
            if mover.has_gate:
                if np.isnan(span[0]):
                    return
                begin = max(begin, float(span[0]))
        self.waiting[rank] = -1
        heappush(self.events, (begin, ATTEND, step, rank))

    def attend(self, time: float, step: int, rank: int) -> None:
        beside = [(mover, span) for mover, span, moves in self.beside(step, rank) if moves]
        work = float(self.work[step, rank])
        if beside:
            total_sms = beside[0][0].total_sms
            work *= total_sms / (total_sms - sum(mover.num_sms for mover, _ in beside))
        spans = [(float(span[0]), float(span[1]), mover.beside_slowdown) for mover, span in beside if span[1] > time]
        end = slowed_end(time, work, spans)
        self.begun[step, rank], self.ended[step, rank] = time, end
        heappush(self.events, (end, READY, step + 1, rank))

    # Transfers. Rates in GB/s, bytes as float.

    def rates(self, kind: int, exchange: int) -> tuple[Mover, float, float, float]:
        """Mover, its rate, that of the network, bytes of a row."""
        mover, factor = self.movers[kind][exchange], self.cost.comm_factor
        return mover, mover.gb_s / factor, self.cost.machine.nic_gb_s / factor, self.cost.row_bytes(kind == REDUCE)

    def packing_us(self, mover: Mover, num_bytes: float | Float64Array) -> float | Float64Array:
        """Gather before or scatter after: each byte is read and written once."""
        return num_bytes * (2.0 / (self.cost.machine.memory_gb_s * 1e3) * self.cost.comm_factor) if mover.is_packed else num_bytes * 0.0

    def run_cast(self, time: float, exchange: int, rank: int) -> None:
        mover, rate, nic, row_bytes = self.rates(CAST, exchange)
        rows, node_rows = self.traffic.rows[exchange, rank], self.traffic.node_rows[exchange, rank]
        first = rank - rank % self.node_size
        near = first + np.flatnonzero(rows[first : first + self.node_size])
        num_near, num_far = float(rows[near].sum()), float(node_rows.sum())
        begin = time + mover.start_us * self.cost.comm_factor + float(self.packing_us(mover, (num_near + num_far) * row_bytes))
        end = begin
        if near.size:
            least_us = float(self.traffic.runs[exchange, rank]) * mover.range_us * num_near / float(rows.sum())
            left, out_end = self.links.nvlink_out.serve(rank, begin, num_near * row_bytes, rate, least_us)
            at = np.maximum(self.links.nvlink_in.serve(near, left, rows[near] * row_bytes, rate)[1], out_end)
            end = float(at.max())
            self.deliver(time, exchange, near, at)
        nodes = np.flatnonzero(node_rows)
        if nodes.size:
            left, out_end = self.links.nic_out.serve(rank, begin, num_far * row_bytes, nic)
            relays = nodes * self.node_size + rank % self.node_size
            at = np.maximum(self.links.nic_in.serve(relays, left, node_rows[nodes] * row_bytes, nic)[1], out_end) + self.hop_us
            end = max(end, float(at.max()))
            self.at_relays[exchange, rank] = nodes, at
            second = float(left) + self.hop_us if mover.is_pipelined else float(at.max()) + mover.start_us * self.cost.comm_factor
            heappush(self.events, (second, FORWARD, exchange, rank))
        self.leave(CAST, exchange, rank, (time, end))

    def pass_on(self, time: float, exchange: int, owner: int) -> None:
        """Relays push the rows of one owner to the other ranks of their nodes."""
        _, rate, _, row_bytes = self.rates(CAST, exchange)
        nodes, relay_at = self.at_relays.pop((exchange, owner))
        own = owner % self.node_size
        rows = self.traffic.rows[exchange, owner].reshape(-1, self.node_size)[nodes].copy()  # [nodes, node_size]
        relays = nodes * self.node_size + own
        is_final = rows[:, own] > 0
        self.deliver(time, exchange, relays[is_final], relay_at[is_final])
        rows[:, own] = 0
        passes = np.flatnonzero(rows.any(axis=1))
        if passes.size:
            left, out_end = self.links.nvlink_out.serve(relays[passes], time, rows[passes].sum(axis=1) * row_bytes, rate)
            idx, peers = np.nonzero(rows[passes])
            to = nodes[passes][idx] * self.node_size + peers
            in_end = self.links.nvlink_in.serve(to, left[idx], rows[passes][idx, peers] * row_bytes, rate)[1]
            at = np.maximum(np.maximum(in_end, out_end[idx]), relay_at[passes][idx]) + self.hop_us
            self.deliver(time, exchange, to, at)

    def deliver(self, time: float, exchange: int, ranks: Int64Array, at: Float64Array) -> None:
        """The rows of one owner arrive at `ranks`."""
        mover, _, _, row_bytes = self.rates(CAST, exchange)
        self.arrival[exchange, ranks] = np.maximum(self.arrival[exchange, ranks], at)
        self.missing[exchange, ranks] -= 1
        complete = ranks[self.missing[exchange, ranks] == 0]
        if complete.size:
            self.arrival[exchange, complete] += self.packing_us(mover, self.traffic.rows[exchange][:, complete].sum(axis=0) * row_bytes)
        for rank in complete.tolist():
            if self.waiting[rank] == exchange + 1:
                self.start_waiting(time, rank)

    def run_reduce(self, time: float, exchange: int, rank: int) -> None:
        mover, rate, _, row_bytes = self.rates(REDUCE, exchange)
        node, own = divmod(rank, self.node_size)
        rows = self.traffic.rows[exchange, :, rank].reshape(-1, self.node_size)  # [owner's node, owner's index]
        far = rows.sum(axis=0) - rows[node]  # by index of the owner, which is the index of the relay in this node
        near = rows[node] + np.where(np.arange(self.node_size) == own, 0, far)
        begin = time + mover.start_us * self.cost.comm_factor + float(self.packing_us(mover, float(near.sum()) * row_bytes))
        peers = np.flatnonzero(near)
        end = begin
        self.sums_ready[exchange, rank] = max(self.sums_ready[exchange, rank], begin)
        if peers.size:
            to, num_bytes = node * self.node_size + peers, near[peers] * row_bytes
            left, out_end = self.links.nvlink_out.serve(rank, begin, float(num_bytes.sum()), rate)
            at = np.maximum(self.links.nvlink_in.serve(to, left, num_bytes, rate)[1], out_end)
            end = float(at.max())
            at = at + self.packing_us(mover, num_bytes)
            self.sums_ready[exchange, to] = np.maximum(self.sums_ready[exchange, to], at)
            self.end[to] = np.maximum(self.end[to], at)
        self.ranks_reduced[exchange, node] += 1
        if self.ranks_reduced[exchange, node] == self.node_size and self.traffic.node_rows[exchange, :, node].any():
            first = node * self.node_size
            summed = float(self.sums_ready[exchange, first : first + self.node_size].max())
            heappush(self.events, (max(time, summed), CROSS, exchange, node))
        self.leave(REDUCE, exchange, rank, (time, end))

    def cross_sums(self, time: float, exchange: int, node: int) -> None:
        """Relays of one node send the sums of their node to the owners of their index on the other nodes."""
        _, _, nic, row_bytes = self.rates(REDUCE, exchange)
        rows = self.traffic.node_rows[exchange, :, node].reshape(-1, self.node_size)  # [owner's node, index]
        own = np.flatnonzero(rows.any(axis=0))
        relays = node * self.node_size + own
        sent_bytes = np.asarray(rows[:, own].sum(axis=0) * row_bytes, np.float64)
        left, out_end = self.links.nic_out.serve(relays, time, sent_bytes, nic)
        nodes, idx = np.nonzero(rows[:, own])
        owners = nodes * self.node_size + own[idx]
        owner_bytes = np.asarray(rows[nodes, own[idx]] * row_bytes, np.float64)
        in_end = self.links.nic_in.serve(owners, left[idx], owner_bytes, nic)[1]
        self.end[relays] = np.maximum(self.end[relays], out_end)
        self.end[owners] = np.maximum(self.end[owners], np.maximum(in_end, out_end[idx]) + self.hop_us)
