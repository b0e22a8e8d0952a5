"""Work lists: pieces against a numpy twin, spans against the dense mask, the cache and the refusals."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from magi_attention import _native
from magi_attention.errors import InputError
from magi_attention.kernels.work import WorkList, clear_prepared, prepare
from magi_attention.mask import AttnMask
from magi_attention.mask.dense import dense_mask
from magi_attention.testing.masks import mask_catalogue, random_slices

CATALOGUE = mask_catalogue()


def pieces_twin(slices: npt.NDArray[np.int32], total_q: int, tile_m: int) -> list[set[tuple[int, int]]]:
    """Per tile, the visible cells, straight from the dense mask."""
    total_k = int(slices[:, 3].max(initial=0))
    dense = dense_mask(slices, total_q, total_k)
    tiles = []
    for start in range(0, total_q, tile_m):
        rows, keys = np.nonzero(dense[start : start + tile_m])
        tiles.append(set(zip((rows + start).tolist(), keys.tolist(), strict=True)))
    return tiles


@pytest.mark.parametrize("tile_m", [16, 64])
def test_pieces_cover_each_tile_exactly_once_and_ascend_in_keys(tile_m: int) -> None:
    rng = np.random.default_rng(1)
    for _ in range(15):
        total_q, total_k = (int(x) for x in rng.integers(1, 150, 2))
        slices = random_slices(rng, total_q, total_k)
        found = _native.run("work_list", slices=slices, total_q=total_q, tile_m=tile_m)
        pieces = found["pieces"].reshape(-1, 6)
        twin = pieces_twin(slices, total_q, tile_m)
        assert len(found["tile_offsets"]) == len(twin) + 1
        for idx, cells in enumerate(twin):
            own = pieces[found["tile_offsets"][idx] : found["tile_offsets"][idx + 1]]
            dense_rows = [(int(r), int(c)) for piece in own for r, c in _cells(piece)]
            assert len(dense_rows) == len(set(dense_rows)) and set(dense_rows) == cells
            assert (np.diff(own[:, 2]) >= 0).all()


def _cells(piece: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    q0, q1, k0, k1, lo, hi = (int(x) for x in piece)
    distance = np.arange(k0, k1)[None] - np.arange(q0, q1)[:, None]
    return np.argwhere((lo <= distance) & (distance <= hi)) + np.array([q0, k0])


def cover_of(work: WorkList) -> npt.NDArray[np.int32]:
    """How often the spans of a work list show each cell."""
    cover = np.zeros((work.total_q, work.total_k), np.int32)
    for tile in work.tiles:
        for span in tile.spans:
            keys = np.arange(span.k_start, span.k_start + span.num_keys) if span.k_index is None else span.k_index
            assert len(keys) == span.num_keys and (np.diff(keys) > 0).all()
            visible = np.ones((span.row_end - span.row_start, span.num_keys), np.int32)
            if span.bounds is not None:
                columns = np.arange(span.num_keys)
                visible = sum((columns >= start[:, None]) & (columns < end[:, None]) for start, end in span.bounds).astype(np.int32)
            assert visible.any(0).all(), "a key that no row sees must not be read"
            cover[np.ix_(np.arange(tile.q_start + span.row_start, tile.q_start + span.row_end), keys)] += visible
    return cover


@pytest.mark.parametrize("name", CATALOGUE)
def test_spans_show_exactly_the_mask(name: str) -> None:
    mask = CATALOGUE[name]
    work = prepare(mask.slices, mask.total_q, mask.total_k)
    dense = dense_mask(mask.slices, mask.total_q, mask.total_k)
    assert np.array_equal(cover_of(work), dense.astype(np.int32))
    for tile in work.tiles:
        dead = np.flatnonzero(~dense[tile.q_start : tile.q_end].any(1))
        assert np.array_equal(dead, tile.dead_rows if tile.dead_rows is not None else [])


def test_spans_of_random_masks() -> None:
    rng = np.random.default_rng(2)
    for _ in range(60):
        total_q, total_k = (int(x) for x in rng.integers(1, 300, 2))
        slices = random_slices(rng, total_q, total_k, max_slices=20)
        cover = cover_of(prepare(slices, total_q, total_k))
        assert np.array_equal(cover, dense_mask(slices, total_q, total_k).astype(np.int32)), slices.tolist()


def test_scattered_single_keys_are_gathered_not_walked() -> None:
    every_third = [[0, 128, j, j + 1, -(1 << 30), 1 << 30] for j in range(0, 300, 3)]
    work = prepare(every_third, 128, 300)
    spans = [span for tile in work.tiles for span in tile.spans]
    assert sum(span.num_keys for span in spans) == 100 * len(work.tiles)
    assert len(spans) <= 2 * len(work.tiles) and all(span.bounds is None for span in spans)


def test_small_documents_of_a_tile_are_one_span() -> None:
    borders = np.arange(0, 513, 4)
    slices = [[a, b, a, b, -(1 << 30), 0] for a, b in itertools.pairwise(borders)]
    work = prepare(slices, 512, 512)
    assert all(len(tile.spans) == 1 and tile.spans[0].bounds is not None and len(tile.spans[0].bounds) == 1 for tile in work.tiles)


def test_long_causal_is_mostly_unmasked_and_memory_follows_tiles() -> None:
    work = prepare([[0, 1 << 16, 0, 1 << 16, -(1 << 30), 0]], 1 << 16, 1 << 16)
    assert max(len(tile.spans) for tile in work.tiles) <= 2
    masked = sum(span.num_keys for tile in work.tiles for span in tile.spans if span.bounds is not None)
    assert masked <= 2 * (1 << 16)


def test_equal_slices_share_one_work_list_and_the_cache_is_bounded() -> None:
    clear_prepared()
    slices = np.array([[0, 8, 0, 8, -8, 0]], np.int32)
    first = prepare(slices, 8, 8)
    assert prepare(slices.copy(), 8, 8) is first and prepare(first, 8, 8) is first
    assert prepare(slices, 8, 9) is not first
    for idx in range(100):
        prepare(slices, 8, 10 + idx)
    assert prepare(slices, 8, 8) is not first


@pytest.mark.parametrize(
    ("slices", "told"),
    [
        ([[0, 200, 0, 100, 0, 0]], r"slices\[0\].*\(0, 200\).*100 rows"),
        ([[0, 100, 0, 100, 0, 0], [0, 1, 0, 101, 0, 0]], r"slices\[1\].*\(0, 101\)"),
        ([[-1, 1, 0, 1, 0, 0]], r"\(-1, 1\)"),
        ([[0, 1, 0, 1]], r"\[1, 4\]"),
        ([[0.0, 1, 0, 1, 0, 0]], "float64"),
    ],
)
def test_wrong_slices_are_refused(slices: list[list[float]], told: str) -> None:
    with pytest.raises(InputError, match=told):
        prepare(slices, 100, 100)


def test_a_work_list_of_other_lengths_is_refused() -> None:
    with pytest.raises(InputError, match="total_q=8"):
        prepare(prepare([], 8, 8), 9, 8)


def test_mask_and_work_list_agree_on_emptiness() -> None:
    for mask in (AttnMask.from_slices([], 5, 0), AttnMask.from_slices([], 0, 5), AttnMask.from_slices([[0, 3, 2, 2, 0, 0]], 3, 5)):
        assert prepare(mask.slices, mask.total_q, mask.total_k).tiles == ()
