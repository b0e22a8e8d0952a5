"""Import path of the peer library for the enums. Re-exports only."""

from magi_attention.config import AttnOverlapMode
from magi_attention.mask.mask_type import AttnMaskType

__all__ = ["AttnMaskType", "AttnOverlapMode"]
