"""The enums under the module path that users of the peer library import them from. Re-exports only."""

from magi_attention.config import AttnOverlapMode
from magi_attention.mask import AttnMaskType

__all__ = ["AttnMaskType", "AttnOverlapMode"]
