"""Masks that people train with, as band slices. A new kind of mask is one function here; planner and kernels only see slices.

Every builder's slices are disjoint by construction, so they skip the search for doubly covered cells; the tests compare each with
its definition on dense arrays. Knows nothing of ranks, chunks or kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from magi_attention.arguments import Int64Array, count, flag, int_array, shown
from magi_attention.errors import InputError
from magi_attention.mask.attn_range import AttnRange
from magi_attention.mask.inputs import offsets
from magi_attention.mask.mask_type import AttnMaskType
from magi_attention.mask.ranges import AttnRanges
from magi_attention.mask.slices import MAX_TOKENS, UNBOUNDED, AttnMask

Window = Sequence[int | None]


def window_bounds(window_size: Window | None, causal: bool = False) -> tuple[int, int]:
    """(left, right) token counts around the aligned diagonal; UNBOUNDED where there is no bound.

    Args:
        window_size: (left, right), each an int >= 0, or None or -1 for no bound; None for no window.
        causal: caps right at 0.

    Raises:
        InputError: not a pair, or a number below -1.
    """
    sides: Any = (None, None) if window_size is None else window_size
    if hasattr(sides, "dtype"):
        sides = int_array("window_size", sides).tolist()
    if not isinstance(sides, Sequence) or isinstance(sides, (str, bytes)) or len(sides) != 2:
        raise InputError(f"window_size={shown(window_size)} must be a pair (left, right); None or -1 leaves a side unbounded")
    left, right = (UNBOUNDED if side is None else count(f"window_size[{idx}]", side, -1, UNBOUNDED) for idx, side in enumerate(sides))
    left, right = (UNBOUNDED if side == -1 else side for side in (left, right))
    return left, min(right, 0) if flag("causal", causal) else right


# ---- documents ----


def from_cu_seqlens(
    cu_seqlens_q: Any, cu_seqlens_k: Any, causal: bool = False, window_size: Window | None = (-1, -1), global_tokens: int = 0
) -> AttnMask:
    """Packed documents: query i of a document sees key j of the same document when i + o - left <= j <= i + o + right.

    i and j count from the document's start, o = its keys - its queries (bottom-right alignment, the last query is level with the
    last key).

    Args:
        cu_seqlens_q, cu_seqlens_k: int [num_documents + 1] cumulative lengths; documents of length 0 are fine.
        causal: no key beyond the aligned diagonal, whatever window_size says on the right.
        window_size: (left, right), None or -1 unbounded.
        global_tokens: the first so many keys of each document are seen from any distance on the left; the right bound holds.

    Raises:
        InputError: offsets that do not start with 0 or fall, unequal numbers of documents, a window below -1.
    """
    q, k = offsets("cu_seqlens_q", cu_seqlens_q, MAX_TOKENS), offsets("cu_seqlens_k", cu_seqlens_k, MAX_TOKENS)
    if len(q) != len(k):
        raise InputError(f"cu_seqlens_q holds {len(q) - 1} documents but cu_seqlens_k {len(k) - 1}; both must describe the same ones")
    left, right = window_bounds(window_size, causal)
    global_tokens = count("global_tokens", global_tokens, 0, MAX_TOKENS)
    diagonal = k[1:] - q[1:]
    hi = np.full(len(diagonal), UNBOUNDED) if right == UNBOUNDED else diagonal + right
    no_bound = np.full(len(diagonal), -UNBOUNDED)
    if left == UNBOUNDED:
        return _disjoint(np.column_stack([q[:-1], q[1:], k[:-1], k[1:], no_bound, hi]), int(q[-1]), int(k[-1]))
    global_end = np.minimum(k[:-1] + global_tokens, k[1:])
    prefixes = np.column_stack([q[:-1], q[1:], k[:-1], global_end, no_bound, hi])
    windows = np.column_stack([q[:-1], q[1:], global_end, k[1:], diagonal - left, hi])
    return _disjoint(np.concatenate([prefixes, windows]), int(q[-1]), int(k[-1]))


def sliding_window(total_q: int, total_k: int, window_size: Window | None, global_tokens: int = 0) -> AttnMask:
    """One document: `from_cu_seqlens` with a single entry. window_size=(None, 0) is causal, (None, None) full."""
    q, k = (count(name, total, 0, MAX_TOKENS) for name, total in (("total_q", total_q), ("total_k", total_k)))
    return from_cu_seqlens([0, q], [0, k], window_size=window_size, global_tokens=global_tokens)


def prefix_lm(cu_seqlens: Any, prefix_lengths: Any) -> AttnMask:
    """Packed documents whose first tokens (the prompt) all see each other; the rest is causal and sees the prompt.

    Args:
        cu_seqlens: int [num_documents + 1].
        prefix_lengths: int [num_documents], prompt tokens of each document.

    Raises:
        InputError: wrong offsets, another number of prefixes, or a prefix longer than its document.
    """
    edges = offsets("cu_seqlens", cu_seqlens, MAX_TOKENS)
    prefix = int_array("prefix_lengths", prefix_lengths)
    start, end = edges[:-1], edges[1:]
    if len(prefix) != len(start):
        raise InputError(f"prefix_lengths has {len(prefix)} entries for {len(start)} documents; pass one per document")
    is_wrong = (prefix < 0) | (prefix > end - start)
    if is_wrong.any():
        idx = int(np.argmax(is_wrong))
        raise InputError(f"prefix_lengths[{idx}]={int(prefix[idx])} must be in [0, {int(end[idx] - start[idx])}], its document's length")
    middle, bound = start + prefix, np.full(len(start), UNBOUNDED)
    prompts = np.column_stack([start, end, start, middle, -bound, bound])
    answers = np.column_stack([middle, end, middle, end, -bound, np.zeros_like(bound)])
    return _disjoint(np.concatenate([prompts, answers]), int(edges[-1]), int(edges[-1]))


def prefix_tree(lengths: Any, parents: Any) -> AttnMask:
    """A forest of text segments: a token sees its own segment up to itself and every token of the segments above it.

    Args:
        lengths: int [num_segments] tokens of each segment, in token order.
        parents: int [num_segments] index of the segment above, -1 for a root; always smaller than the segment's own index.

    Raises:
        InputError: unequal numbers, a negative length, or a parent that is not an earlier segment.
    """
    sizes, above = int_array("lengths", lengths), int_array("parents", parents)
    if len(sizes) != len(above):
        raise InputError(f"lengths has {len(sizes)} segments but parents {len(above)}; pass one parent per segment, -1 for a root")
    if len(sizes) and sizes.min() < 0:
        raise InputError(f"lengths[{int(np.argmin(sizes))}]={int(sizes.min())} must not be negative")
    is_wrong = (above < -1) | (above >= np.arange(len(above)))
    if is_wrong.any():
        idx = int(np.argmax(is_wrong))
        raise InputError(f"parents[{idx}]={int(above[idx])} must be -1 or an earlier segment (below {idx}); order segments top down")
    edges = offsets("lengths (summed)", np.concatenate([[0], np.cumsum(sizes)]), MAX_TOKENS).tolist()
    parent_of = above.tolist()
    # Runs of tokens that see segment s: itself and what hangs below it, one run when the segments are in depth-first order.
    viewers: list[list[list[int]]] = [[] for _ in parent_of]
    for segment, (start, end) in enumerate(itertools.pairwise(edges)):
        ancestor = segment
        while ancestor >= 0:
            runs = viewers[ancestor]
            if runs and runs[-1][1] == start:
                runs[-1][1] = end
            else:
                runs.append([start, end])
            ancestor = parent_of[ancestor]
    rows = [[*run, edges[s], edges[s + 1], -UNBOUNDED, 0] for s, runs in enumerate(viewers) for run in runs]
    return _disjoint(rows, edges[-1], edges[-1])


def shared_question(question_length: int, answer_lengths: Sequence[int]) -> AttnMask:
    """One question followed by several answers: each answer sees the question and itself, causally, not the other answers.

    Raises:
        InputError: a negative length.
    """
    question = count("question_length", question_length, 0, MAX_TOKENS)
    answers = int_array("answer_lengths", answer_lengths).tolist()
    return prefix_tree([question, *answers], [-1, *[0] * len(answers)])


# ---- blocks ----


def block_causal_video(num_frames: int, frame_length: int, total_tokens: int | None = None, frames_back: int | None = None) -> AttnMask:
    """Every token sees its own frame and all earlier ones.

    Args:
        num_frames, frame_length: frames of frame_length tokens each.
        total_tokens: tokens in all, when the last frame is short; num_frames * frame_length by default.
        frames_back: only so many earlier frames; None for all.

    Raises:
        InputError: numbers out of range.
    """
    frame_length = count("frame_length", frame_length, 1, MAX_TOKENS)
    num_frames = count("num_frames", num_frames, 0, MAX_TOKENS // frame_length + 1)
    most = num_frames * frame_length
    total = min(most, MAX_TOKENS) if total_tokens is None else count("total_tokens", total_tokens, 0, min(most, MAX_TOKENS))
    frame = np.arange(num_frames, dtype=np.int64)
    first = np.zeros_like(frame) if frames_back is None else np.maximum(frame - count("frames_back", frames_back, 0, MAX_TOKENS), 0)
    start, end = np.minimum(frame * frame_length, total), np.minimum((frame + 1) * frame_length, total)
    bound = np.full(num_frames, UNBOUNDED)
    return _disjoint(np.column_stack([start, end, np.minimum(first * frame_length, total), end, -bound, bound]), total, total)


def block_map(is_visible: Any, total_q: int, total_k: int, q_block_size: int, k_block_size: int, merge: bool = True) -> AttnMask:
    """Block (a, b) of queries [a * q_block_size, ...) and keys [b * k_block_size, ...) is visible where is_visible[a, b].

    Args:
        is_visible: bool [num_q_blocks, num_k_blocks]; the last block of either side may be short.
        merge: join neighbouring blocks into larger slices; False keeps one slice per block (same cells).

    Raises:
        InputError: no bool matrix, or another shape than the totals and block sizes give.
    """
    visible = _bool_matrix(is_visible)
    q_block_size, k_block_size = count("q_block_size", q_block_size, 1, MAX_TOKENS), count("k_block_size", k_block_size, 1, MAX_TOKENS)
    shape = (-(-count("total_q", total_q, 0, MAX_TOKENS) // q_block_size), -(-count("total_k", total_k, 0, MAX_TOKENS) // k_block_size))
    if visible.shape != shape and (visible.size or 0 not in shape):
        raise InputError(f"is_visible has shape {list(visible.shape)}; total_q, total_k and the block sizes give {list(shape)} blocks")
    q_blocks, k_blocks = np.nonzero(visible.reshape(shape))
    return _blocks(np.column_stack([q_blocks, k_blocks]), total_q, total_k, (q_block_size, k_block_size), merge)


def _bool_matrix(is_visible: Any) -> npt.NDArray[np.bool_]:
    if hasattr(is_visible, "detach") and str(is_visible.dtype) != "torch.bool":
        raise InputError(f"is_visible has {is_visible.dtype} values; it must be bool; compare it with what you mean, e.g. is_visible > 0")
    try:
        visible = np.asarray(is_visible.detach().cpu().numpy() if hasattr(is_visible, "detach") else is_visible)
    except (TypeError, ValueError, RuntimeError) as fault:
        raise InputError(f"is_visible={shown(is_visible)} is no bool matrix ({fault}); give every row the same length") from None
    if visible.size and visible.dtype != np.bool_:
        raise InputError(f"is_visible has {visible.dtype} values; it must be bool; compare it with what you mean, e.g. is_visible > 0")
    return visible


def block_list(blocks: Any, total_q: int, total_k: int, q_block_size: int, k_block_size: int, merge: bool = True) -> AttnMask:
    """Like `block_map`, from the visible blocks alone: int [n, 2] (query block, key block) in any order.

    Raises:
        InputError: a block outside the mask, or one listed twice.
    """
    pairs = int_array("blocks", blocks, columns=2)
    sizes = count("q_block_size", q_block_size, 1, MAX_TOKENS), count("k_block_size", k_block_size, 1, MAX_TOKENS)
    for column, total, name in ((0, total_q, "query"), (1, total_k, "key")):
        num_blocks = -(-count(f"total_{name[0]}", total, 0, MAX_TOKENS) // sizes[column])
        is_wrong = (pairs[:, column] < 0) | (pairs[:, column] >= num_blocks)
        if is_wrong.any():
            idx = int(np.argmax(is_wrong))
            raise InputError(f"blocks[{idx}]={tuple(pairs[idx].tolist())}: the {name} block must be in [0, {num_blocks})")
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    pairs = pairs[order]
    is_double = (np.diff(pairs, axis=0) == 0).all(axis=1)
    if is_double.any():
        at = int(np.argmax(is_double))
        raise InputError(
            f"blocks[{int(order[at])}] and blocks[{int(order[at + 1])}] are both {tuple(pairs[at].tolist())}; list each block once"
        )
    return _blocks(pairs, total_q, total_k, sizes, merge)


def _blocks(pairs: Int64Array, total_q: int, total_k: int, sizes: tuple[int, int], merge: bool) -> AttnMask:
    """From distinct block pairs [n, 2] sorted by (query block, key block)."""
    rect = np.column_stack([pairs[:, 0], pairs[:, 0] + 1, pairs[:, 1], pairs[:, 1] + 1])
    if merge:
        rect = _join_runs(rect, along=2, same=(0, 1))  # neighbours in one line of blocks
        rect = rect[np.lexsort((rect[:, 0], rect[:, 3], rect[:, 2]))]
        rect = _join_runs(rect, along=0, same=(2, 3))  # equal runs in consecutive lines
    rect = np.minimum(rect * np.repeat(sizes, 2), [total_q, total_q, total_k, total_k])
    bound = np.full(len(rect), UNBOUNDED)
    return _disjoint(np.column_stack([rect, -bound, bound]), total_q, total_k)


def _join_runs(rect: Int64Array, along: int, same: tuple[int, int]) -> Int64Array:
    """Join consecutive rectangles (start, end in columns along, along + 1) that touch and agree in the columns `same`."""
    if not len(rect):
        return rect
    is_joined = rect[1:, along] == rect[:-1, along + 1]
    for column in same:
        is_joined &= rect[1:, column] == rect[:-1, column]
    first = np.flatnonzero(np.concatenate([[True], ~is_joined]))
    joined: Int64Array = rect[first].copy()
    joined[:, along + 1] = rect[np.append(first[1:], len(rect)) - 1, along + 1]
    return joined


def _disjoint(slices: Any, total_q: int, total_k: int) -> AttnMask:
    return AttnMask.from_slices(slices, total_q, total_k, check_overlap=False)


# ---- in the four user-level types ----


def infer_attn_mask_from_sliding_window(
    q_range: AttnRange, k_range: AttnRange, window_size: Window | None
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
    """A window on one (q_range, k_range), bottom-right aligned, in at most three ranges of the four types.

    Args:
        q_range, k_range: of any two lengths; pairs are taken too.
        window_size: (left, right), None or -1 unbounded, larger than the range is fine.

    Returns:
        (q_ranges, k_ranges, types); queries that see nothing are in no range.

    Raises:
        InputError: an invalid range or a window below -1.
    """
    q, k = AttnRange.from_range(q_range, check=True), AttnRange.from_range(k_range, check=True)
    left, right = window_bounds(window_size)
    diagonal = k.end - q.end
    lo = -UNBOUNDED if left == UNBOUNDED else diagonal - left
    hi = UNBOUNDED if right == UNBOUNDED else diagonal + right
    return _disjoint([[q.start, q.end, k.start, k.end, lo, hi]], q.end, k.end).to_ranges()


def infer_attn_mask_from_cu_seqlens(
    cu_seqlens_q: Any, cu_seqlens_k: Any, causal: bool = False, window_size: Window | None = (-1, -1), global_window_size: int = 0
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType], int, int]:
    """`from_cu_seqlens` in the four user-level types, global_window_size being its global_tokens.

    Returns:
        (q_ranges, k_ranges, types, total_q, total_k), ranges in token order, no cell twice.

    Raises:
        InputError: as from_cu_seqlens.
    """
    mask = from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, causal, window_size, global_window_size)
    return (*mask.to_ranges(), mask.total_q, mask.total_k)
