"""Import path of the peer library for one range. Re-exports only."""

from magi_attention.mask.attn_range import AttnRange, NaiveRange

__all__ = ["AttnRange", "NaiveRange"]
