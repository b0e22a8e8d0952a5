"""flex_flash_attn_func: every way to give a mask, what it returns, and what it refuses before it computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from magi_attention.api import (
    AttnMask,
    AttnMaskType,
    AttnRanges,
    InputError,
    clear_cache,
    flex_flash_attn_func,
    prepare_attention,
    single_plans,
)
from magi_attention.functional import flex_flash_attn_func as from_functional

Q_RANGES, K_RANGES, TYPES = [[0, 12], [12, 40], [12, 40]], [[0, 12], [12, 40], [0, 6]], [1, 1, 0]


def qkv(
    total_q: int = 40, total_k: int = 40, heads: tuple[int, int] = (4, 2), dim: int = 8, dtype: Any = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(total_q, heads[0], dim), (total_k, heads[1], dim), (total_k, heads[1], dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiable definition, one expression."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5).masked_fill(~torch.from_numpy(mask), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0).unsqueeze(-1)).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "lists": lambda: {"q_ranges": Q_RANGES, "k_ranges": K_RANGES, "attn_type_map": TYPES},
    "int32": lambda: {
        "q_ranges": torch.tensor(Q_RANGES).int(), "k_ranges": torch.tensor(K_RANGES).int(), "attn_type_map": torch.tensor(TYPES).int(),
    },
    "int64": lambda: {"q_ranges": torch.tensor(Q_RANGES), "k_ranges": torch.tensor(K_RANGES), "attn_type_map": torch.tensor(TYPES)},
    "numpy": lambda: {"q_ranges": np.array(Q_RANGES), "k_ranges": np.array(K_RANGES), "attn_type_map": np.array(TYPES)},
    "objects": lambda: {
        "q_ranges": AttnRanges.from_ranges(Q_RANGES),
        "k_ranges": AttnRanges.from_ranges(K_RANGES),
        "attn_type_map": [AttnMaskType.CAUSAL, "causal", 0],
    },
    "mask": lambda: {"mask": AttnMask.from_ranges(Q_RANGES, K_RANGES, TYPES, 40, 40)},
    "plan": lambda: {"plan": prepare_attention(AttnMask.from_ranges(Q_RANGES, K_RANGES, TYPES, 40, 40))},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_mask_gives_the_same_bits(form: str) -> None:
    dense = AttnMask.from_ranges(Q_RANGES, K_RANGES, TYPES, 40, 40).to_dense()
    tensors, twins = qkv(), qkv()
    out, meta = flex_flash_attn_func(*tensors, **FORMS[form]())
    expected, expected_lse = dense_attention(*twins, dense)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(meta.lse, expected_lse, rtol=0, atol=1e-12)
    (out.square().sum() + meta.lse.sum()).backward()
    (expected.square().sum() + expected_lse.sum()).backward()
    for ours, theirs in zip(tensors, twins, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-11)
    again, _ = flex_flash_attn_func(*qkv(), **FORMS["lists"]())
    assert torch.equal(out, again)


def test_returns_what_is_documented() -> None:
    q, k, v = qkv(5, 5, (3, 3), dtype=torch.float32)
    out, meta = flex_flash_attn_func(q, k, v, [[0, 4]], [[0, 4]], [1], return_max_logits=True)
    assert out.shape == (5, 3, 8) and out.dtype == torch.float32
    assert meta.lse.shape == (5, 3) and meta.lse.dtype == torch.float32
    assert meta.max_logits is not None and meta.max_logits.shape == (3,) and meta.max_logits.dtype == torch.float32
    assert not out[4].any() and torch.isneginf(meta.lse[4]).all(), "a row outside every range: out 0, lse -inf"
    scores = torch.einsum("qhd,khd->hqk", q, k)[:, :4, :4] * 8**-0.5
    visible = scores.masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(meta.max_logits, visible.amax((1, 2)).detach())
    assert flex_flash_attn_func(q, k, v, [[0, 4]], [[0, 4]])[1].max_logits is None
    assert from_functional is flex_flash_attn_func


def test_lse_is_differentiable() -> None:
    q, k, v = qkv()
    _, meta = flex_flash_attn_func(q, k, v, mask=AttnMask.from_ranges(Q_RANGES, K_RANGES, TYPES, 40, 40))
    meta.lse.sum().backward()
    assert q.grad is not None and q.grad.abs().max() > 0 and k.grad is not None and k.grad.abs().max() > 0


@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_sink_joins_the_denominator(layout: str) -> None:
    q, k, v = qkv(6, 6)
    sink = torch.full((1, 4) if layout == "sh" else (6, 1, 4), 0.5, dtype=torch.float64, requires_grad=True)
    out, meta = flex_flash_attn_func(q, k, v, [[0, 6]], [[0, 6]], sink=sink, sink_layout=layout)
    plain, plain_meta = flex_flash_attn_func(q, k, v, [[0, 6]], [[0, 6]])
    expected = torch.logaddexp(plain_meta.lse, torch.tensor(0.5, dtype=torch.float64))
    torch.testing.assert_close(meta.lse, expected)
    torch.testing.assert_close(out, plain * (plain_meta.lse - expected).exp().unsqueeze(-1))
    out.sum().backward()
    assert sink.grad is not None and sink.grad.shape == sink.shape and sink.grad.abs().max() > 0


def test_autocast_casts() -> None:  # N25: documented behaviour for fp32 inputs under autocast
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, meta = flex_flash_attn_func(q, k, v, Q_RANGES, K_RANGES, TYPES)
    expected, _ = flex_flash_attn_func(*(x.detach().bfloat16() for x in (q, k, v)), Q_RANGES, K_RANGES, TYPES)
    assert out.dtype == torch.bfloat16 and meta.lse.dtype == torch.float32 and torch.equal(out, expected)


# ---- index tables ----


@pytest.mark.parametrize(("q_block", "k_block"), [(1, 1), (4, 8), (16, 3)])
def test_index_table_means_its_blocks(q_block: int, k_block: int) -> None:
    total_q, total_k = 37, 50
    num_q_blocks, num_k_blocks = -(-total_q // q_block), -(-total_k // k_block)
    rng = np.random.default_rng(q_block)
    table = rng.integers(-1, num_k_blocks, (num_q_blocks, 4))  # repeats and -1 in any place
    table[0] = -1
    dense = np.zeros((total_q, total_k), bool)
    for line, blocks in enumerate(table):
        for block in blocks[blocks >= 0]:
            dense[line * q_block : (line + 1) * q_block, block * k_block : (block + 1) * k_block] = True
    q, k, v = qkv(total_q, total_k)
    out, _ = flex_flash_attn_func(q, k, v, index_attn_indices=torch.from_numpy(table).int(), q_block_size=q_block, k_block_size=k_block)
    torch.testing.assert_close(out, dense_attention(q, k, v, dense)[0], rtol=0, atol=1e-12)


def test_index_table_with_heads_folded_into_tokens() -> None:
    """The original's form: q [tokens * key heads, group, D], k [tokens * key heads, 1, D], table [tokens, key heads, topk] of rows."""
    tokens, num_heads_kv, group = 6, 2, 3
    q, k, v = qkv(tokens * num_heads_kv, tokens * num_heads_kv, (group, 1))
    table = torch.randint(0, tokens, (tokens, num_heads_kv, 3), generator=torch.Generator().manual_seed(1))
    table = (table * num_heads_kv + torch.arange(num_heads_kv).view(1, -1, 1)).int()
    out, _ = flex_flash_attn_func(q, k, v, index_attn_indices=table)
    dense = np.zeros((12, 12), bool)
    for row, keys in enumerate(table.reshape(12, 3).tolist()):
        dense[row, keys] = True
    torch.testing.assert_close(out, dense_attention(q, k, v, dense)[0], rtol=0, atol=1e-12)


def test_index_table_per_key_head() -> None:
    q, k, v = qkv(10, 12)
    table = torch.randint(-1, 12, (10, 2, 5), generator=torch.Generator().manual_seed(2))
    sink = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    out, meta = flex_flash_attn_func(q, k, v, index_attn_indices=table, sink=sink, return_max_logits=True)
    for head in range(2):
        own, own_meta = flex_flash_attn_func(
            q[:, 2 * head : 2 * head + 2], k[:, head : head + 1], v[:, head : head + 1],
            index_attn_indices=table[:, head], sink=sink[:, 2 * head : 2 * head + 2], return_max_logits=True,
        )  # fmt: skip
        assert torch.equal(out[:, 2 * head : 2 * head + 2], own) and torch.equal(meta.lse[:, 2 * head : 2 * head + 2], own_meta.lse)
        assert meta.max_logits is not None and own_meta.max_logits is not None
        assert torch.equal(meta.max_logits[2 * head : 2 * head + 2], own_meta.max_logits)
    out.sum().backward()
    assert q.grad is not None and k.grad is not None and sink.grad is not None and sink.grad.shape == (1, 4)


# ---- what is ignored, and what is refused ----

FLAGS = {
    "auto_range_merge": True, "swap_ab": False, "pack_gqa": True, "cat_gqa": False, "sparse_load": True, "ref_block_size": (64, 64),
    "max_seqlen_q": 7, "swap_bwd_qk_loop": False, "disable_fwd_atomic_reduction": True, "disable_bwd_dkv_atomic_reduction": True,
    "index_attn": False,
}  # fmt: skip


def test_tuning_flags_warn_once_each_and_change_nothing() -> None:
    q, k, v = qkv()
    plain, _ = flex_flash_attn_func(q, k, v, Q_RANGES, K_RANGES, TYPES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, _ = flex_flash_attn_func(q, k, v, Q_RANGES, K_RANGES, TYPES, **FLAGS)
    assert sorted(str(w.message).split()[0] for w in caught) == sorted(FLAGS)
    assert all(w.category is DeprecationWarning and w.filename == __file__ for w in caught)
    assert torch.equal(out, plain)


def _call(**changes: Any) -> None:
    q, k, v = qkv()
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "q_ranges": Q_RANGES, "k_ranges": K_RANGES, "attn_type_map": TYPES}
    arguments.update(changes)
    flex_flash_attn_func(**{name: value for name, value in arguments.items() if value is not None})


NO_RANGES = {"q_ranges": None, "k_ranges": None, "attn_type_map": None}
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "past the end (M12)": (lambda: {"q_ranges": [[0, 12], [12, 40], [40, 41]]}, ["q_ranges[2]", "41", "40"]),
    "negative": (lambda: {"k_ranges": [[-1, 12], [12, 40], [0, 6]]}, ["k_ranges[0]", "-1", "0"]),
    "reversed": (lambda: {"q_ranges": [[12, 0], [12, 40], [12, 40]]}, ["q_ranges[0]", "[12, 0)", "did you mean"]),
    "covered twice (M13)": (lambda: {"k_ranges": [[0, 12], [12, 40], [10, 20]]}, ["entry 1", "entry 2", "twice"]),
    "unknown type": (lambda: {"attn_type_map": [1, 1, 4]}, ["attn_type_map[2]", "4"]),
    "unknown name": (lambda: {"attn_type_map": ["causal", "full", "diagonal"]}, ["attn_type_map", "diagonal", "bi_causal"]),
    "3 ranges, 2 types": (lambda: {"attn_type_map": [1, 1]}, ["attn_type_map", "2", "3"]),
    "3 q ranges, 2 k ranges": (lambda: {"k_ranges": K_RANGES[:2]}, ["q_ranges", "3", "2"]),
    "float offsets (A01)": (lambda: {"q_ranges": torch.tensor(Q_RANGES).float()}, ["q_ranges", "float32", "int"]),
    "float list": (lambda: {"q_ranges": [[0.0, 12.0], [12.0, 40.0], [12.0, 40.0]]}, ["q_ranges", "float64", "int"]),
    "bad shape": (lambda: {"q_ranges": torch.tensor([[0, 12, 40]] * 3)}, ["q_ranges", "[3, 3]", "[n, 2]"]),
    "four dims": (lambda: {"q": torch.zeros(1, 4, 40, 8)}, ["q ", "(1, 4, 40, 8)", "squash_batch_dim"]),
    "two dims": (lambda: {"v": torch.zeros(40, 16)}, ["v ", "(40, 16)"]),
    "head ratio 3:2 (N18)": (lambda: {"q": torch.zeros(40, 3, 8, dtype=torch.float64)}, ["num_heads_q=3", "num_heads_kv=2"]),
    "head ratio 33:2": (lambda: {"q": torch.zeros(40, 33, 8, dtype=torch.float64)}, ["num_heads_q=33", "num_heads_kv=2"]),
    "no key heads": (
        lambda: {"k": torch.zeros(40, 0, 8, dtype=torch.float64), "v": torch.zeros(40, 0, 8, dtype=torch.float64)},
        ["num_heads_kv=0"],
    ),
    "v with other heads": (lambda: {"v": torch.zeros(40, 4, 8, dtype=torch.float64)}, ["v", "4 heads", "2"]),
    "v with other rows": (lambda: {"v": torch.zeros(39, 2, 8, dtype=torch.float64)}, ["v: 39 rows", "40"]),
    "other head_dim": (lambda: {"k": torch.zeros(40, 2, 16, dtype=torch.float64)}, ["k: head_dim 16", "8"]),
    "bf16 with fp32 (N25)": (lambda: {"q": qkv(dtype=torch.bfloat16)[0]}, ["k: dtype torch.float64", "bfloat16"]),
    "integer q": (lambda: {"q": torch.zeros(40, 4, 8, dtype=torch.int32)}, ["q: dtype torch.int32", "bfloat16"]),
    "no mask": (lambda: NO_RANGES, ["nothing", "q_ranges"]),
    "two masks": (lambda: {"mask": AttnMask.from_slices([], 40, 40)}, ["q_ranges and mask", "exactly one"]),
    "q_ranges alone": (lambda: {"k_ranges": None}, ["k_ranges"]),
    "mask of another length (D34)": (lambda: NO_RANGES | {"mask": AttnMask.from_slices([], 41, 40)}, ["q ", "40", "41"]),
    "mask of another kind": (lambda: NO_RANGES | {"mask": np.ones((40, 40))}, ["mask", "ndarray", "AttnMask"]),
    "plan of another kind": (lambda: NO_RANGES | {"plan": 3}, ["plan", "int", "prepare_attention"]),
    "sink shape": (lambda: {"sink": torch.zeros(1, 3)}, ["sink: shape [1, 3]", "[num_sink, 4]"]),
    "sink layout": (lambda: {"sink": torch.zeros(1, 4), "sink_layout": "hs"}, ["sink_layout='hs'", "ssh"]),
    "table of floats": (lambda: NO_RANGES | {"index_attn_indices": torch.zeros(40, 2)}, ["index_attn_indices", "float32"]),
    "table with another number of lines": (lambda: NO_RANGES | {"index_attn_indices": torch.zeros(39, 2).int()}, ["39 lines", "40 query"]),
    "table past the end": (lambda: NO_RANGES | {"index_attn_indices": torch.full((40, 2), 40)}, ["index_attn_indices[0, 0]=40", "[0, 40)"]),
    "table below -1": (lambda: NO_RANGES | {"index_attn_indices": torch.full((40, 2), -2)}, ["=-2", "-1 (unused)"]),
    "table of one dim": (lambda: NO_RANGES | {"index_attn_indices": torch.zeros(40).int()}, ["index_attn_indices", "(40,)"]),
    "block size 0": (lambda: NO_RANGES | {"index_attn_indices": torch.zeros(40, 2).int(), "q_block_size": 0}, ["q_block_size=0"]),
}

NEXT_STEP = ("; ", "must be one of", "must be in [", "needs [")  # what to do, or the values that are right


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_any_compute(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, words = REFUSED[case]

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("attention started")

    monkeypatch.setattr("magi_attention.runtime.attention.attention_forward", never)
    with pytest.raises(InputError) as caught:
        _call(**changes())
    text = str(caught.value)
    assert all(word in text for word in words), f"{words} not all in: {text}"
    assert any(words in text for words in NEXT_STEP), f"no next step in: {text}"


def test_a_mask_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_cache()
    built = []
    real = AttnMask.from_ranges.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(AttnMask, "from_ranges", classmethod(lambda cls, *args: built.append(1) or real(cls, *args)))
    q, k, v = qkv()
    for _ in range(3):
        flex_flash_attn_func(q, k, v, Q_RANGES, K_RANGES, TYPES)
        flex_flash_attn_func(q, k, v, torch.tensor(Q_RANGES), torch.tensor(K_RANGES), torch.tensor(TYPES))
    assert len(built) == 1
    changed = torch.tensor(Q_RANGES)
    changed[0, 1] = 11  # the same tensor, other content
    first, _ = flex_flash_attn_func(q, k, v, changed, torch.tensor(K_RANGES), torch.tensor(TYPES))
    assert len(built) == 2 and not first[11].any()
    clear_cache()
    flex_flash_attn_func(q, k, v, Q_RANGES, K_RANGES, TYPES)
    assert len(built) == 3


def test_plans_do_not_pile_up() -> None:
    for total in range(200):
        prepare_attention(AttnMask.from_ranges([[0, total]], [[0, total]], None, 200, 200))
    assert len(single_plans._plans) <= 64
