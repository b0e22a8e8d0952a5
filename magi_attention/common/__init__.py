"""The data types of the public door: ranges, mask types, masks and what attention returns. Re-exports only."""

from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.mask import AttnMask, AttnMaskType, AttnRange, AttnRanges

__all__ = ["AttnForwardMeta", "AttnMask", "AttnMaskType", "AttnRange", "AttnRanges"]
