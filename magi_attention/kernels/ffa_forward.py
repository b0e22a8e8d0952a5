"""The compiled forward: fresh outputs, or merged into running ones. Tensors and a mask in, a launch on the current stream out.

Knows nothing of autograd, of sinks but their logsumexp, or of ranks. Problems are those that kernels/select.py lets through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magi_attention.kernels import ffa_device
from magi_attention.kernels.ffa_launch import DTYPE_CODE, compiled_head_dim, query, scratch, shape_record
from magi_attention.kernels.ffa_library import ForwardArgs, run_forward
from magi_attention.kernels.ffa_tensors import dense, narrowed, readable, token_tensor
from magi_attention.kernels.ffa_work import device_work
from magi_attention.kernels.options import AttentionOptions
from magi_attention.kernels.work import WorkList

_MINUS_INF = float("-inf")


def forward_fresh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: WorkList,
    options: AttentionOptions,
    *,
    sink_lse: Tensor | None,
    out_dtype: torch.dtype,
    wants_max_logits: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention of these keys alone, every element of the results written once.

    Args:
        sink_lse: logsumexp of the sinks, fp32 [Hq] or [Tq, Hq]; None without sinks.
        out_dtype: dtype of q, or fp32.

    Returns:
        out [Tq, Hq, Dv]; lse fp32 [Tq, Hq]; max_logits fp32 [Hq] or None.
    """
    device = q.device
    width = compiled_head_dim(q, v)
    total_q, num_heads = q.shape[0], q.shape[1]
    out = torch.empty((total_q, num_heads, width), dtype=out_dtype, device=device)
    lse = torch.empty((total_q, num_heads), dtype=torch.float32, device=device)
    max_logits = torch.full((num_heads,), _MINUS_INF, dtype=torch.float32, device=device) if wants_max_logits else None
    if total_q and k.shape[0]:
        _launch(q, k, v, mask, options, (out, lse, max_logits), sink_lse, accumulates=False)
    else:  # no key at all: what is left are the sinks
        out.zero_()
        lse.copy_(sink_lse.expand_as(lse)) if sink_lse is not None else lse.fill_(_MINUS_INF)
    return narrowed(out, v.shape[2]), lse, max_logits


def forward_into(
    q: Tensor, k: Tensor, v: Tensor, mask: WorkList, options: AttentionOptions, running: tuple[Tensor, Tensor, Tensor | None]
) -> None:
    """Merge the attention of these keys into running = (out fp32 [Tq, Hq, Dv], lse fp32 [Tq, Hq], max_logits or None), in place."""
    if not (q.shape[0] and k.shape[0]):
        return
    out, lse, max_logits = running
    own_out, own_lse = dense(out, compiled_head_dim(q, v)), lse.contiguous()
    _launch(q, k, v, mask, options, (own_out, own_lse, max_logits), None, accumulates=True)
    if own_out is not out:
        out.copy_(own_out[..., : out.shape[2]])
    if own_lse is not lse:
        lse.copy_(own_lse)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: WorkList,
    options: AttentionOptions,
    outputs: tuple[Tensor, Tensor, Tensor | None],
    sink_lse: Tensor | None,
    *,
    accumulates: bool,
) -> None:
    out, lse, max_logits = outputs
    device, width = q.device, out.shape[2]
    work = device_work(mask, "forward", width, device)
    shape = shape_record(q.shape, k.shape, width, q.dtype, device, options)
    q, k, v, counter = query(q, width, options), readable(k, width), readable(v, width), scratch(device)
    args = ForwardArgs(
        shape,
        work.record,
        token_tensor(q),
        token_tensor(k),
        token_tensor(v),
        out.data_ptr(),
        DTYPE_CODE[out.dtype],
        lse.data_ptr(),
        None if sink_lse is None else sink_lse.data_ptr(),
        sink_lse.shape[1] if sink_lse is not None and sink_lse.ndim == 2 else 0,
        None if max_logits is None else max_logits.data_ptr(),
        accumulates,
        counter.data_ptr(),
    )
    with ffa_device.on_device(device):
        stream = ffa_device.raw_stream(device)
        work.array.used_on(stream)
        ffa_device.range_push(device, "magi_attention forward")
        run_forward(args, stream)
        ffa_device.range_pop(device)
