"""The adapter for transformers: it refuses what disagrees with the key (D10), and a step in which a layer never came to it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from magi_attention.api import InputError, UnsupportedError, flex_flash_attn_func
from magi_attention.integrations.transformers import KeyedAttention, check_agreement
from tests.api.key_makers import CU, flex_key, local_tensors, varlen_key

CAUSAL, WINDOW, FULL = {"causal": True}, {"causal": True, "window_size": (31, 0)}, {"causal": False}


def call(attention: KeyedAttention, module: Any = None, **options: Any) -> torch.Tensor:
    """As a model calls it: [1, heads, tokens, head_dim]."""
    module = module or SimpleNamespace(is_causal=True)
    tensors = [x.transpose(0, 1).unsqueeze(0) for x in local_tensors()]
    arguments = {"attention_mask": None, "scaling": 0.3} | options
    return attention(module, *tensors, **arguments)[0]


def test_shapes_and_values_are_those_of_the_convention() -> None:
    key = varlen_key(**WINDOW)
    sinks = torch.randn(4)
    out = call(KeyedAttention(key), sliding_window=32, softcap=5.0, s_aux=sinks, position_ids=torch.arange(512)[None])
    q, k, v = local_tensors()
    expected, _ = flex_flash_attn_func(q, k, v, mask=key.mask, softmax_scale=0.3, softcap=5.0, sink=sinks[None])
    assert out.shape == (1, 512, 4, 16) and torch.equal(out[0], expected)


@pytest.mark.parametrize(
    ("mask", "is_causal", "sliding_window"), [(CAUSAL, True, None), (WINDOW, True, 32), (CAUSAL, True, 213), (FULL, False, None)]
)
def test_agreeing_calls_pass(mask: dict[str, Any], is_causal: bool, sliding_window: int | None) -> None:
    check_agreement(varlen_key(**mask), is_causal, sliding_window)


def test_a_window_longer_than_every_document_is_no_window() -> None:
    check_agreement(varlen_key(causal=True, window_size=(300, 0)), True, None)
    check_agreement(varlen_key(causal=True, window_size=(300, 0)), True, 301)
    check_agreement(varlen_key(cu_seqlens_q=[0], cu_seqlens_k=[0]), True, None)


@pytest.mark.parametrize(
    ("mask", "is_causal", "sliding_window", "words"),
    [
        (CAUSAL, False, None, "is_causal=False"),
        (FULL, True, None, "is_causal=True.*211 tokens ahead"),
        (CAUSAL, True, 32, r"sliding_window=32.*211 tokens back.*\(31, 0\)"),
        (WINDOW, True, None, "sliding_window=None.*only 31 tokens back"),
        (WINDOW, True, 33, "sliding_window=33.*only 31 tokens back"),
        (WINDOW, True, 31, "sliding_window=31.*31 tokens back"),
    ],
)
def test_d10_disagreeing_calls_are_refused(mask: dict[str, Any], is_causal: bool, sliding_window: int | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_agreement(varlen_key(**mask), is_causal, sliding_window)
    with pytest.raises(InputError, match=words):
        call(KeyedAttention(varlen_key(**mask)), SimpleNamespace(is_causal=is_causal), sliding_window=sliding_window)


def test_d10_masks_beside_the_key_are_refused() -> None:
    attention = KeyedAttention(varlen_key())
    with pytest.raises(InputError, match=r"attention_mask of shape \(1, 1, 512, 512\)"):
        call(attention, attention_mask=torch.zeros(1, 1, 512, 512))
    with pytest.raises(InputError, match="cu_seq_lens_q"):
        call(attention, cu_seq_lens_q=torch.tensor(CU))
    with pytest.raises(UnsupportedError, match=r"dropout=0\.1"):
        call(attention, dropout=0.1)
    with pytest.raises(InputError, match="batch size 2"):
        attention(SimpleNamespace(), *(x.transpose(0, 1).expand(2, -1, -1, -1) for x in local_tensors()), None)


def test_d10_a_layer_that_never_came_is_reported_at_step_end() -> None:
    layers = [SimpleNamespace(is_causal=True, window=31), SimpleNamespace(is_causal=True, window=-1)]
    keys = {window: varlen_key(causal=True, window_size=(window, 0)) for window in (31, -1)}
    attention = KeyedAttention(lambda module: keys[module.window])
    for _ in range(2):
        with attention.require_all_calls(layers):
            call(attention, layers[0], sliding_window=32)
            call(attention, layers[1])
    with pytest.raises(InputError, match=r"1 of 2 attention modules \(first: number 1"), attention.require_all_calls(layers):
        call(attention, layers[0], sliding_window=32)
    with pytest.raises(ZeroDivisionError), attention.require_all_calls(layers):  # the step's own error is not replaced
        _ = 1 // 0


def test_importing_needs_no_transformers_and_registering_says_what_it_needs() -> None:
    """I25."""
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import magi_attention.integrations.transformers as t\n"
        "try: t.KeyedAttention(None).register('x')\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert text.startswith("UnsupportedError") and "pip install 'transformers>=" in text


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_real_model_matches_its_own_attention() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    attention = KeyedAttention(flex_key(q_ranges=[[0, 96]], k_ranges=[[0, 96]], total_seqlen_q=96, total_seqlen_k=96))
    attention.register("magi_attention_test")
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    eager = LlamaForCausalLM(config)
    ids = torch.randint(0, 64, (1, 96))
    expected = eager(input_ids=ids).logits
    eager.set_attn_implementation("magi_attention_test")
    modules = [layer.self_attn for layer in eager.model.layers]
    with attention.require_all_calls(modules):
        logits = eager(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    eager.set_attn_implementation("eager")
    with pytest.raises(InputError, match="2 of 2 attention modules"), attention.require_all_calls(modules):
        eager(input_ids=ids)
