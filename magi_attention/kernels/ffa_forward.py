"""The compiled forward: fresh outputs, or merged into running ones. Tensors and a mask in, a launch on the current stream out.

Knows nothing of autograd, of sinks but their logsumexp, or of ranks. Problems are those that kernels/select.py lets through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magi_attention.kernels import ffa_device
from magi_attention.kernels.device_mask import poison_at
from magi_attention.kernels.ffa_launch import DTYPE_CODE, compiled_head_dim, counter, query, shape_record
from magi_attention.kernels.ffa_library import FORWARD_TAIL, forward_head, run_forward
from magi_attention.kernels.ffa_tensors import ALIGN_BYTES, aligned, dense, is_readable, narrowed, readable, used_strides
from magi_attention.kernels.ffa_work import Mask, device_work
from magi_attention.kernels.options import AttentionOptions

_MINUS_INF = float("-inf")

Outputs = tuple[Tensor, Tensor, Tensor | None]  # out, lse, max_logits


class ForwardForm:
    """All of a forward that shapes, strides, dtypes and options decide, worked out once for tensors alike, whatever the mask."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, out_dtype: torch.dtype) -> None:
        self.device, self.options = q.device, options
        self.width, self.head_dim_v = compiled_head_dim(q, v), v.shape[2]
        self.lse_shape = (q.shape[0], q.shape[1])
        self.out_shape, self.out_dtype, self.out_code = (*self.lse_shape, self.width), out_dtype, DTYPE_CODE[out_dtype]
        self.is_empty = not (q.shape[0] and k.shape[0])
        self.is_plain = options.softmax_scale >= 0 and all(is_readable(x, self.width) for x in (q, k, v))
        self.strides = tuple(used_strides(x) for x in (q, k, v))
        self.is_out_like_q = q.is_contiguous() and q.shape[2] == self.width and q.dtype == out_dtype
        self.head = forward_head(shape_record(q.shape, k.shape, self.width, q.dtype, self.device, options))


class ForwardCall:
    """A form with a mask. Short sequences wait for the host, so what is left to a call is to allocate, to pack pointers and to launch."""

    __slots__ = ("_form", "_head", "_work")

    def __init__(self, form: ForwardForm, mask: Mask) -> None:
        self._form = form
        if not form.is_empty:
            self._work = device_work(mask, "forward" if form.options.softcap else "forward_any", form.width, form.device)
            self._head = form.head + self._work.packed

    def fresh(self, q: Tensor, k: Tensor, v: Tensor, sink_lse: Tensor | None, wants_max_logits: bool) -> Outputs:
        """Attention of these keys and the sinks alone; see `forward_fresh`."""
        form = self._form
        device = form.device
        # The shorter call takes 0.7 us less.
        out = torch.empty_like(q) if form.is_out_like_q else torch.empty(form.out_shape, dtype=form.out_dtype, device=device)
        lse = torch.empty(form.lse_shape, dtype=torch.float32, device=device)
        max_logits = torch.full((form.lse_shape[1],), _MINUS_INF, dtype=torch.float32, device=device) if wants_max_logits else None
        if form.is_empty:  # no key at all: what is left are the sinks
            out.zero_()
            lse.copy_(sink_lse.expand_as(lse)) if sink_lse is not None else lse.fill_(_MINUS_INF)
        else:
            self._launch(q, k, v, (out, lse, max_logits), sink_lse, 0)
        return (out if form.head_dim_v == form.width else narrowed(out, form.head_dim_v)), lse, max_logits

    def into(self, q: Tensor, k: Tensor, v: Tensor, running: Outputs) -> None:
        """Merge into running results; see `forward_into`."""
        form = self._form
        if form.is_empty:
            return
        out, lse, max_logits = running
        own_out, own_lse, own_top = dense(out, form.width), aligned(lse), None if max_logits is None else aligned(max_logits)
        self._launch(q, k, v, (own_out, own_lse, own_top), None, 1)
        if own_out is not out:
            out.copy_(own_out[..., : out.shape[2]])
        if own_lse is not lse:
            lse.copy_(own_lse)
        if max_logits is not None and own_top is not None and own_top is not max_logits:
            max_logits.copy_(own_top)

    def _launch(self, q: Tensor, k: Tensor, v: Tensor, outputs: Outputs, sink_lse: Tensor | None, accumulates: int) -> None:
        out, lse, max_logits = outputs
        form, work = self._form, self._work
        (q_token, q_head), (k_token, k_head), (v_token, v_head) = form.strides
        q_start, k_start, v_start = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not form.is_plain or (q_start | k_start | v_start) % ALIGN_BYTES:
            q, k, v = query(q, form.width, form.options), readable(k, form.width), readable(v, form.width)
            q_start, k_start, v_start = q.data_ptr(), k.data_ptr(), v.data_ptr()
            (q_token, q_head), (k_token, k_head), (v_token, v_head) = used_strides(q), used_strides(k), used_strides(v)
        out_start, lse_start, top_start = out.data_ptr(), lse.data_ptr(), 0 if max_logits is None else max_logits.data_ptr()
        with ffa_device.launching(form.device, "magi_attention forward", work.array) as stream:
            counted = counter(form.device, stream)
            tail = FORWARD_TAIL.pack(
                *(q_start, q_token, q_head, k_start, k_token, k_head, v_start, v_token, v_head),
                *(out_start, form.out_code, lse_start),
                0 if sink_lse is None else sink_lse.data_ptr(),
                0 if sink_lse is None or sink_lse.ndim == 1 else sink_lse.shape[1],
                *(top_start, accumulates, counted.data_ptr()),
            )
            run_forward(self._head + tail, stream)
            if work.status:
                sizes = (out.nbytes, lse.nbytes, 0 if max_logits is None else max_logits.nbytes)
                poison_at(work.status, (out_start, lse_start, top_start), sizes, form.device, stream)


def forward_fresh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    options: AttentionOptions,
    *,
    sink_lse: Tensor | None,
    out_dtype: torch.dtype,
    wants_max_logits: bool,
) -> Outputs:
    """Attention of these keys alone, every element of the results written once.

    Args:
        sink_lse: logsumexp of the sinks, fp32 [Hq] or [Tq, Hq]; None without sinks.
        out_dtype: dtype of q, or fp32.

    Returns:
        out [Tq, Hq, Dv]; lse fp32 [Tq, Hq]; max_logits fp32 [Hq] or None.
    """
    return ForwardCall(ForwardForm(q, k, v, options, out_dtype), mask).fresh(q, k, v, sink_lse, wants_max_logits)


def forward_into(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: AttentionOptions, running: Outputs) -> None:
    """Merge the attention of these keys into running = (out fp32 [Tq, Hq, Dv], lse fp32 [Tq, Hq], max_logits or None), in place."""
    ForwardCall(ForwardForm(q, k, v, options, torch.float32), mask).into(q, k, v, running)
