"""Local rows of every rank to one tensor in global order, and back with a sum. Knows who owns which token, nothing of masks.

A rank sends its rows to every rank, so the bytes on their way are those of the whole tensor, once to send and once to receive. Large
tensors therefore travel in rounds, each over a part of every rank's rows, and what a call holds beside its result stays bounded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import torch

from magi_attention.comm.cast import group_cast
from magi_attention.comm.group import comm_group
from magi_attention.comm.reduce import group_reduce
from magi_attention.errors import InputError
from magi_attention.plan.types import DispatchPlan, Exchange, frozen_array

ROUND_BYTES = 1 << 28  # of all ranks' rows in one round: messages stay large, buffers small beside the tensors that need rounds

_exchanges: weakref.WeakKeyDictionary[DispatchPlan, dict[tuple[int, int], tuple[Exchange, ...]]] = weakref.WeakKeyDictionary()


def gather_rows(
    x_local: torch.Tensor, dispatch: DispatchPlan, group: object, *, timeout_s: float | None = None, what: str = "gather"
) -> torch.Tensor:
    """Every rank's rows, in global token order, on every rank. Not differentiable.

    Collective, also for ranks that own nothing.

    Args:
        x_local: [tokens this rank owns, ...], any dtype.
        dispatch: who owns which token.
        group: a CommGroup, or anything comm_group takes; of dispatch.cp_size ranks.

    Returns:
        [dispatch.total_tokens, ...], a new tensor.

    Raises:
        InputError: wrong number of rows or ranks. CommError: a peer was lost or the time ran out.
    """
    exchanges = gather_exchanges(dispatch, comm_group(group).rank, _num_rounds(x_local, dispatch))
    _check_rows("x_local", x_local, exchanges[0].num_rows_in)
    if len(exchanges) == 1:
        return group_cast(exchanges[0], [x_local], group, timeout_s=timeout_s, what=what).wait()[0]
    whole = x_local.new_empty((dispatch.total_tokens, *x_local.shape[1:]))
    for exchange in exchanges:
        group_cast(exchange, [x_local], group, out=[whole], timeout_s=timeout_s, what=what).wait()
    return whole


def scatter_reduce_rows(
    x_global_partial: torch.Tensor, dispatch: DispatchPlan, group: object, *, timeout_s: float | None = None, what: str = "scatter"
) -> torch.Tensor:
    """The transpose of gather_rows: the sum over ranks (in rank order) of this rank's rows of every rank's partial.

    Sums in fp32 (fp64 for fp64) and rounds once to the dtype of the input. Not differentiable.

    Args:
        x_global_partial: [dispatch.total_tokens, ...], real floating point.
        dispatch, group: as in gather_rows.

    Returns:
        [tokens this rank owns, ...], dtype of the input.

    Raises:
        InputError: wrong number of rows or ranks, or not floating point. CommError: a peer was lost or the time ran out.
    """
    exchanges = gather_exchanges(dispatch, comm_group(group).rank, _num_rounds(x_global_partial, dispatch))
    _check_rows("x_global_partial", x_global_partial, dispatch.total_tokens)
    if not x_global_partial.is_floating_point():
        raise InputError(f"x_global_partial is {x_global_partial.dtype}; only floating point partials are summed")
    sum_dtype = torch.float64 if x_global_partial.dtype == torch.float64 else torch.float32
    shape = (exchanges[0].num_rows_in, *x_global_partial.shape[1:])
    sums = torch.zeros(shape, dtype=sum_dtype, device=x_global_partial.device)
    for exchange in exchanges:
        group_reduce(exchange, [x_global_partial], group, into=[sums], timeout_s=timeout_s, what=what).wait()
    return sums.to(x_global_partial.dtype)


def gather_exchanges(dispatch: DispatchPlan, rank: int, num_rounds: int) -> tuple[Exchange, ...]:
    """Every rank sends all its rows to every rank, about a `num_rounds`-th of them a round; they land in global order.

    Cached as long as `dispatch` lives.

    Raises:
        InputError: `rank` is not one of the dispatch plan's.
    """
    if not 0 <= rank < dispatch.cp_size:
        raise InputError(f"rank {rank} of the group is outside the dispatch plan's {dispatch.cp_size} ranks; use the group it was made for")
    found = _exchanges.setdefault(dispatch, {})
    name = (rank, num_rounds)
    if name not in found:
        found[name] = tuple(_build_exchanges(dispatch, rank, num_rounds))
    return found[name]


def _num_rounds(x: torch.Tensor, dispatch: DispatchPlan) -> int:
    """Equal on every rank: a power of two, so that tensors of many widths share few sets of exchanges."""
    if dispatch.cp_size == 1:
        return 1
    num_bytes = dispatch.total_tokens * x.element_size() * x.shape[1:].numel()
    return 1 << max(0, (-(-num_bytes // ROUND_BYTES) - 1)).bit_length()


def _build_exchanges(dispatch: DispatchPlan, rank: int, num_rounds: int) -> Iterator[Exchange]:
    owners = np.repeat(np.arange(dispatch.cp_size), [len(runs) for runs in dispatch.rank_runs])
    starts, ends = np.concatenate(dispatch.rank_runs).astype(np.int64).T
    lengths = ends - starts
    before = np.cumsum(dispatch.rank_tokens) - dispatch.rank_tokens  # rows of lower ranks
    first_rows = np.cumsum(lengths) - lengths - before[owners]  # of each run, among its owner's rows
    num_local = int(dispatch.rank_tokens[rank])
    for turn in range(num_rounds):
        low, high = (dispatch.rank_tokens * part // num_rounds for part in (turn, turn + 1))
        skipped = np.maximum(low[owners] - first_rows, 0)
        taken = np.minimum(high[owners] - first_rows, lengths) - skipped
        recv = np.stack([owners, starts + skipped, taken], axis=1)[taken > 0]
        num_sent = int(high[rank] - low[rank])
        peers = np.arange(dispatch.cp_size if num_sent else 0)
        send = np.stack([peers, np.full_like(peers, low[rank]), np.full_like(peers, num_sent)], axis=1)
        yield Exchange(dispatch.cp_size, num_local, dispatch.total_tokens, frozen_array(send), frozen_array(recv))


def _check_rows(name: str, x: torch.Tensor, num_rows: int) -> None:
    if x.dim() == 0 or x.shape[0] != num_rows:
        raise InputError(f"{name} has shape {tuple(x.shape)}; its first dimension must be {num_rows} rows by the dispatch plan")
