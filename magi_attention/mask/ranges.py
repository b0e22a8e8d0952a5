"""AttnRanges: a growable list of half-open token ranges, stored as one integer array. Knows nothing of masks.

torch is imported in `to_tensor` alone, when it is called: the result is a tensor, so the caller has torch, and everything else
here must work (and stay quick to import) without it.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator
from typing import Any, overload

import numpy as np

from magi_attention.arguments import Int64Array, count, flag, int_array, integer
from magi_attention.errors import InputError
from magi_attention.mask.attn_range import AttnRange, NaiveRange
from magi_attention.mask.inputs import offsets

_MAX_TOKENS = (1 << 30) - 1
_MAX_INDEX = (1 << 63) - 1


class AttnRanges:
    """Ranges in the caller's order; duplicates, empty and overlapping ones are kept. Equal when their ranges are, in order."""

    __hash__ = None  # type: ignore[assignment]  # it can grow

    def __init__(self) -> None:
        self._bounds = array.array("q")  # start, end, start, end, ...

    # ---- building ----

    @classmethod
    def from_ranges(cls, ranges: AttnRanges | Iterable[Any] | Any, check: bool = False) -> AttnRanges:
        """From AttnRange objects, (start, end) pairs, an int array or tensor [n, 2]; `check` refuses invalid ranges.

        Raises:
            InputError: floats, another shape, or with `check` a range that is not 0 <= start <= end.
        """
        if isinstance(ranges, Iterable) and not hasattr(ranges, "dtype") and not isinstance(ranges, (AttnRanges, str, bytes, dict, set)):
            ranges = list(ranges)
        made = cls()
        made._bounds.frombytes(int_array("ranges", ranges, columns=2).tobytes())
        if flag("check", check):
            made.check_valid()
        return made

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Any, seq_len: int | None = None) -> AttnRanges:
        """One range per document from cumulative lengths [num_documents + 1].

        Args:
            seq_len: when given, what the last offset must be.

        Raises:
            InputError: offsets that do not start with 0, fall, or end elsewhere than at seq_len.
        """
        values = offsets("cu_seqlens", cu_seqlens, _MAX_TOKENS)
        if seq_len is not None and values[-1] != count("seq_len", seq_len, 0, _MAX_TOKENS):
            raise InputError(f"cu_seqlens ends with {int(values[-1])} but seq_len={seq_len}; the last offset must be the total")
        return cls.from_ranges(np.stack([values[:-1], values[1:]], axis=1))

    def append(self, attn_range: AttnRange | NaiveRange, check: bool = False) -> None:
        self.insert(len(self), attn_range, check)

    def insert(self, idx: int, attn_range: AttnRange | NaiveRange, check: bool = False) -> None:
        added = AttnRanges.from_ranges([AttnRange.from_range(attn_range, check)])
        idx = integer("idx", idx)
        at = 2 * min(max(idx + len(self) if idx < 0 else idx, 0), len(self))
        self._bounds[at:at] = added._bounds

    def extend(self, attn_ranges: AttnRanges | Iterable[AttnRange], check: bool = False) -> None:
        self._bounds.extend(AttnRanges.from_ranges(attn_ranges, check)._bounds)

    def pop(self, idx: int = -1) -> AttnRange:
        popped = self[idx]
        at = 2 * (idx + len(self) if idx < 0 else idx)
        del self._bounds[at : at + 2]
        return popped

    # ---- list protocol ----

    def __len__(self) -> int:
        return len(self._bounds) // 2

    @property
    def size(self) -> int:
        """Number of ranges."""
        return len(self)

    def __iter__(self) -> Iterator[AttnRange]:
        return (AttnRange(start, end) for start, end in self.to_naive_ranges())

    @overload
    def __getitem__(self, idx: int) -> AttnRange: ...
    @overload
    def __getitem__(self, idx: slice) -> AttnRanges: ...
    def __getitem__(self, idx: int | slice) -> AttnRange | AttnRanges:
        if isinstance(idx, slice):
            return AttnRanges.from_ranges(self.to_array()[idx])
        at = idx + len(self) if idx < 0 else idx
        if not 0 <= at < len(self):
            raise IndexError(f"range {idx} of {len(self)}")
        return AttnRange(self._bounds[2 * at], self._bounds[2 * at + 1])

    def __setitem__(self, idx: int, attn_range: AttnRange | NaiveRange) -> None:
        new = AttnRanges.from_ranges([AttnRange.from_range(attn_range)])
        self[idx]  # raises IndexError
        at = 2 * (idx + len(self) if idx < 0 else idx)
        self._bounds[at : at + 2] = new._bounds

    def __copy__(self) -> AttnRanges:
        return self.clone()  # a list of its own, as copy.copy of a list is

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttnRanges) and self._bounds == other._bounds

    def __repr__(self) -> str:
        shown = ", ".join(repr(r) for r in self[:8])
        return f"AttnRanges({len(self)}: {shown}{', ...' if len(self) > 8 else ''})"

    # ---- facts ----

    def is_empty(self) -> bool:
        """True when there is no range (ranges without tokens count as ranges)."""
        return not self._bounds

    def is_valid(self) -> bool:
        """Every range has 0 <= start <= end."""
        values = self.to_array()
        return bool(((values[:, 0] >= 0) & (values[:, 0] <= values[:, 1])).all())

    def check_valid(self) -> None:
        """Raise InputError, naming the first one, unless every range is valid."""
        for idx, attn_range in enumerate(() if self.is_valid() else self):
            if not attn_range.is_valid():
                raise InputError(f"ranges[{idx}]={attn_range} must have 0 <= start <= end; ranges are half-open [start, end)")

    def is_sorted(self) -> bool:
        """Starts never fall."""
        return bool((np.diff(self.to_array()[:, 0]) >= 0).all())

    def is_non_overlap(self) -> bool:
        """No token is in two ranges."""
        values = self._nonempty_by_start()
        return bool((values[1:, 0] >= values[:-1, 1]).all())

    def is_merged(self) -> bool:
        """Sorted, without empty, touching or overlapping ranges: what `merge` returns."""
        return self == self.merge()

    def is_cu_seqlens(self, seqlen: int) -> bool:
        """The ranges tile [0, seqlen) in order."""
        seqlen = integer("seqlen", seqlen)
        values = self.to_array()
        edges = np.concatenate([[0], values[:, 1]])
        return bool((edges[:-1] == values[:, 0]).all() and edges[-1] == seqlen and self.is_valid())

    @property
    def total_seqlen(self) -> int:
        """Tokens summed over ranges; a token in two ranges counts twice."""
        return int(np.maximum(np.diff(self.to_array(), axis=1), 0).sum())

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest range, 0 without ranges."""
        return int(np.diff(self.to_array(), axis=1).max(initial=0))

    @property
    def start(self) -> int:
        """Smallest start.

        Raises:
            InputError: there is no range.
        """
        return int(self._nonempty_list()[:, 0].min())

    @property
    def end(self) -> int:
        """Largest end.

        Raises:
            InputError: there is no range.
        """
        return int(self._nonempty_list()[:, 1].max())

    @property
    def points(self) -> list[int]:
        """Every start and end once, ascending."""
        return [int(point) for point in np.unique(self.to_array())]

    # ---- new lists ----

    def clone(self) -> AttnRanges:
        return AttnRanges.from_ranges(self)

    def sort(self) -> AttnRanges:
        """A new list by (start, end)."""
        values = self.to_array()
        return AttnRanges.from_ranges(values[np.lexsort((values[:, 1], values[:, 0]))])

    def merge(self) -> AttnRanges:
        """A new list with the same tokens: sorted, touching and overlapping ranges joined, empty ones dropped."""
        values = self._nonempty_by_start()
        if not len(values):
            return AttnRanges()
        reach = np.maximum.accumulate(values[:, 1])
        first = np.flatnonzero(np.concatenate([[True], values[1:, 0] > reach[:-1]]))
        last = np.append(first[1:], len(values)) - 1
        return AttnRanges.from_ranges(np.stack([values[first, 0], reach[last]], axis=1))

    def clear_empty(self) -> AttnRanges:
        """A new list without the ranges that hold no token, order kept."""
        values = self.to_array()
        return AttnRanges.from_ranges(values[values[:, 0] < values[:, 1]])

    def offset(self, offset: int) -> AttnRanges:
        """A new list, every range moved by `offset` tokens."""
        offset = count("offset", offset, -_MAX_INDEX, _MAX_INDEX)
        values = self.to_array()
        moved = values + offset
        if offset and ((moved > values) != (offset > 0)).any():
            raise InputError(f"offset={offset} moves a range past 64 bits; token ids are below 2^30")
        return AttnRanges.from_ranges(moved)

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRanges:
        """A new list with the part of each range inside [start, end); parts without tokens are dropped."""
        return AttnRanges.from_ranges([r.truncate(start, end) for r in self]).clear_empty()

    def intersect(self, other: AttnRanges) -> AttnRanges:
        """Tokens in both lists, merged."""
        return self._covered(other, 2)

    def union(self, other: AttnRanges) -> AttnRanges:
        """Tokens in either list, merged."""
        return self._covered(other, 1)

    def find_hole_ranges(self, other: AttnRanges) -> AttnRanges:
        """Tokens of this list that are not in `other`, merged."""
        # With own tokens counted once and the other's minus once, exactly the wanted ones count 1.
        return _where_count(self.merge().to_array(), other.merge().to_array(), -1, 1)

    def find_overlap_ranges(self, other: AttnRanges) -> AttnRanges:
        """Tokens in both lists, merged; the same as `intersect`."""
        return self.intersect(other)

    def _covered(self, other: AttnRanges, min_count: int) -> AttnRanges:
        return _where_count(self.merge().to_array(), other.merge().to_array(), 1, min_count)

    # ---- out ----

    def to_naive_ranges(self) -> list[NaiveRange]:
        return list(zip(self._bounds[0::2], self._bounds[1::2], strict=True))

    def to_array(self) -> Int64Array:
        """int64 [n, 2], a copy."""
        return np.array(self._bounds, dtype=np.int64).reshape(-1, 2)

    def to_cu_seqlens(self, seq_len: int) -> list[int]:
        """Cumulative lengths [num_ranges + 1] of ranges that tile [0, seq_len) in order.

        Raises:
            InputError: they do not.
        """
        if not self.is_cu_seqlens(integer("seq_len", seq_len)):
            raise InputError(f"{self} does not tile [0, {seq_len}) in order, so it has no cu_seqlens")
        return [0, *self._bounds[1::2]]

    def to_tensor(self, device: Any = "cpu") -> Any:
        """int32 torch.Tensor [n, 2] on `device` (a torch.device or what makes one).

        Raises:
            InputError: a bound that does not fit 32 bits.
        """
        import torch  # the one place that needs it, see the top of the file

        values = self.to_array()
        if values.size and (values.max() >= 1 << 31 or values.min() < -(1 << 31)):
            raise InputError(f"{self} has a bound that does not fit 32 bits; token ids are below 2^30")
        return torch.from_numpy(values.astype(np.int32)).to(device)

    def _nonempty_by_start(self) -> Int64Array:
        values = self.to_array()
        values = values[values[:, 0] < values[:, 1]]
        return values[np.argsort(values[:, 0], kind="stable")]

    def _nonempty_list(self) -> Int64Array:
        if self.is_empty():
            raise InputError("AttnRanges has no range, so it has no start or end; test is_empty() first")
        return self.to_array()


def _where_count(a: Int64Array, b: Int64Array, b_weight: int, min_count: int) -> AttnRanges:
    """Tokens where (1 if in a) + (b_weight if in b) >= min_count; a and b are merged."""
    points = np.concatenate([a[:, 0], a[:, 1], b[:, 0], b[:, 1]])
    weights = np.repeat([1, -1, b_weight, -b_weight], [len(a), len(a), len(b), len(b)])
    order = np.argsort(points, kind="stable")
    points, counts = points[order], np.cumsum(weights[order])
    is_in = counts[:-1] >= min_count
    return AttnRanges.from_ranges(np.stack([points[:-1][is_in], points[1:][is_in]], axis=1)).merge()
