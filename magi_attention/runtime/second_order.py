"""Backwards that can be run but not differentiated again: a second derivative is an error, never a part that is silently missing.

Our backwards call kernels and exchanges that autograd cannot see. Without this, `create_graph=True` would give first gradients that
look like constants, and a penalty on them would train nothing. As a function of its own, a backward also gets plain tensors inside
torch.func.grad and torch.func.vjp. Computes nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from magi_attention.errors import UnsupportedError

Grads = tuple[torch.Tensor | None, ...]


def first_order(what: str, gradients: Callable[..., Grads], *tensors: torch.Tensor | None) -> Grads:
    """gradients(*tensors); where a graph of the result is recorded, a backward through it raises UnsupportedError.

    Args:
        what: the operation, for the message.
    """
    if not torch.is_grad_enabled():
        return gradients(*tensors)
    found: Grads = _FirstOrder.apply(what, gradients, *tensors)  # type: ignore[no-untyped-call]
    return found


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(what: str, gradients: Callable[..., Grads], *tensors: torch.Tensor | None) -> Grads:
        return gradients(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Grads) -> None:
        ctx.what = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> Any:
        raise UnsupportedError(
            f"{ctx.what} has no second derivative: its gradient cannot be differentiated again; leave create_graph out, or detach the "
            "gradient where it is used"
        )
