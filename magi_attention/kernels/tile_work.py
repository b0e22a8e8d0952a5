"""The work list of the compiled kernels: one int32 array for one upload. Knows nothing of torch, heads or ranks.

csrc/attention/work.h says what the records mean and how a kernel walks them; csrc/solver/tile_work.cpp builds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from magi_attention import _native
from magi_attention.arguments import count
from magi_attention.errors import InputError
from magi_attention.plan.types import Int32Array

_MAX_TOKENS = (1 << 30) - 1
HEADER = 4  # int32 numbers before the first record: status (0 is complete), num_segments, num_pieces, 0


@dataclass(frozen=True, eq=False)
class TileWork:
    """Tiles of one direction of one mask. Depends on the mask and the tile sizes alone, so one list serves every layer.

    Attributes:
        packed: int32, the whole list; offsets below count its elements.
        num_tiles: ceil(num_rows / tile_rows), or more where tiles are fitted.
        num_rows: rows that exist.
        offset_order: of int32 [num_tiles], tile ids by falling cost, ties by id, tiles without work last.
        offset_segment_offsets: of int32 [num_tiles + 1].
        offset_near_order: of int32 [num_tiles], see `near_order`; -1 where the list has none.
        offset_cuts: of int32 [num_tiles + 1], see `cuts`; -1 where the list has none: tile t begins at row t * tile_rows.
        offset_segments: of int32 [num_segments, 4] (col_begin, col_end, piece_begin, piece_end); a multiple of 4.
        offset_pieces: of int32 [num_pieces, 6] (row_begin, row_end, col_begin, col_end, lo, hi).
        tile_rows, block_cols: what the list was made for.
        costs: int32 [num_tiles], relative time of each tile, not part of packed.
    """

    packed: Int32Array
    num_tiles: int
    num_rows: int
    offset_order: int
    offset_segment_offsets: int
    offset_near_order: int
    offset_cuts: int
    offset_segments: int
    offset_pieces: int
    num_segments: int
    num_pieces: int
    tile_rows: int
    block_cols: int
    costs: Int32Array

    @property
    def order(self) -> Int32Array:
        """int32 [num_tiles], a view."""
        return self.packed[self.offset_order :][: self.num_tiles]

    @property
    def near_order(self) -> Int32Array:
        """int32 [num_tiles], tiles that read the same columns side by side, `order` where the list has no other; a view."""
        return self.packed[self.offset_near_order :][: self.num_tiles] if self.offset_near_order >= 0 else self.order

    @property
    def segment_offsets(self) -> Int32Array:
        """int32 [num_tiles + 1], a view."""
        return self.packed[self.offset_segment_offsets :][: self.num_tiles + 1]

    @property
    def cuts(self) -> Int32Array:
        """int32 [num_tiles + 1], the first row of each tile, then num_rows; a view where they are part of the list."""
        if self.offset_cuts >= 0:
            return self.packed[self.offset_cuts :][: self.num_tiles + 1]
        return np.minimum(np.arange(self.num_tiles + 1, dtype=np.int64) * self.tile_rows, self.num_rows).astype(np.int32)

    @property
    def segments(self) -> Int32Array:
        """int32 [num_segments, 4], a view."""
        return self.packed[self.offset_segments :][: 4 * self.num_segments].reshape(-1, 4)

    @property
    def pieces(self) -> Int32Array:
        """int32 [num_pieces, 6], a view."""
        return self.packed[self.offset_pieces :][: 6 * self.num_pieces].reshape(-1, 6)

    @property
    def total_cost(self) -> int:
        """Sum of `costs`."""
        return int(self.costs.sum(dtype=np.int64))


def tile_work(
    slices: npt.ArrayLike, num_rows: int, tile_rows: int, block_cols: int, *, transposed: bool = False, fitted: bool = False
) -> TileWork:
    """The work list of a mask for one tile shape.

    Args:
        slices: int [N, 6] (q_start, q_end, k_start, k_end, lo, hi), no cell covered twice; may be empty.
        num_rows: rows of the tensor that tiles own: queries, or keys when transposed.
        tile_rows, block_cols: as the kernel states them (magi_ffa_forward_tile, magi_ffa_backward_tile).
        transposed: tiles own keys and columns are queries, as in the backward pass.
        fitted: tiles may be shorter, so that they begin and end where documents do; only where that costs less. Takes about twice as
            long. Lists made on a GPU are never fitted.

    Raises:
        InputError: slices that are not [N, 6] integers or reach outside the rows, sizes out of range, or a list too long for
            32-bit offsets.
    """
    num_rows = count("num_rows", num_rows, 0, _MAX_TOKENS)
    tile_rows, block_cols = count("tile_rows", tile_rows, 1, _MAX_TOKENS), count("block_cols", block_cols, 1, _MAX_TOKENS)
    records = _checked(slices, num_rows, transposed)
    sizes = {"num_rows": num_rows, "tile_rows": tile_rows, "block_cols": block_cols}
    found = _native.run("tile_work", slices=records, **sizes, transposed=int(transposed), fitted=int(fitted))
    num_tiles, order, segment_offsets, near_order, cuts, segments, pieces, num_segments, num_pieces = found["layout"].tolist()
    return TileWork(
        packed=found["packed"].astype(np.int32, copy=False),
        num_tiles=num_tiles,
        num_rows=num_rows,
        offset_order=order,
        offset_segment_offsets=segment_offsets,
        offset_near_order=near_order,
        offset_cuts=cuts,
        offset_segments=segments,
        offset_pieces=pieces,
        num_segments=num_segments,
        num_pieces=num_pieces,
        tile_rows=tile_rows,
        block_cols=block_cols,
        costs=found["costs"].astype(np.int32, copy=False),
    )


def _checked(slices: npt.ArrayLike, num_rows: int, transposed: bool) -> Int32Array:
    raw = np.asarray(slices)
    if raw.size == 0:
        return np.zeros((0, 6), np.int32)
    if raw.ndim != 2 or raw.shape[1] != 6 or raw.dtype.kind not in "iu":
        raise InputError(f"slices: {raw.dtype} {list(raw.shape)} given, must be integers [N, 6] (q_start, q_end, k_start, k_end, lo, hi)")
    first, last = (2, 3) if transposed else (0, 1)
    wrong = (raw[:, [0, 2]] < 0).any(1) | (raw[:, [1, 3]] > _MAX_TOKENS).any(1) | (raw[:, last] > num_rows)
    if wrong.any():
        idx = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"slices[{idx}]={tuple(raw[idx].tolist())}: rows [{raw[idx, first]}, {raw[idx, last]}) must lie in num_rows={num_rows}, "
            f"token ids in [0, {_MAX_TOKENS}]; clip the slices to the tensors"
        )
    return np.ascontiguousarray(np.clip(raw, -(1 << 30), 1 << 30), dtype=np.int32)
