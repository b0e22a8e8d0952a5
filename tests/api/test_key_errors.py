"""Bad keys, bad calls and bad moves: refused with name, value, rule and next step before anything is planned, sent or computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from magi_attention.api import (
    DispatchConfig,
    DistAttnConfig,
    DistAttnKey,
    InputError,
    calc_attn,
    clear_cache,
    dispatch,
    get_position_ids,
    make_flex_key_for_new_mask_after_dispatch,
    make_varlen_key_for_new_mask_after_dispatch,
    roll,
    shift_labels,
    undispatch,
)
from tests.api.key_makers import CU, flex_key, local_tensors, simulated_group, varlen_key

KEY_REFUSED: dict[str, tuple[Callable[..., DistAttnKey], dict[str, Any], list[str]]] = {
    "q_ranges past the end": (flex_key, {"q_ranges": [[0, 137], [137, 300], [300, 513]]}, ["q_ranges[2]", "513", "512"]),
    "negative": (flex_key, {"k_ranges": [[-3, 137], [137, 300], [300, 512]]}, ["k_ranges[0]", "-3"]),
    "covered twice": (
        flex_key,
        {"q_ranges": [[0, 137], [0, 137], [300, 512]], "k_ranges": [[0, 137], [9, 137], [300, 512]]},
        ["entry 0", "entry 1", "twice"],
    ),
    "unknown type": (flex_key, {"attn_mask_type": "diagonal"}, ["attn_mask_type", "diagonal"]),
    "unknown number": (flex_key, {"attn_mask_type": 7}, ["7"]),
    "3 ranges, 2 types": (flex_key, {"attn_mask_type": ["full", "full"]}, ["attn_mask_type", "2", "3"]),
    "float offsets": (varlen_key, {"cu_seqlens_q": torch.tensor(CU).float()}, ["cu_seqlens_q", "float32", "int"]),
    "falling offsets": (varlen_key, {"cu_seqlens_k": [0, 137, 100, 300, 512]}, ["cu_seqlens_k[2]", "100", "137"]),
    "offsets not from 0": (varlen_key, {"cu_seqlens_q": [1, 137, 137, 300, 512]}, ["cu_seqlens_q", "1", "0"]),
    "other number of documents": (varlen_key, {"cu_seqlens_q": [0, 512]}, ["cu_seqlens_q", "1 doc", "4"]),
    "window (-1, -3) (M09)": (varlen_key, {"causal": False, "window_size": (-1, -3)}, ["window_size[1]", "-3"]),
    "window (-2, 0)": (varlen_key, {"causal": False, "window_size": (-2, 0)}, ["window_size[0]", "-2"]),
    "window (4, -9)": (varlen_key, {"causal": False, "window_size": (4, -9)}, ["window_size[1]", "-9"]),
    "heads 3:2 (N18)": (varlen_key, {"num_heads_q": 3}, ["num_heads_q=3", "num_heads_kv=2"]),
    "heads 8:0": (varlen_key, {"num_heads_kv": 0}, ["num_heads_kv=0", "1"]),
    "head_dim 0": (varlen_key, {"head_dim": 0}, ["head_dim=0"]),
    "head_dim float": (varlen_key, {"head_dim": 16.0}, ["head_dim=16.0", "int"]),
    "negative total": (flex_key, {"total_seqlen_q": -1}, ["total_seqlen_q=-1"]),
    "self attention of two lengths": (flex_key, {"total_seqlen_k": 600}, ["512", "600", "is_same_source=False"]),
    "chunk_size 0": (varlen_key, {"chunk_size": 0}, ["chunk_size=0"]),
    "two chunk sizes": (
        varlen_key,
        {"chunk_size": 32, "dist_attn_config": DistAttnConfig(dispatch_config=DispatchConfig(chunk_size=64))},
        ["chunk_size=32", "64", "once"],
    ),
    "negative pad_size": (varlen_key, {"pad_size": -1}, ["pad_size=-1"]),
    "config of another kind": (varlen_key, {"dist_attn_config": {"deterministic": True}}, ["dist_attn_config", "DistAttnConfig"]),
    "group of another kind": (varlen_key, {"cp_group_or_mesh": "world"}, ["cp_group_or_mesh", "world"]),
}


@pytest.mark.parametrize("case", KEY_REFUSED)
def test_a_bad_key_is_refused_before_planning(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, changes, words = KEY_REFUSED[case]

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("planning started")

    clear_cache()
    monkeypatch.setattr("magi_attention.api.keys.plan_attention", never)
    with pytest.raises(InputError) as caught:
        make(**changes)
    text = str(caught.value)
    assert all(word in text for word in words), f"{words} not all in: {text}"


CALL_REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], list[str]]] = {
    "length (D34)": (lambda: (*local_tensors(128), varlen_key()), ["q", "128", "512", "dispatch"]),
    "k of another length": (lambda: (local_tensors()[0], *local_tensors(500)[1:], varlen_key()), ["k", "500", "512"]),
    "q heads": (lambda: (*local_tensors(heads=(8, 2)), varlen_key()), ["q has 8 heads", "num_heads_q=4"]),
    "k heads": (lambda: (*local_tensors(heads=(4, 1)), varlen_key()), ["k has 1 heads", "num_heads_kv=2"]),
    "head_dim": (lambda: (*local_tensors(dim=32), varlen_key()), ["q has width 32", "head_dim=16"]),
    "head_dim_v": (lambda: (*local_tensors(), varlen_key(head_dim_v=8)), ["v has width 16", "head_dim_v=8"]),
    "(B, H, S, D)": (
        lambda: (torch.zeros(1, 4, 512, 16), *local_tensors()[1:], varlen_key()),
        ["q", "(1, 4, 512, 16)", "squash_batch_dim"],
    ),
    "no tensor": (lambda: (None, *local_tensors()[1:], varlen_key()), ["q is a NoneType"]),
    "no key": (lambda: (*local_tensors(), "key"), ["key is a str", "magi_attn_flex_key"]),
    "dtypes": (lambda: (local_tensors()[0].bfloat16(), *local_tensors()[1:], varlen_key()), ["k", "float32", "bfloat16"]),
    "destroyed group": (lambda: (*local_tensors(256), varlen_key(simulated_group(2))), ["group", "again"]),
}


@pytest.mark.parametrize("case", CALL_REFUSED)
def test_a_bad_call_is_refused_before_any_message(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, words = CALL_REFUSED[case]
    arguments = make()

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("an exchange or a kernel started")

    for name in ("attention_forward", "Arrivals"):
        monkeypatch.setattr(f"magi_attention.runtime.attention.{name}", never)
    with pytest.raises(InputError) as caught:
        calc_attn(*arguments)
    text = str(caught.value)
    assert all(word in text for word in words), f"{words} not all in: {text}"


def test_bad_moves_are_refused() -> None:
    key, flex = varlen_key(), flex_key()
    x = torch.zeros(512, 3)
    for call, words in [
        (lambda: dispatch(x[:100], key), "100 entries"),
        (lambda: dispatch(torch.zeros(3, 2, 512), key, dim=1), "dim=1"),
        (lambda: dispatch(x, key, dim=2), "dim=2"),
        (lambda: dispatch(x, key, role="v"), "role='v'"),
        (lambda: undispatch(x[:511], key), "511 entries"),
        (lambda: roll(x, 1, 1, key), "dim=1"),
        (lambda: roll(x, 1.5, 0, key), "shift=1.5"),  # type: ignore[arg-type]
        (lambda: roll(x, 1, 0, flex, within_documents=True), "cu_seqlens=None"),
        (lambda: roll(x, 1, 0, flex, cu_seqlens=CU), "within_documents=False"),
        (lambda: shift_labels(x, flex), "cu_seqlens=None"),
        (lambda: get_position_ids(flex, within_documents=True), "cu_seqlens=None"),
        (lambda: get_position_ids("key"), "key is a str"),  # type: ignore[arg-type]
        (lambda: make_varlen_key_for_new_mask_after_dispatch([0, 500], [0, 500], key), "cu_seqlens_q ends with 500"),
        (lambda: make_flex_key_for_new_mask_after_dispatch([[0, 513]], [[0, 512]], None, key), r"q_ranges\[0\]"),
        (lambda: make_flex_key_for_new_mask_after_dispatch([[0, 5]], [[0, 5]], None, None), "key_for_dispatch is a NoneType"),  # type: ignore[arg-type]
        (lambda: make_flex_key_for_new_mask_after_dispatch([[0, 5]], [[0, 5]], None, key, 3), "num_heads_q=3"),
    ]:
        with pytest.raises(InputError, match=words):
            call()
