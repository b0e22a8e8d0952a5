"""What the blocked forward and backward share: matmul rows, key rows, blocks and their masks. Knows nothing of softmax or ranks.

Layout: the query heads of one kv head become matmul rows, row = query row * group_size + head in group. A row range of a tile
is then one contiguous run of every matmul, and grouped-query attention copies no keys.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from magi_attention.kernels.spans import Span
from magi_attention.kernels.work import Tile

BLOCK_COLUMNS = 512  # keys per matmul
SCORE_CELLS = 1 << 18  # scores held at once: 1 MiB stays in the caches of a core or two between the passes over it
_MANY_LAYERS = 8


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores, sums and accumulators are fp32; fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Heads:
    """Head counts of one call."""

    num_kv: int
    group_size: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> Heads:
        return cls(k.shape[1], q.shape[1] // max(k.shape[1], 1))

    def tile_view(self, x: Tensor, tile: Tile) -> Tensor:
        """View [num_kv, rows, group_size, width] of the tile's rows of a tensor [T, Hq, width]."""
        rows = x[tile.q_start : tile.q_end]
        return rows.view(rows.shape[0], self.num_kv, self.group_size, rows.shape[2]).permute(1, 0, 2, 3)

    def load_rows(self, x: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
        """Copy of the tile's rows as matmul rows [num_kv, rows * group_size, width]; rows that see no key become 0, whatever they hold."""
        view = self.tile_view(x, tile)
        rows = torch.empty(view.shape, dtype=dtype, device=x.device).copy_(view)
        if tile.dead_rows is not None:
            rows.index_fill_(1, uploaded(tile, "dead_rows", tile.dead_rows, x.device), 0)
        return rows.flatten(1, 2)


@dataclass(frozen=True)
class Block:
    """One matmul per head: matmul rows of a tile times keys.

    Attributes:
        rows: matmul rows within the tile.
        keys: rows of k and v, a run or int64 indices; each is seen by some row, so no other key is ever read.
        num_keys: how many.
        bias: [query rows, 1, num_keys], 0 where visible, -inf elsewhere; None when all is visible.
    """

    rows: slice
    keys: slice | Tensor
    num_keys: int
    bias: Tensor | None

    def read(self, x: Tensor, chunk: slice) -> Tensor:
        """The block's keys out of head-major [Hkv, Tk, width], for a chunk of kv heads."""
        return x[chunk, self.keys] if isinstance(self.keys, slice) else x[chunk].index_select(1, self.keys)

    def add_to(self, x: Tensor, chunk: slice, left: Tensor, right: Tensor, alpha: float) -> None:
        """x[keys] += alpha * left^T @ right, x head-major [Hkv, Tk, width]."""
        if isinstance(self.keys, slice):
            x[chunk, self.keys].baddbmm_(left.transpose(1, 2), right, alpha=alpha)
        else:
            x[chunk].index_add_(1, self.keys, torch.bmm(left.transpose(1, 2), right), alpha=alpha)

    def mask(self, scores: Tensor, group_size: int) -> None:
        """Hidden cells of scores [heads, matmul rows, keys] become -inf."""
        if self.bias is not None:
            scores.view(scores.shape[0], -1, group_size, self.num_keys).add_(self.bias)

    def chunks(self, num_heads: int) -> Iterator[slice]:
        """kv heads in chunks whose scores stay near SCORE_CELLS."""
        size = max(1, SCORE_CELLS // max(1, (self.rows.stop - self.rows.start) * self.num_keys))
        for start in range(0, num_heads, size):
            yield slice(start, min(start + size, num_heads))


def tile_blocks(tile: Tile, group_size: int, dtype: torch.dtype, device: torch.device) -> Iterator[Block]:
    """The blocks of a tile in ascending order of keys, spans cut into about equal parts of at most BLOCK_COLUMNS."""
    for span in tile.spans:
        rows = slice(span.row_start * group_size, span.row_end * group_size)
        index = None if span.k_index is None else uploaded(span, "k_index", span.k_index, device)
        bounds = None if span.bounds is None else uploaded(span, "bounds", span.bounds, device)
        num_blocks = -(-span.num_keys // BLOCK_COLUMNS)
        for idx in range(num_blocks):
            begin, end = span.num_keys * idx // num_blocks, span.num_keys * (idx + 1) // num_blocks
            keys = slice(span.k_start + begin, span.k_start + end) if index is None else index[begin:end]
            yield Block(rows, keys, end - begin, None if bounds is None else _bias(bounds, begin, end, dtype))


def _bias(bounds: Tensor, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """[rows, 1, columns] for int32 bounds [layers, 2, rows] (see Span.bounds) and columns [begin, end) of the span."""
    num_layers, _, num_rows = bounds.shape
    bias = torch.full((num_rows, 1, end - begin), float("-inf"), dtype=dtype, device=bounds.device)
    if num_layers > _MANY_LAYERS:
        # +1 where an interval starts, -1 where it ends: the running sum counts covers, at a cost that does not grow with layers.
        edges = (bounds - begin).clamp_(0, end - begin).to(torch.int64).permute(1, 2, 0)
        steps = torch.zeros(num_rows, end - begin + 1, dtype=torch.int32, device=bounds.device)
        steps.scatter_add_(1, edges[0], torch.ones_like(edges[0], dtype=torch.int32))
        steps.scatter_add_(1, edges[1], torch.full_like(edges[1], -1, dtype=torch.int32))
        return bias.masked_fill_(steps.cumsum(1)[:, None, :-1] > 0, 0)
    columns = torch.arange(begin, end, dtype=torch.int32, device=bounds.device)
    for starts, ends in bounds[:, :, :, None, None].unbind(0):
        bias.masked_fill_((columns >= starts) & (columns < ends), 0)
    return bias


def head_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H, width] as [H, T, width] in `dtype`: a view when a matmul can read it in place, else a copy."""
    if x.dtype == dtype and x.stride(2) == 1 and x.stride(0) >= x.shape[2]:
        return x.transpose(0, 1)
    return torch.empty((x.shape[1], x.shape[0], x.shape[2]), dtype=dtype, device=x.device).copy_(x.transpose(0, 1))


_uploads: weakref.WeakKeyDictionary[Tile | Span, dict[tuple[str, torch.device], Tensor]] = weakref.WeakKeyDictionary()


def uploaded(owner: Tile | Span, name: str, indices: npt.NDArray[np.integer], device: torch.device) -> Tensor:
    """An array of a work list as a tensor on `device`. Copied to a GPU once and kept as long as the work list: a copy stops the host."""
    if device.type == "cpu":
        return torch.from_numpy(indices)
    of_owner = _uploads.setdefault(owner, {})
    if (name, device) not in of_owner:
        of_owner[name, device] = torch.from_numpy(indices).to(device)
    return of_owner[name, device]
