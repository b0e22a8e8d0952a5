"""Every builder against its definition, cell by cell, and its cover count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from magi_attention.common import AttnMask
from magi_attention.errors import InputError
from magi_attention.mask import builders
from magi_attention.mask.dense import cover_count

WINDOW_SIDES = (None, -1, 0, 1, 2, 5, 40)


def assert_mask_is(mask: AttnMask, expected: np.ndarray) -> None:
    cover = cover_count(mask.slices, mask.total_q, mask.total_k)
    assert cover.shape == expected.shape
    assert cover.max(initial=0) <= 1, "a cell is covered twice"
    assert (cover == expected).all()
    assert mask.area() == expected.sum()


def random_offsets(rng: np.random.Generator, num_documents: int, longest: int) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(rng.integers(0, longest + 1, num_documents))])


def dense_documents(cu_q: Any, cu_k: Any, left: int | None, right: int | None, global_tokens: int = 0) -> np.ndarray:
    """By definition: same document, and inside the aligned window or among the first keys."""
    expected = np.zeros((cu_q[-1], cu_k[-1]), bool)
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        offset = (k1 - k0) - (q1 - q0)
        for i in range(q1 - q0):
            for j in range(k1 - k0):
                after_left = left is None or left == -1 or j >= i + offset - left or j < global_tokens
                before_right = right is None or right == -1 or j <= i + offset + right
                expected[q0 + i, k0 + j] = after_left and before_right
    return expected


# ---- documents ----


def test_documents_and_windows() -> None:
    rng = np.random.default_rng(0)
    for _ in range(150):
        num_documents = int(rng.integers(0, 5))
        cu_q, cu_k = random_offsets(rng, num_documents, 9), random_offsets(rng, num_documents, 9)
        left, right = (WINDOW_SIDES[idx] for idx in rng.integers(0, len(WINDOW_SIDES), 2))
        causal, global_tokens = bool(rng.integers(0, 2)), int(rng.integers(0, 5))
        mask = builders.from_cu_seqlens(cu_q, cu_k, causal, (left, right), global_tokens)
        assert_mask_is(mask, dense_documents(cu_q, cu_k, left, 0 if causal else right, global_tokens))
        q_ranges, k_ranges, types, total_q, total_k = builders.infer_attn_mask_from_cu_seqlens(
            cu_q, cu_k, causal, (left, right), global_tokens
        )
        assert (total_q, total_k) == (cu_q[-1], cu_k[-1])
        assert (AttnMask.from_ranges(q_ranges, k_ranges, types, total_q, total_k).to_dense() == mask.to_dense()).all()


def test_plain_documents_stay_one_range_each() -> None:
    q_ranges, k_ranges, types, total_q, total_k = builders.infer_attn_mask_from_cu_seqlens(
        torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32), causal=True
    )
    assert q_ranges.to_naive_ranges() == k_ranges.to_naive_ranges() == [(0, 5), (5, 12)]
    assert [kind.value for kind in types] == ["causal", "causal"] and (total_q, total_k) == (12, 12)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "words"),
    [
        ([0, 4], [0, 2, 4], "1 documents but cu_seqlens_k 2"),
        ([1, 4], [0, 4], "cu_seqlens_q starts with 1"),
        ([0, 4], [0, 4, 2], "cu_seqlens_k.2.=2 is below"),
        ([0, 4.5], [0, 4], "cu_seqlens_q.*float"),
        ([0, 1 << 30], [0, 4], "32-bit"),
        ([], [0], "cu_seqlens_q starts with nothing"),
    ],
)
def test_wrong_offsets(cu_q: Any, cu_k: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        builders.from_cu_seqlens(cu_q, cu_k)


@pytest.mark.parametrize("window", [(1,), (1, 2, 3), 5, "ab", (0.5, 0), (1, "2")])
def test_wrong_windows(window: Any) -> None:
    with pytest.raises(InputError, match="window_size"):
        builders.from_cu_seqlens([0, 4], [0, 4], window_size=window)
    with pytest.raises(InputError, match="global_tokens=-1"):
        builders.sliding_window(4, 4, (1, 0), global_tokens=-1)


def test_prefix_lm() -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        edges = random_offsets(rng, int(rng.integers(0, 5)), 9)
        prefix = np.array([rng.integers(0, length + 1) for length in np.diff(edges)], int)
        expected = dense_documents(edges, edges, None, 0)
        for start, length in zip(edges[:-1], prefix, strict=True):
            expected[start : start + length, start : start + length] = True
        assert_mask_is(builders.prefix_lm(edges, prefix), expected)


@pytest.mark.parametrize(("prefix", "words"), [([3], "1 entries for 2"), ([3, 9], r"\[1\]=9.*\[0, 4\]"), ([-1, 0], r"\[0\]=-1")])
def test_wrong_prefixes(prefix: list[int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        builders.prefix_lm([0, 4, 8], prefix)


def dense_tree(lengths: list[int], parents: list[int]) -> np.ndarray:
    owner = np.repeat(np.arange(len(lengths)), lengths)
    expected = np.zeros((len(owner), len(owner)), bool)
    for i, segment in enumerate(owner):
        above = set()
        while segment >= 0:
            above.add(segment)
            segment = parents[segment]
        for j in range(i + 1):
            expected[i, j] = owner[j] in above
    return expected


def test_prefix_tree() -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        num_segments = int(rng.integers(0, 9))
        lengths = rng.integers(0, 6, num_segments).tolist()
        parents = [int(rng.integers(-1, segment)) for segment in range(num_segments)]
        assert_mask_is(builders.prefix_tree(lengths, parents), dense_tree(lengths, parents))


def test_shared_question_needs_one_slice_per_part() -> None:
    mask = builders.shared_question(5, [3, 0, 4])
    assert_mask_is(mask, dense_tree([5, 3, 0, 4], [-1, 0, 0, 0]))
    assert len(mask.slices) == 3
    assert_mask_is(builders.shared_question(0, []), np.zeros((0, 0), bool))


@pytest.mark.parametrize(
    ("lengths", "parents", "words"),
    [
        ([1, 2], [-1], "2 segments but parents 1"),
        ([1, 2], [-1, 1], r"parents\[1\]=1"),
        ([1, -2], [-1, 0], "-2"),
        ([1], [-2], r"parents\[0\]=-2"),
    ],
)
def test_wrong_trees(lengths: list[int], parents: list[int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        builders.prefix_tree(lengths, parents)


# ---- blocks ----


def test_block_maps_and_lists() -> None:
    rng = np.random.default_rng(3)
    for _ in range(80):
        total_q, total_k = (int(total) for total in rng.integers(0, 40, 2))
        q_size, k_size = (int(size) for size in rng.integers(1, 12, 2))
        visible = rng.random((-(-total_q // q_size), -(-total_k // k_size))) < rng.random()
        expected = np.repeat(np.repeat(visible, q_size, axis=0)[:total_q], k_size, axis=1)[:, :total_k]
        merged = builders.block_map(visible, total_q, total_k, q_size, k_size)
        assert_mask_is(merged, expected)
        single = builders.block_map(torch.from_numpy(visible), total_q, total_k, q_size, k_size, merge=False)
        assert_mask_is(single, expected)
        assert len(single.slices) == visible.sum() and len(merged.slices) <= len(single.slices)
        pairs = rng.permutation(np.argwhere(visible))
        assert builders.block_list(pairs, total_q, total_k, q_size, k_size) == merged


def test_merging_joins_whole_rectangles() -> None:
    assert len(builders.block_map(np.ones((7, 9), bool), 70, 90, 10, 10).slices) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: builders.block_map(np.ones((2, 2)), 4, 4, 2, 2), "float64"),
        (lambda: builders.block_map(np.ones((2, 3), bool), 4, 4, 2, 2), r"\[2, 3\].*\[2, 2\]"),
        (lambda: builders.block_map(np.ones((2, 2), bool), 4, 4, 2, 0), "k_block_size=0"),
        (lambda: builders.block_list([[0, 0], [0, 2]], 4, 4, 2, 2), r"blocks\[1\]=\(0, 2\): the key block"),
        (lambda: builders.block_list([[-1, 0]], 4, 4, 2, 2), "the query block"),
        (lambda: builders.block_list([[1, 0], [0, 1], [1, 0]], 4, 4, 2, 2), r"blocks\[0\] and blocks\[2\] are both \(1, 0\)"),
        (lambda: builders.block_list([[0.0, 1.0]], 4, 4, 2, 2), "float"),
    ],
)
def test_wrong_blocks(call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_block_causal_video() -> None:
    for num_frames in range(5):
        for frame_length in (1, 3, 8):
            for total in {num_frames * frame_length, max(num_frames * frame_length - 2, 0)}:
                for frames_back in (None, 0, 1, 2, 9):
                    frame = np.arange(total) // frame_length
                    distance = frame[:, None] - frame[None]
                    expected = (distance >= 0) & (distance <= (num_frames if frames_back is None else frames_back))
                    assert_mask_is(builders.block_causal_video(num_frames, frame_length, total, frames_back), expected)
    assert builders.block_causal_video(4, 6).total_q == 24


@pytest.mark.parametrize(("args", "words"), [((2, 0), "frame_length=0"), ((-1, 4), "num_frames=-1"), ((2, 4, 9), "total_tokens=9")])
def test_wrong_videos(args: tuple[int, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        builders.block_causal_video(*args)
