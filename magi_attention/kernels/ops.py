"""Attention of one device as registered torch operations, so that autograd and torch.compile see one node. Knows nothing of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from magi_attention.arguments import flag
from magi_attention.kernels.attention import attention_backward, attention_forward, compute_dtype, prepare, softmax_delta
from magi_attention.kernels.select import check_scale, choose, describe
from magi_attention.kernels.sink import sink_backward, sink_lse

_OPTIONS = "Tensor slices, Tensor? sink, str sink_layout, float softmax_scale, float softcap"
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool wants_max_logits, str backend) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS}, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("magi_attention::flex_attention", mutates_args=(), schema=_FORWARD)
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Tensor,
    sink: Tensor | None,
    sink_layout: str,
    softmax_scale: float,
    softcap: float,
    wants_max_logits: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits) of attention over int32 slices [N, 6]; max_logits is empty unless wanted. See single_device_attention."""
    dtype = compute_dtype(q.dtype)
    out, lse, max_logits = _outputs(q, v, dtype, wants_max_logits)
    out.zero_()
    lse.copy_(sink_lse(sink, sink_layout, q.shape[0], q.shape[1], dtype, q.device))
    top = max_logits.fill_(float("-inf")) if wants_max_logits else None
    attention_forward(
        q, k, v, _records(slices), softmax_scale=softmax_scale, softcap=softcap, out=out, lse=lse, max_logits=top, backend=backend
    )
    return out.to(q.dtype), lse, max_logits


@_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Tensor,
    sink: Tensor | None,
    sink_layout: str,
    softmax_scale: float,
    softcap: float,
    wants_max_logits: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, max_logits = _outputs(q, v, compute_dtype(q.dtype), wants_max_logits)
    return out.to(q.dtype), lse, max_logits


def _outputs(q: Tensor, v: Tensor, dtype: torch.dtype, wants_max_logits: bool) -> tuple[Tensor, Tensor, Tensor]:
    total_q, num_heads_q = q.shape[:2]
    out = q.new_empty((total_q, num_heads_q, v.shape[2]), dtype=dtype)
    return out, q.new_empty((total_q, num_heads_q), dtype=dtype), q.new_empty((num_heads_q if wants_max_logits else 0,), dtype=dtype)


@torch.library.custom_op("magi_attention::flex_attention_backward", mutates_args=(), schema=_BACKWARD)
def _backward_op(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slices: Tensor,
    sink: Tensor | None,
    sink_layout: str,
    softmax_scale: float,
    softcap: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsink) in the dtypes of the inputs; dsink is empty without a sink."""
    delta = softmax_delta(dout, out, dlse)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    attention_backward(
        dout,
        q,
        k,
        v,
        lse,
        delta,
        _records(slices),
        softmax_scale=softmax_scale,
        softcap=softcap,
        dq=dq,
        dk=dk,
        dv=dv,
        backend=backend,
    )
    dsink = q.new_empty(0) if sink is None else sink_backward(sink, sink_layout, lse, delta)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink


@_backward_op.register_fake
def _(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slices: Tensor,
    sink: Tensor | None,
    sink_layout: str,
    softmax_scale: float,
    softcap: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink, memory_format=torch.contiguous_format)
    return dq, dk, dv, dsink


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, slices, sink, sink_layout, softmax_scale, softcap, _, backend = inputs
    out, lse, max_logits = output
    ctx.mark_non_differentiable(max_logits)
    ctx.save_for_backward(q, k, v, out, lse, slices, sink)
    ctx.options = (sink_layout, softmax_scale, softcap, backend)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, slices, sink = ctx.saved_tensors
    dq, dk, dv, dsink = _backward_op(dout, dlse, q, k, v, out, lse, slices, sink, *ctx.options)
    return dq, dk, dv, None, None if sink is None else dsink, None, None, None, None, None


_forward_op.register_autograd(_differentiate, setup_context=_save)
flex_attention_op = _forward_op  # (q, k, v, slices, sink, sink_layout, softmax_scale, softcap, wants_max_logits, backend)


def _records(slices: Tensor) -> npt.NDArray[np.integer]:
    return slices.cpu().numpy()


def single_device_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Tensor | npt.ArrayLike,
    *,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention on one device over a mask of slices, differentiable in q, k, v, sink through both out and lse.

    Args:
        q: [total_q, num_heads_q, head_dim]; k: [total_k, num_heads_kv, head_dim]; v: [total_k, num_heads_kv, head_dim_v]; bf16,
            fp16, fp32 or fp64, any strides. Under autocast, fp32/bf16/fp16 inputs are cast to the autocast dtype first.
        slices: int32 [N, 6], tensor or array (q_start, q_end, k_start, k_end, lo, hi), no cell covered twice.
        sink: logits without value in the softmax denominator, "sh" [num_sink, num_heads_q] or "ssh" [total_q, num_sink, num_heads_q].
        softmax_scale: default head_dim ** -0.5; softcap: cap * tanh(score / cap) after the scale, 0 is off.
        backend: "auto", "blocked" or "ffa", see kernels/select.py.

    Returns:
        out [total_q, num_heads_q, head_dim_v] in the dtype of q; lse [total_q, num_heads_q] natural log, fp32 (fp64 for fp64);
        max_logits [num_heads_q] of the dtype of lse, detached, or None when not asked for.

    Raises:
        InputError: tensors or slices that do not fit together. UnsupportedError: no kernel takes the problem.
    """
    q, k, v = cast_for_autocast(q, k, v)
    choose(describe(q, k, v, sink=sink, sink_layout=sink_layout, softcap=softcap), backend)
    records = slices if isinstance(slices, Tensor) else torch.from_numpy(np.array(slices, dtype=np.int32).reshape(-1, 6))
    if not torch.compiler.is_compiling():
        prepare(_records(records), q.shape[0], k.shape[0])  # refuses ranges outside the tensors before anything runs
    scale, wants_max_logits = check_scale(softmax_scale, q.shape[-1]), flag("return_max_logits", return_max_logits)
    out, lse, max_logits = flex_attention_op(q, k, v, records, sink, sink_layout, scale, float(softcap), wants_max_logits, backend)
    return out, lse, max_logits if wants_max_logits else None


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the dtype of an active autocast, as torch's own attention does (fp64 stays); unchanged outside of one."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type) or any(x.dtype == torch.float64 for x in (q, k, v)):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return q.to(dtype), k.to(dtype), v.to(dtype)
