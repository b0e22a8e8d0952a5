"""What tests of the compiled kernels on a GPU share: when they run, and how cases get there."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from magi_attention.api import AttnMask, flex_flash_attn_func
from magi_attention.kernels.select import resolve
from magi_attention.testing.numerics import AttentionCase, AttentionResult
from tests.kernels import problems


@functools.cache
def why_not() -> str:
    """Why no compiled kernel can be tested here; empty when it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    chosen, reasons = resolve("cuda")
    return "" if chosen == "ffa" else "; ".join(reasons)


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Cases of tests/kernels/problems.py are made on the GPU."""
    monkeypatch.setattr(problems, "DEVICE", "cuda")


def by_the_door(case: AttentionCase, mask: AttnMask, **changes: Any) -> AttentionResult:
    """Forward and backward of flex_flash_attn_func."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
        out, meta = flex_flash_attn_func(q, k, v, mask=mask, **options, **changes)
        return out, meta.lse

    return case.run(attend)


def assert_same_bits(name: str, ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal to the bit, or the first place where not."""
    for key, value in expected.items():
        if not torch.equal(ours[key], value):
            at = (ours[key] != value).nonzero()
            first = tuple(at[0].tolist()) if len(at) else "a NaN"
            raise AssertionError(f"{name}: {key} differs at {len(at)} places, first {first}: {ours[key][first]} and {value[first]}")
