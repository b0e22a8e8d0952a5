"""What every tensor of a call must be: plain, dense and with memory. Knows no shape rule of any operation."""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.errors import InputError


def require_tensor(name: str, value: Any, form: str) -> torch.Tensor:
    """The value, when kernels and exchanges can read it as it is.

    Args:
        form: the shape in words, for the message.

    Raises:
        InputError: no tensor, a DTensor, a sparse, nested or quantised tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{name} is a {type(value).__name__}; it must be a tensor {form}")
    if torch.compiler.is_compiling():
        return value  # a graph holds plain tensors only
    if type(value) is torch.Tensor and not value.is_nested and value.layout is torch.strided and not value.is_quantized:
        return value  # nearly always; looking for a method that is not there takes longer than all of this
    if hasattr(value, "to_local"):
        raise InputError(f"{name} is a {type(value).__name__}; pass this rank's part as a plain tensor, {name}.to_local()")
    if value.is_nested or value.layout != torch.strided:
        layout = "nested" if value.is_nested else str(value.layout)
        raise InputError(f"{name} has layout {layout}; pass a dense tensor {form}")
    if value.is_quantized:
        raise InputError(f"{name} is quantised ({value.dtype}); pass {name}.dequantize()")
    return value
