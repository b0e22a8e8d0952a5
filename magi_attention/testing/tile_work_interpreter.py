"""The slow, obvious twin of a kernel's walk over a tile work list: which cell is counted how often. Knows neither planner nor kernel.

Takes plain arrays, so that a list made on the host and one read back from a device are checked alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from magi_attention.kernels.tile_work import TileWork

Int32Array = npt.NDArray[np.int32]

# Relative times as in csrc/base/tile_cost.h, written again: the twin takes nothing from the planner.
INTERIOR_BLOCK_COST, EDGE_BLOCK_COST, TILE_COST = 1024, 1300, 600


@dataclass(frozen=True, eq=False)
class WorkArrays:
    """A list as csrc/attention/work.h has it.

    Attributes:
        order: int32 [num_tiles].
        segment_offsets: int32 [num_tiles + 1].
        segments: int32 [S, 4].
        pieces: int32 [P, 6].
        cuts: int32 [num_tiles + 1], the first row of each tile, then num_rows; None: tile t begins at row t * tile_rows.
    """

    order: Int32Array
    segment_offsets: Int32Array
    segments: Int32Array
    pieces: Int32Array
    num_rows: int
    tile_rows: int
    block_cols: int
    cuts: Int32Array | None = None

    @classmethod
    def of(cls, work: TileWork) -> WorkArrays:
        sizes = (work.num_rows, work.tile_rows, work.block_cols)
        cuts = work.packed[work.offset_cuts :][: work.num_tiles + 1] if work.offset_cuts >= 0 else None
        return cls(work.order, work.segment_offsets, work.segments, work.pieces, *sizes, cuts)

    def rows_of(self, tile: int) -> range:
        """Rows that a tile has."""
        if self.cuts is not None:
            return range(int(self.cuts[tile]), int(self.cuts[tile + 1]))
        return range(tile * self.tile_rows, min((tile + 1) * self.tile_rows, self.num_rows))


def cover_of(work: WorkArrays, num_cols: int) -> Int32Array:
    """int32 [num_rows, num_cols]: how often a kernel that walks the list counts each cell.

    Raises:
        AssertionError: the list breaks a rule of csrc/attention/work.h.
    """
    _check_order(work)
    cover = np.zeros((work.num_rows, num_cols), np.int32)
    for tile in work.order.tolist():
        rows = work.rows_of(tile)
        begin, end = work.segment_offsets[tile : tile + 2].tolist()
        segments = work.segments[begin:end].tolist()
        kinds = [(piece_begin == piece_end, col_begin) for col_begin, _, piece_begin, piece_end in segments]
        assert kinds == sorted(set(kinds)), f"tile {tile}: edge segments come first, each kind by column"
        for col_begin, col_end, piece_begin, piece_end in segments:
            assert 0 <= col_begin < col_end <= num_cols, f"tile {tile}: columns [{col_begin}, {col_end}) of {num_cols}"
            if piece_begin == piece_end:
                assert (col_end - col_begin) % work.block_cols == 0, f"tile {tile}: an interior segment has whole blocks"
                cover[rows.start : rows.stop, col_begin:col_end] += 1
                continue
            assert 0 <= piece_begin < piece_end <= len(work.pieces)
            _add_edges(cover, work, rows, (col_begin, col_end), work.pieces[piece_begin:piece_end])
    return cover


def costs_of(work: WorkArrays) -> list[int]:
    """Relative time of each tile, from its blocks."""
    costs = []
    for tile in range(len(work.order)):
        interior, edge = num_blocks(work, tile)
        costs.append(INTERIOR_BLOCK_COST * interior + EDGE_BLOCK_COST * edge + TILE_COST if interior + edge else 0)
    return costs


def num_blocks(work: WorkArrays, tile: int) -> tuple[int, int]:
    """(interior, edge) blocks of a tile."""
    counts = [0, 0]
    for col_begin, col_end, piece_begin, piece_end in work.segments[slice(*work.segment_offsets[tile : tile + 2])].tolist():
        counts[piece_begin < piece_end] += -((col_begin - col_end) // work.block_cols)
    return counts[0], counts[1]


def _check_order(work: WorkArrays) -> None:
    num_tiles = -(-work.num_rows // work.tile_rows) if work.cuts is None else len(work.cuts) - 1
    if work.cuts is not None:
        assert work.cuts[0] == 0 and work.cuts[-1] == work.num_rows, "tiles own all rows"
        assert all(1 <= height <= work.tile_rows for height in np.diff(work.cuts).tolist()), "no tile is empty or too high"
    assert len(work.order) == num_tiles and len(work.segment_offsets) == num_tiles + 1
    assert work.segment_offsets[0] == 0 and (np.diff(work.segment_offsets) >= 0).all()
    costs = costs_of(work)
    assert work.order.tolist() == sorted(range(num_tiles), key=lambda tile: (-costs[tile], tile)), "falling cost, ties by id"


def _add_edges(cover: Int32Array, work: WorkArrays, rows: range, columns: tuple[int, int], pieces: Int32Array) -> None:
    """Edge blocks evaluate every piece on every column of a whole block; columns past the segment's end may be those of other runs."""
    num_edge_blocks = -((columns[0] - columns[1]) // work.block_cols)
    first, last = columns[0], columns[0] + num_edge_blocks * work.block_cols
    seen = np.zeros((len(rows), last - first), np.int32)
    for row_begin, row_end, col_begin, col_end, lo, hi in pieces.astype(np.int64).tolist():
        assert rows.start <= row_begin < row_end <= rows.stop and col_begin < col_end, "pieces are clipped to the tile"
        assert lo <= hi and first < col_end and col_begin < last, "a piece touches its segment"
        row_ids, col_ids = np.arange(rows.start, rows.stop)[:, None], np.arange(first, last)[None, :]
        distance = col_ids - row_ids
        inside = (row_begin <= row_ids) & (row_ids < row_end) & (col_begin <= col_ids) & (col_ids < col_end)
        seen += inside & (lo <= distance) & (distance <= hi)
    assert not seen[:, columns[1] - first :].any(), "no column from col_end on is seen"
    touching = [_touched_blocks(piece, first, work.block_cols, num_edge_blocks) for piece in pieces.tolist()]
    assert all(blocks == range(num_edge_blocks) for blocks in touching), "blocks of an edge segment have the same pieces"
    cover[rows.start : rows.stop, columns[0] : columns[1]] += seen[:, : columns[1] - first]


def _touched_blocks(piece: list[int], first: int, block_cols: int, num_edge_blocks: int) -> range:
    """Blocks of the segment that a piece's columns intersect."""
    begin, end = (piece[2] - first) // block_cols, (piece[3] - 1 - first) // block_cols + 1
    return range(max(begin, 0), min(end, num_edge_blocks))
