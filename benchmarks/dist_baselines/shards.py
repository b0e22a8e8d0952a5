"""Fixed shares of the tokens, and the part of a mask between some rows and some keys. Knows no method, no torch and no group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from magi_attention.mask import AttnMask
from magi_attention.mask.slices import UNBOUNDED
from magi_attention.plan.types import Int32Array, Int64Array

Runs = tuple[tuple[int, int], ...]  # half-open global token ranges, ascending, none of them empty


def contiguous(total: int, num_ranks: int) -> list[Runs]:
    """Per rank one run; lengths differ by at most one token, and a rank may have none."""
    return [((start, end),) if end > start else () for start, end in _cuts(total, num_ranks)]


def zigzag(total: int, num_ranks: int) -> list[Runs]:
    """Per rank the r-th part from the front and the r-th from the back, which balances a causal mask."""
    parts = _cuts(total, 2 * num_ranks)
    pairs = [(parts[rank], parts[-1 - rank]) for rank in range(num_ranks)]
    return [_joined([run for run in pair if run[1] > run[0]]) for pair in pairs]


def _cuts(total: int, num_parts: int) -> list[tuple[int, int]]:
    borders = [total * idx // num_parts for idx in range(num_parts + 1)]
    return list(itertools.pairwise(borders))


def _joined(runs: Sequence[tuple[int, int]]) -> Runs:
    """The middle parts touch; as one run they need one slice less."""
    if len(runs) == 2 and runs[0][1] == runs[1][0]:
        return ((runs[0][0], runs[1][1]),)
    return tuple(runs)


def num_rows(runs: Runs) -> int:
    return sum(end - start for start, end in runs)


def tokens(runs: Runs) -> Int64Array:
    """int64: the global token of each row."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(start, end, dtype=np.int64) for start, end in runs)])


def placed(runs: Runs, first_row: int = 0) -> list[tuple[int, int, int]]:
    """(start, end, first row in a buffer that holds the runs one after another from `first_row` on)."""
    rows = itertools.accumulate((end - start for start, end in runs), initial=first_row)
    return [(start, end, row) for (start, end), row in zip(runs, rows, strict=False)]


def part_of(mask: AttnMask, q_runs: Iterable[tuple[int, int, int]], k_runs: Iterable[tuple[int, int, int]]) -> Int32Array:
    """int32 [N, 6]: the slices between two sets of placed runs, in rows of their buffers. Each cell of the mask appears once."""
    k_runs = list(k_runs)
    parts = [np.zeros((0, 6), np.int64)]
    for (q_start, q_end, q_row), (k_start, k_end, k_row) in itertools.product(q_runs, k_runs):
        moved = mask.crop(q_start, q_end, k_start, k_end).slices.astype(np.int64)
        moved[:, 0:2] += q_row
        moved[:, 2:4] += k_row
        is_bound = np.abs(moved[:, 4:6]) < UNBOUNDED
        moved[:, 4:6] += is_bound * (k_row - q_row)
        parts.append(moved)
    return np.concatenate(parts).astype(np.int32)


def area_of(slices: Int32Array, total_q: int, total_k: int) -> int:
    """Visible pairs, exact."""
    return AttnMask.from_slices(slices, total_q, total_k, check_overlap=False).area()
