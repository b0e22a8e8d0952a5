"""Every public function against values that nobody should pass: our own error that names the argument, or a result; nothing raw."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from magi_attention import api
from magi_attention.api import AttnMask, AttnMaskType, AttnRange, AttnRanges, InputError
from magi_attention.config import DistAttnConfig, GrpCollConfig, OverlapAlg, OverlapConfig
from magi_attention.mask import builders
from tests.hostile import raw_errors

RANGES = [[0, 8]]
CU_SEQLENS = [0, 3, 8]
Q, K, V = (torch.randn(8, 2, 4) for _ in range(3))
HEADS: dict[str, Any] = {"num_heads_q": 2, "num_heads_kv": 2, "head_dim": 4}
KEY: dict[str, Any] = {**HEADS, "pad_size": 0, "cp_group_or_mesh": None, "dist_attn_config": DistAttnConfig(), "chunk_size": None}
MASK = AttnMask.from_ranges(RANGES, RANGES, "causal", 8, 8)


def key() -> api.DistAttnKey:
    return api.magi_attn_varlen_key(CU_SEQLENS, CU_SEQLENS, 2, 2, 4, 0, None, causal=True)


ROLL: dict[str, Any] = {"shift": 1, "dim": 0, "key": key(), "within_documents": True}


def attend(**arguments: Any) -> Any:
    return api.flex_flash_attn_func(**{"q": Q, "k": K, "v": V, **arguments})


def on_ranges(method: str) -> Any:
    return lambda **arguments: getattr(AttnRanges.from_ranges(RANGES), method)(**arguments)


DOORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AttnRange": (AttnRange, {"start": 0, "end": 4}),
    "AttnRange.from_range": (AttnRange.from_range, {"attn_range": (0, 4), "check": True}),
    "AttnRange.truncate": (AttnRange(0, 8).truncate, {"start": 1, "end": 3}),
    "AttnRange.offset": (AttnRange(0, 8).offset, {"offset": 1}),
    "AttnRanges.from_ranges": (AttnRanges.from_ranges, {"ranges": RANGES, "check": True}),
    "AttnRanges.from_cu_seqlens": (AttnRanges.from_cu_seqlens, {"cu_seqlens": CU_SEQLENS, "seq_len": 8}),
    "AttnRanges.append": (on_ranges("append"), {"attn_range": (0, 1), "check": False}),
    "AttnRanges.insert": (on_ranges("insert"), {"idx": 0, "attn_range": (0, 1)}),
    "AttnRanges.extend": (on_ranges("extend"), {"attn_ranges": RANGES}),
    "AttnRanges.offset": (on_ranges("offset"), {"offset": 1}),
    "AttnRanges.truncate": (on_ranges("truncate"), {"start": 1, "end": 3}),
    "AttnRanges.to_cu_seqlens": (on_ranges("to_cu_seqlens"), {"seq_len": 8}),
    "AttnRanges.is_cu_seqlens": (on_ranges("is_cu_seqlens"), {"seqlen": 8}),
    "AttnMaskType.from_int_type": (AttnMaskType.from_int_type, {"int_type": 0}),
    "from_slices": (AttnMask.from_slices, {"slices": [[0, 8, 0, 8, -9, 0]], "total_q": 8, "total_k": 8}),
    "from_ranges": (AttnMask.from_ranges, {"q_ranges": RANGES, "k_ranges": RANGES, "attn_type_map": [1], "total_q": 8, "total_k": 8}),
    "from_json": (AttnMask.from_json, {"text": MASK.to_json()}),
    "crop": (MASK.crop, {"q_start": 0, "q_end": 4, "k_start": 0, "k_end": 4}),
    "from_cu_seqlens": (
        builders.from_cu_seqlens,
        {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS, "causal": True, "window_size": (-1, -1), "global_tokens": 0},
    ),
    "sliding_window": (builders.sliding_window, {"total_q": 8, "total_k": 8, "window_size": (1, 0), "global_tokens": 0}),
    "prefix_lm": (builders.prefix_lm, {"cu_seqlens": CU_SEQLENS, "prefix_lengths": [2, 1]}),
    "prefix_tree": (builders.prefix_tree, {"lengths": [8], "parents": [-1]}),
    "shared_question": (builders.shared_question, {"question_length": 3, "answer_lengths": [1, 2]}),
    "block_causal_video": (builders.block_causal_video, {"num_frames": 2, "frame_length": 4, "total_tokens": 8, "frames_back": 1}),
    "block_map": (
        builders.block_map,
        {"is_visible": [[True]], "total_q": 8, "total_k": 8, "q_block_size": 8, "k_block_size": 8},
    ),
    "block_list": (builders.block_list, {"blocks": [[0, 0]], "total_q": 8, "total_k": 8, "q_block_size": 8, "k_block_size": 8}),
    "infer_window": (
        api.infer_attn_mask_from_sliding_window,
        {"q_range": (0, 8), "k_range": (0, 8), "window_size": (1, 0)},
    ),
    "top_p": (api.ToppHeapDispatchAlg, {"top_p": 0.2}),
    "DispatchConfig": (api.DispatchConfig, {"chunk_size": 4, "alg": api.MinHeapDispatchAlg(), "uneven_shard": True}),
    "OverlapConfig": (api.OverlapConfig, copy.copy(vars(OverlapConfig(degree=2)))),
    "GrpCollConfig": (api.GrpCollConfig, copy.copy(vars(GrpCollConfig()))),
    "DistAttnConfig": (api.DistAttnConfig, copy.copy(vars(DistAttnConfig()))),
    "compute_pad_size": (api.compute_pad_size, {"total_seqlen_q": 8, "cp_size": 2, "chunk_size": 2}),
    "pad_at_dim": (api.pad_at_dim, {"x": torch.zeros(4, 2), "dim": 0, "pad_size": 1, "value": 0.0, "side": "left"}),
    "unpad_at_dim": (api.unpad_at_dim, {"x": torch.zeros(4, 2), "dim": 0, "pad_size": 1}),
    "squash_batch_dim": (api.squash_batch_dim, {"x": torch.zeros(4, 2)}),
    "infer_varlen_mask_from_batch": (api.infer_varlen_mask_from_batch, {"batch_size": 2, "seq_len": 2, "device": "cpu"}),
    "apply_padding": (
        api.apply_padding,
        {"q_ranges": RANGES, "k_ranges": RANGES, "attn_mask_type": [AttnMaskType.FULL], "total_seqlen": 8, "pad_size": 8},
    ),
    "attention over ranges": (
        attend,
        {
            "q": Q,
            "k": K,
            "v": V,
            "q_ranges": RANGES,
            "k_ranges": RANGES,
            "attn_type_map": [1],
            "sink": torch.zeros(1, 2),
            "sink_layout": "sh",
            "softmax_scale": 1.0,
            "softcap": 0.0,
            "deterministic": False,
            "sm_margin": 0,
            "return_max_logits": False,
        },
    ),
    "attention over a table": (attend, {"index_attn_indices": torch.zeros(8, 1, dtype=torch.int32), "q_block_size": 1, "k_block_size": 1}),
    "attention over a mask": (attend, {"mask": MASK}),
    "attention over a plan": (attend, {"plan": api.prepare_attention(MASK)}),
    "prepare_attention": (api.prepare_attention, {"mask": MASK}),
    "flex key": (
        api.magi_attn_flex_key,
        {
            "q_ranges": RANGES,
            "k_ranges": RANGES,
            "attn_mask_type": [1],
            "total_seqlen_q": 8,
            "total_seqlen_k": 8,
            **KEY,
            "is_same_source": True,
            "is_q_permutable": True,
            "is_k_permutable": True,
            "head_dim_v": 4,
        },
    ),
    "varlen key": (
        api.magi_attn_varlen_key,
        {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS, **KEY, "causal": True, "window_size": (1, 0)},
    ),
    "flex key after dispatch": (
        api.make_flex_key_for_new_mask_after_dispatch,
        {
            "q_ranges": RANGES,
            "k_ranges": RANGES,
            "attn_mask_type": [1],
            "key_for_dispatch": key(),
            **HEADS,
            "dist_attn_config": DistAttnConfig(),
        },
    ),
    "varlen key after dispatch": (
        api.make_varlen_key_for_new_mask_after_dispatch,
        {
            "cu_seqlens_q": CU_SEQLENS,
            "cu_seqlens_k": CU_SEQLENS,
            "key_for_dispatch": key(),
            "causal": True,
            "window_size": (1, 0),
            "dist_attn_config": DistAttnConfig(),
        },
    ),
    "get_most_recent_key": (api.get_most_recent_key, {"cp_group": None}),
    "calc_attn": (
        api.calc_attn,
        {
            "q": Q,
            "k": K,
            "v": V,
            "key": key(),
            "sink": torch.zeros(1, 2),
            "softmax_scale": 1.0,
            "softcap": 0.0,
            "return_max_logits": False,
            "sink_layout": "sh",
        },
    ),
    "dispatch": (api.dispatch, {"x": torch.zeros(8, 3), "key": key(), "pad_value": 0.0, "dim": 0, "role": "q"}),
    "undispatch": (api.undispatch, {"x": torch.zeros(8, 3), "key": key(), "is_partial_grad": False, "dim": 0, "role": "q"}),
    "roll": (
        api.roll,
        {
            "x": torch.zeros(8, 3),
            "shift": 1,
            "dim": 0,
            "key": key(),
            "within_documents": True,
            "cu_seqlens": CU_SEQLENS,
            "fill_value": 0.0,
        },
    ),
    "shift_labels": (api.shift_labels, {"labels": torch.arange(8), "key": key(), "cu_seqlens": None, "dim": 0, "fill_value": -100}),
    "get_position_ids": (api.get_position_ids, {"key": key(), "within_documents": True, "cu_seqlens": CU_SEQLENS, "device": "cpu"}),
    "reduce_loss": (api.reduce_loss, {"loss_sum": torch.tensor(1.0), "count": 1, "group": None, "grad_reduction": "avg"}),
    "local_cu_seqlens": (api.local_cu_seqlens, {"positions": [0, 1], "cu_seqlens": CU_SEQLENS}),
    "cu_seqlens_from_positions": (api.cu_seqlens_from_positions, {"positions": [0, 1]}),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("door", DOORS)
def test_no_hostile_value_gets_a_raw_error(door: str) -> None:
    function, good = DOORS[door]
    function(**good)  # else the errors below would say nothing about the argument
    wrong = raw_errors(function, good)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("function", "arguments", "told"),
    [
        (api.magi_attn_varlen_key, {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS, **KEY, "causal": (-1, 0)}, r"causal=\(-1, 0\)"),
        (AttnRanges.from_ranges, {"ranges": [{0, 4}]}, "ranges="),
        (AttnRanges.from_ranges, {"ranges": [b"ab"]}, "ranges="),
        (builders.sliding_window, {"total_q": 8, "total_k": 8, "window_size": {1, 0}}, "window_size="),
        (OverlapConfig, {"degree": 1.5}, "degree=1.5"),
        (OverlapConfig, {"degree": True}, "degree=True"),
        (OverlapConfig, {"degree": 10**6}, "degree=1000000"),
        (OverlapConfig, {"dynamic_max_degree": 10**9}, "dynamic_max_degree"),
        (OverlapConfig, {"min_chunk_size": 2**70}, "min_chunk_size"),
        (OverlapConfig, {"comm_cost_factor": float("inf")}, "comm_cost_factor=inf"),
        (OverlapConfig, {"alg": OverlapAlg()}, "alg="),
        (api.DispatchConfig, {"chunk_size": True}, "chunk_size=True"),
        (api.DispatchConfig, {"uneven_shard": "no"}, "uneven_shard='no'"),
        (api.ToppHeapDispatchAlg, {"top_p": float("nan")}, "top_p=nan"),
        (GrpCollConfig, {"timeout_s": float("inf")}, "timeout_s=inf"),
        (GrpCollConfig, {"timeout_s": 1e-9}, "timeout_s=1e-09"),
        (DistAttnConfig, {"deterministic": "false"}, "deterministic='false'"),
        (attend, {"mask": MASK, "softcap": float("nan")}, "softcap=nan"),
        (attend, {"mask": MASK, "softcap": float("inf")}, "softcap=inf"),
        (attend, {"mask": MASK, "softcap": 1e-300}, "softcap=1e-300"),
        (attend, {"mask": MASK, "softmax_scale": float("nan")}, "softmax_scale=nan"),
        (attend, {"mask": MASK, "softmax_scale": torch.tensor(1.0, requires_grad=True)}, "softmax_scale .*requires grad"),
        (
            api.roll,
            {"x": torch.zeros(8, dtype=torch.uint8), "shift": 1, "dim": 0, "key": key(), "within_documents": True},
            "fill_value=-100",
        ),
        (
            api.roll,
            {"x": torch.zeros(8, dtype=torch.bool), "shift": 1, "dim": 0, "key": key(), "within_documents": True},
            "fill_value=-100",
        ),
        (api.dispatch, {"x": torch.zeros(8, dtype=torch.int32), "key": key(), "pad_value": 0.5}, "pad_value=0.5"),
        (api.dispatch, {"x": torch.zeros(8, dtype=torch.float16), "key": key(), "pad_value": 1e6}, "pad_value=1000000.0"),
    ],
)
def test_what_was_silently_misread_is_refused(function: Any, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        function(**arguments)


def test_config_records_hold_plain_numbers() -> None:
    """Records that are equal print alike, which keys of different ranks compare."""
    given = api.DispatchConfig(chunk_size=np.int64(8), uneven_shard=np.bool_(False))  # type: ignore[arg-type]
    assert repr(given) == repr(api.DispatchConfig(chunk_size=8, uneven_shard=False))
    assert repr(OverlapConfig(calc_cost_factor=2)) == repr(OverlapConfig(calc_cost_factor=2.0))


def test_sinks_of_other_heads_are_refused_before_heads_are_split() -> None:
    table = torch.zeros(8, 2, 1, dtype=torch.int32)
    with pytest.raises(InputError, match=r"sink: shape \[1, 5\]"):
        attend(index_attn_indices=table, sink=torch.zeros(1, 5))


def test_ranges_are_taken_in_every_form() -> None:
    want = AttnMask.from_ranges([[0, 4], [4, 8]], [[0, 4], [0, 8]], ["causal", "full"], 8, 8)
    pairs, keys = [(0, 4), (4, 8)], [(0, 4), (0, 8)]
    forms = [
        ([AttnRange(*p) for p in pairs], [AttnRange(*p) for p in keys]),
        ([pairs[0], AttnRange(*pairs[1])], keys),
        (torch.tensor(pairs), np.array(keys, np.uint16)),
        ([torch.tensor(p) for p in pairs], [np.array(p) for p in keys]),
    ]
    for q, k in forms:
        assert AttnMask.from_ranges(q, k, [1, 0], 8, 8) == want
        assert api.magi_attn_flex_key(q, k, [1, 0], 8, 8, 1, 1, 8, 0, None).mask == want


def test_the_callers_data_is_left_alone() -> None:
    pairs = [[0, 4], [4, 8]]
    q, k = AttnRanges.from_ranges(pairs), np.array(pairs)
    types = torch.tensor([1, 0])
    magi_key = api.magi_attn_flex_key(q, k, types, 8, 8, 1, 1, 8, 0, None)
    k[:] = 0  # nor does the key look at it again
    types[:] = 3
    assert q == AttnRanges.from_ranges(pairs) and k.flags.writeable
    assert magi_key.mask == AttnMask.from_ranges(pairs, pairs, [1, 0], 8, 8)


def test_a_copy_of_ranges_grows_alone() -> None:
    first = AttnRanges.from_ranges([[0, 4]])
    second = copy.copy(first)
    second.append((4, 8))
    assert len(first) == 1 and len(second) == 2
    with pytest.raises(InputError):
        first.append([])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="32 bits"):
        AttnRanges.from_ranges([[0, 1 << 40]]).to_tensor()
    with pytest.raises(InputError, match="past 64 bits"):
        AttnRanges.from_ranges([[0, 1 << 40]]).offset((1 << 63) - 1)
