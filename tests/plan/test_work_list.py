"""The work list of CPU kernels: pieces per tile rebuild the slices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from magi_attention import _native
from magi_attention.errors import InputError
from magi_attention.mask.slices import AttnMask
from magi_attention.testing.masks import random_slices


@pytest.mark.parametrize("tile_m", [1, 7, 64, 1000])
def test_pieces_rebuild_the_mask(tile_m: int) -> None:
    rng = np.random.default_rng(tile_m)
    for _ in range(25):
        total_q, total_k = int(rng.integers(0, 150)), int(rng.integers(0, 150))
        slices = random_slices(rng, total_q, total_k)
        found = _native.run("work_list", slices=slices, total_q=total_q, tile_m=tile_m)
        offsets, pieces = found["tile_offsets"], found["pieces"].reshape(-1, 6)
        assert offsets[0] == 0 and offsets[-1] == len(pieces) and len(offsets) == -(-total_q // tile_m) + 1
        assert AttnMask.from_slices(pieces, total_q, total_k).area() == AttnMask.from_slices(slices, total_q, total_k).area()
        dense = AttnMask.from_slices(pieces, total_q, total_k).to_dense()
        assert np.array_equal(dense, AttnMask.from_slices(slices, total_q, total_k).to_dense())
        for tile, (start, end) in enumerate(itertools.pairwise(offsets)):
            inside = pieces[start:end]
            assert (inside[:, 0] >= tile * tile_m).all() and (inside[:, 1] <= (tile + 1) * tile_m).all()
            assert (np.diff(inside[:, 2]) >= 0).all(), "ascending keys"
            assert (inside[:, 0] < inside[:, 1]).all() and (inside[:, 2] < inside[:, 3]).all()


@pytest.mark.parametrize(("total_q", "tile_m", "name"), [(8, 0, "tile_m=0"), (-1, 4, "total_q=-1")])
def test_wrong_sizes_are_named(total_q: int, tile_m: int, name: str) -> None:
    with pytest.raises(InputError, match=name):
        _native.run("work_list", slices=np.zeros((0, 6), np.int32), total_q=total_q, tile_m=tile_m)


def test_too_many_pieces_are_refused() -> None:
    everything = np.array([[0, 1 << 29, 0, 8, -(1 << 30), 1 << 30]], np.int32)
    with pytest.raises(InputError, match="larger tiles"):
        _native.run("work_list", slices=everything, total_q=1 << 29, tile_m=1)
