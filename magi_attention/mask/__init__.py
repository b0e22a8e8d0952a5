"""Masks as data: the band record, ranges and types that callers use, builders, pictures. Knows nothing of ranks or kernels."""

from magi_attention.mask.attn_range import AttnRange, NaiveRange
from magi_attention.mask.mask_type import AttnMaskType
from magi_attention.mask.ranges import AttnRanges
from magi_attention.mask.slices import AttnMask

__all__ = ["AttnMask", "AttnMaskType", "AttnRange", "AttnRanges", "NaiveRange"]
