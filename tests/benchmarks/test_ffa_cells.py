"""Masks of the attention benchmark: their cells, areas and operations, and the words baselines hear, against dense masks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from benchmarks.ffa_cells import FRAME, MASKS, SIZED_MASKS, SMALL_MASKS, WINDOW, Cell, Layout, cells, flops
from benchmarks.ffa_providers import mask_mod
from magi_attention.mask import builders

TOTAL = 4096
AREAS = {
    "full": TOTAL**2,
    "causal": TOTAL * (TOTAL + 1) // 2,
    "swa_causal": WINDOW * (WINDOW + 1) // 2 + (TOTAL - WINDOW) * WINDOW,
    "frame_causal": FRAME * FRAME + FRAME * 2 * FRAME + (TOTAL - 2 * FRAME) * TOTAL,
}


@pytest.mark.parametrize("name", AREAS)
def test_areas(name: str) -> None:
    assert SIZED_MASKS[name](TOTAL).mask().area() == AREAS[name]


@pytest.mark.parametrize("total", [1024, TOTAL, 65_536])
def test_documents_fill_the_tokens_and_repeat(total: int) -> None:
    full, causal = (SIZED_MASKS[name](total) for name in ("varlen_full", "varlen_causal"))
    lengths = np.diff(full.borders)
    assert full.borders == causal.borders == SIZED_MASKS["varlen_full"](total).borders
    assert lengths.sum() == total and lengths.min() >= 1 and lengths.max() == full.longest <= total // 4
    assert full.mask().area() == (lengths**2).sum() and causal.mask().area() == (lengths * (lengths + 1) // 2).sum()


def test_small_documents() -> None:
    small, medium = SMALL_MASKS["docs_1_4"](), SMALL_MASKS["docs_8_64"]()
    assert (len(small.borders) - 1, small.total, small.mask().area()) == (15_000, 37_473, 74_992)
    lengths = np.diff(medium.borders)
    assert (len(lengths), lengths.min(), lengths.max()) == (2_000, 8, 64)
    for name in ("docs_1_4", "docs_8_64"):
        tiles = SMALL_MASKS[f"{name}_as_tiles"]()
        assert tiles.total == SMALL_MASKS[name]().total and tiles.longest == 128 and not tiles.is_causal
        assert len(tiles.borders) - 1 == -(-tiles.total // 128)


@pytest.mark.parametrize(
    "layout",
    [
        Layout((0, 40)),
        Layout((0, 40), is_causal=True),
        Layout((0, 7, 7, 40)),
        Layout((0, 7, 7, 40), is_causal=True),
        Layout((0, 40), is_causal=True, window=5),
        Layout((0, 40), frame=15),
    ],
    ids=["full", "causal", "documents", "documents_causal", "window", "frames"],
)
def test_words_for_flex_attention_mean_the_mask(layout: Layout) -> None:
    expected = torch.from_numpy(np.array(layout.mask().to_dense()))
    mod = mask_mod(layout, "cpu")
    found = torch.ones_like(expected) if mod is None else create_mask(mod, 1, 1, 40, 40, device="cpu")[0, 0]
    assert torch.equal(found, expected)


def test_window_counts_the_query_itself() -> None:
    assert Layout((0, 40), is_causal=True, window=5).mask() == builders.sliding_window(40, 40, (4, 0))


def test_cells_are_the_product_and_small_masks_come_once() -> None:
    grid = cells(["causal", "docs_1_4"], [1024, 2048], [(48, 8), (16, 16)], [128, 64], ["bfloat16"])
    assert len(grid) == len(set(grid)) == 3 * 2 * 2
    assert {cell.tokens for cell in grid if cell.mask == "docs_1_4"} == {37_473}
    assert grid[0] == Cell("causal", 1024, 48, 8, 128) and grid[0].heads == "48/8"
    outer = [key for key, _ in itertools.groupby((cell.head_dim, cell.heads) for cell in grid)]
    assert outer == [(128, "48/8"), (128, "16/16"), (64, "48/8"), (64, "16/16")]
    for cell in grid:
        assert cell.layout().total == cell.tokens


def test_every_mask_is_one_or_the_other() -> None:
    assert set(MASKS) == set(SIZED_MASKS) | set(SMALL_MASKS) and not set(SIZED_MASKS) & set(SMALL_MASKS)


def test_flops() -> None:
    assert flops(10, 6, 128, "fwd") == 4 * 10 * 6 * 128
    assert flops(10, 6, 128, "bwd") == flops(10, 6, 128, "bwd_det") == 10 * 10 * 6 * 128
    assert flops(2**32, 64, 128, "bwd") == 2.5 * 2**2 * 2**32 * 2**6 * 2**7  # no 32-bit product
