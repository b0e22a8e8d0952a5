"""Import path of the peer library for lists of ranges. Re-exports only."""

from typing import TypeAlias

from magi_attention.mask.attn_range import NaiveRange
from magi_attention.mask.ranges import AttnRanges

NaiveRanges: TypeAlias = list[NaiveRange]

__all__ = ["AttnRanges", "NaiveRanges"]
