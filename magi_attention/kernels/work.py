"""The work list of one mask: query tiles and, per tile, the spans of keys they see. Knows nothing of torch, heads or ranks.

Spans are what the blocked path walks, and are made when it first does; compiled kernels keep their own lists in `derived`.

A tile is a run of query rows. Its slices, clipped to the tile, are its pieces. Their key columns are cut where the set of
pieces or the full visibility changes, then neighbouring cuts are joined again where one matmul is cheaper than two. What
is left is a span: a row range times some keys, either fully visible or with the visible columns of each row listed.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from magi_attention import _native
from magi_attention.errors import InputError
from magi_attention.kernels.spans import Span, tile_spans
from magi_attention.plan.types import Int32Array, Int64Array

_KEPT_WORK_LISTS = 64


@dataclass(frozen=True, eq=False)
class Tile:
    """Rows [q_start, q_end) of the query buffer and the spans they see, ascending in keys.

    Attributes:
        dead_rows: int64 rows of the tile (relative) that see no key; None when every row sees one.
    """

    q_start: int
    q_end: int
    spans: tuple[Span, ...]
    dead_rows: Int64Array | None


@dataclass(frozen=True, eq=False)
class WorkList:
    """What a launch walks. Depends on the mask alone, so one serves every layer and both passes.

    Attributes:
        slices: int32 [N, 6], checked.
        total_q, total_k: rows of the query and key buffers.
        derived: what kernels made of it, by their own names; lives as long as the work list.
        calls: what callers worked out for tensors alike, by their own names.
    """

    slices: Int32Array
    total_q: int
    total_k: int
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    calls: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def tile_m(self) -> int:
        """Rows of a tile of the blocked path."""
        return tile_rows(self.slices, self.total_q)

    @functools.cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Tiles of the blocked path, only those that see a key."""
        return _tiles(self.slices, self.total_q, self.tile_m)


def prepare(slices: npt.ArrayLike | WorkList, total_q: int, total_k: int) -> WorkList:
    """The work list of a mask, from a bounded cache when these slices were seen before.

    Args:
        slices: int [N, 6] (q_start, q_end, k_start, k_end, lo, hi), no cell covered twice; or a work list, returned as it is.
        total_q, total_k: rows of the query and key buffers.

    Raises:
        InputError: slices that are not [N, 6] integers, or reach outside the buffers.
    """
    if isinstance(slices, WorkList):
        if (slices.total_q, slices.total_k) != (total_q, total_k):
            raise InputError(
                f"slices: the work list was prepared for total_q={slices.total_q}, total_k={slices.total_k}, "
                f"but q has {total_q} rows and k has {total_k}; prepare one for these lengths"
            )
        return slices
    records = _checked(slices, total_q, total_k)
    key = (records.tobytes(), total_q, total_k)
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    work = WorkList(records.copy(), total_q, total_k)
    with _lock:
        _kept[key] = work
        while len(_kept) > _KEPT_WORK_LISTS:
            _kept.popitem(last=False)
    return work


def clear_prepared() -> None:
    """Drop every cached work list."""
    with _lock:
        _kept.clear()


_kept: OrderedDict[tuple[bytes, int, int], WorkList] = OrderedDict()
_lock = threading.Lock()


def _checked(slices: npt.ArrayLike, total_q: int, total_k: int) -> Int32Array:
    raw = np.asarray(slices)
    if raw.size == 0:
        return np.zeros((0, 6), np.int32)
    if raw.ndim != 2 or raw.shape[1] != 6 or raw.dtype.kind not in "iu":
        raise InputError(f"slices: {raw.dtype} {list(raw.shape)} given, must be integers [N, 6] (q_start, q_end, k_start, k_end, lo, hi)")
    wrong = (raw[:, [0, 2]] < 0).any(1) | (raw[:, 1] > total_q) | (raw[:, 3] > total_k)
    if wrong.any():
        idx = int(np.flatnonzero(wrong)[0])
        q_start, q_end, k_start, k_end = (int(x) for x in raw[idx, :4])
        raise InputError(
            f"slices[{idx}]: q_range=({q_start}, {q_end}), k_range=({k_start}, {k_end}) reach outside q with {total_q} rows "
            f"or k with {total_k} rows; ranges are half-open rows of q and k, clip them or pass the whole tensors"
        )
    return np.ascontiguousarray(raw, dtype=np.int32)


def tile_rows(slices: npt.NDArray[np.integer], total_q: int) -> int:
    """Rows per tile: small where rows see few keys (less waste), else what was fastest for 64 to 128 wide heads on two cores."""
    if not len(slices):
        return 128
    s = slices.astype(np.int64)
    num_keys = np.minimum(s[:, 3] - s[:, 2], np.maximum(s[:, 5] - s[:, 4] + 1, 0))  # a row of a band sees at most hi - lo + 1 keys
    seen_per_row = float(((s[:, 1] - s[:, 0]) * num_keys).sum()) / max(total_q, 1)
    return 128 if seen_per_row >= 16 else 64


def _tiles(slices: Int32Array, total_q: int, tile_m: int) -> tuple[Tile, ...]:
    found = _native.run("work_list", slices=slices, total_q=total_q, tile_m=tile_m)
    offsets, pieces = found["tile_offsets"], found["pieces"].reshape(-1, 6).astype(np.int32, copy=False)
    tiles = []
    for idx in range(len(offsets) - 1):
        begin, end = int(offsets[idx]), int(offsets[idx + 1])
        if begin == end:
            continue
        q_start = idx * tile_m
        q_end = min(q_start + tile_m, total_q)
        own = pieces[begin:end]
        tiles.append(Tile(q_start, q_end, tile_spans(own, q_start), _dead_rows(own, q_start, q_end)))
    return tuple(tiles)


def _dead_rows(pieces: Int32Array, q_start: int, q_end: int) -> Int64Array | None:
    edges = np.zeros(q_end - q_start + 1, np.int64)
    np.add.at(edges, pieces[:, 0] - q_start, 1)
    np.add.at(edges, pieces[:, 1] - q_start, -1)
    dead = np.flatnonzero(np.cumsum(edges[:-1]) == 0)
    return dead if len(dead) else None
