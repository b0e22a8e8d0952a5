"""What callers say about a key besides its mask: heads, config, chunk and pad size, checked. Plans nothing."""

from __future__ import annotations

import dataclasses
import warnings

from magi_attention.arguments import count, shown
from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError
from magi_attention.mask.slices import MAX_TOKENS
from magi_attention.plan.build import MAX_WIDTH


def check_config(config: DistAttnConfig) -> None:
    """A DistAttnConfig.

    Raises:
        InputError: another type.
    """
    if not isinstance(config, DistAttnConfig):
        raise InputError(f"dist_attn_config={shown(config)} must be a DistAttnConfig; leave it out for the default")


def check_heads(num_heads_q: int, num_heads_kv: int, head_dim: int, head_dim_v: int | None) -> tuple[int, int, int, int | None]:
    """The four as plain ints.

    Raises:
        InputError: not positive ints, or num_heads_q is no multiple of num_heads_kv.
    """
    heads_q, heads_kv = count("num_heads_q", num_heads_q, 1, MAX_WIDTH), count("num_heads_kv", num_heads_kv, 1, MAX_WIDTH)
    if heads_q % heads_kv:
        raise InputError(
            f"num_heads_q={heads_q} must be a multiple of num_heads_kv={heads_kv} (every key head serves the same number of query heads); "
            "repeat key heads or change the counts"
        )
    return (
        heads_q,
        heads_kv,
        count("head_dim", head_dim, 1, MAX_WIDTH),
        None if head_dim_v is None else count("head_dim_v", head_dim_v, 1, MAX_WIDTH),
    )


def with_chunk_size(config: DistAttnConfig, chunk_size: int | None) -> DistAttnConfig:
    """The config with the chunk_size argument of a key function filled in.

    Raises:
        InputError: the config already asks for another one.
    """
    if chunk_size is None:
        return config
    check_config(config)
    wanted = count("chunk_size", chunk_size, 1, MAX_TOKENS)
    configured = config.dispatch_config.chunk_size
    if configured not in (None, wanted):
        raise InputError(f"chunk_size={wanted} differs from dist_attn_config.dispatch_config.chunk_size={configured}; pass it once")
    return dataclasses.replace(config, dispatch_config=dataclasses.replace(config.dispatch_config, chunk_size=wanted))


def check_pad_size(pad_size: int) -> None:
    """Warn about a pad_size that is not 0: no length needs padding.

    Raises:
        InputError: not an int of at least 0.
    """
    if count("pad_size", pad_size, 0, MAX_TOKENS):
        warnings.warn(
            f"pad_size={pad_size} is ignored: any length works without padding; pass 0 (uneven_shard=False pads by itself)",
            DeprecationWarning,
            stacklevel=4,
        )
