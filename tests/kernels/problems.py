"""Problems for kernel tests: default inputs of the cases, and our attention in the form the checkers call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from magi_attention.kernels.ops import single_device_attention
from magi_attention.mask import AttnMask
from magi_attention.mask.dense import dense_mask
from magi_attention.testing.numerics import AttentionCase, AttentionResult


def make_case(
    mask: AttnMask,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype = torch.bfloat16,
    *,
    sink_shape: tuple[int, ...] | None = None,
    with_dlse: bool = False,
    **options: Any,
) -> AttentionCase:
    """Inputs ~ N(0, 1) from seed 0, made in fp32 then cast; heads = (Hq, Hkv), dims = (D, Dv)."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {
        "q": draw(mask.total_q, heads[0], dims[0]),
        "k": draw(mask.total_k, heads[1], dims[0]),
        "v": draw(mask.total_k, heads[1], dims[1]),
    }
    dout = draw(mask.total_q, heads[0], dims[1])
    if sink_shape is not None:
        tensors["sink"] = torch.randn(sink_shape, generator=generator)
    dlse = torch.randn(mask.total_q, heads[0], generator=generator) if with_dlse else None
    return AttentionCase(tensors, torch.from_numpy(np.array(dense_mask(mask.slices, mask.total_q, mask.total_k))), dout, dlse, options)


def run_ours(case: AttentionCase, slices: AttnMask | np.ndarray) -> AttentionResult:
    """Forward and backward of our attention on the case."""
    records = slices.slices if isinstance(slices, AttnMask) else slices

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
        out, lse, _ = single_device_attention(q, k, v, records, **options)
        return out, lse

    return case.run(attend)


def check(name: str, mask: AttnMask, *args: Any, **options: Any) -> AttentionResult:
    """Our forward and backward on a mask, against the rule; the result for further looks."""
    case = make_case(mask, *args, **options)
    ours = run_ours(case, mask)
    case.check(name, ours)
    return ours
