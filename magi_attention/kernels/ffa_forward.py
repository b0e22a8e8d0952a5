"""The compiled forward: fresh outputs, or merged into running ones. Tensors and a mask in, a launch on the current stream out.

Knows nothing of autograd, of sinks but their logsumexp, or of ranks. Problems are those that kernels/select.py lets through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magi_attention.kernels import ffa_device
from magi_attention.kernels.device_mask import poison
from magi_attention.kernels.ffa_launch import DTYPE_CODE, compiled_head_dim, query, shape_record
from magi_attention.kernels.ffa_library import FORWARD_TAIL, forward_head, run_forward
from magi_attention.kernels.ffa_tensors import ALIGN_BYTES, dense, is_readable, narrowed, readable, used_strides
from magi_attention.kernels.ffa_work import Mask, device_work
from magi_attention.kernels.options import AttentionOptions

_MINUS_INF = float("-inf")

Outputs = tuple[Tensor, Tensor, Tensor | None]  # out, lse, max_logits


class ForwardCall:
    """All of a forward that shapes, strides, options and mask decide, worked out once for tensors alike.

    Short sequences wait for the host, so what is left to a call is to allocate, to pack pointers and to launch.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: AttentionOptions, out_dtype: torch.dtype) -> None:
        self.device = q.device
        self._options = options
        self._width, self._head_dim_v = compiled_head_dim(q, v), v.shape[2]
        self._lse_shape = (q.shape[0], q.shape[1])
        self._out_shape, self._out_dtype, self._out_code = (*self._lse_shape, self._width), out_dtype, DTYPE_CODE[out_dtype]
        self._is_empty = not (q.shape[0] and k.shape[0])
        self._is_plain = options.softmax_scale >= 0 and all(is_readable(x, self._width) for x in (q, k, v))
        self._strides = tuple(used_strides(x) for x in (q, k, v))
        if not self._is_empty:
            self._work = device_work(mask, "forward", self._width, self.device)
            self._head = forward_head(shape_record(q.shape, k.shape, self._width, q.dtype, self.device, options), self._work.record)

    def fresh(self, q: Tensor, k: Tensor, v: Tensor, sink_lse: Tensor | None, wants_max_logits: bool) -> Outputs:
        """Attention of these keys and the sinks alone; see `forward_fresh`."""
        device = self.device
        out = torch.empty(self._out_shape, dtype=self._out_dtype, device=device)
        lse = torch.empty(self._lse_shape, dtype=torch.float32, device=device)
        max_logits = torch.full((self._lse_shape[1],), _MINUS_INF, dtype=torch.float32, device=device) if wants_max_logits else None
        if self._is_empty:  # no key at all: what is left are the sinks
            out.zero_()
            lse.copy_(sink_lse.expand_as(lse)) if sink_lse is not None else lse.fill_(_MINUS_INF)
        else:
            self._launch(q, k, v, (out, lse, max_logits), sink_lse, 0)
        return (out if self._head_dim_v == self._width else narrowed(out, self._head_dim_v)), lse, max_logits

    def into(self, q: Tensor, k: Tensor, v: Tensor, running: Outputs) -> None:
        """Merge into running results; see `forward_into`."""
        if self._is_empty:
            return
        out, lse, max_logits = running
        own_out, own_lse = dense(out, self._width), lse.contiguous()
        self._launch(q, k, v, (own_out, own_lse, max_logits), None, 1)
        if own_out is not out:
            out.copy_(own_out[..., : out.shape[2]])
        if own_lse is not lse:
            lse.copy_(own_lse)

    def _launch(self, q: Tensor, k: Tensor, v: Tensor, outputs: Outputs, sink_lse: Tensor | None, accumulates: int) -> None:
        out, lse, max_logits = outputs
        device, strides = self.device, self._strides
        q_start, k_start, v_start = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not self._is_plain or (q_start | k_start | v_start) % ALIGN_BYTES:
            q, k, v = query(q, self._width, self._options), readable(k, self._width), readable(v, self._width)
            q_start, k_start, v_start = q.data_ptr(), k.data_ptr(), v.data_ptr()
            strides = (used_strides(q), used_strides(k), used_strides(v))
        counter = torch.empty(1, dtype=torch.int32, device=device)  # not kept: launches of several streams or threads must not share one
        tail = FORWARD_TAIL.pack(
            q_start,
            *strides[0],
            k_start,
            *strides[1],
            v_start,
            *strides[2],
            out.data_ptr(),
            self._out_code,
            lse.data_ptr(),
            0 if sink_lse is None else sink_lse.data_ptr(),
            0 if sink_lse is None or sink_lse.ndim == 1 else sink_lse.shape[1],
            0 if max_logits is None else max_logits.data_ptr(),
            accumulates,
            counter.data_ptr(),
        )
        with ffa_device.launching(device, "magi_attention forward", self._work.array) as stream:
            run_forward(self._head + tail, stream)
            if self._work.status:
                poison(self._work.status, outputs, stream)


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
    return ForwardCall(q, k, v, mask, options, out_dtype).fresh(q, k, v, sink_lse, wants_max_logits)


def forward_into(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: AttentionOptions, running: Outputs) -> None:
    """Merge the attention of these keys into running = (out fp32 [Tq, Hq, Dv], lse fp32 [Tq, Hq], max_logits or None), in place."""
    ForwardCall(q, k, v, mask, options, torch.float32).into(q, k, v, running)
