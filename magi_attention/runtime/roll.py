"""torch.roll over the global token order without the global tensor, optionally never across a document. Differentiable.

y[i] = x[(i - shift) mod num_tokens]; within documents y[i] = x[i - shift] where both tokens are of one document, else a fill value.
Each rank asks the owners for exactly the tokens it needs; the ranges and their exchange are computed once per (dispatch, shift, documents).
The gradient travels the same exchange backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from magi_attention.errors import InputError
from magi_attention.plan.exchange import exchange_for_wanted_tokens
from magi_attention.plan.types import DispatchPlan, Exchange, Int32Array, Int64Array
from magi_attention.runtime.rows import cached_route, require_tokens, rows_back, rows_first, send_rows, sum_rows
from magi_attention.runtime.tokens import TokenOwners, document_borders


@dataclass(frozen=True, eq=False)
class RollRoute:
    """How one rank's rolled rows arrive.

    Attributes:
        exchange: fills a compact buffer with the rows that have a source.
        filled_rows: int64, the local row of each buffer row, ascending; every other local row takes the fill value.
        num_local_rows: rows of the result.
    """

    exchange: Exchange
    filled_rows: torch.Tensor
    num_local_rows: int

    @property
    def is_complete(self) -> bool:
        return self.exchange.num_rows_out == self.num_local_rows


def roll(
    x_local: torch.Tensor,
    shift: int,
    owners: TokenOwners,
    *,
    dim: int = 0,
    within_documents: bool = False,
    cu_seqlens: npt.ArrayLike | torch.Tensor | None = None,
    fill_value: float = -100,
) -> torch.Tensor:
    """This rank's rows of torch.roll(whole, shift, dim), where `whole` is the undispatched tensor. Collective.

    Args:
        x_local: any dtype; this rank's number of tokens along `dim`.
        shift: tokens to move by, any int: -1 brings the next token (labels), +1 the previous one.
        owners: who owns which token.
        dim: the dimension that counts tokens.
        within_documents: tokens do not cross document borders and do not wrap around.
        cu_seqlens: int [num_documents + 1], global borders, when within_documents; None is one document. Tokens past its end belong
            to no document and take the fill value.
        fill_value: what rows without a source hold, when within_documents.

    Returns:
        The shape of `x_local`, contiguous. Padded rows (past num_tokens) hold 0.

    Raises:
        InputError: `dim` does not count this rank's tokens, shift is not an int, or cu_seqlens is malformed.
        CommError: the exchange failed or timed out.
    """
    dim = require_tokens(x_local, dim, owners.num_local_tokens, "x_local")
    if isinstance(shift, bool) or not isinstance(shift, (int, np.integer)):
        raise InputError(f"shift={shift!r} must be an int, in tokens")
    num_tokens = owners.num_real_tokens
    if within_documents:
        documents = tuple(document_borders(cu_seqlens, num_tokens).tolist())
        step = max(-num_tokens, min(num_tokens, int(shift)))
    else:
        documents = None
        step = int(shift) % num_tokens if num_tokens else 0
        fill_value = 0
    name = ("roll", owners.cp_rank, step, num_tokens, documents)
    route = cached_route(owners.dispatch, name, lambda: _roll_route(owners, step, documents))
    rolled: torch.Tensor = _Roll.apply(x_local, route, owners, dim, fill_value)  # type: ignore[no-untyped-call]
    return rolled


class _Roll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: torch.Tensor, route: RollRoute, owners: TokenOwners, dim: int, fill_value: float) -> torch.Tensor:
        ctx.route, ctx.owners, ctx.dim = route, owners, dim
        rows = rows_first(x_local, dim)
        arrived = send_rows(route.exchange, rows, owners.group, timeout_s=owners.timeout_s, what="roll")
        if not route.is_complete:
            whole = arrived.new_full((route.num_local_rows, *arrived.shape[1:]), fill_value)
            whole[owners.num_real_local_tokens :] = 0
            arrived = whole.index_copy_(0, route.filled_rows.to(arrived.device), arrived)
        return rows_back(arrived, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        route, owners = ctx.route, ctx.owners
        rows = rows_first(grad, ctx.dim)
        if not route.is_complete:
            rows = rows.index_select(0, route.filled_rows.to(rows.device))
        summed = sum_rows(route.exchange, rows, owners.group, timeout_s=owners.timeout_s, what="gradient of roll")
        return rows_back(summed, ctx.dim), None, None, None, None


def _roll_route(owners: TokenOwners, shift: int, documents: tuple[int, ...] | None) -> RollRoute:
    """The route of one rank; every rank computes the wishes of all, so none has to be sent."""
    dispatch, rank, num_tokens = owners.dispatch, owners.cp_rank, owners.num_real_tokens
    if documents is None:
        cuts = np.array([0, shift, num_tokens], np.int64)  # targets [0, shift) wrap around, [shift, num_tokens) do not
        sources = cuts[:-1] + np.array([num_tokens - shift, -shift], np.int64)
        targets = np.stack([cuts[:-1], cuts[1:]], axis=1)
    else:
        borders = np.array(documents, np.int64)
        starts = np.minimum(borders[:-1] + max(shift, 0), borders[1:])
        ends = np.maximum(borders[1:] + min(shift, 0), starts)
        targets = np.stack([starts, ends], axis=1)
        sources = starts - shift
    clipped = [_clip_targets(dispatch, peer, targets, sources) for peer in range(dispatch.cp_size)]
    wanted: list[Int32Array] = [ranges for ranges, _ in clipped]
    filled = clipped[rank][1]
    exchange = exchange_for_wanted_tokens(wanted, dispatch, rank)
    return RollRoute(exchange, torch.from_numpy(filled), owners.num_local_tokens)


def _clip_targets(dispatch: DispatchPlan, rank: int, targets: Int64Array, sources: Int64Array) -> tuple[Int32Array, Int64Array]:
    """(int32 [n, 2] source ranges in row order, int64 local rows they fill) for the tokens of `rank` inside `targets`.

    Targets are disjoint and ascending, sources has the first source token of each.
    """
    runs = dispatch.rank_runs[rank].astype(np.int64)
    num_rows = runs[:, 1] - runs[:, 0]
    first_rows = np.cumsum(num_rows) - num_rows
    first = np.searchsorted(targets[:, 1], runs[:, 0], side="right")
    last = np.searchsorted(targets[:, 0], runs[:, 1], side="left")
    num_pairs = np.maximum(last - first, 0)
    run_idx = np.repeat(np.arange(len(runs)), num_pairs)
    target_idx = np.arange(num_pairs.sum()) - np.repeat(np.cumsum(num_pairs) - num_pairs, num_pairs) + np.repeat(first, num_pairs)
    starts = np.maximum(runs[run_idx, 0], targets[target_idx, 0])
    ends = np.minimum(runs[run_idx, 1], targets[target_idx, 1])
    kept = ends > starts
    run_idx, target_idx, starts, ends = run_idx[kept], target_idx[kept], starts[kept], ends[kept]
    shift = sources[target_idx] - targets[target_idx, 0]
    wanted = np.stack([starts + shift, ends + shift], axis=1).astype(np.int32)
    rows = first_rows[run_idx] + starts - runs[run_idx, 0]
    parts = [np.arange(row, row + size, dtype=np.int64) for row, size in zip(rows, ends - starts, strict=True)]
    return wanted, np.concatenate(parts) if parts else np.zeros(0, np.int64)
