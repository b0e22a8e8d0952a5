"""AttnRanges under the module path that users of the peer library import it from. Re-exports only."""

from magi_attention.mask import AttnRanges

__all__ = ["AttnRanges"]
