"""Tensors in the form compiled kernels read: 64 or 128 wide, rows of 16-byte aligned runs. Others are copied. Knows no mask, no launch.

Zero columns change no product, so a head_dim between the compiled ones is padded to the next by a copy: exact, at the cost of the wider
kernel and of one pass over q, k, v (and dout in the backward) plus one over the results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magi_attention.kernels.ffa_library import TokenTensor

HEAD_DIMS = (64, 128)
ALIGN_BYTES = 16
_ALIGN_ELEMENTS = 8  # of 16 bits


def padded_head_dim(head_dim: int, head_dim_v: int) -> int | None:
    """The compiled width that holds q, k and v; None when there is none."""
    widest = max(head_dim, head_dim_v)
    return next((width for width in HEAD_DIMS if widest <= width), None)


def readable(x: Tensor, width: int) -> Tensor:
    """x [T, H, D] as the kernel can read it, width columns wide: itself, or a contiguous copy with zero columns at the end."""
    missing = width - x.shape[2]
    if missing:
        return torch.nn.functional.pad(x, (0, missing)).contiguous()
    if is_readable(x, width) and x.data_ptr() % ALIGN_BYTES == 0:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def is_readable(x: Tensor, width: int) -> bool:
    """Whether TMA can walk x [T, H, width] as it lies, if it starts at a multiple of ALIGN_BYTES."""
    num_tokens, num_heads, num_columns = x.shape
    token_stride, head_stride, column_stride = x.stride()
    if num_columns != width or column_stride != 1:
        return False
    # A stride below the width repeats memory (a broadcast, an overlapping view), which TMA does not read.
    if num_heads > 1 and (head_stride < width or head_stride % _ALIGN_ELEMENTS):
        return False
    return num_tokens <= 1 or (token_stride >= width and token_stride % _ALIGN_ELEMENTS == 0)


def used_strides(x: Tensor) -> tuple[int, int]:
    """(token, head) strides of a readable tensor. The stride of a dimension of one is never used but must be legal."""
    num_tokens, num_heads, width = x.shape
    token_stride, head_stride, _ = x.stride()
    return (width * num_heads if num_tokens == 1 else token_stride), (width if num_heads == 1 else head_stride)


def token_tensor(x: Tensor) -> TokenTensor:
    """A readable tensor for the C ABI."""
    return TokenTensor(x.data_ptr(), *used_strides(x))


def narrowed(x: Tensor, width: int) -> Tensor:
    """The first columns of a result as a tensor of its own; x itself when it has no more."""
    return x if x.shape[2] == width else x[..., :width].contiguous()


def dense(x: Tensor, width: int) -> Tensor:
    """An accumulator [T, H, D] as a kernel adds to it: itself when aligned and `width` wide, else a contiguous copy, zero-padded."""
    missing = width - x.shape[2]
    return torch.nn.functional.pad(x, (0, missing)).contiguous() if missing else aligned(x)


def aligned(x: Tensor) -> Tensor:
    """A result as a kernel writes it: itself when aligned, else an aligned copy."""
    return x if is_aligned(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def is_aligned(x: Tensor) -> bool:
    """Whether x is contiguous and starts at a multiple of ALIGN_BYTES, which a view into a flat buffer need not."""
    return x.is_contiguous() and x.data_ptr() % ALIGN_BYTES == 0
