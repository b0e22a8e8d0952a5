"""Tokens to their owners and back: differentiable dispatch and undispatch, and where local tokens stand. Plans nothing.

A replicated tensor is one that every rank of the group holds with equal values, in global token order. `num_tokens` is its length;
when a key pads (uneven_shard=False) the padded tail exists only on the ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from magi_attention.arguments import flag, int_array
from magi_attention.comm import announce_refusal, gather_rows, scatter_reduce_rows
from magi_attention.errors import InputError
from magi_attention.runtime.checks import check_move_agreement, has_backward
from magi_attention.runtime.rows import TokenOwners, require_fill, require_tensor, require_tokens, rows_back, rows_first
from magi_attention.runtime.second_order import first_order


def dispatch(x: torch.Tensor, owners: TokenOwners, *, dim: int = 0, pad_value: float = 0.0) -> torch.Tensor:
    """This rank's rows of a replicated tensor.

    Forward sends nothing. Backward is collective: every rank gets the whole gradient of `x`, so parameters before a dispatch
    have equal gradients on all ranks and need no reduction over the cp group.

    Args:
        x: replicated, any dtype; num_tokens entries along `dim`.
        owners: who owns which token.
        dim: the dimension that counts tokens, e.g. -1 for position ids [3, B, S].
        pad_value: value of padded tokens.

    Returns:
        The shape of `x` with this rank's number of tokens along `dim`, contiguous.

    Raises:
        InputError: `dim` does not count num_tokens, or x cannot hold pad_value.
    """
    dim = require_tokens(x, dim, owners.num_tokens, "x")
    fill = require_fill("pad_value", pad_value, x.dtype)
    local: torch.Tensor = _Dispatch.apply(x, owners, dim, fill)  # type: ignore[no-untyped-call]
    return local


def undispatch(x_local: torch.Tensor, owners: TokenOwners, *, dim: int = 0, is_partial_grad: bool = False) -> torch.Tensor:
    """The replicated tensor of which each rank holds its rows; inverse of dispatch. Collective.

    Args:
        x_local: any dtype; this rank's number of tokens along `dim`.
        owners: who owns which token.
        dim: the dimension that counts tokens.
        is_partial_grad: False when every rank computes the same loss from the result: backward takes this rank's rows of the gradient
            and sends nothing. True when each rank's gradient is only a part: backward sums the parts of all ranks, in rank order and
            fp32, and is collective.

    Returns:
        The shape of `x_local` with num_tokens along `dim` (padding cut off), contiguous, in global order.

    Raises:
        InputError: `dim` does not count this rank's tokens; in check mode also when ranks disagree.
        CommError: the exchange failed or timed out.
    """
    with announce_refusal(owners.group, "undispatch"):
        dim = require_tokens(x_local, dim, owners.num_local_tokens, "x_local")
        is_partial_grad = flag("is_partial_grad", is_partial_grad)
    options = {"is_partial_grad": is_partial_grad, "its backward sums over ranks": is_partial_grad and has_backward(x_local)}
    check_move_agreement("undispatch", x_local, dim, owners, options)
    whole: torch.Tensor = _Undispatch.apply(x_local, owners, dim, is_partial_grad)  # type: ignore[no-untyped-call]
    return whole


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, owners: TokenOwners, dim: int, pad_value: float) -> torch.Tensor:
        return _take_local(x, owners, dim, pad_value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.owners, ctx.dim, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gradients = functools.partial(_dispatch_gradients, ctx.owners, ctx.dim)
        return *first_order("dispatch", gradients, grad), None, None, None


class _Undispatch(torch.autograd.Function):
    @staticmethod
    def forward(x_local: torch.Tensor, owners: TokenOwners, dim: int, is_partial_grad: bool) -> torch.Tensor:
        return _gather(x_local, owners, dim, "undispatch")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.owners, ctx.dim, ctx.is_partial_grad = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        owners, dim = ctx.owners, ctx.dim
        if not ctx.is_partial_grad:
            return _take_local(grad, owners, dim, 0.0), None, None, None
        gradients = functools.partial(_undispatch_gradients, owners, dim)
        return *first_order("undispatch with is_partial_grad=True", gradients, grad), None, None, None


def _dispatch_gradients(owners: TokenOwners, dim: int, grad: torch.Tensor) -> tuple[torch.Tensor]:
    return (_gather(grad, owners, dim, "gradient of dispatch"),)


def _undispatch_gradients(owners: TokenOwners, dim: int, grad: torch.Tensor) -> tuple[torch.Tensor]:
    """This rank's rows of the sum of all ranks' gradients."""
    rows = rows_first(grad, dim)
    parts = torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows
    if owners.num_padded_tokens:
        parts = torch.cat([parts, parts.new_zeros((owners.num_padded_tokens, *parts.shape[1:]))])
    summed = scatter_reduce_rows(parts, owners.routes.dispatch, owners.group, timeout_s=owners.timeout_s, what="gradient of undispatch")
    return (rows_back(torch.view_as_complex(summed) if rows.is_complex() else summed, dim),)


def _take_local(x: torch.Tensor, owners: TokenOwners, dim: int, pad_value: float) -> torch.Tensor:
    tokens = owners.token_index(x.device)
    num_real = owners.num_real_local_tokens
    local = x.index_select(dim, tokens[:num_real])
    if num_real == len(tokens):
        return local
    shape = list(x.shape)
    shape[dim] = len(tokens) - num_real
    return torch.cat([local, x.new_full(shape, pad_value)], dim)


def _gather(x_local: torch.Tensor, owners: TokenOwners, dim: int, what: str) -> torch.Tensor:
    rows = gather_rows(rows_first(x_local, dim), owners.routes.dispatch, owners.group, timeout_s=owners.timeout_s, what=what)
    return rows_back(rows[: owners.num_tokens], dim)


# ---- where tokens stand ----


def position_ids(owners: TokenOwners, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [local tokens]: global position of each local row, ascending. A new tensor, the caller's to change."""
    return owners.token_index(torch.device(device)).clone()


def document_position_ids(
    owners: TokenOwners, cu_seqlens: npt.ArrayLike | torch.Tensor, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """int64 [local tokens]: position of each local row inside its document, restarting at 0 (what RoPE per document wants).

    Args:
        owners: who owns which token.
        cu_seqlens: int [num_documents + 1], from 0 to num_tokens; tokens past its end count from 0 as one more document.
        device: of the result.

    Raises:
        InputError: cu_seqlens does not start at 0, falls, or is not integer.
    """
    borders = document_borders(cu_seqlens, owners.num_tokens)
    tokens = owners.routes.dispatch.position_ids(owners.routes.cp_rank)
    starts = borders[np.searchsorted(borders, tokens, side="right") - 1]
    return torch.from_numpy(tokens - starts).to(device)


def local_cu_seqlens(positions: npt.ArrayLike | torch.Tensor, cu_seqlens: npt.ArrayLike | torch.Tensor) -> torch.Tensor:
    """int32 [num_pieces + 1] on the CPU: local rows cut where tokens stop being neighbours in one document.

    For layers that run on local rows alone (convolutions, recurrences) and must not mix documents or jump over a gap.

    Args:
        positions: int [local tokens], global positions of the local rows (`position_ids`).
        cu_seqlens: int [num_documents + 1], global document borders.
    """
    tokens = int_array("positions", positions)
    borders = document_borders(cu_seqlens, None)
    document = np.searchsorted(borders, tokens, side="right")
    is_first = (np.diff(tokens, prepend=-2) != 1) | (np.diff(document, prepend=-1) != 0)
    cuts = np.append(np.flatnonzero(is_first), len(tokens)) if len(tokens) else np.zeros(1, np.int64)
    return torch.from_numpy(cuts.astype(np.int32))


def cu_seqlens_from_positions(positions: npt.ArrayLike | torch.Tensor) -> torch.Tensor:
    """int32 [num_documents + 1] on the CPU: document borders of global positions that restart at 0 in each document.

    Args:
        positions: int [num_tokens] in global order, or [batch, tokens], read row after row.

    Raises:
        InputError: a position is neither 0 nor one more than the one before it.
    """
    if isinstance(positions, torch.Tensor):
        require_tensor("positions", positions, "[num_tokens] or [batch, tokens]")
    flat = int_array("positions", positions.reshape(-1) if hasattr(positions, "reshape") else _flattened(positions))
    is_first = flat == 0
    bad = np.flatnonzero(~is_first & (np.diff(flat, prepend=-1) != 1))
    if len(bad):
        raise InputError(
            f"positions[{bad[0]}]={flat[bad[0]]} is neither 0 nor one more than the position before it; pass positions in global order "
            "that restart at 0 in each document (before dispatch)"
        )
    return torch.from_numpy(np.append(np.flatnonzero(is_first), len(flat)).astype(np.int32))


def document_borders(cu_seqlens: npt.ArrayLike | torch.Tensor | None, num_tokens: int | None) -> npt.NDArray[np.int64]:
    """int64, strictly rising from 0: cu_seqlens without its empty documents; None is one document.

    Raises:
        InputError: cu_seqlens does not start at 0, falls, ends past num_tokens, or is not integer.
    """
    if cu_seqlens is None:
        return np.array([0, num_tokens or 0], np.int64)[: 2 if num_tokens else 1]
    borders = int_array("cu_seqlens", cu_seqlens)
    if not len(borders) or borders[0] != 0 or (np.diff(borders) < 0).any():
        raise InputError(f"cu_seqlens={borders[:8].tolist()}... must start with 0 and never fall")
    if num_tokens is not None and borders[-1] > num_tokens:
        raise InputError(f"cu_seqlens ends at {borders[-1]}, past the {num_tokens} tokens of the key; cut the last document")
    return np.unique(borders)


def _flattened(positions: Any) -> Any:
    """Rows of a list of lists one after another; anything else as it is."""
    has_rows = isinstance(positions, (list, tuple)) and all(isinstance(row, (list, tuple)) for row in positions)
    return [token for row in positions for token in row] if has_rows else positions
