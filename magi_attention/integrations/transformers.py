"""calc_attn as an attention implementation of Hugging Face transformers: refuses calls that disagree with the key.

Knows the calling convention (query [1, heads, tokens, head_dim], result [1, tokens, heads, head_dim]) and no model. Importing this file
needs no transformers; `register` does.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from magi_attention.api import DistAttnKey, InputError, UnsupportedError, calc_attn

SUPPORTED = "transformers>=4.51"

# Keyword arguments by which a model describes a mask of its own; the key's mask would silently win over them.
_MASK_ARGUMENTS = ("head_mask", "position_bias", "attention_bias", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class KeyedAttention:
    """An attention function for transformers models whose tokens were dispatched with a key.

        attention = KeyedAttention(lambda module: window_key if module.is_sliding else causal_key)
        attention.register("magi_attention")
        model = AutoModelForCausalLM.from_config(config, attn_implementation="magi_attention")
        with attention.require_all_calls(layer.self_attn for layer in model.model.layers):
            loss = model(input_ids=dispatch(ids, key).unsqueeze(0), position_ids=get_position_ids(key).unsqueeze(0)).logits...

    Args:
        key_of: the key, or a function from an attention module to its key (layers may have different masks).
    """

    def __init__(self, key_of: DistAttnKey | Callable[[Any], DistAttnKey]) -> None:
        self._key_of = key_of
        self._called: set[int] = set()

    def register(self, name: str) -> None:
        """Make `attn_implementation=name` mean this object.

        Raises:
            UnsupportedError: transformers is missing or too old.
        """
        try:
            interface = importlib.import_module("transformers").AttentionInterface
        except (ImportError, AttributeError) as fault:
            raise UnsupportedError(f"no AttentionInterface ({fault}); install it: pip install '{SUPPORTED}'") from fault
        interface.register(name, self)

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """What a model calls: query [1, num_heads_q, local tokens, head_dim] -> ([1, local tokens, num_heads_q, head_dim_v], None).

        Of `options`, sliding_window, is_causal, softcap and s_aux (sinks) are used.

        Raises:
            InputError: a mask, window or causality that disagrees with the key of the module, or a batch of more than one row.
            UnsupportedError: dropout.
        """
        plan_key = self._key_of if isinstance(self._key_of, DistAttnKey) else self._key_of(module)
        if attention_mask is not None:
            raise InputError(
                f"attention_mask of shape {tuple(attention_mask.shape)} is given, but the key has the mask; pass attention_mask=None to "
                "the model and put the mask in the key"
            )
        for name in _MASK_ARGUMENTS:
            if options.get(name) is not None:
                raise InputError(f"{name} is given, but the key has the mask; leave it out and put documents and biases in the key")
        if dropout:
            raise UnsupportedError(f"dropout={dropout} has no kernel; set attention_dropout=0 in the model's config")
        if query.shape[0] != 1:
            raise InputError(f"query has batch size {query.shape[0]}; it must be 1: pack sequences in one row (squash_batch_dim)")
        is_causal = options.get("is_causal")
        check_agreement(plan_key, getattr(module, "is_causal", True) if is_causal is None else is_causal, options.get("sliding_window"))
        sink = options.get("s_aux")
        self._called.add(id(module))
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        out, _ = calc_attn(
            q,
            k,
            v,
            plan_key,
            sink=None if sink is None else sink.float().reshape(1, -1),
            softmax_scale=scaling,
            softcap=options.get("softcap") or 0.0,
        )
        return out.unsqueeze(0), None

    @contextlib.contextmanager
    def require_all_calls(self, modules: Iterable[Any]) -> Iterator[None]:
        """A training step in which each of these attention modules must come here; a backward may be part of it.

        Raises:
            InputError: at the end of the step, when some never did: they attended with another implementation, to local tokens only.
        """
        wanted = list(modules)
        self._called.clear()
        yield
        missed = [idx for idx, module in enumerate(wanted) if id(module) not in self._called]
        if missed:
            raise InputError(
                f"modules: {len(missed)} of {len(wanted)} attention modules (first: number {missed[0]}, a "
                f"{type(wanted[missed[0]]).__name__}) never called this attention in the step; each must, or it sees only "
                "this rank's tokens; load the model with the attn_implementation that register() was given"
            )


def check_agreement(key: DistAttnKey, is_causal: bool, sliding_window: int | None) -> None:
    """The model's idea of its mask against the key's mask.

    Args:
        key: of self attention.
        is_causal: no query sees later tokens.
        sliding_window: a query sees itself and sliding_window - 1 tokens before it; None is unbounded.

    Raises:
        InputError: they differ. (Where documents end is the key's alone.)
    """
    q_start, q_end, k_start, k_end, lo, hi = key.mask.slices.astype("int64").T
    # The largest j - i and i - j of any visible pair: a corner of the rectangle, or the band.
    ahead = int((hi.clip(max=k_end - 1 - q_start)).max(initial=-1))
    behind = -int((lo.clip(min=k_start - q_end + 1)).min(initial=0))
    if is_causal and ahead > 0:
        raise InputError(f"is_causal=True, but a query of the key's mask sees {ahead} tokens ahead; build the key with causal=True")
    if not is_causal and ahead <= 0 and key.mask.area() > key.total_seqlen_q:
        raise InputError("is_causal=False, but the key's mask is causal; build the key with causal=False")
    limit = None if sliding_window is None else int(sliding_window) - 1
    if limit is not None and behind > limit:
        raise InputError(
            f"sliding_window={sliding_window}, but a query of the key's mask sees {behind} tokens back; "
            f"build this layer's key with window_size=({limit}, 0)"
        )
    is_cut = lo > k_start - q_end + 1  # some row of the slice does not reach the slice's first key because of its lower bound
    window = -int(lo[is_cut].max(initial=-key.total_seqlen_q)) if is_cut.any() else None
    if window is not None and (limit is None or window < limit):
        raise InputError(
            f"sliding_window={sliding_window}, but the key's mask lets a query see only {window} tokens back; "
            "build this layer's key without that window"
        )
