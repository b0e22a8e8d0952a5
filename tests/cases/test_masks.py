"""The cases of the project's case table that are about masks alone: M05, M06, M08, M09, M13, M17, M20, M23, D03, N07, A01."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from magi_attention import api
from magi_attention.common import AttnMask, AttnRange, AttnRanges
from magi_attention.errors import InputError
from magi_attention.mask import builders
from magi_attention.testing.masks import random_typed_ranges

TYPES = "FCIB"


def dense_cover(slices: Any, total_q: int, total_k: int) -> np.ndarray:
    """Cover count of (q0, q1, k0, k1, letter): C and B end at the bottom-right diagonal, I and B start at the top-left one."""
    cover = np.zeros((total_q, total_k), int)
    for q0, q1, k0, k1, letter in slices:
        i, j = np.arange(q1 - q0)[:, None], np.arange(k1 - k0)[None]
        last = (k1 - k0) - (q1 - q0)
        is_visible = (j >= i if letter in "IB" else j >= 0) & (j <= i + last if letter in "CB" else i >= 0)
        cover[q0:q1, k0:k1] += is_visible
    return cover


def dense_of_ranges(q_ranges: AttnRanges, k_ranges: AttnRanges, types: Any, total_q: int, total_k: int) -> np.ndarray:
    rows = [
        (*q.to_naive_range(), *k.to_naive_range(), TYPES[kind.to_int_type()]) for q, k, kind in zip(q_ranges, k_ranges, types, strict=True)
    ]
    return dense_cover(rows, total_q, total_k)


def dense_window(total_q: int, total_k: int, left: int | None, right: int | None) -> np.ndarray:
    distance = np.arange(total_k)[None] - np.arange(total_q)[:, None] - (total_k - total_q)
    is_visible = np.ones((total_q, total_k), bool)
    if left is not None:
        is_visible &= distance >= -left
    if right is not None:
        is_visible &= distance <= right
    return is_visible


def offsets(lengths: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


# ---- areas ----


def test_m05_area_and_the_unused_key() -> None:
    mask = builders.from_cu_seqlens(offsets([0, 0, 1023]), offsets([0, 1, 2045]), causal=True)
    assert mask.area() == 1_569_282
    assert not mask.to_dense()[:, 0].any()


def test_d03_area() -> None:
    cu_seqlens = offsets([137, 2041, 89])
    mask = builders.from_cu_seqlens(cu_seqlens, cu_seqlens, causal=True)
    assert (mask.total_q, mask.area()) == (2267, 2_097_319)


def test_n07_area() -> None:
    lengths = np.random.default_rng(0).integers(1, 5, 15_000)
    cu_seqlens = offsets(lengths)
    mask = builders.from_cu_seqlens(cu_seqlens, cu_seqlens, causal=True)
    assert (mask.total_q, mask.area(), len(mask.slices)) == (37_473, 74_992, 15_000)


@pytest.mark.parametrize(("total_q", "total_k", "areas"), [(8, 4, (32, 10, 10, 0)), (4, 8, (32, 26, 26, 20)), (5, 5, (25, 15, 15, 5))])
def test_m17_areas_of_the_four_types(total_q: int, total_k: int, areas: tuple[int, ...]) -> None:
    for number, letter in enumerate(TYPES):
        mask = AttnMask.from_ranges([[0, total_q]], [[0, total_k]], [number], total_q, total_k)
        assert mask.area() == areas[number]
        assert (mask.to_dense() == dense_cover([(0, total_q, 0, total_k, letter)], total_q, total_k)).all()


@pytest.mark.parametrize(("number", "empty_rows"), [(1, [0, 1, 2, 3]), (2, [4, 5, 6, 7]), (3, list(range(8)))])
def test_m17_empty_rows(number: int, empty_rows: list[int]) -> None:
    dense = AttnMask.from_ranges([[0, 8]], [[0, 4]], [number], 8, 4).to_dense()
    assert np.flatnonzero(~dense.any(axis=1)).tolist() == empty_rows


# ---- windows ----


@pytest.mark.parametrize("window", [(None, 0), (16, 0), (15, 0)])
def test_m06_wide_windows_are_causal(window: tuple[int | None, int]) -> None:
    q_ranges, k_ranges, types = builders.infer_attn_mask_from_sliding_window(AttnRange(0, 16), AttnRange(0, 16), window)
    dense = dense_of_ranges(q_ranges, k_ranges, types, 16, 16)
    assert dense.sum() == 136 and (dense == np.tri(16)).all()


def test_m08_four_ways_to_say_causal() -> None:
    plain = builders.from_cu_seqlens([0, 1024, 2048], [0, 1024, 2048], causal=True)
    for window in (None, (None, 0), (-1, 0), (-1, -1)):
        assert builders.from_cu_seqlens([0, 1024, 2048], [0, 1024, 2048], causal=True, window_size=window) == plain
    for window in ((None, 0), (-1, 0)):
        assert builders.from_cu_seqlens([0, 1024, 2048], [0, 1024, 2048], window_size=window) == plain


@pytest.mark.parametrize("window", [(-1, -3), (-2, 0), (4, -9)])
def test_m09_only_minus_one_is_unbounded(window: tuple[int, int]) -> None:
    wrong = min(window)
    key = api.magi_attn_varlen_key([0, 8], [0, 8], 8, 2, 128, 0, None)
    for call in (
        lambda: builders.from_cu_seqlens([0, 8], [0, 8], window_size=window),
        lambda: builders.infer_attn_mask_from_cu_seqlens([0, 8], [0, 8], window_size=window),
        lambda: builders.infer_attn_mask_from_sliding_window(AttnRange(0, 8), AttnRange(0, 8), window),
        lambda: builders.sliding_window(8, 8, window),
        lambda: api.magi_attn_varlen_key([0, 8], [0, 8], 8, 2, 128, 0, None, window_size=window),
        lambda: api.make_varlen_key_for_new_mask_after_dispatch([0, 8], [0, 8], key, window_size=window),
    ):
        with pytest.raises(InputError, match=rf"window_size\[[01]\]={wrong} must be in \[-1"):
            call()


SIDES = [None, *range(34)]


@pytest.mark.parametrize("left", SIDES)
def test_m20_every_window_on_every_length(left: int | None) -> None:
    """All lengths 1 to 32 packed as documents, so that one call covers them; each document must equal its dense window."""
    edges = offsets(np.arange(1, 33))
    for right in SIDES:
        expected = np.zeros((edges[-1], edges[-1]), int)
        for start, end in itertools.pairwise(edges):
            expected[start:end, start:end] = dense_window(end - start, end - start, left, right)
        helper = builders.infer_attn_mask_from_cu_seqlens(edges, edges, window_size=(left, right))
        assert (dense_of_ranges(*helper) == expected).all(), f"window ({left}, {right})"


@pytest.mark.parametrize("seqlen", range(1, 33))
def test_m20_the_window_helper_on_one_range(seqlen: int) -> None:
    q_range, k_range = AttnRange(5, 5 + seqlen), AttnRange(9, 9 + seqlen)
    for left in SIDES:
        for right in SIDES:
            q_ranges, k_ranges, types = builders.infer_attn_mask_from_sliding_window(q_range, k_range, (left, right))
            cover = dense_of_ranges(q_ranges.offset(-5), k_ranges.offset(-9), types, seqlen, seqlen)
            assert (cover == dense_window(seqlen, seqlen, left, right)).all(), f"window ({left}, {right})"


def test_m20_ranges_of_different_length() -> None:
    rng = np.random.default_rng(0)
    for _ in range(4_000):
        total_q, total_k = (int(total) for total in rng.integers(0, 34, 2))
        left, right = (SIDES[idx] for idx in rng.integers(0, len(SIDES), 2))
        ranges = builders.infer_attn_mask_from_sliding_window(AttnRange(0, total_q), AttnRange(0, total_k), (left, right))
        cover = dense_of_ranges(*ranges, total_q, total_k)
        assert (cover == dense_window(total_q, total_k, left, right)).all(), (total_q, total_k, left, right)


def test_m20_documents() -> None:
    edges = offsets([5, 3, 1, 64])
    q_ranges, k_ranges, types, total_q, total_k = builders.infer_attn_mask_from_cu_seqlens(edges, edges, window_size=(8, 0))
    cover = dense_of_ranges(q_ranges, k_ranges, types, total_q, total_k)
    assert cover.sum() == 562 and cover.max() == 1
    assert builders.from_cu_seqlens(edges, edges, window_size=(8, 0)).area() == 562


# ---- double cover and random sets ----


def test_m13_a_doubly_covered_cell_names_both_slices() -> None:
    with pytest.raises(InputError) as caught:
        AttnMask.from_ranges([[0, 128], [64, 192]], [[0, 128], [0, 128]], [0, 0], 192, 128)
    for words in ("entry 0", "[0, 128)", "entry 1", "[64, 192)", "8192 cells twice"):
        assert words in str(caught.value)


def test_m13_overlapping_queries_with_disjoint_keys_are_legal() -> None:
    q, c = 1000, 4096
    split = AttnMask.from_ranges([[0, q], [0, q]], [[0, c], [c, c + q]], ["full", "causal"], q, c + q)
    whole = AttnMask.from_ranges([[0, q]], [[0, c + q]], ["causal"], q, c + q)
    assert (split.to_dense() == whole.to_dense()).all()


def test_m23_random_slice_sets_cover_what_the_words_say() -> None:
    rng = np.random.default_rng(23)
    num_slices = 0
    for _ in range(2_000):
        total_q, total_k = (int(total) for total in rng.integers(0, 301, 2))
        q_ranges, k_ranges, types = random_typed_ranges(rng, total_q, total_k, max_slices=8)
        rows = [(*q, *k, TYPES[kind]) for q, k, kind in zip(q_ranges.tolist(), k_ranges.tolist(), types.tolist(), strict=True)]
        cover = dense_cover(rows, total_q, total_k)
        assert cover.max(initial=0) <= 1
        mask = AttnMask.from_ranges(q_ranges, k_ranges, types, total_q, total_k)
        assert (mask.to_dense() == cover).all() and mask.area() == cover.sum()
        num_slices += len(mask.slices)
    assert num_slices > 4_000


# ---- what offsets may be ----


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a01_integer_offsets_are_accepted(dtype: torch.dtype) -> None:
    plain = builders.from_cu_seqlens([0, 5, 9], [0, 5, 9], causal=True)
    tensor = torch.tensor([0, 5, 9], dtype=dtype)
    assert builders.from_cu_seqlens(tensor, tensor, causal=True) == plain
    ranges = torch.tensor([[0, 5], [5, 9]], dtype=dtype)
    assert AttnMask.from_ranges(ranges, ranges, torch.tensor([1, 1], dtype=dtype), 9, 9) == plain
    assert AttnMask.from_ranges(ranges.tolist(), ranges.tolist(), [1, 1], 9, 9) == plain
    keys = [varlen_key(offset) for offset in (tensor, tensor.tolist(), tensor.numpy())]
    assert keys[0].mask == plain and len(set(keys)) == 1
    q, k = torch.randn(9, 8, 16), torch.randn(9, 2, 16)
    outs = [api.flex_flash_attn_func(q, k, k, *given, [1, 1])[0] for given in ((ranges, ranges), (ranges.tolist(), ranges.numpy()))]
    assert torch.equal(*outs)


def varlen_key(cu_seqlens: Any, **options: Any) -> api.DistAttnKey:
    return api.magi_attn_varlen_key(cu_seqlens, cu_seqlens, 8, 2, 16, 0, None, causal=True, **options)


@pytest.mark.parametrize(
    "wrong", [[0, 5.0, 9], torch.tensor([0.0, 5.0, 9.0]), np.array([0.0, 5.0, 9.0]), torch.tensor([0, 5, 9]).bfloat16()]
)
def test_a01_float_offsets_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"cu_seqlens_q.*float"):
        builders.from_cu_seqlens(wrong, [0, 5, 9])
    with pytest.raises(InputError, match=r"cu_seqlens_q.*float"):
        varlen_key(wrong)
    with pytest.raises(InputError, match=r"attn_type_map.*float"):
        AttnMask.from_ranges([[0, 1]] * 3, [[0, 1]] * 3, wrong, 9, 9)
    tensor = torch.zeros(9, 2, 16)
    with pytest.raises(InputError, match=r"q_ranges.*float"):
        api.flex_flash_attn_func(tensor, tensor, tensor, torch.tensor([[0.0, 9.0]]), [[0, 9]])


def test_a01_no_longest_length_is_asked_for() -> None:
    """max_seqlen is no parameter of a key; the original's argument of the single-device function is ignored, so it cannot be too small."""
    for function in (api.magi_attn_varlen_key, api.magi_attn_flex_key, builders.from_cu_seqlens, api.infer_attn_mask_from_cu_seqlens):
        assert not [name for name in inspect.signature(function).parameters if "max" in name]
    q, k = torch.randn(9, 8, 16), torch.randn(9, 2, 16)
    plain, _ = api.flex_flash_attn_func(q, k, k, [[0, 9]], [[0, 9]], [1])
    with pytest.warns(DeprecationWarning, match="max_seqlen_q is ignored"):
        too_small, _ = api.flex_flash_attn_func(q, k, k, [[0, 9]], [[0, 9]], [1], max_seqlen_q=3)
    assert torch.equal(plain, too_small)
