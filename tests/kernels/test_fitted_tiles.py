"""Lists with tiles that begin where documents do: cells, blocks saved, never dearer than uniform tiles, and what a launch is given."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch

from magi_attention.kernels.ffa_work import DeviceWork, device_work
from magi_attention.kernels.tile_work import TileWork, tile_work
from magi_attention.kernels.work import WorkList
from magi_attention.mask import AttnMask, builders
from magi_attention.testing.masks import mask_catalogue, random_mask
from magi_attention.testing.tile_work_interpreter import WorkArrays, num_blocks
from tests.kernels.test_tile_work import check, work_of
from tests.kernels.twin_library import install_twin, needs_compiler, remove_twin

SHAPES = ((128, 128), (128, 64), (64, 128), (16, 8))


def documents(lengths: list[int] | np.ndarray, causal: bool = True) -> AttnMask:
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    return builders.from_cu_seqlens(borders, borders, causal=causal)


def blocks_in(work: TileWork) -> int:
    return sum(sum(num_blocks(WorkArrays.of(work), tile)) for tile in range(work.num_tiles))


def check_fitted(mask: AttnMask, shape: tuple[int, int], transposed: bool) -> bool:
    """Whether tiles are fitted; then they cost less, else the list is the uniform one."""
    work, uniform = check(mask, shape, transposed, fitted=True), work_of(mask, shape, transposed)
    if work.offset_cuts < 0:
        assert np.array_equal(work.packed, uniform.packed)
        return False
    assert work.total_cost < uniform.total_cost
    assert np.shares_memory(work.cuts, work.packed) and not np.array_equal(work.cuts, uniform.cuts)
    assert {int(cut) for cut in work.cuts} <= reachable(mask, shape[0], work.num_rows, transposed)
    return True


def reachable(mask: AttnMask, tile_rows: int, num_rows: int, transposed: bool) -> set[int]:
    """Rows that are whole tiles after the first row or after a border of what a slice sees."""
    borders = {0, num_rows}
    for piece in mask.slices.tolist():
        cells = AttnMask.from_slices([piece], mask.total_q, mask.total_k).to_dense()
        rows = np.flatnonzero((cells.T if transposed else cells).any(1))
        borders |= {int(rows[0]), int(rows[-1]) + 1} if len(rows) else set()
    return {row for border in borders for row in range(border, num_rows, tile_rows)} | {num_rows}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_random_masks(shape: tuple[int, int], transposed: bool) -> None:
    rng = np.random.default_rng(SHAPES.index(shape))
    found = []
    for _ in range(250):
        total_q, total_k = (int(x) for x in rng.integers(0, 301, 2))
        found.append(check_fitted(random_mask(rng, total_q, total_k, max_slices=20), shape, transposed))
    assert 10 < sum(found) < 240


def test_random_documents() -> None:
    rng = np.random.default_rng(5)
    found = []
    for idx in range(60):
        lengths = rng.integers(1, int(rng.integers(3, 160)), int(rng.integers(1, 12)))
        found.append(check_fitted(documents(lengths, causal=bool(idx % 2)), SHAPES[idx % 4], bool(idx % 3)))
    assert sum(found) > 20


@pytest.mark.parametrize("name", mask_catalogue())
def test_catalogue(name: str) -> None:
    for shape, transposed in itertools.product(SHAPES, (False, True)):
        check_fitted(mask_catalogue()[name], shape, transposed)


@pytest.mark.parametrize("transposed", [False, True])
def test_documents_are_cut_at_their_borders(transposed: bool) -> None:
    work = work_of(documents([200] * 4), (128, 128), transposed, fitted=True)
    assert work.cuts.tolist() == [0, 128, 200, 328, 400, 528, 600, 728, 800]
    assert blocks_in(work) == 4 * 3
    assert work.num_tiles == 8 and len(work.order) == 8 and len(work.segment_offsets) == 9


@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_of_documents_has_fewer_blocks(causal: bool) -> None:
    lengths = np.random.default_rng(2).lognormal(5.8, 1, 16).astype(int)  # 28 to 1997 tokens, 7778 in all
    mask = documents(lengths, causal)
    for block_cols, transposed in ((128, False), (64, True)):
        uniform, fitted = (work_of(mask, (128, block_cols), transposed, fitted=choice) for choice in (False, True))
        assert blocks_in(fitted) < 0.975 * blocks_in(uniform)
        assert fitted.total_cost < 0.95 * uniform.total_cost


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("longest, fewer", [(4, 0.7), (64, 0.8)])
def test_tiny_documents_share_fewer_blocks(longest: int, fewer: float, transposed: bool) -> None:
    mask = documents(np.random.default_rng(0).integers(longest // 8 + 1, longest + 1, 3000))
    uniform, fitted = (work_of(mask, (128, 128), transposed, fitted=choice) for choice in (False, True))
    assert blocks_in(fitted) < fewer * blocks_in(uniform) and fitted.total_cost < 0.8 * uniform.total_cost


def test_masks_without_documents_keep_uniform_tiles() -> None:
    masks = (
        builders.sliding_window(1000, 1000, (None, 0)),
        builders.sliding_window(1000, 1000, (99, 0)),
        documents([128, 256, 384, 100]),
        documents([2] * 600),  # borders before the end of a tile, and one at its end
    )
    for mask, transposed in itertools.product(masks, (False, True)):
        assert work_of(mask, (128, 128), transposed, fitted=True).offset_cuts == -1


@pytest.mark.parametrize("num_frames", [4, 6, 11])
def test_frames_are_not_dearer(num_frames: int) -> None:
    mask = builders.block_causal_video(num_frames, 1560)
    for shape, transposed in itertools.product(((128, 128), (128, 64), (128, 176)), (False, True)):
        uniform, fitted = (work_of(mask, shape, transposed, fitted=choice) for choice in (False, True))
        assert fitted.total_cost < uniform.total_cost or np.array_equal(fitted.packed, uniform.packed)


def test_rows_that_see_nothing_are_owned() -> None:
    """Before, between and after the slices; a tile that ends where the rows that see something do."""
    everything = [-(1 << 30), 1 << 30]
    mask = AttnMask.from_slices([[40, 300, 0, 900, *everything], [420, 500, 900, 1000, *everything]], 700, 1000)
    for shape, transposed in itertools.product(SHAPES, (False, True)):
        check_fitted(mask, shape, transposed)


@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_one_row_and_borders_at_the_ends(transposed: bool) -> None:
    for slices in ([], [[3, 3, 0, 9, -(1 << 30), 1 << 30]]):
        work = tile_work(slices, 300, 128, 128, transposed=transposed, fitted=True)
        assert work.cuts.tolist() == [0, 128, 256, 300] and work.total_cost == 0
    assert tile_work([], 0, 128, 128, transposed=transposed, fitted=True).cuts.tolist() == [0]
    for lengths in ([1], [1, 1], [1, 127, 128], [128, 127, 1], [255, 1], [1, 255]):
        check_fitted(documents(lengths), (128, 128), transposed)
        check_fitted(documents(lengths), (1, 1), transposed)


@pytest.mark.parametrize("transposed", [False, True])
def test_many_slices_and_tiles_are_planned_in_one_sweep(transposed: bool) -> None:
    """Looking at every slice for every tile would take minutes."""
    lengths = np.diff(np.linspace(0, 1 << 20, 10_001).astype(int) + np.concatenate([[0], np.arange(9999) % 50, [0]]))
    masks = (documents(lengths), documents([3] * 60_000), builders.sliding_window(1 << 20, 1 << 20, (1023, 0)))
    for mask in masks:
        seconds = {}
        for choice in (False, True):
            start = time.process_time()
            work_of(mask, (128, 128), transposed, fitted=choice)
            seconds[choice] = time.process_time() - start
        assert seconds[True] < 10 * seconds[False] + 0.1


@needs_compiler
def test_a_launch_is_given_the_cuts_of_all_its_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    install_twin(monkeypatch)
    try:
        mask = documents(np.random.default_rng(0).integers(3, 45, 20))
        work = WorkList(mask.slices, mask.total_q, mask.total_k)
        for direction in ("forward", "forward_any", "backward", "dq"):
            found = device_work(work, direction, 64, torch.device("cpu"))
            record, start = found.record, found.array.tensor.data_ptr()
            host = tile_work(
                mask.slices, mask.total_q, record.tile_rows, record.block_cols, transposed=direction == "backward", fitted=True
            )
            assert host.offset_cuts > 0 and record.cuts == start + 4 * host.offset_cuts and record.num_tiles == host.num_tiles
            assert found.array.tensor.tolist() == host.packed.tolist()
        uniform = WorkList(AttnMask.from_slices([[0, 223, 0, 223, 0, 9]], 223, 223).slices, 223, 223)
        assert device_work(uniform, "forward", 64, torch.device("cpu")).record.cuts is None
        assert DeviceWork(found.array, (0, 0, 0, 0), (1, 1, 1, 1)).record.cuts is None
    finally:
        remove_twin()
