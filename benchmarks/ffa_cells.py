"""What the attention benchmark measures: masks, sizes, heads, and the work that is in them. Runs no attention and needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.bench_plan import long_tailed_documents
from magi_attention.mask import AttnMask, builders

SIZES = tuple(1024 * 2**exponent for exponent in range(7))  # 1k to 64k
HEADS = ((48, 8), (16, 16), (64, 8))
HEAD_DIMS = (128, 64)
DTYPES = ("bfloat16", "float16")
OPS = ("fwd", "bwd", "bwd_det")  # bwd_det: the deterministic backward
WINDOW = 1024
FRAME = 1560
TILE = 128


@dataclass(frozen=True)
class Layout:
    """A mask in the words that baselines ask for.

    Attributes:
        borders: cumulative lengths of the documents, 0 first.
        is_causal: no key after the query, inside each document.
        window: keys that a query sees, itself included, counted backwards; None for all.
        frame: every token sees its own and all earlier frames of so many tokens; then there is one document and is_causal is False.
    """

    borders: tuple[int, ...]
    is_causal: bool = False
    window: int | None = None
    frame: int | None = None

    @property
    def total(self) -> int:
        return self.borders[-1]

    @property
    def is_one_document(self) -> bool:
        return len(self.borders) == 2

    @property
    def longest(self) -> int:
        return max((end - start for start, end in itertools.pairwise(self.borders)), default=0)

    def mask(self) -> AttnMask:
        if self.frame is not None:
            return builders.block_causal_video(-(-self.total // self.frame), self.frame, self.total)
        window = None if self.window is None else (self.window - 1, 0)
        return builders.from_cu_seqlens(self.borders, self.borders, causal=self.is_causal, window_size=window)


def _small_documents(count: int, shortest: int, longest: int) -> Layout:
    lengths = np.random.default_rng(0).integers(shortest, longest + 1, size=count)
    return Layout((0, *np.cumsum(lengths).tolist()), is_causal=True)


def _as_tiles(layout: Layout) -> Layout:
    """As many full tiles as the documents fill: the time that small documents are held against."""
    return Layout((*range(0, layout.total, TILE), layout.total))


SIZED_MASKS: dict[str, Callable[[int], Layout]] = {
    "full": lambda total: Layout((0, total)),
    "causal": lambda total: Layout((0, total), is_causal=True),
    "varlen_full": lambda total: Layout(tuple(long_tailed_documents(total))),
    "varlen_causal": lambda total: Layout(tuple(long_tailed_documents(total)), is_causal=True),
    "swa_causal": lambda total: Layout((0, total), is_causal=True, window=WINDOW),
    "frame_causal": lambda total: Layout((0, total), frame=FRAME),
}
# Their number of tokens is their own, so --sizes does not touch them.
SMALL_MASKS: dict[str, Callable[[], Layout]] = {
    "docs_1_4": lambda: _small_documents(15_000, 1, 4),
    "docs_1_4_as_tiles": lambda: _as_tiles(_small_documents(15_000, 1, 4)),
    "docs_8_64": lambda: _small_documents(2_000, 8, 64),
    "docs_8_64_as_tiles": lambda: _as_tiles(_small_documents(2_000, 8, 64)),
}
MASKS = (*SIZED_MASKS, *SMALL_MASKS)


@dataclass(frozen=True, order=True)
class Cell:
    """One problem of the grid; `layout()` is its mask."""

    mask: str
    tokens: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def heads(self) -> str:
        return f"{self.num_heads_q}/{self.num_heads_kv}"

    def layout(self) -> Layout:
        return SIZED_MASKS[self.mask](self.tokens) if self.mask in SIZED_MASKS else SMALL_MASKS[self.mask]()

    def __str__(self) -> str:
        return f"{self.mask} {self.tokens} {self.heads} d{self.head_dim} {self.dtype}"


def cells(
    masks: Iterable[str], sizes: Iterable[int], heads: Iterable[tuple[int, int]], head_dims: Iterable[int], dtypes: Iterable[str]
) -> list[Cell]:
    """The selected grid, head counts outermost, so that a run that stops early has whole tables of the first ones."""
    masks, sizes = tuple(masks), tuple(sizes)
    problems = [(mask, size) for mask in masks if mask in SIZED_MASKS for size in sizes]
    problems += [(mask, SMALL_MASKS[mask]().total) for mask in masks if mask in SMALL_MASKS]
    order = itertools.product(dtypes, head_dims, heads, problems)
    return [Cell(mask, size, hq, hkv, head_dim, dtype) for dtype, head_dim, (hq, hkv), (mask, size) in order]


def flops(area: int, num_heads_q: int, head_dim: int, op: str) -> float:
    """Two matmuls forward, five backward, two operations for each visible pair and channel in each."""
    return 4.0 * area * num_heads_q * head_dim * (1.0 if op == "fwd" else 2.5)
