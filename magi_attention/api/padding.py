"""Padding and batch helpers on plain tensors and ranges. Knows nothing of ranks, keys or plans."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi_attention.arguments import count, integer, one_of, shown
from magi_attention.errors import InputError
from magi_attention.mask import AttnMaskType, AttnRange, AttnRanges
from magi_attention.mask.slices import MAX_TOKENS
from magi_attention.runtime.rows import require_device, require_fill, require_tensor


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Tokens to append so that every rank owns the same whole number of chunks.

    Only `uneven_shard=False` needs this, and keys built with it do it by themselves.

    Args:
        total_seqlen_q: tokens in the global sequence, 0 or more.
        cp_size: ranks, 1 or more.
        chunk_size: tokens per chunk, 1 or more.

    Returns:
        The smallest pad with (total_seqlen_q + pad) % (cp_size * chunk_size) == 0.

    Raises:
        InputError: an argument is not an int in its range.
    """
    total = count("total_seqlen_q", total_seqlen_q, 0, MAX_TOKENS)
    return -total % (count("cp_size", cp_size, 1, MAX_TOKENS) * count("chunk_size", chunk_size, 1, MAX_TOKENS))


def _valid_dim(x: torch.Tensor, dim: int) -> int:
    require_tensor("x", x, "of any shape")
    dim = integer("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise InputError(f"dim={dim} must be in [{-x.dim()}, {x.dim() - 1}] for x of shape {tuple(x.shape)}; pass an existing dim")
    return dim % x.dim()


def pad_at_dim(x: torch.Tensor, dim: int, pad_size: int, value: float = 0.0, side: str = "right") -> torch.Tensor:
    """x with `pad_size` entries of `value` after ("right") or before ("left") dim; any dtype; differentiable.

    Returns:
        x itself when pad_size is 0, else a new tensor whose `dim` is longer by pad_size.

    Raises:
        InputError: unknown dim or side, or a negative pad_size.
    """
    dim = _valid_dim(x, dim)
    pad_size = count("pad_size", pad_size, 0, MAX_TOKENS)
    one_of("side", side, ("left", "right"))
    fill = require_fill("value", value, x.dtype)
    if pad_size == 0:
        return x
    shape = list(x.shape)
    shape[dim] = pad_size
    padding = torch.full(shape, fill, dtype=x.dtype, device=x.device)
    return torch.cat([x, padding] if side == "right" else [padding, x], dim=dim)


def unpad_at_dim(x: torch.Tensor, dim: int, pad_size: int) -> torch.Tensor:
    """A view of x without the last `pad_size` entries of dim.

    Raises:
        InputError: unknown dim, or pad_size outside [0, x.size(dim)].
    """
    dim = _valid_dim(x, dim)
    pad_size = count("pad_size", pad_size, 0, MAX_TOKENS)
    if pad_size > x.size(dim):
        raise InputError(f"pad_size={pad_size} must be at most x.size({dim})={x.size(dim)}; pass the size that was added")
    return x.narrow(dim, 0, x.size(dim) - pad_size)


def squash_batch_dim(x: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, ...] -> [batch * tokens, ...].

    Raises:
        InputError: x has fewer than two dims.
    """
    require_tensor("x", x, "[batch, tokens, ...]")
    if x.dim() < 2:
        raise InputError(f"x has shape {tuple(x.shape)}; it must be [batch, tokens, ...]; packed tensors need no squash")
    return x.flatten(0, 1)


def infer_varlen_mask_from_batch(
    batch_size: int, seq_len: int, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cu_seqlens of a batch of equally long sequences packed in one row.

    Args:
        batch_size: sequences, 0 or more.
        seq_len: tokens per sequence, 0 or more.
        device: where the tensors live; default CPU, since planning reads them there.

    Returns:
        (cu_seqlens_q, cu_seqlens_k), both int32 [batch_size + 1], equal.

    Raises:
        InputError: a negative count, or a total beyond 32-bit token ids.
    """
    batch_size, seq_len = count("batch_size", batch_size, 0, MAX_TOKENS), count("seq_len", seq_len, 0, MAX_TOKENS)
    if batch_size * seq_len >= 2**31:
        raise InputError(f"batch_size * seq_len = {batch_size * seq_len} must fit 32-bit token ids; split the batch")
    place = None if device is None else require_device("device", device)
    cu_seqlens = torch.arange(batch_size + 1, dtype=torch.int64, device=place).mul_(seq_len).to(torch.int32)
    return cu_seqlens, cu_seqlens.clone()


def apply_padding(
    q_ranges: AttnRanges, k_ranges: AttnRanges, attn_mask_type: Sequence[AttnMaskType], total_seqlen: int, pad_size: int
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
    """The same mask with `pad_size` more query rows that see nothing.

    Returns:
        New (q_ranges, k_ranges, mask types): the given ones plus one entry, q [total_seqlen, total_seqlen + pad_size), k empty, FULL.

    Raises:
        InputError: a negative total_seqlen or pad_size.
    """
    start = count("total_seqlen", total_seqlen, 0, MAX_TOKENS)
    padded_q, padded_k = AttnRanges.from_ranges(q_ranges), AttnRanges.from_ranges(k_ranges)
    padded_q.append(AttnRange(start, start + count("pad_size", pad_size, 0, MAX_TOKENS)))
    padded_k.append(AttnRange(0, 0))
    if not isinstance(attn_mask_type, Sequence) or isinstance(attn_mask_type, (str, bytes)):
        raise InputError(f"attn_mask_type={shown(attn_mask_type)} must be a list of AttnMaskType, one per range")
    return padded_q, padded_k, [*attn_mask_type, AttnMaskType.FULL]
