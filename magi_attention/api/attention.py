"""calc_attn: distributed attention of local tensors with a key. Plans nothing."""

from __future__ import annotations

import torch

from magi_attention.api.keys import DistAttnKey, check_living_key
from magi_attention.comm import announce_refusal
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.errors import InputError
from magi_attention.runtime.attention import dist_attention
from magi_attention.runtime.graphs import outside_graphs
from magi_attention.runtime.rows import require_tensor


@outside_graphs
def calc_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key: DistAttnKey,
    sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
    *,
    sink_layout: str = "sh",
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention of this rank's queries to every key the mask lets them see, wherever it lives. Collective, also in its backward.

    Safe for interleaved micro-batches, several keys at once, and both kinds of activation checkpointing: a backward uses the key of
    its own forward. Under autocast, q, k and v are cast to the autocast dtype (float64 stays).

    Args:
        q: [key.num_local_q, num_heads_q, head_dim], bf16, fp16, fp32 or fp64.
        k: [key.num_local_k, num_heads_kv, head_dim], dtype of q.
        v: [key.num_local_k, num_heads_kv, head_dim_v], dtype of q. k or v requires grad on every rank, or on none; then q does on every
            rank or on none: the backward of either is collective.
        key: from magi_attn_flex_key and its like.
        sink: fp32 logits that join the softmax denominator, equal on every rank, [num_sink, num_heads_q] ("sh"); its gradient is this
            rank's share unless the key's config has sink_grad_reduce. Or one set per local query, [num_local_q, num_sink,
            num_heads_q] ("ssh").
        softmax_scale: factor on q @ k.T; None is head_dim ** -0.5.
        softcap: cap * tanh(score / cap) on scaled scores; 0 is off.
        return_max_logits: fill `max_logits` of the second result with the maximum over all ranks.
        sink_layout: "sh" or "ssh".

    Returns:
        out [num_local_q, num_heads_q, head_dim_v] in q's dtype, and AttnForwardMeta with lse [num_local_q, num_heads_q], fp32 (fp64 for
        fp64 inputs), natural log, differentiable, and max_logits [num_heads_q], equal on every rank, or None.

    Raises:
        InputError: before any message, when the tensors do not fit the key; in check mode also when ranks disagree.
        CommError: an exchange failed or timed out.
    """
    check_living_key(key)
    with announce_refusal(key.group, "attention call"):
        _check_heads(q, k, v, key)
    out, lse, max_logits = dist_attention(
        q,
        k,
        v,
        key.plan,
        key.group,
        key.config,
        sink=sink,
        sink_layout=sink_layout,
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_max_logits=return_max_logits,
    )
    return out, AttnForwardMeta(lse, max_logits)


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: DistAttnKey) -> None:
    """Heads against the key; the runtime checks rows, dtypes and devices."""
    facts = key.identity
    wanted = (
        ("q", q, facts.num_heads_q, "num_heads_q", facts.head_dim, "head_dim"),
        ("k", k, facts.num_heads_kv, "num_heads_kv", facts.head_dim, "head_dim"),
        ("v", v, facts.num_heads_kv, "num_heads_kv", facts.head_dim_v, "head_dim_v"),
    )
    for name, tensor, num_heads, heads_name, head_dim, dim_name in wanted:
        require_tensor(name, tensor, "[local tokens, heads, head_dim]")
        if tensor.dim() != 3:
            raise InputError(
                f"{name} has shape {tuple(tensor.shape)}; it must be [local tokens, heads, head_dim] without a batch dimension; "
                "pack the batch with squash_batch_dim before dispatch"
            )
        if tensor.shape[1] != num_heads:
            raise InputError(
                f"{name} has {tensor.shape[1]} heads but the key was made for {heads_name}={num_heads}; make a key for these heads "
                "(make_flex_key_for_new_mask_after_dispatch keeps the dispatch)"
            )
        if head_dim is not None and tensor.shape[2] != head_dim:
            raise InputError(
                f"{name} has width {tensor.shape[2]} but the key was made for {dim_name}={head_dim}; make a key for this width"
            )
