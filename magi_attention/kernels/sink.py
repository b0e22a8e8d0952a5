"""Sinks: learnable logits that join the softmax denominator and bring no value. Knows nothing of masks, blocks or ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_attention.arguments import one_of
from magi_attention.errors import InputError
from magi_attention.kernels.tensors import require_tensor

SINK_LAYOUTS = ("sh", "ssh")


def check_sink(sink: Tensor | None, sink_layout: str, total_q: int, num_heads_q: int) -> None:
    """Raises InputError unless sink is None, "sh" [num_sink, num_heads_q] or "ssh" [total_q, num_sink, num_heads_q], floating."""
    one_of("sink_layout", sink_layout, SINK_LAYOUTS)
    if sink is None:
        return
    expected = f"[num_sink, {num_heads_q}]" if sink_layout == "sh" else f"[{total_q}, num_sink, {num_heads_q}]"
    require_tensor("sink", sink, expected)
    leading_fits = sink_layout == "sh" or (sink.ndim == 3 and sink.shape[0] == total_q)
    if sink.ndim != len(sink_layout) or sink.shape[-1] != num_heads_q or not leading_fits:
        raise InputError(f"sink: shape {list(sink.shape)} given, sink_layout={sink_layout!r} needs {expected}")
    if not sink.dtype.is_floating_point:
        raise InputError(f"sink: dtype {sink.dtype} given, must be floating (torch.float32)")


def sink_lse(
    sink: Tensor | None,
    sink_layout: str,
    total_q: int,
    num_heads_q: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """lse [total_q, num_heads_q] of the sinks alone, where attention starts from; -inf without a sink.

    Args:
        sink: "sh" [num_sink, num_heads_q] or "ssh" [total_q, num_sink, num_heads_q]; None or num_sink = 0 is no sink.
        dtype: of the result, fp32 (fp64 for fp64 attention).
        device: of the result when sink is None.
    """
    if sink is None:
        return torch.full((total_q, num_heads_q), float("-inf"), dtype=dtype, device=device)
    joined = joined_sink(sink, dtype)
    assert joined is not None
    return joined.expand(total_q, num_heads_q).clone(memory_format=torch.contiguous_format)


def joined_sink(sink: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """logsumexp over the sinks, contiguous: [num_heads_q] ("sh") or [total_q, num_heads_q] ("ssh"); None without a sink."""
    return None if sink is None else torch.logsumexp(sink.detach().to(dtype), dim=-2).contiguous()


def sink_backward(sink: Tensor, sink_layout: str, lse: Tensor, delta: Tensor) -> Tensor:
    """Gradient of sink, of its shape and dtype: -exp(sink - lse) * delta, summed over rows for "sh".

    Args:
        lse: [total_q, num_heads_q], final: all keys and the sinks.
        delta: [total_q, num_heads_q], rowsum(dout * out) - dlse.

    exp(sink - lse) is the softmax weight of the sink, whose value is 0; see the derivative of logsumexp.
    """
    per_row = sink.detach().to(lse.dtype)
    weights = torch.exp((per_row if sink_layout == "ssh" else per_row[None]) - lse[:, None])  # [T, num_sink, Hq]
    # A sink of -inf on a row without keys: lse is -inf too, and nothing flows.
    weights = torch.where((lse == float("-inf"))[:, None], 0, weights)
    dsink = -weights * delta[:, None]
    return (dsink if sink_layout == "ssh" else dsink.sum(0)).to(sink.dtype)
