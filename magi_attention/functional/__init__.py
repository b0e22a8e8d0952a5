"""The single-device function where users of the peer library look for it. Re-exports only."""

from magi_attention.api.single_device import flex_flash_attn_func

__all__ = ["flex_flash_attn_func"]
