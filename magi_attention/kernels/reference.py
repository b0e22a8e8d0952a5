"""The dense float64 twin of every attention path: slow, plain, differentiable by autograd. Knows nothing of slices or blocks."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense_mask: Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over a boolean mask, computed in float64.

    Args:
        q: [Tq, Hq, D]; k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv]; any floating dtype.
        dense_mask: bool [Tq, Tk], True where the query sees the key.
        softmax_scale: default D ** -0.5; softcap: cap * tanh(score / cap) after the scale, 0 is off.
        sink: "sh" [num_sink, Hq] or "ssh" [Tq, num_sink, Hq].

    Returns:
        out float64 [Tq, Hq, Dv], 0 on rows without a key; lse float64 [Tq, Hq], natural log, -inf on rows without key and sink;
        max_logits float64 [Hq], -inf for a head without a visible pair, not differentiable. Rows of k, v that nobody sees and
        rows of q that see nothing may hold NaN.
    """
    return dense_attention(
        q.double(),
        k.double(),
        v.double(),
        dense_mask,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=None if sink is None else sink.double(),
        sink_layout=sink_layout,
    )


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense_mask: Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in the dtype of the inputs, every operation rounded to it: the error budget of tests is measured with it."""
    group_size = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q = q.masked_fill(~dense_mask.any(1)[:, None, None], 0).transpose(0, 1)  # [Hq, Tq, D]
    seen = dense_mask.any(0)[:, None, None]
    k = k.masked_fill(~seen, 0).repeat_interleave(group_size, 1).transpose(0, 1)
    v = v.masked_fill(~seen, 0).repeat_interleave(group_size, 1).transpose(0, 1)
    scores = q @ k.transpose(1, 2) * scale  # [Hq, Tq, Tk]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~dense_mask, float("-inf"))
    max_logits = scores.detach().flatten(1).amax(1) if scores[0].numel() else scores.new_full((q.shape[0],), float("-inf"))
    if sink is not None:
        rows = sink.expand(q.shape[1], *sink.shape) if sink_layout == "sh" else sink
        scores = torch.cat([scores, rows.permute(2, 0, 1).to(scores.dtype)], dim=2)
    if scores.shape[2] == 0:  # no key at all: a reduction over nothing has no maximum
        scores = torch.nn.functional.pad(scores, (0, 1), value=float("-inf"))
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    is_empty = total == 0
    out = weights[..., : k.shape[1]] / total.masked_fill(is_empty, 1) @ v
    lse = (torch.log(total.masked_fill(is_empty, 1)) + top).masked_fill(is_empty, float("-inf"))
    return out.transpose(0, 1), lse[..., 0].transpose(0, 1), max_logits
