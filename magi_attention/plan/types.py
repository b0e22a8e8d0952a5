"""The records every stage exchanges: frozen, numpy only. Knows nothing of torch, ranks at run time, or how plans are made.

    AttnMask --solve--> DispatchPlan --build--> StepPlan (Exchange + local slices) per step --run--> out, lse

Shape letters: N slices or runs, R ranks (cp_size). All token ids and row indices are int32, counts of pairs int64.
Row means one token's row in a local buffer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@overload
def frozen_array(values: npt.ArrayLike) -> Int32Array: ...
@overload
def frozen_array(values: npt.ArrayLike, dtype: type[np.int64]) -> Int64Array: ...


def frozen_array(values: npt.ArrayLike, dtype: type[np.int32] | type[np.int64] = np.int32) -> npt.NDArray[np.integer]:
    """A read-only contiguous copy."""
    array: npt.NDArray[np.integer] = np.array(values, dtype=dtype, order="C")
    array.setflags(write=False)
    return array


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Which rank owns which tokens. A rank's local buffer holds its tokens in ascending global order.

    Attributes:
        total_tokens: tokens in the global sequence (padding of uneven_shard=False included).
        chunk_size: tokens per chunk; the last chunk may be short.
        cp_size: number of ranks, R.
        chunk_owner: int32 [num_chunks], the owner of each chunk.
    """

    total_tokens: int
    chunk_size: int
    cp_size: int
    chunk_owner: Int32Array

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # what is kept beside them is made again

    @functools.cached_property
    def rank_runs(self) -> tuple[Int32Array, ...]:
        """Per rank int32 [n, 2]: its tokens as maximal half-open global ranges, ascending."""
        owner = self.chunk_owner
        first = np.flatnonzero(np.diff(owner, prepend=-1)) if owner.size else np.zeros(0, np.int64)
        last = np.append(first[1:], owner.size) if first.size else first
        starts = (first * self.chunk_size).astype(np.int32)
        ends = np.minimum(last * self.chunk_size, self.total_tokens).astype(np.int32)
        runs = np.stack([starts, ends], axis=1)
        owners = owner[first]
        by_owner = np.argsort(owners, kind="stable")
        cuts = np.searchsorted(owners[by_owner], np.arange(self.cp_size + 1))
        return tuple(frozen_array(runs[by_owner[start:end]]) for start, end in itertools.pairwise(cuts))

    @functools.cached_property
    def rank_tokens(self) -> Int64Array:
        """int64 [R]: tokens each rank owns."""
        tokens = [int((runs[:, 1] - runs[:, 0]).sum()) for runs in self.rank_runs]
        return frozen_array(tokens, np.int64)

    def position_ids(self, rank: int) -> Int64Array:
        """int64 [local tokens]: global token id of each local row of `rank`."""
        runs = self.rank_runs[rank]
        parts = [np.arange(start, end, dtype=np.int64) for start, end in runs]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Exchange:
    """One rank's view of one collective that moves rows. Mirrored, it is the reduce.

    Wire order: `send` is sorted by (peer, order in the receiver's arrival), `recv` by (peer, order of arrival), so the
    concatenated payload from one peer arrives as that peer's send runs for us, in order. A peer may be ourselves.

    Attributes:
        cp_size: number of ranks, R.
        num_rows_in: rows of the local source buffer that send runs index.
        num_rows_out: rows of the receive buffer. In a plan recv runs tile it exactly once; rows that no run covers are left as they are.
        send: int32 [n, 3], (peer, first row in the source buffer, number of rows).
        recv: int32 [m, 3], (peer, first row in the receive buffer, number of rows).
    """

    cp_size: int
    num_rows_in: int
    num_rows_out: int
    send: Int32Array
    recv: Int32Array

    @functools.cached_property
    def send_counts(self) -> tuple[int, ...]:
        """Rows to each peer."""
        return _rows_per_peer(self.send, self.cp_size)

    @functools.cached_property
    def recv_counts(self) -> tuple[int, ...]:
        """Rows from each peer."""
        return _rows_per_peer(self.recv, self.cp_size)

    @functools.cached_property
    def send_rows(self) -> Int64Array:
        """int64 [sum(send_counts)]: source row of each payload row, in wire order."""
        return _expand_runs(self.send)

    @functools.cached_property
    def recv_rows(self) -> Int64Array:
        """int64 [sum(recv_counts)]: receive-buffer row of each payload row, in wire order."""
        return _expand_runs(self.recv)

    def transpose(self) -> Exchange:
        """The same rows travelling back: what GroupReduce runs."""
        return Exchange(self.cp_size, self.num_rows_out, self.num_rows_in, self.recv, self.send)


def _rows_per_peer(runs: Int32Array, cp_size: int) -> tuple[int, ...]:
    counts = np.zeros(cp_size, np.int64)
    np.add.at(counts, runs[:, 0], runs[:, 2])
    return tuple(int(count) for count in counts)


def _expand_runs(runs: Int32Array) -> Int64Array:
    if not len(runs):
        return np.zeros(0, np.int64)
    num_rows = runs[:, 2].astype(np.int64)
    ends = np.cumsum(num_rows)
    shift = np.repeat(runs[:, 1].astype(np.int64) - (ends - num_rows), num_rows)
    return shift + np.arange(ends[-1], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class HierarchicalExchange:
    """Two-level form of one Exchange on an (inter, intra) mesh: a row crosses nodes once per node that needs it.

    Rank = node * intra_size + index in node. `inter` runs on the group of ranks with our index (peers are nodes) and fills the
    relay buffer from local rows; `intra` runs on the group of our node (peers are indices) and fills the receive buffer from
    the concatenation [local rows, relay buffer].
    """

    inter: Exchange
    intra: Exchange


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step of one rank. Step 0 is local: no exchange, its keys are the rank's own.

    Attributes:
        exchange: how the step's keys arrive (None in step 0).
        k_token_runs: int32 [n, 2], the global key ranges of the step's buffer, ascending; row order of the buffer.
        num_keys: rows of the step's key buffer.
        slices: int32 [N, 6], local slices: q rows of the rank's local buffer, k rows of the step's buffer (01-masks).
        area: int64 visible pairs of the step.
        hierarchical: the two-level form, when the plan was made for a 2-D mesh.
    """

    exchange: Exchange | None
    k_token_runs: Int32Array
    num_keys: int
    slices: Int32Array
    area: int
    hierarchical: HierarchicalExchange | None = None


@dataclass(frozen=True, eq=False)
class RankPlan:
    """Everything one rank executes. Forward and backward may split the same rows in different steps.

    Attributes:
        cp_rank, cp_size: whose plan.
        dispatch_q, dispatch_k: owners of query and key tokens (the same object for self attention).
        num_local_q, num_local_k: rows of the rank's own buffers.
        forward, backward: steps in execution order; step 0 is local. Every rank has the same number of steps.
        rank_areas: int64 [R], visible pairs of every rank.
        rank_recv_rows, rank_send_rows: int64 [R], rows each rank receives and sends in one cast (whole plan).
        reasons: what was chosen and why, one sentence each (chunk size, degree, algorithm).
    """

    cp_rank: int
    cp_size: int
    dispatch_q: DispatchPlan
    dispatch_k: DispatchPlan
    num_local_q: int
    num_local_k: int
    forward: tuple[StepPlan, ...]
    backward: tuple[StepPlan, ...]
    rank_areas: Int64Array
    rank_recv_rows: Int64Array
    rank_send_rows: Int64Array
    reasons: tuple[str, ...]
