"""Moving rows of one tensor along any dimension: the differentiable core of dispatch, undispatch and roll. Knows no attention.

A tensor is brought to [rows, everything else] here and back again; below this file only rows exist. Any dtype travels bit for bit.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np
import torch

from magi_attention.comm import Groups, group_cast, group_reduce
from magi_attention.errors import InputError
from magi_attention.plan.exchange import exchange_for_wanted_tokens
from magi_attention.plan.types import DispatchPlan, Exchange, Int32Array

_MAX_ROUTES_PER_PLAN = 64

_Route = TypeVar("_Route")


def normalized_dim(dim: int, tensor: torch.Tensor, name: str) -> int:
    """`dim` counted from the front.

    Raises:
        InputError: the tensor has no such dimension.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(f"dim={dim} is not a dimension of {name} with shape {tuple(tensor.shape)}; use 0 to {tensor.dim() - 1}")
    return dim % tensor.dim()


def require_tokens(tensor: torch.Tensor, dim: int, num_tokens: int, name: str) -> int:
    """`dim` counted from the front, after checking that `tensor` has `num_tokens` entries along it.

    Raises:
        InputError: another number of entries.
    """
    dim = normalized_dim(dim, tensor, name)
    if tensor.shape[dim] != num_tokens:
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)}, so {tensor.shape[dim]} entries along dim={dim}; the key has {num_tokens} tokens there; "
            "pass the dimension that counts tokens, or a tensor made for this key"
        )
    return dim


def rows_first(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """[rows, ...] with `dim` in front, contiguous."""
    return tensor.movedim(dim, 0).contiguous()


def rows_back(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of rows_first."""
    return rows.movedim(0, dim).contiguous()


def send_rows(exchange: Exchange, rows: torch.Tensor, group: Groups, *, timeout_s: float, what: str) -> torch.Tensor:
    """Rows of the receive buffer of `exchange`, [num_rows_out, ...]. Collective unless the exchange is of one rank."""
    if exchange.cp_size == 1:
        received = rows.new_empty((exchange.num_rows_out, *rows.shape[1:]))
        received[row_index(exchange, "recv", rows.device)] = rows[row_index(exchange, "send", rows.device)]
        return received
    return group_cast(exchange, [rows], group, timeout_s=timeout_s, what=what).wait()[0]


def sum_rows(exchange: Exchange, rows: torch.Tensor, group: Groups, *, timeout_s: float, what: str) -> torch.Tensor:
    """The transpose of send_rows: [num_rows_in, ...], each row the sum in rank order of what all ranks hold for it, in rows.dtype."""
    accumulate_dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros((exchange.num_rows_in, *rows.shape[1:]), dtype=accumulate_dtype, device=rows.device)
    if exchange.cp_size == 1:
        partial = rows[row_index(exchange, "recv", rows.device)].to(accumulate_dtype)
        total.index_add_(0, row_index(exchange, "send", rows.device), partial)
    else:
        group_reduce(exchange, [rows.to(accumulate_dtype)], group, into=[total], timeout_s=timeout_s, what=what).wait()
    return total.to(rows.dtype)


# ---- routes: exchanges made once per dispatch ----

_routes: weakref.WeakKeyDictionary[DispatchPlan, OrderedDict[Hashable, object]] = weakref.WeakKeyDictionary()
_routes_lock = threading.Lock()


def cached_route(dispatch: DispatchPlan, name: Hashable, build: Callable[[], _Route]) -> _Route:
    """The route `name` of `dispatch`, built at first use. Bounded; lives as long as the dispatch. Building sends nothing."""
    with _routes_lock:
        of_plan = _routes.setdefault(dispatch, OrderedDict())
        if name not in of_plan:
            of_plan[name] = build()
            if len(of_plan) > _MAX_ROUTES_PER_PLAN:
                of_plan.popitem(last=False)
        of_plan.move_to_end(name)
        return of_plan[name]  # type: ignore[return-value]


def gather_exchange(dispatch: DispatchPlan, rank: int) -> Exchange:
    """Every rank receives every token, in global order."""

    def build() -> Exchange:
        everything = np.array([[0, dispatch.total_tokens]], np.int32)[: min(1, dispatch.total_tokens)]
        wanted: list[Int32Array] = [everything] * dispatch.cp_size
        return exchange_for_wanted_tokens(wanted, dispatch, rank)

    return cached_route(dispatch, ("gather", rank), build)


_row_indices: weakref.WeakKeyDictionary[Exchange, dict[tuple[str, torch.device], torch.Tensor]] = weakref.WeakKeyDictionary()


def row_index(exchange: Exchange, side: str, device: torch.device) -> torch.Tensor:
    """send_rows or recv_rows of `exchange` as an int64 tensor on `device`, uploaded once."""
    of_exchange = _row_indices.setdefault(exchange, {})
    if (side, device) not in of_exchange:
        rows = exchange.send_rows if side == "send" else exchange.recv_rows
        of_exchange[side, device] = torch.from_numpy(rows.copy()).to(device)
    return of_exchange[side, device]


def local_token_index(dispatch: DispatchPlan, rank: int, device: torch.device) -> torch.Tensor:
    """int64 [local tokens]: global token id of each local row of `rank`, ascending, on `device`. Do not write to it."""
    return cached_route(dispatch, ("tokens", rank, device), lambda: torch.from_numpy(dispatch.position_ids(rank).copy()).to(device))
