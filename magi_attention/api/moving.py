"""Tokens to their owners and back: dispatch, undispatch, roll, and where local tokens stand. Plans nothing, computes no attention."""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.api.keys import DistAttnKey, check_living_key
from magi_attention.arguments import flag
from magi_attention.errors import InputError
from magi_attention.runtime import loss, tokens
from magi_attention.runtime import roll as rolling
from magi_attention.runtime.graphs import outside_graphs
from magi_attention.runtime.rows import TokenOwners, require_device


def _owners(key: DistAttnKey, role: str) -> TokenOwners:
    check_living_key(key)
    if not isinstance(role, str) or role not in ("q", "k"):
        raise InputError(f'role={role!r} must be "q" (query tokens) or "k" (key and value tokens, when is_same_source=False)')
    return key.owners_q if role == "q" else key.owners_k


@outside_graphs
def dispatch(x: torch.Tensor, key: DistAttnKey, pad_value: float = 0.0, *, dim: int = 0, role: str = "q") -> torch.Tensor:
    """This rank's rows of a tensor that every rank holds. Sends nothing; its backward is collective.

    In the backward every rank gets the whole gradient of x, so parameters before a dispatch need no reduction over the group.

    Args:
        x: any dtype, the key's total number of tokens along `dim`, equal on every rank.
        key: whose dispatch.
        pad_value: of the rows added when the key pads (uneven_shard=False).
        dim: the dimension that counts tokens, e.g. -1 for position ids [3, batch, tokens].
        role: "q" for query tokens (and key tokens of self attention), "k" for key and value tokens of cross attention.

    Returns:
        The shape of x with this rank's number of tokens along `dim`; contiguous.

    Raises:
        InputError: `dim` does not count the key's tokens, or another role.
    """
    return tokens.dispatch(x, _owners(key, role), dim=dim, pad_value=pad_value)


@outside_graphs
def undispatch(x: torch.Tensor, key: DistAttnKey, is_partial_grad: bool = False, *, dim: int = 0, role: str = "q") -> torch.Tensor:
    """The whole tensor, in global order and without padding, on every rank; the inverse of dispatch. Collective.

    Args:
        x: any dtype, this rank's number of tokens along `dim`.
        key: whose dispatch.
        is_partial_grad: False when every rank computes the same loss from the result: the backward takes this rank's rows of the
            gradient and sends nothing. True when each rank's gradient is only a part: the backward sums the parts over ranks.
        dim: the dimension that counts tokens.
        role: see dispatch.

    Raises:
        InputError: `dim` does not count this rank's tokens, or another role.
        CommError: the exchange failed or timed out.
    """
    return tokens.undispatch(x, _owners(key, role), dim=dim, is_partial_grad=is_partial_grad)


@outside_graphs
def roll(
    x: torch.Tensor,
    shift: int,
    dim: int,
    key: DistAttnKey,
    *,
    within_documents: bool = False,
    cu_seqlens: Any = None,
    fill_value: float = -100,
) -> torch.Tensor:
    """dispatch(torch.roll(undispatch(x), shift, dim)) without the global tensor; differentiable. Collective.

    Args:
        x: any dtype, this rank's number of tokens along `dim`.
        shift: positive moves tokens to later positions; -1 brings the next token (labels).
        dim: the dimension that counts tokens.
        key: whose dispatch.
        within_documents: tokens neither leave their document nor wrap around; rows without a source get fill_value.
        cu_seqlens: int [num_docs + 1] global document offsets; None takes those the key was made from.
        fill_value: see within_documents.

    Raises:
        InputError: `dim` does not count this rank's tokens, cu_seqlens without within_documents, or documents that are not known.
        CommError: the exchange failed or timed out.
    """
    owners = _owners(key, "q")
    within_documents = flag("within_documents", within_documents)
    if cu_seqlens is not None and not within_documents:
        raise InputError("cu_seqlens is given but within_documents=False; pass within_documents=True, or leave cu_seqlens out")
    documents = _documents(key, cu_seqlens) if within_documents else None
    return rolling.roll(x, shift, owners, dim=dim, within_documents=within_documents, cu_seqlens=documents, fill_value=fill_value)


@outside_graphs
def shift_labels(labels: torch.Tensor, key: DistAttnKey, *, cu_seqlens: Any = None, dim: int = 0, fill_value: int = -100) -> torch.Tensor:
    """Next-token labels: each local row gets the token after it in its document, the last of a document fill_value. Collective.

    Args:
        labels: int, dispatched token ids, this rank's number of tokens along `dim`.
        key: whose dispatch.
        cu_seqlens: int [num_docs + 1] global document offsets; None takes those the key was made from.
        dim: the dimension that counts tokens.
        fill_value: the label that the loss ignores; padded rows hold it too.

    Raises:
        InputError, CommError: see roll.
    """
    return loss.shift_labels(labels, _owners(key, "q"), _documents(key, cu_seqlens), dim=dim, fill_value=fill_value)


@outside_graphs
def get_position_ids(
    key: DistAttnKey, *, within_documents: bool = False, cu_seqlens: Any = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """Positions of this rank's query rows in the global sequence, int64 [local tokens], ascending.

    Args:
        key: whose dispatch.
        within_documents: count from the start of each document instead.
        cu_seqlens: int [num_docs + 1] global document offsets; None takes those the key was made from.
        device: of the result; None is the current CUDA device when the group uses NCCL, else the CPU.

    Raises:
        InputError: within_documents without known documents.
    """
    owners = _owners(key, "q")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in key.group.backends.values() else torch.device("cpu")
    device = require_device("device", device)
    if flag("within_documents", within_documents):
        return tokens.document_position_ids(owners, _documents(key, cu_seqlens), device)
    return tokens.position_ids(owners, device)


def _documents(key: DistAttnKey, cu_seqlens: Any) -> Any:
    if cu_seqlens is not None:
        return cu_seqlens
    if key.cu_seqlens_q is None:
        raise InputError(
            "cu_seqlens=None, and the key was made from ranges, so it does not know where documents end; pass cu_seqlens=[0, ..., total], "
            "or build the key with magi_attn_varlen_key"
        )
    return key.cu_seqlens_q
