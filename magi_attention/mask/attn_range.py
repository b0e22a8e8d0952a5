"""AttnRange: one half-open run of token ids, frozen. Knows nothing of masks, tensors or lists of ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from magi_attention.arguments import flag, integer, shown
from magi_attention.errors import InputError

NaiveRange: TypeAlias = tuple[int, int]


@dataclass(frozen=True, order=True, repr=False, slots=True)
class AttnRange:
    """Tokens start, start + 1, ..., end - 1. Equal, ordered and hashed by (start, end).

    Any two ints can be held, so that arithmetic on ranges is closed; `is_valid` tells whether they name tokens
    (0 <= start <= end), and everything that takes ranges from a caller checks it.

    Raises:
        InputError: a bound that is no integer.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            rule = "must be an int; token ids have no fractions"
            object.__setattr__(self, name, integer(f"AttnRange {name}", getattr(self, name), rule))

    @classmethod
    def from_range(cls, attn_range: AttnRange | Sequence[int], check: bool = False) -> AttnRange:
        """From another range or a (start, end) pair; `check` refuses an invalid one."""
        start, end = (attn_range.start, attn_range.end) if isinstance(attn_range, AttnRange) else _pair(attn_range)
        made = cls(start, end)
        if flag("check", check):
            made.check_valid()
        return made

    # ---- facts ----

    @property
    def seqlen(self) -> int:
        """Number of tokens; 0 when the range is reversed."""
        return max(self.end - self.start, 0)

    def __len__(self) -> int:
        return self.seqlen

    def is_empty(self) -> bool:
        return self.start >= self.end

    def is_valid(self) -> bool:
        """True for 0 <= start <= end."""
        return 0 <= self.start <= self.end

    def check_valid(self) -> None:
        """Raise InputError unless `is_valid()`."""
        if not self.is_valid():
            raise InputError(f"range {self} must have 0 <= start <= end; ranges are half-open [start, end)")

    def is_subrange_of(self, other: AttnRange) -> bool:
        """Every token of this range is in `other`; an empty range is part of any."""
        return self.is_empty() or (other.start <= self.start and self.end <= other.end)

    def is_overlap_with(self, other: AttnRange) -> bool:
        """The two share a token."""
        return self.intersect_size(other) > 0

    def intersect_size(self, other: AttnRange) -> int:
        return max(min(self.end, other.end) - max(self.start, other.start), 0)

    def union_size(self, other: AttnRange) -> int:
        return self.seqlen + other.seqlen - self.intersect_size(other)

    # ---- new ranges ----

    def clone(self) -> AttnRange:
        return AttnRange(self.start, self.end)

    def offset(self, offset: int) -> AttnRange:
        """Moved by `offset` tokens."""
        offset = integer("offset", offset)
        return AttnRange(self.start + offset, self.end + offset)

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRange:
        """The part inside [start, end); None leaves that side. An empty part keeps a place inside the bounds."""
        low = self.start if start is None else max(self.start, integer("start", start))
        high = self.end if end is None else min(self.end, integer("end", end))
        return AttnRange(low, high) if low <= high else AttnRange(high, high)

    def intersect(self, other: AttnRange) -> AttnRange:
        """Tokens in both; empty (start == end) when there are none."""
        start = max(self.start, other.start)
        return AttnRange(start, max(min(self.end, other.end), start))

    def union(self, other: AttnRange) -> list[AttnRange]:
        """Tokens in either: one range when the two touch or overlap, else two in ascending order; empty ones are left out."""
        first, second = sorted((self, other))
        if first.is_empty() or second.is_empty():
            return [kept for kept in (first, second) if not kept.is_empty()]
        if second.start <= first.end:
            return [AttnRange(first.start, max(first.end, second.end))]
        return [first, second]

    def diff_by(self, other: AttnRange) -> list[AttnRange]:
        """Tokens of `other` that are not in this range: zero, one or two ranges, ascending."""
        if self.intersect_size(other) == 0:
            return [] if other.is_empty() else [other]
        parts = (AttnRange(other.start, self.start), AttnRange(self.end, other.end))
        return [part for part in parts if not part.is_empty()]

    def to_naive_range(self) -> NaiveRange:
        return (self.start, self.end)

    def __repr__(self) -> str:
        return f"[{self.start}, {self.end})"


def _pair(values: Sequence[int]) -> NaiveRange:
    try:
        if isinstance(values, (str, bytes, set, frozenset, dict)):
            raise TypeError("no order, or letters")
        start, end = values
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"attn_range={shown(values)} must be a (start, end) pair of ints") from None
    return start, end
