"""Local rows of every rank to one tensor in global order, and back with a sum. Knows who owns which token, nothing of masks."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from magi_attention.comm.cast import group_cast
from magi_attention.comm.group import comm_group
from magi_attention.comm.reduce import group_reduce
from magi_attention.errors import InputError
from magi_attention.plan.types import DispatchPlan, Exchange

_exchanges: weakref.WeakKeyDictionary[DispatchPlan, dict[int, Exchange]] = weakref.WeakKeyDictionary()


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
    exchange = gather_exchange(dispatch, comm_group(group).rank)
    _check_rows("x_local", x_local, exchange.num_rows_in)
    return group_cast(exchange, [x_local], group, timeout_s=timeout_s, what=what).wait()[0]


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
    exchange = gather_exchange(dispatch, comm_group(group).rank)
    _check_rows("x_global_partial", x_global_partial, exchange.num_rows_out)
    if not x_global_partial.is_floating_point():
        raise InputError(f"x_global_partial is {x_global_partial.dtype}; only floating point partials are summed")
    sum_dtype = torch.float64 if x_global_partial.dtype == torch.float64 else torch.float32
    shape = (exchange.num_rows_in, *x_global_partial.shape[1:])
    sums = torch.zeros(shape, dtype=sum_dtype, device=x_global_partial.device)
    group_reduce(exchange, [x_global_partial], group, into=[sums], timeout_s=timeout_s, what=what).wait()
    return sums.to(x_global_partial.dtype)


def gather_exchange(dispatch: DispatchPlan, rank: int) -> Exchange:
    """Every rank sends all its rows to every rank; they land in global order. Cached as long as `dispatch` lives.

    Raises:
        InputError: `rank` is not one of the dispatch plan's.
    """
    if not 0 <= rank < dispatch.cp_size:
        raise InputError(f"rank {rank} of the group is outside the dispatch plan's {dispatch.cp_size} ranks; use the group it was made for")
    found = _exchanges.setdefault(dispatch, {})
    if rank not in found:
        found[rank] = _build_gather_exchange(dispatch, rank)
    return found[rank]


def _build_gather_exchange(dispatch: DispatchPlan, rank: int) -> Exchange:
    num_local = int(dispatch.rank_tokens[rank])
    peers = range(dispatch.cp_size) if num_local else range(0)
    send = np.array([(peer, 0, num_local) for peer in peers], dtype=np.int32).reshape(-1, 3)
    parts = [
        np.column_stack([np.full(len(runs), peer, np.int32), runs[:, 0], runs[:, 1] - runs[:, 0]])
        for peer, runs in enumerate(dispatch.rank_runs)
    ]
    recv = np.concatenate(parts).astype(np.int32)
    return Exchange(dispatch.cp_size, num_local, dispatch.total_tokens, send, recv)


def _check_rows(name: str, x: torch.Tensor, num_rows: int) -> None:
    if x.dim() == 0 or x.shape[0] != num_rows:
        raise InputError(f"{name} has shape {tuple(x.shape)}; its first dimension must be {num_rows} rows by the dispatch plan")
