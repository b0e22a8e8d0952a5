"""Padding and batch helpers against their definitions."""

from __future__ import annotations

import pytest
import torch

from magi_attention.api import (
    AttnMask,
    AttnMaskType,
    AttnRanges,
    InputError,
    apply_padding,
    compute_pad_size,
    infer_varlen_mask_from_batch,
    pad_at_dim,
    squash_batch_dim,
    unpad_at_dim,
)


@pytest.mark.parametrize(
    ("total", "cp_size", "chunk_size", "pad"), [(0, 4, 16, 0), (1, 4, 16, 63), (64, 4, 16, 0), (65, 4, 16, 63), (2999, 4, 1, 1)]
)
def test_compute_pad_size(total: int, cp_size: int, chunk_size: int, pad: int) -> None:
    assert compute_pad_size(total, cp_size, chunk_size) == pad


@pytest.mark.parametrize("bad", [(-1, 1, 1), (1, 0, 1), (1, 1, 0), (1.0, 1, 1)])
def test_compute_pad_size_refuses(bad: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match=r"=(-1|0|1\.0) must be (an int|in \[)"):
        compute_pad_size(*bad)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_pad_and_unpad(dtype: torch.dtype, dim: int) -> None:
    x = torch.randint(0, 2, (3, 4, 5)).to(dtype)
    right = pad_at_dim(x, dim, 2, value=1)
    assert right.shape[dim] == x.shape[dim] + 2 and right.dtype == dtype
    assert torch.equal(unpad_at_dim(right, dim, 2), x)
    assert (right.narrow(dim, x.shape[dim], 2) == torch.ones((), dtype=dtype)).all()
    left = pad_at_dim(x, dim, 2, side="left")
    assert torch.equal(left.narrow(dim, 2, x.shape[dim]), x) and not left.narrow(dim, 0, 2).any()
    assert pad_at_dim(x, dim, 0) is x


def test_padding_is_differentiable() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    unpad_at_dim(pad_at_dim(x, 0, 4) * 2, 0, 4).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((3, 2), 2.0))


def test_padding_refuses() -> None:
    x = torch.zeros(3)
    with pytest.raises(InputError, match="dim=1"):
        pad_at_dim(x, 1, 1)
    with pytest.raises(InputError, match="side='up'"):
        pad_at_dim(x, 0, 1, side="up")
    with pytest.raises(InputError, match="pad_size=4"):
        unpad_at_dim(x, 0, 4)
    with pytest.raises(InputError, match="pad_size=-1"):
        pad_at_dim(x, 0, -1)


def test_batch_helpers() -> None:
    cu_q, cu_k = infer_varlen_mask_from_batch(3, 5)
    assert cu_q.tolist() == [0, 5, 10, 15] == cu_k.tolist() and cu_q.dtype == torch.int32
    assert infer_varlen_mask_from_batch(0, 5)[0].tolist() == [0]
    assert squash_batch_dim(torch.arange(24).reshape(2, 3, 4)).shape == (6, 4)
    with pytest.raises(InputError, match="shape"):
        squash_batch_dim(torch.zeros(3))
    with pytest.raises(InputError, match="32-bit"):
        infer_varlen_mask_from_batch(1 << 16, 1 << 15)


def test_apply_padding_adds_rows_that_see_nothing() -> None:
    q_ranges, k_ranges = AttnRanges.from_ranges([[0, 4], [4, 6]]), AttnRanges.from_ranges([[0, 4], [0, 6]])
    padded = apply_padding(q_ranges, k_ranges, [AttnMaskType.CAUSAL, AttnMaskType.FULL], 6, 3)
    mask = AttnMask.from_ranges(*padded, 9, 9)
    assert not mask.to_dense()[6:].any() and mask.area() == AttnMask.from_ranges(q_ranges, k_ranges, [1, 0], 6, 6).area()
    assert len(q_ranges) == 2, "the caller's ranges stay as they are"
