"""Masks for tests: a catalogue of named small ones and a generator of random valid slice sets. Knows no kernel and no plan.

Every planner and kernel test takes its masks from here, so a new kind of mask is tested everywhere once it is in the catalogue.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from magi_attention.mask import builders
from magi_attention.mask.slices import UNBOUNDED, AttnMask
from magi_attention.mask.typed_ranges import bands_from_types

Int32Array = npt.NDArray[np.int32]

EDGE_MULTIPLES = (1, 8, 64, 128)  # where tiles and chunks end; the errors live one token beside them


@functools.cache
def mask_catalogue() -> dict[str, AttnMask]:
    """Every kind of mask the library promises, small (at most 300 tokens a side), by name; the order never changes."""
    documents = [0, 5, 5, 8, 9, 73, 201]
    block_map = np.random.default_rng(0).random((6, 6)) < 0.4
    block_map[2] = False  # a row of blocks that sees nothing
    return {
        "empty": AttnMask.from_slices([], 0, 0),
        "no_slices": AttnMask.from_slices([], 33, 17),
        "no_keys": AttnMask.from_slices([], 16, 0),
        "no_queries": AttnMask.from_slices([], 0, 16),
        "one_cell": AttnMask.from_ranges([[3, 4]], [[6, 7]], None, 8, 8),
        "full": builders.sliding_window(96, 96, None),
        "causal": builders.sliding_window(130, 130, (None, 0)),
        "inv_causal": AttnMask.from_ranges([[0, 64]], [[0, 64]], ["inv_causal"], 64, 64),
        "bi_causal": AttnMask.from_ranges([[0, 40]], [[0, 72]], ["bi_causal"], 40, 72),
        "causal_more_queries": AttnMask.from_ranges([[0, 90]], [[0, 40]], ["causal"], 90, 40),
        "causal_more_keys": AttnMask.from_ranges([[0, 40]], [[0, 90]], ["causal"], 40, 90),
        "cross_full": AttnMask.from_ranges([[0, 31]], [[0, 129]], None, 31, 129),
        "diagonal": builders.sliding_window(65, 65, (0, 0)),
        "window": builders.sliding_window(200, 200, (31, 0)),
        "window_both_sides": builders.sliding_window(150, 150, (7, 12)),
        "window_cross": builders.sliding_window(70, 110, (16, 3)),
        "window_global": builders.sliding_window(160, 160, (15, 0), global_tokens=4),
        "documents_full": builders.from_cu_seqlens(documents, documents),
        "documents_causal": builders.from_cu_seqlens(documents, documents, causal=True),
        "documents_window": builders.from_cu_seqlens(documents, documents, window_size=(8, 0)),
        "documents_window_global": builders.from_cu_seqlens(documents, documents, True, (12, 0), 3),
        "documents_cross": builders.from_cu_seqlens([0, 0, 7, 40, 64], [0, 12, 12, 30, 130], causal=True),
        "prefix_lm": builders.prefix_lm([0, 20, 90, 90, 128], [6, 0, 0, 38]),
        "prefix_tree": builders.prefix_tree([17, 9, 0, 24, 13, 5, 21], [-1, 0, 1, 1, 0, -1, 5]),
        "prefix_tree_breadth_first": builders.prefix_tree([10, 8, 7, 6, 5, 4], [-1, 0, 0, 1, 2, 1]),
        "shared_question": builders.shared_question(40, [13, 0, 29, 8]),
        "block_map": builders.block_map(block_map, 180, 170, 32, 32),
        "block_map_unmerged": builders.block_map(block_map, 180, 170, 32, 32, merge=False),
        "video": builders.block_causal_video(5, 24, total_tokens=110),
        "video_frames_back": builders.block_causal_video(6, 16, frames_back=2),
        "every_row_sees_key_0": AttnMask.from_ranges([[0, 128]], [[0, 1]], None, 128, 128),
        "one_key_per_segment": AttnMask.from_ranges([[0, 76], [76, 110], [110, 256]], [[0, 1], [1, 2], [2, 3]], ["causal"] * 3, 256, 3),
        "rows_without_keys": AttnMask.from_ranges([[0, 64], [128, 256]], [[0, 64], [0, 256]], None, 256, 256),
        "split_at_the_diagonal": AttnMask.from_slices(
            [[0, 99, 0, 99, -UNBOUNDED, -9], [0, 99, 0, 99, -8, 4], [0, 99, 0, 99, 5, UNBOUNDED]], 99, 99
        ),
        "overlapping_queries": AttnMask.from_ranges([[0, 64], [0, 64]], [[0, 128], [128, 192]], ["full", "causal"], 64, 192),
        "overlapping_keys": AttnMask.from_ranges([[0, 30], [30, 100]], [[0, 80], [0, 80]], ["inv_causal", "causal"], 100, 80),
    }


def random_slices(
    rng: np.random.Generator, total_q: int, total_k: int, *, max_slices: int = 12, bands: bool = True, empties: bool = True
) -> Int32Array:
    """A random valid slice set (no cell covered twice), in random order, not tightened.

    Edges lie at multiples of 1, 8, 64 or 128 and one token beside; all four types and free bands occur, rows without keys are
    common, and slices touch along rows, columns and diagonals. Builds a total_q x total_k array: for small totals.

    Args:
        rng: the only source of randomness.
        total_q, total_k: tokens on each side; may be 0.
        max_slices: at most so many non-empty ones.
        bands: False keeps to the four user-level types.
        empties: also zero-length ranges and bands without a cell.

    Returns:
        int32 [N, 6], ready for `AttnMask.from_slices`.
    """
    is_taken = np.zeros((total_q, total_k), bool)
    wanted = int(rng.integers(0, max_slices + 1))
    kept: list[Int32Array] = []
    for _ in range(3 * wanted):
        pieces = _random_piece(rng, total_q, total_k, bands)
        for piece in pieces[: wanted - len(kept)]:
            cells = _cells(piece)
            box = is_taken[piece[0] : piece[1], piece[2] : piece[3]]
            if cells.any() and not (box & cells).any():
                box |= cells
                kept.append(piece)
    if empties:
        kept += [_empty_slice(rng, total_q, total_k, bands) for _ in range(int(rng.integers(0, 3)))]
    order = rng.permutation(len(kept))
    return np.array([kept[idx] for idx in order], np.int32).reshape(-1, 6)


def random_typed_ranges(
    rng: np.random.Generator, total_q: int, total_k: int, *, max_slices: int = 12
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """A random valid mask as callers write it: q_ranges [n, 2], k_ranges [n, 2], types [n] (0..3), no cell covered twice."""
    slices = random_slices(rng, total_q, total_k, max_slices=max_slices, bands=False, empties=True).astype(np.int64)
    types = 2 * (slices[:, 4] > -UNBOUNDED) + (slices[:, 5] < UNBOUNDED)
    return slices[:, 0:2], slices[:, 2:4], types.astype(np.int64)


def random_mask(rng: np.random.Generator, total_q: int, total_k: int, *, max_slices: int = 12) -> AttnMask:
    """`random_slices` as a mask."""
    return AttnMask.from_slices(random_slices(rng, total_q, total_k, max_slices=max_slices), total_q, total_k)


def _random_box(rng: np.random.Generator, total_q: int, total_k: int) -> tuple[int, int, int, int]:
    """(q_start, q_end, k_start, k_end) with edges at and beside the multiples; drawn together, since draws are what takes time."""
    totals = np.array([total_q, total_q, total_k, total_k])
    multiples = np.array(EDGE_MULTIPLES)[rng.integers(0, len(EDGE_MULTIPLES), 4)]
    edges = multiples * rng.integers(0, totals // multiples + 2) + rng.integers(-1, 2, 4)
    first_q, second_q, first_k, second_k = edges.clip(0, totals).tolist()
    return min(first_q, second_q), max(first_q, second_q), min(first_k, second_k), max(first_k, second_k)


def _random_piece(rng: np.random.Generator, total_q: int, total_k: int, bands: bool) -> list[Int32Array]:
    """One random slice, or two that tile it: cut along rows, keys or (bands only) a diagonal."""
    q_start, q_end, k_start, k_end = _random_box(rng, total_q, total_k)
    if not bands or rng.random() < 0.6:
        ranges = np.array([[q_start, q_end], [k_start, k_end]], np.int64)
        return [bands_from_types(ranges[:1], ranges[1:], rng.integers(0, 4, 1))[0]]
    middle = (k_start + k_end - q_start - q_end) // 2
    spread = max(q_end - q_start, k_end - k_start) // 2 + 2
    lo, hi = sorted(middle + int(offset) for offset in rng.integers(-spread, spread + 1, 2))
    lo, hi = (-UNBOUNDED if rng.random() < 0.2 else lo), (UNBOUNDED if rng.random() < 0.2 else hi)
    whole = np.array([q_start, q_end, k_start, k_end, lo, hi], np.int32)
    cut = int(rng.integers(0, 4))
    if cut == 0:
        return [whole]
    low, high = whole.copy(), whole.copy()
    if cut == 1:
        low[1] = high[0] = rng.integers(q_start, q_end + 1)
    elif cut == 2:
        low[3] = high[2] = rng.integers(k_start, k_end + 1)
    else:
        low[5] = middle
        high[4] = middle + 1
        low[4], high[5] = min(low[4], middle), max(high[5], middle + 1)
    return [low, high]


def _empty_slice(rng: np.random.Generator, total_q: int, total_k: int, bands: bool) -> Int32Array:
    q_start, q_end, k_start, k_end = _random_box(rng, total_q, total_k)
    kind = int(rng.integers(0, 3 if bands else 2))
    if kind == 2:
        return np.array([q_start, q_end, k_start, k_end, 1, 0], np.int32)
    if kind == 1:
        q_end = q_start
    else:
        k_end = k_start
    return np.array([q_start, q_end, k_start, k_end, -UNBOUNDED, UNBOUNDED], np.int32)


def _cells(slice_record: Int32Array) -> npt.NDArray[np.bool_]:
    q_start, q_end, k_start, k_end, lo, hi = slice_record.tolist()
    distance = np.arange(k_start, k_end)[None, :] - np.arange(q_start, q_end)[:, None]
    inside: npt.NDArray[np.bool_] = (lo <= distance) & (distance <= hi)
    return inside
