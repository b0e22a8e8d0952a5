"""A case on one device at the catalogue's default sizes, by the public function and by the registered operation. For the cases only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magi_attention.api import flex_flash_attn_func
from magi_attention.mask import AttnMask
from magi_attention.testing.numerics import LSE_ERROR, AttentionCase, AttentionResult, allowed_error
from tests.kernels.problems import make_case, run_ours

IS_DETERMINISTIC = True  # False where a GPU may sum gradients in any order
HEADS, DIMS = (8, 2), (128, 128)  # (Hq, Hkv), (D, Dv) of the catalogue


def case_of(mask: AttnMask, heads: tuple[int, int] = HEADS, dims: tuple[int, int] = DIMS, *args: Any, **options: Any) -> AttentionCase:
    """Default inputs of the catalogue on a mask; options as `make_case`."""
    return make_case(mask, heads, dims, *args, **options)


def by_the_door(case: AttentionCase, mask: AttnMask, **changes: Any) -> AttentionResult:
    """Forward and backward of flex_flash_attn_func."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
        out, meta = flex_flash_attn_func(q, k, v, mask=mask, **options, **changes)
        return out, meta.lse

    return case.run(attend)


def run_both(case: AttentionCase, mask: AttnMask) -> AttentionResult:
    """The result of the public function; the operation that torch.compile uses must have the same bits."""
    ours, op = by_the_door(case, mask), run_ours(case, mask)
    for name, value in ours.values.items():
        if name in ("dq", "dk", "dv") and value.is_cuda and not IS_DETERMINISTIC:
            continue  # summed in any order
        assert torch.equal(value, op.values[name]), f"{name}: the public function and the operation differ"
    return ours


def check(name: str, mask: AttnMask, *args: Any, **options: Any) -> AttentionResult:
    """Rule NUM on a mask, by both; arguments as `case_of`. The result is returned for further looks."""
    case = case_of(mask, *args, **options)
    ours = run_both(case, mask)
    case.check(name, ours)
    return ours


def is_exact_zero(x: Tensor) -> bool:
    """Every element is +0, to the bit."""
    return not x.contiguous().view(torch.uint8).any()


def assert_same_within_rule(
    name: str, one: AttentionResult, other: AttentionResult, twins: tuple[AttentionResult, AttentionResult]
) -> None:
    """Two results that should be one: they differ by no more than the rule allows each from float64."""
    for key, value in one.values.items():
        second, (reference, eager) = other.values[key], (twin.values[key] for twin in twins)
        assert torch.equal(value.isinf(), second.isinf()), f"{name} {key}: infinities at other places"
        limit = LSE_ERROR if key == "lse" else allowed_error(reference, eager, "forward" if key == "out" else "backward")
        error = torch.where(value.isinf(), 0.0, value.double() - second.double()).abs().max()
        assert error <= limit, f"{name} {key}: they differ by {error:.3g} > {limit:.3g}"
