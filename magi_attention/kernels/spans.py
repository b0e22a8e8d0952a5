"""Pieces of one query tile joined into spans, each one matmul wide. Plain integers; knows nothing of torch, heads or ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from magi_attention.plan.types import Int32Array, Int64Array

# Costs in score cells, measured against a matmul cell: a span costs some fixed calls, a masked cell an extra pass.
_SPAN_CELLS = 16_384
_MASKED_CELL = 1.25
_GATHERED_KEY = 32
_SHORT_COLUMNS = 32  # narrower parts of a piece are not worth a cut of their own

Piece = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, eq=False)
class Span:
    """Rows of a tile times keys that at least one of them sees.

    Attributes:
        row_start, row_end: rows, relative to the tile.
        k_start: first key when the keys are one run, else unused.
        num_keys: columns of the span.
        k_index: int64 [num_keys], the keys in ascending order, when they are not one run.
        bounds: int32 [layers, 2, rows], visible columns [start, end) of each row, a row's layers disjoint; None when every
            row sees every column.
    """

    row_start: int
    row_end: int
    k_start: int
    num_keys: int
    k_index: Int64Array | None
    bounds: Int32Array | None


@dataclass(slots=True)
class _Columns:
    """A candidate span: key runs, row hull, visible cells."""

    runs: list[tuple[int, int]]
    row_start: int
    row_end: int
    num_keys: int
    cells: int

    @property
    def is_full(self) -> bool:
        return self.cells == self.num_keys * (self.row_end - self.row_start)

    @property
    def cost(self) -> float:
        area = self.num_keys * (self.row_end - self.row_start)
        cost = _SPAN_CELLS + (area if area == self.cells else area * _MASKED_CELL)
        return cost + (self.num_keys * _GATHERED_KEY if len(self.runs) > 1 else 0)


def tile_spans(pieces: Int32Array, q_start: int) -> tuple[Span, ...]:
    """Spans of one tile.

    Args:
        pieces: int32 [P, 6], tight, non-empty, inside the tile, sorted by k_start.
        q_start: first row of the tile.
    """
    records: list[Piece] = [tuple(row) for row in pieces.tolist()]
    groups: list[_Columns] = []
    for columns in _elementary_columns(records):
        if groups:
            joined = _join(groups[-1], columns)
            if joined.cost <= groups[-1].cost + columns.cost:
                groups[-1] = joined
                continue
        groups.append(columns)
    return tuple(_span(group, records, q_start) for group in groups)


def _clip_columns(piece: Piece, k_start: int, k_end: int) -> Piece | None:
    q0, q1, k0, k1, lo, hi = piece
    k0, k1 = max(k0, k_start), min(k1, k_end)
    q0, q1 = max(q0, k0 - hi), min(q1, k1 - lo)
    k0, k1 = max(k0, q0 + lo), min(k1, q1 + hi)
    return (q0, q1, k0, k1, lo, hi) if q0 < q1 and k0 < k1 else None


def _num_cells(piece: Piece) -> int:
    """Visible pairs of a piece; the closed form of the mask design, with the corner shortcut first."""
    q0, q1, k0, k1, lo, hi = piece
    m, n = q1 - q0, k1 - k0
    x_hi, x_lo = min(hi - (k0 - q0), n - 1), max(lo - 1 - (k0 - q0), -m)
    if x_hi == n - 1 and x_lo == -m:
        return m * n

    def triangle(t: int) -> int:
        return 0 if t <= 0 else t * (t + 1) // 2 if t <= n else n * (n + 1) // 2 + (t - n) * n

    return triangle(x_hi + m) - triangle(x_hi) - triangle(x_lo + m) + triangle(x_lo)


def _cuts(pieces: list[Piece]) -> list[int]:
    """Columns where the covering pieces change, or where a band starts or stops to bind."""
    cuts: set[int] = set()
    for q0, q1, k0, k1, lo, hi in pieces:
        cuts.update((k0, k1))
        full_start, full_end = q1 - 1 + lo, q0 + hi + 1  # every row of the piece sees columns in here
        if full_end - full_start >= _SHORT_COLUMNS:
            cuts.update(c for c in (full_start, full_end) if k0 + _SHORT_COLUMNS <= c <= k1 - _SHORT_COLUMNS)
    return sorted(cuts)


def _elementary_columns(pieces: list[Piece]) -> list[_Columns]:
    cuts = _cuts(pieces)
    found = []
    active: list[Piece] = []
    next_idx = 0
    for k_start, k_end in itertools.pairwise(cuts):
        while next_idx < len(pieces) and pieces[next_idx][2] <= k_start:
            active.append(pieces[next_idx])
            next_idx += 1
        active = [piece for piece in active if piece[3] > k_start]
        clipped = [c for c in (_clip_columns(piece, k_start, k_end) for piece in active) if c is not None]
        if clipped:
            row_start, row_end = min(c[0] for c in clipped), max(c[1] for c in clipped)
            found.append(_Columns([(k_start, k_end)], row_start, row_end, k_end - k_start, sum(map(_num_cells, clipped))))
    return found


def _join(left: _Columns, right: _Columns) -> _Columns:
    runs = list(left.runs)
    if runs[-1][1] == right.runs[0][0]:
        runs[-1] = (runs[-1][0], right.runs[0][1])
    else:
        runs += right.runs
    row_start, row_end = min(left.row_start, right.row_start), max(left.row_end, right.row_end)
    return _Columns(runs, row_start, row_end, left.num_keys + right.num_keys, left.cells + right.cells)


def _span(columns: _Columns, pieces: list[Piece], q_start: int) -> Span:
    runs, rows = columns.runs, (columns.row_start - q_start, columns.row_end - q_start)
    k_index = np.concatenate([np.arange(a, b) for a, b in runs]) if len(runs) > 1 else None
    bounds = None if columns.is_full else _bounds(columns, pieces)
    return Span(*rows, runs[0][0], columns.num_keys, k_index, bounds)


def _bounds(columns: _Columns, pieces: list[Piece]) -> Int32Array:
    run_starts = np.array([a for a, _ in columns.runs])
    run_columns = np.cumsum([0] + [b - a for a, b in columns.runs])
    begin, end = columns.runs[0][0], columns.runs[-1][1]
    kept = [c for c in (_clip_columns(p, begin, end) for p in pieces if p[3] > begin and p[2] < end) if c is not None]
    kept.sort()
    last_row: list[int] = []
    layers: list[int] = []
    for piece in kept:  # first layer whose rows ended before this piece starts
        layer = next((idx for idx, row in enumerate(last_row) if row <= piece[0]), len(last_row))
        if layer == len(last_row):
            last_row.append(0)
        last_row[layer] = piece[1]
        layers.append(layer)
    bounds = np.zeros((len(last_row), 2, columns.row_end - columns.row_start), np.int32)
    for layer, (q0, q1, k0, k1, lo, hi) in zip(layers, kept, strict=True):
        run = int(np.searchsorted(run_starts, k0, side="right")) - 1
        shift = int(run_columns[run] - run_starts[run])
        rows = slice(q0 - columns.row_start, q1 - columns.row_start)
        row_ids = np.arange(q0, q1, dtype=np.int64)
        bounds[layer, 0, rows] = np.maximum(k0, row_ids + lo) + shift
        bounds[layer, 1, rows] = np.minimum(k1, row_ids + hi + 1) + shift
    return bounds
