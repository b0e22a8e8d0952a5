"""For tests on CUDA: a block in which an operation that makes the host wait for the device is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_host_wait(is_on: bool = True) -> Iterator[None]:
    """What PyTorch knows of: copies to pageable memory, .item(), nonzero and the like. With is_on=False nothing is watched."""
    torch.cuda.set_sync_debug_mode("error" if is_on else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
