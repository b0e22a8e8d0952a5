"""The functions that make keys: from ranges, from cu_seqlens, for a new mask on an old dispatch. Moves no tensor but in *_dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from magi_attention.api.key_arguments import check_config, check_heads, check_pad_size, with_chunk_size
from magi_attention.api.key_cache import cache_of, clear_all
from magi_attention.api.keys import (
    AGREED,
    DistAttnKey,
    KeyIdentity,
    check_key,
    checked_identity,
    dispatch_digest,
    make_key,
    most_recent_key,
)
from magi_attention.api.mask_inputs import clear_masks, mask_from_ranges
from magi_attention.api.moving import dispatch
from magi_attention.api.single_plans import clear_plans
from magi_attention.arguments import count, int_array
from magi_attention.comm import announce_refusal, comm_group
from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError
from magi_attention.mask import AttnMask, AttnRanges, builders
from magi_attention.mask.slices import MAX_TOKENS
from magi_attention.runtime.graphs import outside_graphs
from magi_attention.runtime.single import clear_prepared

CpGroupInput: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"

_DEFAULT_CONFIG = DistAttnConfig()


@outside_graphs
def magi_attn_flex_key(
    q_ranges: AttnRanges | Any,
    k_ranges: AttnRanges | Any,
    attn_mask_type: Any,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: CpGroupInput,
    dist_attn_config: DistAttnConfig = _DEFAULT_CONFIG,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    chunk_size: int | None = None,
    *,
    head_dim_v: int | None = None,
) -> DistAttnKey:
    """The key of any mask: plans who owns which token, who sends what to whom, and what each rank computes.

    Every rank of the group calls it with equal arguments and plans alone: nothing is sent (but see Raises), nothing moves to a device.
    Equal arguments on one group give an equal key, and its plan comes from a bounded cache.

    Args:
        q_ranges, k_ranges: [n, 2] half-open token ranges of the global sequence: AttnRanges, int tensors, arrays or lists.
        attn_mask_type: AttnMaskType, its name, or 0..3: one for all ranges or one per range; None is FULL.
        total_seqlen_q, total_seqlen_k: tokens of the global sequence, any number, 0 included; no padding is needed.
        num_heads_q, num_heads_kv: heads of the tensors that calc_attn will get.
        head_dim: width of q and k heads.
        pad_size: ignored, with a DeprecationWarning unless 0.
        cp_group_or_mesh: a ProcessGroup, or a DeviceMesh of 1 dim, or of 2 dims (inter, intra) for two-level exchange; None is the
            default group, or one rank when torch.distributed is not initialised.
        dist_attn_config: everything else; uneven_shard=False in its dispatch_config pads so that all ranks own equally many tokens.
        is_same_source: True when queries and keys are the same tokens (self attention), which then have the same owners. False for
            cross attention: key tokens have a dispatch of their own, used with `dispatch(x, key, role="k")`.
        is_q_permutable, is_k_permutable: False keeps those tokens in contiguous runs, in order.
        chunk_size: tokens per chunk; None lets the solver choose.
        head_dim_v: width of v heads; None accepts any.

    Raises:
        InputError: an argument breaks a rule. In check mode (MAGI_CHECK=1) also, on every rank, when ranks pass different arguments.
    """
    group = comm_group(cp_group_or_mesh)
    with announce_refusal(group, AGREED):
        check_pad_size(pad_size)
        config = with_chunk_size(dist_attn_config, chunk_size)
        totals = _totals(total_seqlen_q, total_seqlen_k)
        mask = mask_from_ranges(q_ranges, k_ranges, attn_mask_type, *totals, "attn_mask_type")
        sources = {"is_same_source": is_same_source, "is_q_permutable": is_q_permutable, "is_k_permutable": is_k_permutable}
        identity = checked_identity(mask, (num_heads_q, num_heads_kv, head_dim, head_dim_v), config, **sources)
    return make_key(mask, identity, group)


@outside_graphs
def magi_attn_varlen_key(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: CpGroupInput,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    dist_attn_config: DistAttnConfig = _DEFAULT_CONFIG,
    chunk_size: int | None = None,
    *,
    head_dim_v: int | None = None,
) -> DistAttnKey:
    """The key of packed documents; as magi_attn_flex_key, and it remembers the documents for roll, shift_labels and position ids.

    Args:
        cu_seqlens_q, cu_seqlens_k: int [num_docs + 1], start with 0, never fall, end with the total; tensors, arrays or lists.
        num_heads_q, num_heads_kv, head_dim, pad_size, cp_group_or_mesh, dist_attn_config, chunk_size, head_dim_v: see there.
        causal: no row sees keys after its own, aligned to the last key of its document.
        window_size: (left, right) around the diagonal of each document; -1 or None is unbounded. With causal, right counts as 0.

    Raises:
        InputError: see magi_attn_flex_key.
    """
    group = comm_group(cp_group_or_mesh)
    with announce_refusal(group, AGREED):
        check_pad_size(pad_size)
        config = with_chunk_size(dist_attn_config, chunk_size)
        mask = builders.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, causal=causal, window_size=window_size)
        identity = checked_identity(mask, (num_heads_q, num_heads_kv, head_dim, head_dim_v), config)
    return make_key(mask, identity, group, documents=_documents(cu_seqlens_q, cu_seqlens_k))


@outside_graphs
def make_flex_key_for_new_mask_after_dispatch(
    q_ranges: AttnRanges | Any,
    k_ranges: AttnRanges | Any,
    attn_mask_type: Any,
    key_for_dispatch: DistAttnKey,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    dist_attn_config: DistAttnConfig | None = None,
    *,
    head_dim_v: int | None = None,
) -> DistAttnKey:
    """The key of another mask over tokens that lie where `key_for_dispatch` put them: for layers with different masks.

    Work is balanced for the mask of key_for_dispatch, not for this one. Both keys may be used in any order.

    Args:
        q_ranges, k_ranges, attn_mask_type: the new mask, over the same tokens.
        key_for_dispatch: whose dispatch is kept, with its group and sizes.
        num_heads_q, num_heads_kv, head_dim, head_dim_v: None keeps those of key_for_dispatch.
        dist_attn_config: None keeps that of key_for_dispatch; of another one the dispatch_config is not used.

    Raises:
        InputError: see magi_attn_flex_key.
    """
    check_key(key_for_dispatch, "key_for_dispatch")
    with announce_refusal(key_for_dispatch.group, AGREED):
        totals = (key_for_dispatch.total_seqlen_q, key_for_dispatch.total_seqlen_k)
        mask = mask_from_ranges(q_ranges, k_ranges, attn_mask_type, *totals, "attn_mask_type")
        identity = _identity_after(mask, key_for_dispatch, (num_heads_q, num_heads_kv, head_dim, head_dim_v), dist_attn_config)
    documents = (key_for_dispatch.cu_seqlens_q, key_for_dispatch.cu_seqlens_k)
    return make_key(mask, identity, key_for_dispatch.group, key_for_dispatch=key_for_dispatch, documents=documents)


@outside_graphs
def make_varlen_key_for_new_mask_after_dispatch(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    key_for_dispatch: DistAttnKey,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    dist_attn_config: DistAttnConfig | None = None,
    *,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
) -> DistAttnKey:
    """The key of packed documents over tokens that lie where `key_for_dispatch` put them.

    Args:
        cu_seqlens_q, cu_seqlens_k, causal, window_size: the new mask, see magi_attn_varlen_key; the totals must be the same.
        key_for_dispatch, dist_attn_config and heads: see make_flex_key_for_new_mask_after_dispatch.

    Raises:
        InputError: see magi_attn_flex_key.
    """
    check_key(key_for_dispatch, "key_for_dispatch")
    with announce_refusal(key_for_dispatch.group, AGREED):
        mask = builders.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, causal=causal, window_size=window_size)
        identity = _identity_after(mask, key_for_dispatch, (num_heads_q, num_heads_kv, head_dim, head_dim_v), dist_attn_config)
    documents = _documents(cu_seqlens_q, cu_seqlens_k)
    return make_key(mask, identity, key_for_dispatch.group, key_for_dispatch=key_for_dispatch, documents=documents)


def _identity_after(
    mask: AttnMask, key: DistAttnKey, heads: tuple[int | None, int | None, int | None, int | None], config: DistAttnConfig | None
) -> KeyIdentity:
    old = key.identity
    for side, total, expected in (("q", mask.total_q, old.total_seqlen_q), ("k", mask.total_k, old.total_seqlen_k)):
        if total != expected:
            raise InputError(
                f"cu_seqlens_{side} ends with {total} but key_for_dispatch was made for {expected} tokens; "
                "the new mask must be over the same tokens, or make a key with its own dispatch"
            )
    kept = (old.num_heads_q, old.num_heads_kv, old.head_dim, old.head_dim_v)
    new = check_heads(*(value if given is None else given for given, value in zip(heads, kept, strict=True)))  # type: ignore[arg-type]
    new_config = old.config
    if config is not None:
        check_config(config)
        new_config = dataclasses.replace(config, dispatch_config=old.config.dispatch_config)
    return dataclasses.replace(
        old,
        mask_digest=mask.digest,
        num_heads_q=new[0],
        num_heads_kv=new[1],
        head_dim=new[2],
        head_dim_v=new[3],
        config=new_config,
        dispatch_digest=dispatch_digest(key.plan),
    )


def _totals(total_seqlen_q: int, total_seqlen_k: int) -> tuple[int, int]:
    return count("total_seqlen_q", total_seqlen_q, 0, MAX_TOKENS), count("total_seqlen_k", total_seqlen_k, 0, MAX_TOKENS)


def _documents(cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[Any, Any]:
    both = int_array("cu_seqlens_q", cu_seqlens_q).copy(), int_array("cu_seqlens_k", cu_seqlens_k).copy()
    for offsets in both:
        offsets.setflags(write=False)
    return both


# ---- key and dispatch in one call ----


@outside_graphs
def magi_attn_flex_dispatch(
    x: torch.Tensor,
    q_ranges: AttnRanges | Any,
    k_ranges: AttnRanges | Any,
    attn_mask_type: Any,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: CpGroupInput,
    dist_attn_config: DistAttnConfig = _DEFAULT_CONFIG,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, DistAttnKey]:
    """magi_attn_flex_key and dispatch of x [total_seqlen_q, ...] in one call -> (x_local, key)."""
    key = magi_attn_flex_key(
        q_ranges,
        k_ranges,
        attn_mask_type,
        total_seqlen_q,
        total_seqlen_k,
        num_heads_q,
        num_heads_kv,
        head_dim,
        pad_size,
        cp_group_or_mesh,
        dist_attn_config,
        is_same_source,
        is_q_permutable,
        is_k_permutable,
        chunk_size,
    )
    return dispatch(x, key), key


@outside_graphs
def magi_attn_varlen_dispatch(
    x: torch.Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: CpGroupInput,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    dist_attn_config: DistAttnConfig = _DEFAULT_CONFIG,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, DistAttnKey]:
    """magi_attn_varlen_key and dispatch of x [total tokens, ...] in one call -> (x_local, key)."""
    key = magi_attn_varlen_key(
        cu_seqlens_q,
        cu_seqlens_k,
        num_heads_q,
        num_heads_kv,
        head_dim,
        pad_size,
        cp_group_or_mesh,
        causal,
        window_size,
        dist_attn_config,
        chunk_size,
    )
    return dispatch(x, key), key


# ---- caches ----


@outside_graphs
def get_most_recent_key(cp_group: CpGroupInput) -> DistAttnKey:
    """The key made or found last on this group, for code that cannot be handed one. Prefer to pass keys.

    Raises:
        InputError: the group has none.
    """
    return most_recent_key(comm_group(cp_group))


@outside_graphs
def clear_cache(cp_group: CpGroupInput = None) -> None:
    """Forget the plans of one group, or with None everything this package remembers. Keys that callers hold stay usable."""
    if cp_group is not None:
        cache_of(comm_group(cp_group)).clear()
        return
    clear_all()
    clear_masks()
    clear_plans()
    clear_prepared()
