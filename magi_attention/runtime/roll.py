"""torch.roll over the global token order without the global tensor, optionally never across a document. Differentiable.

y[i] = x[(i - shift) mod num_tokens]; within documents y[i] = x[i - shift] where both tokens are of one document, else a fill value.
Each rank asks the owners for exactly the tokens it needs; the ranges and their exchange are computed once per (dispatch, shift, documents).
The gradient travels the same exchange backwards.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy.typing as npt
import torch

from magi_attention.arguments import flag, integer
from magi_attention.comm import announce_refusal, group_cast
from magi_attention.plan.types import Exchange
from magi_attention.runtime.checks import check_move_agreement, has_backward
from magi_attention.runtime.rows import TokenOwners, as_bits, require_fill, require_tokens, rows_back, rows_first, sum_rows, uploaded
from magi_attention.runtime.second_order import first_order
from magi_attention.runtime.tokens import document_borders


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
        InputError: `dim` does not count this rank's tokens, shift is not an int, x cannot hold fill_value, or cu_seqlens is
            malformed; in check mode also when ranks disagree.
        CommError: the exchange failed or timed out.
    """
    with announce_refusal(owners.group, "roll"):
        dim = require_tokens(x_local, dim, owners.num_local_tokens, "x_local")
        shift = integer("shift", shift, "must be an int, in tokens")
        fill = require_fill("fill_value", fill_value, x_local.dtype) if flag("within_documents", within_documents) else 0
        borders = tuple(document_borders(cu_seqlens, owners.num_tokens).tolist()) if within_documents else None
    options = {"shift": shift, "fill_value": fill, "requires grad": has_backward(x_local), "borders": borders}
    check_move_agreement("roll", x_local, dim, owners, options)
    exchange, filled_rows = owners.routes.roll(shift, borders)
    filled = None if len(filled_rows) == owners.num_local_tokens else uploaded(exchange, "filled", lambda: filled_rows, x_local.device)
    rolled: torch.Tensor = _Roll.apply(x_local, exchange, filled, owners, dim, fill)  # type: ignore[no-untyped-call]
    return rolled


class _Roll(torch.autograd.Function):
    @staticmethod
    def forward(
        x_local: torch.Tensor, exchange: Exchange, filled: torch.Tensor | None, owners: TokenOwners, dim: int, fill_value: float
    ) -> torch.Tensor:
        rows = group_cast(exchange, [rows_first(x_local, dim)], owners.group, timeout_s=owners.timeout_s, what="roll").wait()[0]
        if filled is not None:
            whole = torch.full((owners.num_local_tokens, *rows.shape[1:]), fill_value, dtype=rows.dtype, device=rows.device)
            whole[owners.num_real_local_tokens :] = 0
            as_bits(whole).index_copy_(0, filled, as_bits(rows))
            rows = whole
        return rows_back(rows, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.exchange, ctx.filled, ctx.owners, ctx.dim, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gradients = functools.partial(_roll_gradients, ctx.exchange, ctx.owners, ctx.dim)
        return *first_order("roll", gradients, grad, ctx.filled), None, None, None, None, None


def _roll_gradients(
    exchange: Exchange, owners: TokenOwners, dim: int, grad: torch.Tensor, filled: torch.Tensor | None
) -> tuple[torch.Tensor]:
    """Every row's gradient back to where the row came from."""
    rows = rows_first(grad, dim)
    if filled is not None:
        rows = rows.index_select(0, filled)
    return (rows_back(sum_rows(exchange, rows, owners, "gradient of roll"), dim),)
