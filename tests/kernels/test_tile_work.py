"""The work list of compiled kernels: a dense interpreter against the mask, block counts of known masks, order, costs, refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.errors import InputError
from magi_attention.kernels.tile_work import HEADER, TileWork, tile_work
from magi_attention.mask import AttnMask, builders
from magi_attention.mask.dense import dense_mask
from magi_attention.testing.masks import mask_catalogue, random_mask
from magi_attention.testing.tile_work_interpreter import WorkArrays, costs_of, cover_of, num_blocks

CATALOGUE = mask_catalogue()
SHAPES = ((128, 128), (128, 64), (64, 128), (16, 8))


def work_of(mask: AttnMask, shape: tuple[int, int], transposed: bool = False, fitted: bool = False) -> TileWork:
    return tile_work(mask.slices, mask.total_k if transposed else mask.total_q, *shape, transposed=transposed, fitted=fitted)


def check(mask: AttnMask, shape: tuple[int, int], transposed: bool, fitted: bool = False) -> TileWork:
    work = work_of(mask, shape, transposed, fitted)
    dense = mask.to_dense().T if transposed else mask.to_dense()
    assert np.array_equal(cover_of(WorkArrays.of(work), dense.shape[1]), dense), (mask.slices.tolist(), dense.shape)
    assert work.costs.tolist() == costs_of(WorkArrays.of(work))
    assert work.packed[:HEADER].tolist() == [0, work.num_segments, work.num_pieces, 0] and work.offset_segments % 4 == 0
    assert len(work.packed) == work.offset_pieces + 6 * work.num_pieces
    assert [num_blocks(WorkArrays.of(work), tile)[0] for tile in range(work.num_tiles)] == num_interior(mask, work, transposed)
    assert work.near_order.tolist() == near_order_of(dense, work)
    assert (work.offset_near_order < 0) == np.array_equal(work.near_order, work.order)
    return work


def near_order_of(dense: np.ndarray, work: TileWork) -> list[int]:
    """Clusters of neighbours in row order, by the first and last column that each tile sees."""
    clusters: list[list[int]] = []
    reaches: list[tuple[int, int]] = []
    for tile, (start, end) in enumerate(itertools.pairwise(work.cuts.tolist())):
        seen = np.flatnonzero(dense[start:end].any(0))
        if not len(seen):
            continue
        begin, stop = int(seen[0]), int(seen[-1]) + 1
        widest = max([stop - begin, *(reaches[other][1] - reaches[other][0] for other in (clusters[-1] if clusters else []))])
        low, high = _union(reaches, clusters[-1]) if clusters else (0, 0)
        reaches.extend([(0, 0)] * (tile - len(reaches)))
        reaches.append((begin, stop))
        if begin >= high or stop <= low or max(high, stop) - min(low, begin) > 2 * widest:
            clusters.append([tile])
        else:
            clusters[-1].append(tile)
    costs = work.costs.tolist()
    ordered = sorted(clusters, key=lambda cluster: -max(costs[tile] for tile in cluster))
    tiles = [tile for cluster in ordered for tile in sorted(cluster, key=lambda tile: -costs[tile])]
    return tiles + [tile for tile in range(work.num_tiles) if tile not in set(tiles)]


def _union(reaches: list[tuple[int, int]], tiles: list[int]) -> tuple[int, int]:
    return min(reaches[tile][0] for tile in tiles), max(reaches[tile][1] for tile in tiles)


def num_interior(mask: AttnMask, work: TileWork, transposed: bool) -> list[int]:
    """Of each tile: whole blocks, on the grid of their run, that all rows see, of cells from slices whose rows there all see the column."""
    starts, heights = work.cuts[:-1].astype(int), np.diff(work.cuts)
    if not len(starts):
        return []
    num_cols = mask.total_q if transposed else mask.total_k
    num_full, seen = np.zeros((len(starts), num_cols), int), np.zeros((len(starts), num_cols), bool)
    for piece in mask.slices:
        dense = dense_mask(piece, mask.total_q, mask.total_k)
        cells = dense.T if transposed else dense
        num_seeing = np.add.reduceat(cells, starts, axis=0, dtype=int)  # [tile, column]
        num_rows = np.add.reduceat(cells.any(1), starts, dtype=int)
        seen |= num_seeing > 0
        num_full += np.where(num_seeing == num_rows[:, None], num_seeing, 0)
    return [_whole_blocks(*tile, work.block_cols) for tile in zip(seen, num_full == heights[:, None], strict=True)]


def _whole_blocks(seen: np.ndarray, is_full: np.ndarray, block_cols: int) -> int:
    """Blocks of full columns, counted from the first column of each run of seen ones."""
    found = 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], seen, [False]])))
    for run_begin, run_end in edges.reshape(-1, 2).tolist():
        columns = is_full[run_begin : run_begin + (run_end - run_begin) // block_cols * block_cols]
        found += int(columns.reshape(-1, block_cols).all(1).sum())
    return found


def blocks_of(mask: AttnMask, shape: tuple[int, int], transposed: bool = False) -> list[tuple[int, int]]:
    work = work_of(mask, shape, transposed)
    return [num_blocks(WorkArrays.of(work), tile) for tile in range(work.num_tiles)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_random_masks(shape: tuple[int, int], transposed: bool) -> None:
    rng = np.random.default_rng(SHAPES.index(shape))
    for _ in range(500):
        total_q, total_k = (int(x) for x in rng.integers(0, 301, 2))
        check(random_mask(rng, total_q, total_k, max_slices=20), shape, transposed)


@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue(name: str) -> None:
    for shape, transposed in itertools.product(SHAPES, (False, True)):
        check(CATALOGUE[name], shape, transposed)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    totals=st.tuples(st.integers(0, 90), st.integers(0, 90)),
    shape=st.tuples(st.integers(1, 100), st.integers(1, 100)),
    transposed=st.booleans(),
)
def test_any_tile_shape(seed: int, totals: tuple[int, int], shape: tuple[int, int], transposed: bool) -> None:
    check(random_mask(np.random.default_rng(seed), *totals), shape, transposed)


def test_full_has_no_edge_blocks_but_a_ragged_tail() -> None:
    assert blocks_of(builders.sliding_window(512, 512, None), (128, 128)) == [(4, 0)] * 4
    assert blocks_of(AttnMask.from_ranges([[0, 300]], [[0, 300]], None, 300, 300), (128, 128)) == [(2, 1)] * 3


def test_causal_has_one_edge_block_a_tile() -> None:
    mask = builders.sliding_window(1024, 1024, (None, 0))
    assert blocks_of(mask, (128, 128)) == [(tile, 1) for tile in range(8)]
    assert blocks_of(mask, (128, 128), transposed=True) == [(7 - tile, 1) for tile in range(8)]
    assert blocks_of(mask, (128, 64)) == [(2 * tile, 2) for tile in range(8)]
    work = work_of(mask, (128, 128))
    assert work.order.tolist() == list(range(7, -1, -1)) and work.num_pieces == 8


def test_window_has_an_edge_on_each_side() -> None:
    mask = builders.sliding_window(4096, 4096, (1023, 0))
    blocks = blocks_of(mask, (128, 128))
    # The run of a tile starts one column past the multiple (row - 1023), so 7 whole blocks are left between the two diagonals.
    assert blocks[8:] == [(7, 2)] * 24
    assert all(work_pieces == 1 for work_pieces in np.diff(work_of(mask, (128, 128)).segments[:, 2:]).ravel() if work_pieces)


def test_frames_that_straddle_tiles_have_interior_blocks() -> None:
    mask = builders.block_causal_video(4, 1560)
    blocks = blocks_of(mask, (128, 128))
    straddling = [tile for tile in range(len(blocks)) if (tile * 128) // 1560 != min(tile * 128 + 127, mask.total_q - 1) // 1560]
    assert len(straddling) == 3
    for tile, (interior, edge) in enumerate(blocks):
        frame = tile * 128 // 1560
        assert interior == (frame + 1) * 1560 // 128  # what the rows of the earlier frame see, all of it unmasked
        assert edge <= (14 if tile in straddling else 1)


@pytest.mark.parametrize("transposed", [False, True])
def test_tiny_documents_of_a_tile_share_their_blocks(transposed: bool) -> None:
    borders = np.concatenate([[0], np.cumsum(np.random.default_rng(0).integers(1, 5, 1500))])
    mask = builders.from_cu_seqlens(borders, borders, causal=True)
    work = work_of(mask, (128, 128), transposed)
    assert all(interior == 0 and edge <= 2 for interior, edge in blocks_of(mask, (128, 128), transposed))
    assert work.num_pieces <= len(mask.slices) + 2 * work.num_tiles


def test_a_long_thin_band_lists_its_piece_once() -> None:
    one_row = AttnMask.from_slices([[5, 6, 0, 100_000, -(1 << 30), 1 << 30]], 128, 100_000)
    work = work_of(one_row, (128, 128))
    assert work.segments.tolist() == [[0, 100_000, 0, 1]] and work.num_pieces == 1


def test_touching_pieces_fill_a_block_together() -> None:
    two_halves = AttnMask.from_ranges([[0, 128], [0, 64], [64, 128]], [[0, 100], [100, 256], [100, 256]], None, 128, 256)
    assert blocks_of(two_halves, (128, 128)) == [(2, 0)]


def test_runs_are_cut_from_their_own_first_column() -> None:
    mask = AttnMask.from_ranges([[0, 128], [0, 128]], [[3, 259], [300, 428]], None, 128, 500)
    assert work_of(mask, (128, 128)).segments.tolist() == [[3, 259, 0, 0], [300, 428, 0, 0]]


@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_is_a_list_of_empty_tiles(transposed: bool) -> None:
    for slices in ([], [[3, 3, 0, 9, -(1 << 30), 1 << 30]], [[0, 9, 0, 9, 2, 1]]):
        work = tile_work(slices, 300, 128, 128, transposed=transposed)
        assert work.order.tolist() == [0, 1, 2] and work.segment_offsets.tolist() == [0] * 4 and work.total_cost == 0
        assert work.segments.shape == (0, 4) and work.pieces.shape == (0, 6)
    assert tile_work([], 0, 128, 128).segment_offsets.tolist() == [0]


def test_tiles_begin_at_multiples_of_their_rows() -> None:
    work = tile_work([], 300, 128, 128)
    assert work.offset_cuts == -1 and work.cuts.tolist() == [0, 128, 256, 300] and work.cuts.dtype == np.int32
    assert tile_work([], 0, 128, 128).cuts.tolist() == [0] and tile_work([], 9, (1 << 30) - 1, 8).cuts.tolist() == [0, 9]


def test_tiles_without_work_come_last() -> None:
    work = tile_work([[130, 140, 0, 9, -(1 << 30), 1 << 30]], 300, 128, 128)
    assert work.order.tolist() == [1, 0, 2] and work.costs.tolist() == [0, 1900, 0]


def test_tiles_of_a_document_are_begun_one_after_another() -> None:
    borders = [0, 256, 768, 896]
    work = work_of(builders.from_cu_seqlens(borders, borders, causal=True), (128, 64), transposed=True)
    assert work.order.tolist() == [2, 3, 0, 4, 1, 5, 6], "by cost"
    assert work.near_order.tolist() == [2, 3, 4, 5, 0, 1, 6], "document by document, the heaviest first"
    assert work_of(builders.sliding_window(1024, 1024, (None, 0)), (128, 64), transposed=True).offset_near_order == -1
    window = work_of(builders.sliding_window(8192, 8192, (511, 0)), (128, 64), transposed=True)
    assert np.abs(np.diff(window.near_order[:-8])).max() <= 8, "neighbours of a window stay neighbours"


def test_ids_near_the_limit() -> None:
    top = (1 << 30) - 1
    work = tile_work([[top - 5, top, 0, top, -(1 << 30), 0]], top, 1 << 20, 1 << 20)
    assert num_blocks(WorkArrays.of(work), work.num_tiles - 1) == (0, 1024) and work.order[0] == work.num_tiles - 1
    everything = [[0, top, 0, top, -(1 << 30), 1 << 30]]
    assert tile_work(everything, top, 1 << 25, 8).costs.tolist() == [(1 << 31) - 1] * 32, "costs saturate, they only order"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (([[0, 200, 0, 100, 0, 0]], 100, 128, 128), r"slices\[0\].*num_rows=100"),
        (([[0, 1, 0, 1], [0, 1, 0, 1]], 100, 128, 128), r"\[2, 4\]"),
        (([[-1, 1, 0, 1, 0, 0]], 100, 128, 128), r"slices\[0\]"),
        (([], -1, 128, 128), "num_rows=-1"),
        (([], 1, 0, 128), "tile_rows=0"),
        (([], 1, 128, 0), "block_cols=0"),
        (([[0, 1 << 29, 0, 8, -(1 << 30), 1 << 30]], 1 << 29, 1, 8), "larger tiles"),
    ],
)
def test_wrong_input_is_refused(arguments: tuple[list[list[int]], int, int, int], told: str) -> None:
    with pytest.raises(InputError, match=told):
        tile_work(*arguments)
