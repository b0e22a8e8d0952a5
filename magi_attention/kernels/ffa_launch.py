"""What a forward and a backward launch share: the shape record, scratch, and q when the scale is negative. Knows no direction."""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from magi_attention.kernels.ffa_device import usable_sms
from magi_attention.kernels.ffa_library import DTYPE_CODES, AttentionShape
from magi_attention.kernels.ffa_tensors import padded_head_dim, readable
from magi_attention.kernels.options import AttentionOptions

DTYPE_CODE = {getattr(torch, name): code for name, code in DTYPE_CODES.items()}


@functools.lru_cache(maxsize=1024)
def shape_record(
    q_shape: torch.Size, k_shape: torch.Size, head_dim: int, dtype: torch.dtype, device: torch.device, options: AttentionOptions
) -> AttentionShape:
    """Sizes and factors of a call; head_dim is the compiled one, the scale is made non-negative (see `query`)."""
    return AttentionShape(
        q_shape[0],
        k_shape[0],
        q_shape[1],
        k_shape[1],
        head_dim,
        DTYPE_CODE[dtype],
        abs(options.softmax_scale),
        options.softcap,
        usable_sms(device, options.sm_margin),
    )


def compiled_head_dim(q: Tensor, v: Tensor) -> int:
    """Width of the kernel that takes a problem that kernels/select.py let through."""
    width = padded_head_dim(q.shape[2], v.shape[2])
    assert width is not None, f"head_dim {q.shape[2]} and {v.shape[2]} were let through"
    return width


def query(q: Tensor, width: int, options: AttentionOptions) -> Tensor:
    """q as the kernel reads it. Kernels take scales >= 0: scale * q.k = |scale| * (-q).k, and the gradient of q changes its sign back."""
    return readable(-q if options.softmax_scale < 0 else q, width)


class _Counters(threading.local):
    """One counter for each device, of one thread."""

    def __init__(self) -> None:
        self.on: dict[torch.device, Tensor] = {}


_counters = _Counters()


def counter(device: torch.device, stream: int) -> Tensor:
    """One int32 that counts the work items of a launch on `stream`, the current one of the device.

    Launches that may run at the same time must not share one: those of several streams, of several threads, or of a graph. On the default
    stream, where nothing is captured, each thread has one of its own, and its launches follow each other.
    """
    if stream:
        return torch.empty(1, dtype=torch.int32, device=device)
    found = _counters.on.get(device)
    if found is None:
        with torch.inference_mode(False):  # outlives the mode of the call that happens to be first
            found = _counters.on[device] = torch.empty(1, dtype=torch.int32, device=device)
    return found
