"""Doors of the kernels for the rest of the package: forward and backward of one step, and the merge of partials.

A step either merges into running results (`attention_forward`, `attention_backward`) or, when it is the first, makes them
(`attention_forward_fresh`, `attention_backward_fresh`), which saves filling and reading them. Plain tensors in and out; knows
nothing of autograd, ranks, plans or exchanges.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from magi_attention.kernels import blocked_backward, blocked_forward, ffa_backward, ffa_forward
from magi_attention.kernels.blocked import compute_dtype
from magi_attention.kernels.delta import softmax_delta
from magi_attention.kernels.device_mask import DeviceMask
from magi_attention.kernels.ffa_backward import Rows
from magi_attention.kernels.ffa_work import Mask
from magi_attention.kernels.options import AttentionOptions
from magi_attention.kernels.select import choose, describe
from magi_attention.kernels.sink import joined_sink, sink_lse
from magi_attention.kernels.work import WorkList, clear_prepared, prepare

__all__ = [
    "AttentionOptions",
    "Rows",
    "WorkList",
    "attention_backward",
    "attention_backward_fresh",
    "attention_forward",
    "attention_forward_fresh",
    "clear_prepared",
    "compute_dtype",
    "merge",
    "prepare",
    "softmax_delta",
]


@torch.no_grad()
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: npt.ArrayLike | Mask,
    *,
    softmax_scale: float,
    softcap: float,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    sm_margin: int = 0,
) -> None:
    """Merge the attention of these keys into the running out and lse, in place.

    Args:
        q: [Tq, Hq, D]; k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv]; one dtype and device, any strides.
        slices: int32 [N, 6] in rows of q and k, or their work list from `prepare`.
        softmax_scale: factor on q.k; softcap: cap * tanh(score / cap) after it, 0 is off.
        out: [Tq, Hq, Dv] fp32 (fp64 for fp64 inputs), normalised; start with 0.
        lse: [Tq, Hq], natural log, dtype of out; start with -inf, or with `sink_lse`.
        max_logits: [Hq], dtype of out, running maximum of the capped scores; start with -inf.
        backend, deterministic, sm_margin: see AttentionOptions.

    Rows that see no key here keep what they hold. Keys that no slice sees are not read.

    Raises:
        InputError: slices outside the tensors. UnsupportedError: no kernel takes the problem (see kernels/select.py).
    """
    name = choose(describe(q, k, v, softcap=softcap), backend)
    work = _mask_of(slices, q, k, name)
    if name == "ffa":
        options = AttentionOptions(softmax_scale, softcap, backend, deterministic, sm_margin)
        return ffa_forward.forward_into(q, k, v, work, options, (out, lse, max_logits))
    with torch.autocast(q.device.type, enabled=False):  # accumulation stays in the dtype of out
        return blocked_forward.forward(q, k, v, work, (softmax_scale, softcap), (out, lse), max_logits)


@torch.no_grad()
def attention_forward_fresh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: npt.ArrayLike | Mask,
    options: AttentionOptions,
    *,
    sink: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wants_max_logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The attention of these keys and the sinks alone.

    Args:
        q, k, v, slices: as in `attention_forward`.
        sink: "sh" [num_sink, Hq] or "ssh" [Tq, num_sink, Hq]; None is no sink.
        out_dtype: of the first result; None is fp32 (fp64 for fp64 inputs), to be merged with other keys.

    Returns:
        out [Tq, Hq, Dv]; lse [Tq, Hq], fp32 (fp64); max_logits [Hq] of the dtype of lse, or None when not wanted.

    Raises:
        As `attention_forward`.
    """
    sink_layout = "sh" if sink is None or sink.ndim == 2 else "ssh"
    name = choose(describe(q, k, v, sink=sink, sink_layout=sink_layout, softcap=options.softcap), options.backend)
    work = _mask_of(slices, q, k, name)
    wide = compute_dtype(q.dtype)
    if name == "ffa":
        outputs = ffa_forward.forward_fresh(
            q, k, v, work, options, sink_lse=joined_sink(sink, wide), out_dtype=out_dtype or wide, wants_max_logits=wants_max_logits
        )
        return outputs
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=wide, device=q.device)
    lse = sink_lse(sink, sink_layout, q.shape[0], q.shape[1], wide, q.device)
    max_logits = torch.full((q.shape[1],), -torch.inf, dtype=wide, device=q.device) if wants_max_logits else None
    with torch.autocast(q.device.type, enabled=False):
        blocked_forward.forward(q, k, v, work, (options.softmax_scale, options.softcap), (out, lse), max_logits)
    return out.to(out_dtype or wide), lse, max_logits


@torch.no_grad()
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    slices: npt.ArrayLike | Mask,
    *,
    softmax_scale: float,
    softcap: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    backend: str = "auto",
    deterministic: bool = False,
    sm_margin: int = 0,
) -> None:
    """Add the gradients that flow through these keys to dq, dk, dv, in place.

    Args:
        dout: like out, dtype of q, any strides (also broadcast).
        q, k, v, slices, softmax_scale, softcap: as in the forward.
        lse: [Tq, Hq], the final one over all keys of all steps and the sinks.
        delta: [Tq, Hq], from `softmax_delta`.
        dq: [Tq, Hq, D]; dk: [Tk, Hkv, D]; dv: [Tk, Hkv, Dv]; fp32 (fp64 for fp64 inputs).
        backend, deterministic, sm_margin: see AttentionOptions.

    Rows that see nothing, and keys that nobody sees, get nothing added.
    """
    name = choose(describe(q, k, v, softcap=softcap), backend, "backward")
    work = _mask_of(slices, q, k, name)
    if name == "ffa":
        options = AttentionOptions(softmax_scale, softcap, backend, deterministic, sm_margin)
        rows = Rows(q, dout.to(q.dtype), lse, delta.contiguous())
        return ffa_backward.backward_into(rows, k, v, work, options, (dq, dk, dv))
    with torch.autocast(q.device.type, enabled=False):
        return blocked_backward.backward((q, dout, lse, delta), k, v, work, (softmax_scale, softcap), (dq, dk, dv))


@torch.no_grad()
def attention_backward_fresh(
    rows: Rows,
    k: Tensor,
    v: Tensor,
    slices: npt.ArrayLike | Mask,
    options: AttentionOptions,
    *,
    dq: Tensor,
    dkv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """dk and dv of these keys alone, and dq added to, in place; shapes as in `attention_backward`.

    Args:
        rows: what belongs to the queries. With `rows.out`, `softmax_delta(dout, out, dlse)` is written to `rows.delta` on the way.
        dkv_dtype: of dk and dv; None is fp32 (fp64 for fp64 inputs), to be summed with others.
    """
    q, dout, lse, delta = rows.q, rows.dout, rows.lse, rows.delta
    name = choose(describe(q, k, v, softcap=options.softcap), options.backend, "backward")
    work = _mask_of(slices, q, k, name)
    wide = compute_dtype(q.dtype)
    if name == "ffa":
        rows = dataclasses.replace(rows, dout=dout.to(q.dtype))
        return ffa_backward.backward_fresh(rows, k, v, work, options, dq=dq, dkv_dtype=dkv_dtype or wide)
    if rows.out is not None:
        delta.copy_(softmax_delta(dout, rows.out, rows.dlse))
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        blocked_backward.backward((q, dout, lse, delta), k, v, work, (options.softmax_scale, options.softcap), (dq, dk, dv))
    return dk.to(dkv_dtype or wide), dv.to(dkv_dtype or wide)


def _mask_of(slices: npt.ArrayLike | Mask, q: Tensor, k: Tensor, backend: str) -> Any:
    """What the backend walks. A mask on a GPU is read by the host for backends that do not know it."""
    if isinstance(slices, DeviceMask) and backend == "ffa":
        return slices
    if isinstance(slices, DeviceMask):
        slices = slices.tensors[0].cpu().numpy()
    return prepare(slices, q.shape[0], k.shape[0])


@torch.no_grad()
def merge(out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor) -> None:
    """Join a partial (attention over other keys of the same rows) into (out, lse), in place.

    Args:
        out, partial_out: [T, H, Dv], normalised; lse, partial_lse: [T, H], natural log. Where both lse are -inf: (0, -inf).
    """
    total = torch.logaddexp(lse, partial_lse)
    # Where there is no weight at all, any finite number in place of -inf keeps exp(-inf - total) = 0.
    finite = total.masked_fill(total == float("-inf"), 0)
    out.mul_(torch.exp(lse - finite)[..., None]).add_(partial_out * torch.exp(partial_lse - finite)[..., None])
    lse.copy_(total)
