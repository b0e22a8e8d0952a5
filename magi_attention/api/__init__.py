"""The public door: everything a user calls or passes. Re-exports only; each subject has its file in this folder."""

import magi_attention._needs_torch  # noqa: F401

# isort: split
from magi_attention.api.attention import calc_attn
from magi_attention.api.keys import DistAttnKey
from magi_attention.api.losses import reduce_loss
from magi_attention.api.moving import dispatch, get_position_ids, roll, shift_labels, undispatch
from magi_attention.api.padding import (
    apply_padding,
    compute_pad_size,
    infer_varlen_mask_from_batch,
    pad_at_dim,
    squash_batch_dim,
    unpad_at_dim,
)
from magi_attention.api.planning import (
    clear_cache,
    get_most_recent_key,
    magi_attn_flex_dispatch,
    magi_attn_flex_key,
    magi_attn_varlen_dispatch,
    magi_attn_varlen_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_varlen_key_for_new_mask_after_dispatch,
)
from magi_attention.api.single_device import flex_flash_attn_func
from magi_attention.api.single_plans import AttnPlan, prepare_attention
from magi_attention.common import AttnForwardMeta, AttnMask, AttnMaskType, AttnRange, AttnRanges
from magi_attention.config import (
    AttnOverlapMode,
    BSDispatchAlg,
    ContiguousDispatchAlg,
    DispatchConfig,
    DistAttnConfig,
    DPDispatchAlg,
    GreedyOverlapAlg,
    GrpCollConfig,
    LBDispatchAlg,
    MinHeapDispatchAlg,
    OverlapConfig,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
    UniformOverlapAlg,
    ZigzagDispatchAlg,
)
from magi_attention.errors import CommError, InputError, UnsupportedError
from magi_attention.mask.builders import infer_attn_mask_from_cu_seqlens, infer_attn_mask_from_sliding_window
from magi_attention.runtime.tokens import cu_seqlens_from_positions, local_cu_seqlens

__all__ = [
    "AttnForwardMeta",
    "AttnMask",
    "AttnMaskType",
    "AttnOverlapMode",
    "AttnPlan",
    "AttnRange",
    "AttnRanges",
    "BSDispatchAlg",
    "CommError",
    "ContiguousDispatchAlg",
    "DPDispatchAlg",
    "DispatchConfig",
    "DistAttnConfig",
    "DistAttnKey",
    "GreedyOverlapAlg",
    "GrpCollConfig",
    "InputError",
    "LBDispatchAlg",
    "MinHeapDispatchAlg",
    "OverlapConfig",
    "SequentialDispatchAlg",
    "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg",
    "UniformOverlapAlg",
    "UnsupportedError",
    "ZigzagDispatchAlg",
    "apply_padding",
    "calc_attn",
    "clear_cache",
    "compute_pad_size",
    "cu_seqlens_from_positions",
    "dispatch",
    "flex_flash_attn_func",
    "get_most_recent_key",
    "get_position_ids",
    "infer_attn_mask_from_cu_seqlens",
    "infer_attn_mask_from_sliding_window",
    "infer_varlen_mask_from_batch",
    "local_cu_seqlens",
    "magi_attn_flex_dispatch",
    "magi_attn_flex_key",
    "magi_attn_varlen_dispatch",
    "magi_attn_varlen_key",
    "make_flex_key_for_new_mask_after_dispatch",
    "make_varlen_key_for_new_mask_after_dispatch",
    "pad_at_dim",
    "prepare_attention",
    "reduce_loss",
    "roll",
    "shift_labels",
    "squash_batch_dim",
    "undispatch",
    "unpad_at_dim",
]
