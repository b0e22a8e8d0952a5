"""Uninitialised memory that shows when it is read: new tensors hold NaN, or +inf. Knows no kernel; rank processes use it too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

NUMBERS = ("nan", "inf")

# Little-endian +inf of fp32, and of every second bf16: what byte and integer buffers hold, since they carry floats of other tensors.
_INF_BYTES = (0x00, 0x00, 0x80, 0x7F)


@contextlib.contextmanager
def poisoned(number: str) -> Iterator[None]:
    """Inside, memory that nobody has written holds `number`, "nan" or "inf"."""
    with _full_of_nan() if number == "nan" else _full_of_inf():
        yield


@contextlib.contextmanager
def _full_of_nan() -> Iterator[None]:
    """torch's own switch, which also reaches tensors made inside of its operations."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = was_filling
        torch.use_deterministic_algorithms(was_deterministic)


@contextlib.contextmanager
def _full_of_inf() -> Iterator[None]:
    """torch has no switch for +inf: the functions that give new memory to Python are replaced by ones that fill it."""
    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, _filling(getattr(owner, name))))
        yield


def _filling(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make_filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        if made.is_floating_point():
            return made.fill_(float("inf"))
        if made.is_contiguous() and made.dtype != torch.bool:
            octets = made.view(-1).view(torch.uint8)
            octets.copy_(torch.tensor(_INF_BYTES, dtype=torch.uint8).repeat(-(-octets.numel() // 4))[: octets.numel()])
        return made

    return make_filled
