"""Problems for kernel tests: default inputs of the cases, and our attention in the form the checkers call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from magi_attention.kernels.ops import single_device_attention
from magi_attention.mask import AttnMask, builders
from magi_attention.mask.dense import dense_mask
from magi_attention.testing.numerics import AttentionCase, AttentionResult

DEVICE = "cpu"  # where cases live; drawn on the CPU, so that every device gets the same numbers


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
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(dtype).to(DEVICE)

    tensors = {
        "q": draw(mask.total_q, heads[0], dims[0]),
        "k": draw(mask.total_k, heads[1], dims[0]),
        "v": draw(mask.total_k, heads[1], dims[1]),
    }
    dout = draw(mask.total_q, heads[0], dims[1])
    if sink_shape is not None:
        tensors["sink"] = torch.randn(sink_shape, generator=generator, device="cpu").to(DEVICE)
    dlse = torch.randn(mask.total_q, heads[0], generator=generator, device="cpu").to(DEVICE) if with_dlse else None
    dense = torch.from_numpy(np.array(dense_mask(mask.slices, mask.total_q, mask.total_k))).to(DEVICE)
    return AttentionCase(tensors, dense, dout, dlse, options)


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


def typed(rows: list[tuple[int, int, int, int, str]], total_q: int, total_k: int) -> AttnMask:
    """From (q_start, q_end, k_start, k_end, type)."""
    return AttnMask.from_ranges([r[:2] for r in rows], [r[2:4] for r in rows], [r[4] for r in rows], total_q, total_k)


def causal(total_q: int, total_k: int | None = None) -> AttnMask:
    """One causal slice over everything."""
    return typed([(0, total_q, 0, total_k or total_q, "causal")], total_q, total_k or total_q)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttnMask, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of our attention."""
    return single_device_attention(q, k, v, mask.slices, **options)[:2]


def block_map_mask(merge: bool) -> AttnMask:
    """8 x 8 blocks of 128 tokens, 0.3 of them visible."""
    is_visible = np.random.default_rng(0).random((8, 8)) < 0.3
    return builders.block_map(is_visible, 1024, 1024, 128, 128, merge=merge)
