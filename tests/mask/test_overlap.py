"""The sweep that finds doubly covered cells, against dense cover counts."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention import _native
from magi_attention.common import AttnMask
from magi_attention.errors import InputError
from magi_attention.mask.dense import cover_count
from magi_attention.mask.slices import UNBOUNDED
from magi_attention.testing.masks import random_slices


def found_overlap(slices: np.ndarray) -> list[int]:
    return _native.run("canonical", slices=np.ascontiguousarray(slices, np.int32), check=1)["overlap"].tolist()


def assert_sweep_is_right(slices: np.ndarray, total_q: int, total_k: int) -> bool:
    """The sweep reports a pair exactly when the dense cover has a cell above 1, and the pair's count is right."""
    overlap = found_overlap(slices)
    if cover_count(slices, total_q, total_k).max(initial=0) <= 1:
        assert overlap == [], slices.tolist()
        return False
    first, second, num_cells = overlap
    assert 0 <= first < second < len(slices)
    pair = cover_count(slices[[first, second]], total_q, total_k)
    assert num_cells == (pair == 2).sum() > 0
    return True


def wild_slices(rng: np.random.Generator, num_slices: int, total: int) -> np.ndarray:
    """Any slices at all, overlapping or not."""
    ends = np.sort(rng.integers(0, total + 1, (num_slices, 2, 2)), axis=2).reshape(num_slices, 4)
    lo = np.where(rng.random(num_slices) < 0.3, -UNBOUNDED, rng.integers(-total, total, num_slices))
    hi = np.where(rng.random(num_slices) < 0.3, UNBOUNDED, lo.clip(-total) + rng.integers(0, 3, num_slices))
    return np.column_stack([ends, lo, hi]).astype(np.int32)


def test_tiny_random_sets() -> None:
    rng = np.random.default_rng(0)
    verdicts = [assert_sweep_is_right(wild_slices(rng, int(rng.integers(2, 9)), 7), 7, 7) for _ in range(4_000)]
    assert 800 < sum(verdicts) < 3_500, "both verdicts must be common for the test to mean anything"


def test_valid_sets_with_one_slice_grown_by_one_token() -> None:
    """The hardest sets: everything touches, and one edge or bound is off by one."""
    rng = np.random.default_rng(1)
    verdicts = []
    for _ in range(800):
        total_q, total_k = (int(total) for total in rng.integers(1, 25, 2))
        slices = random_slices(rng, total_q, total_k, max_slices=16)
        assert not assert_sweep_is_right(slices, total_q, total_k)
        if len(slices):
            row, column = int(rng.integers(0, len(slices))), int(rng.integers(0, 6))
            slices[row, column] += 1 if column in (1, 3, 5) else -1
            slices[row, :4] = slices[row, :4].clip(0, [total_q, total_q, total_k, total_k])
            verdicts.append(assert_sweep_is_right(slices, total_q, total_k))
    assert 0.1 < np.mean(verdicts) < 0.9


def test_diagonals_that_touch_and_meet() -> None:
    """Many bands active at once, each one key wide; then one of them two wide."""
    total = 60
    lo = np.arange(-total + 1, total)
    full = np.zeros_like(lo)
    slices = np.column_stack([full, full + total, full, full + total, lo, lo]).astype(np.int32)
    assert found_overlap(slices) == [] and cover_count(slices, total, total).min() == 1
    slices[70, 5] += 1
    assert found_overlap(slices) == [70, 71, total - 12]


def test_slices_that_meet_only_after_the_one_between_them_ended() -> None:
    # A band and a block are kept apart by a short block, and meet in row 6 of 10.
    band = [0, 10, 0, 20, -UNBOUNDED, 2]
    between = [0, 3, 4, 8, 1, UNBOUNDED]
    right = [0, 10, 8, 20, -UNBOUNDED, UNBOUNDED]
    slices = np.array([right, between, band], np.int32)
    slices[1, 4] = 3  # the short block starts right of the band
    assert found_overlap(slices)[:2] == [0, 2]
    assert_sweep_is_right(slices, 10, 20)


def test_the_reported_pair_does_not_depend_on_what_else_is_there() -> None:
    total = 40
    disjoint = [[row, row + 1, 0, total, -UNBOUNDED, UNBOUNDED] for row in range(10)]
    doubled = [[20, 30, 0, 10, -UNBOUNDED, UNBOUNDED], [25, 35, 5, 15, -UNBOUNDED, UNBOUNDED]]
    assert found_overlap(np.array(doubled)) == [0, 1, 25]
    assert found_overlap(np.array(disjoint + doubled)) == [10, 11, 25]
    assert found_overlap(np.array(doubled[::-1] + disjoint)) == [0, 1, 25]


def test_the_message_names_both_slices() -> None:
    records = [[0, 8, 0, 8, -UNBOUNDED, 0], [9, 9, 0, 8, 0, 0], [4, 12, 2, 6, -3, 5]]
    num_cells = int((cover_count(records, 12, 8) == 2).sum())
    with pytest.raises(InputError) as caught:
        AttnMask.from_slices(records, 12, 8)
    for words in (f"slices[0]={tuple(records[0])}", f"slices[2]={tuple(records[2])}", f"{num_cells} cells twice"):
        assert words in str(caught.value)
    unchecked = AttnMask.from_slices(records, 12, 8, check_overlap=False)
    assert len(unchecked.slices) == 2


def test_a_slice_given_twice_is_found_among_many() -> None:
    starts = np.arange(20_000) * 3
    ranges = np.column_stack([starts, starts + 3])
    total = 60_000
    AttnMask.from_ranges(ranges, ranges, "causal", total, total)
    with pytest.raises(InputError, match=r"entry 777 .* entry 20000 .* cover 6 cells twice"):
        AttnMask.from_ranges(np.vstack([ranges, ranges[777]]), np.vstack([ranges, ranges[777]]), "causal", total, total)
