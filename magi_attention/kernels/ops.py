"""Attention of one device as registered torch operations, so that autograd and torch.compile see one node. Knows nothing of ranks.

Registered through torch.library.Library: a call costs half of one by custom_op, which a compiled graph pays in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from magi_attention.arguments import flag
from magi_attention.kernels.attention import (
    AttentionOptions,
    Rows,
    attention_backward_fresh,
    attention_forward_fresh,
    compute_dtype,
    prepare,
)
from magi_attention.kernels.device_mask import DeviceMask, check_reports, device_mask
from magi_attention.kernels.select import check_scale, choose, describe
from magi_attention.kernels.sink import check_sink, sink_backward

_LIBRARY = torch.library.Library("magi_attention", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPTIONS = "Tensor slices, Tensor? sink, str sink_layout, float softmax_scale, float softcap"
_LAST = "str backend, bool deterministic=False, int sm_margin=0"
_define: Callable[[str], None] = _LIBRARY.define
_define(f"flex_attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool wants_max_logits, {_LAST}) -> (Tensor, Tensor, Tensor)")
_define(
    "flex_attention_backward(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, {_LAST}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _forward(
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
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits) of attention over int32 slices [N, 6]; max_logits is empty unless wanted. See single_device_attention."""
    check_sink(sink, sink_layout, q.shape[0], q.shape[1])
    out, lse, max_logits = attention_forward_fresh(
        q,
        k,
        v,
        _records(slices, q, k),
        AttentionOptions(softmax_scale, softcap, backend, deterministic, sm_margin),
        sink=sink,
        out_dtype=q.dtype,
        wants_max_logits=wants_max_logits,
    )
    return out, lse, lse.new_empty(0) if max_logits is None else max_logits


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Tensor,
    sink: Tensor | None,
    sink_layout: str,
    softmax_scale: float,
    softcap: float,
    wants_max_logits: bool,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor, Tensor]:
    total_q, num_heads_q = q.shape[:2]
    dtype = compute_dtype(q.dtype)
    lse = q.new_empty((total_q, num_heads_q), dtype=dtype)
    return q.new_empty((total_q, num_heads_q, v.shape[2])), lse, q.new_empty((num_heads_q if wants_max_logits else 0,), dtype=dtype)


def _backward(
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
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsink) in the dtypes of the inputs; dsink is empty without a sink."""
    delta = torch.empty_like(lse, memory_format=torch.contiguous_format)
    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    options = AttentionOptions(softmax_scale, softcap, backend, deterministic, sm_margin)
    rows = Rows(q, dout, lse, delta, out, dlse)
    dk, dv = attention_backward_fresh(rows, k, v, _records(slices, q, k), options, dq=dq, dkv_dtype=k.dtype)
    dsink = q.new_empty(0) if sink is None else sink_backward(sink, sink_layout, lse, delta)
    return dq.to(q.dtype), dk, dv, dsink


def _fake_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, slices: Tensor, sink: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink, memory_format=torch.contiguous_format)
    return dq, dk, dv, dsink


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, slices, sink, sink_layout, softmax_scale, softcap, _, *last = inputs
    out, lse, max_logits = output
    ctx.mark_non_differentiable(max_logits)
    ctx.save_for_backward(q, k, v, out, lse, slices, sink)
    ctx.options = (sink_layout, softmax_scale, softcap, *last)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, slices, sink = ctx.saved_tensors
    dq, dk, dv, dsink = _backward_op(dout, dlse, q, k, v, out, lse, slices, sink, *ctx.options)
    return dq, dk, dv, None, None if sink is None else dsink, None, None, None, None, None, None, None


for _name, _run, _fake in (("flex_attention", _forward, _fake_forward), ("flex_attention_backward", _backward, _fake_backward)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"magi_attention::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("magi_attention::flex_attention", _differentiate, setup_context=_save, lib=_LIBRARY)

# (q, k, v, slices, sink, sink_layout, softmax_scale, softcap, wants_max_logits, backend, deterministic=False, sm_margin=0)
flex_attention_op = torch.ops.magi_attention.flex_attention.default
_backward_op = torch.ops.magi_attention.flex_attention_backward.default


def _records(slices: Tensor, q: Tensor, k: Tensor) -> npt.NDArray[np.integer] | DeviceMask:
    """Slices on the host as they are; on a GPU they stay there when the planner there reads them, and come to the one of q."""
    if slices.device.type != "cpu" and slices.device != q.device:
        slices = slices.to(q.device)
    found = None if slices.device.type == "cpu" else device_mask((slices,), q.shape[0], k.shape[0])
    if found is None:
        return slices.cpu().numpy()
    check_reports()
    return found


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
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention on one device over a mask of slices, differentiable in q, k, v, sink through both out and lse.

    Args:
        q: [total_q, num_heads_q, head_dim]; k: [total_k, num_heads_kv, head_dim]; v: [total_k, num_heads_kv, head_dim_v]; bf16,
            fp16, fp32 or fp64, any strides. Under autocast, fp32/bf16/fp16 inputs are cast to the autocast dtype first.
        slices: int32 [N, 6], tensor or array (q_start, q_end, k_start, k_end, lo, hi), no cell covered twice.
        sink: logits without value in the softmax denominator, "sh" [num_sink, num_heads_q] or "ssh" [total_q, num_sink, num_heads_q].
        softmax_scale: default head_dim ** -0.5; softcap: cap * tanh(score / cap) after the scale, 0 is off.
        backend: "auto", "blocked" or "ffa", see kernels/select.py. deterministic, sm_margin: see AttentionOptions.

    Returns:
        out [total_q, num_heads_q, head_dim_v] in the dtype of q; lse [total_q, num_heads_q] natural log, fp32 (fp64 for fp64);
        max_logits [num_heads_q] of the dtype of lse, detached, or None when not asked for.

    Raises:
        InputError: tensors or slices that do not fit together. UnsupportedError: no kernel takes the problem.
    """
    q, k, v = cast_for_autocast(q, k, v)
    desc = describe(q, k, v, sink=sink, sink_layout=sink_layout, softcap=softcap)
    records = slices if isinstance(slices, Tensor) else torch.from_numpy(np.array(slices, dtype=np.int32).reshape(-1, 6))
    if not torch.compiler.is_compiling():  # in a graph the operation does both when it runs
        choose(desc, backend)
        if records.device.type == "cpu":
            prepare(records.numpy(), q.shape[0], k.shape[0])  # refuses ranges outside the tensors before anything runs
    scale, wants_max_logits = check_scale(softmax_scale, q.shape[-1]), flag("return_max_logits", return_max_logits)
    last = (wants_max_logits, backend, deterministic, sm_margin)
    out, lse, max_logits = flex_attention_op(q, k, v, records, sink, sink_layout, scale, float(softcap), *last)
    return out, lse, max_logits if wants_max_logits else None


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the dtype of an active autocast, as torch's own attention does (fp64 stays); unchanged outside of one."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type) or any(x.dtype == torch.float64 for x in (q, k, v)):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return q.to(dtype), k.to(dtype), v.to(dtype)
