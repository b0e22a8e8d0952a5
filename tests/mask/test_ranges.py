"""AttnRange and AttnRanges against sets of tokens."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magi_attention.common import AttnRange, AttnRanges
from magi_attention.errors import InputError

bounds = st.integers(0, 30)
valid_pairs = st.tuples(bounds, bounds).map(lambda pair: (min(pair), max(pair)))
pair_lists = st.lists(valid_pairs, max_size=8)


def tokens(*ranges: AttnRange) -> list[int]:
    return [token for attn_range in ranges for token in range(attn_range.start, attn_range.end)]


# ---- one range ----


@given(valid_pairs, valid_pairs)
def test_range_algebra_is_set_algebra(first: tuple[int, int], second: tuple[int, int]) -> None:
    a, b = AttnRange(*first), AttnRange(*second)
    set_a, set_b = set(tokens(a)), set(tokens(b))
    assert set(tokens(a.intersect(b))) == set_a & set_b
    assert a.intersect_size(b) == len(set_a & set_b)
    assert a.is_overlap_with(b) == bool(set_a & set_b)
    union = a.union(b)
    assert sorted(tokens(*union)) == sorted(set_a | set_b) and union == sorted(union)
    assert a.union_size(b) == len(set_a | set_b)
    assert tokens(*a.diff_by(b)) == sorted(set_b - set_a)
    assert a.is_subrange_of(b) == (set_a <= set_b)
    assert a.seqlen == len(a) == len(set_a)
    assert a.is_empty() == (not set_a)
    assert (a == b) == (first == second) and (a != b or hash(a) == hash(b))


@given(valid_pairs, st.integers(-40, 40), st.none() | bounds, st.none() | bounds)
def test_offset_and_truncate(pair: tuple[int, int], delta: int, start: int | None, end: int | None) -> None:
    attn_range = AttnRange(*pair)
    assert tokens(attn_range.offset(delta)) == [token + delta for token in tokens(attn_range)]
    kept = attn_range.truncate(start, end)
    assert tokens(kept) == [t for t in tokens(attn_range) if (start is None or t >= start) and (end is None or t < end)]
    assert kept.is_valid()


def test_range_conversions_and_text() -> None:
    made = AttnRange.from_range([np.int32(3), np.int64(9)])
    assert made == AttnRange.from_range(AttnRange(3, 9)) == AttnRange(start=3, end=9) == made.clone()
    assert made.to_naive_range() == (3, 9) and repr(made) == "[3, 9)" and type(made.start) is int
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize("pair", [(5, 3), (-1, 3)])
def test_invalid_ranges_can_be_asked_and_refused(pair: tuple[int, int]) -> None:
    assert not AttnRange(*pair).is_valid()
    with pytest.raises(InputError, match="0 <= start <= end"):
        AttnRange.from_range(pair, check=True)
    with pytest.raises(InputError, match=r"ranges\[1\]"):
        AttnRanges.from_ranges([(0, 1), pair], check=True)


@pytest.mark.parametrize("wrong", [(1.0, 2), (0, None), ("0", 2)])
def test_bounds_must_be_integers(wrong: tuple[object, object]) -> None:
    with pytest.raises(InputError, match="must be an int"):
        AttnRange(*wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [(1, 2, 3), 7, (1,)])
def test_from_range_needs_a_pair(wrong: object) -> None:
    with pytest.raises(InputError, match="pair"):
        AttnRange.from_range(wrong)  # type: ignore[arg-type]


# ---- lists of ranges ----


@given(pair_lists, pair_lists)
def test_list_algebra_is_set_algebra(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    a, b = AttnRanges.from_ranges(first), AttnRanges.from_ranges(second)
    set_a, set_b = set(tokens(*a)), set(tokens(*b))
    for result, expected in (
        (a.merge(), set_a),
        (a.intersect(b), set_a & set_b),
        (a.find_overlap_ranges(b), set_a & set_b),
        (a.union(b), set_a | set_b),
        (a.find_hole_ranges(b), set_a - set_b),
    ):
        assert tokens(*result) == sorted(expected)
        assert result.is_merged() and result.is_sorted() and result.is_non_overlap()
        gaps = result.to_array()
        assert (gaps[1:, 0] > gaps[:-1, 1]).all(), "touching ranges must be joined"
    assert a.total_seqlen == len(tokens(*a))
    assert a.is_non_overlap() == (len(tokens(*a)) == len(set_a))
    assert a.max_seqlen == max((end - start for start, end in first), default=0)
    assert a.points == sorted({bound for pair in first for bound in pair})


@given(pair_lists)
def test_list_protocol(pairs: list[tuple[int, int]]) -> None:
    ranges = AttnRanges.from_ranges(pairs)
    grown = AttnRanges()
    for pair in pairs:
        grown.append(AttnRange(*pair))
    assert grown == ranges == ranges.clone() and len(ranges) == ranges.size == len(pairs)
    assert ranges.to_naive_ranges() == pairs == [r.to_naive_range() for r in ranges]
    assert ranges.is_empty() == (not pairs)
    assert ranges.sort().to_naive_ranges() == sorted(pairs)
    assert ranges.clear_empty().to_naive_ranges() == [pair for pair in pairs if pair[0] < pair[1]]
    assert [ranges[idx].to_naive_range() for idx in range(-len(pairs), len(pairs))] == pairs * 2
    assert ranges[1:].to_naive_ranges() == pairs[1:]
    if pairs:
        assert (ranges.start, ranges.end) == (min(p[0] for p in pairs), max(p[1] for p in pairs))
        assert grown.pop().to_naive_range() == pairs[-1]
        assert grown.to_naive_ranges() == pairs[:-1]
    ranges.extend(grown)
    ranges.insert(0, (7, 8))
    assert ranges.to_naive_ranges() == [(7, 8), *pairs, *pairs[:-1]]


def test_from_cu_seqlens_and_back() -> None:
    ranges = AttnRanges.from_cu_seqlens([0, 3, 3, 10], 10)
    assert ranges.to_naive_ranges() == [(0, 3), (3, 3), (3, 10)]
    assert ranges.is_cu_seqlens(10) and not ranges.is_cu_seqlens(11)
    assert ranges.to_cu_seqlens(10) == [0, 3, 3, 10]
    assert AttnRanges.from_cu_seqlens(torch.tensor([0, 3, 3, 10], dtype=torch.int32)) == ranges
    assert AttnRanges.from_cu_seqlens([0]).is_empty()
    with pytest.raises(InputError, match="does not tile"):
        AttnRanges.from_ranges([(0, 3), (4, 10)]).to_cu_seqlens(10)


@pytest.mark.parametrize(
    ("cu_seqlens", "fault"), [([1, 4], "start with 0"), ([], "start with 0"), ([0, 5, 4], "must not fall"), ([0, 2.5], "integers")]
)
def test_wrong_cu_seqlens(cu_seqlens: list[float], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        AttnRanges.from_cu_seqlens(cu_seqlens)


def test_cu_seqlens_must_end_at_the_total() -> None:
    with pytest.raises(InputError, match="seq_len=9"):
        AttnRanges.from_cu_seqlens([0, 10], 9)


def test_empty_lists_have_no_ends() -> None:
    with pytest.raises(InputError, match="no range"):
        _ = AttnRanges().start
    with pytest.raises(IndexError):
        AttnRanges()[0]
    assert AttnRanges().total_seqlen == 0 and AttnRanges().merge().is_empty() and AttnRanges().is_valid()


def test_to_tensor() -> None:
    made = AttnRanges.from_ranges([(0, 3), (5, 9)]).to_tensor()
    assert made.dtype == torch.int32 and made.tolist() == [[0, 3], [5, 9]]
    assert AttnRanges().to_tensor().shape == (0, 2)
    assert AttnRanges.from_ranges(made) == AttnRanges.from_ranges([(0, 3), (5, 9)])


def test_masks_and_ranges_import_no_torch() -> None:
    code = "import sys, magi_attention.common, magi_attention.mask.builders; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_import_paths_of_the_peer_library() -> None:
    from magi_attention.common.enum import AttnMaskType, AttnOverlapMode
    from magi_attention.common.range import AttnRange as by_range
    from magi_attention.common.ranges import AttnRanges as by_ranges

    assert by_range is AttnRange and by_ranges is AttnRanges
    assert AttnMaskType("bi_causal").to_int_type() == 3 and AttnOverlapMode.STATIC
