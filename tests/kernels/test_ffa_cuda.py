"""Compiled kernels on a GPU against float64: masks, shapes, options, strides, merges, numbers that must not leak, equal bits.

References are computed on the GPU. The whole file takes a minute or two on an H200.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from magi_attention.api import AttnMask, InputError, UnsupportedError, flex_flash_attn_func, prepare_attention
from magi_attention.kernels.attention import (
    AttentionOptions,
    Rows,
    attention_backward,
    attention_backward_fresh,
    attention_forward,
    attention_forward_fresh,
    merge,
    prepare,
    softmax_delta,
)
from magi_attention.kernels.ffa_work import device_work
from magi_attention.mask import builders
from magi_attention.testing.masks import mask_catalogue, random_mask
from magi_attention.testing.numerics import AttentionCase, AttentionResult
from tests.cases.single import is_exact_zero
from tests.kernels.cuda import assert_same_bits, by_the_door, on_cuda, on_gpu
from tests.kernels.problems import make_case, run_ours, typed

__all__ = ["on_cuda"]
pytestmark = [*on_gpu, pytest.mark.usefixtures("on_cuda")]
DTYPES = (torch.bfloat16, torch.float16)
MIXED = typed([(0, 300, 0, 200, "full"), (3, 600, 250, 900, "causal"), (610, 666, 100, 500, "inv_causal")], 700, 1000)


# ---- masks ----


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", mask_catalogue())
def test_catalogue(name: str, head_dim: int) -> None:
    mask = mask_catalogue()[name]
    case = make_case(mask, (8, 2), (head_dim, head_dim), with_dlse=True)
    ours = by_the_door(case, mask, deterministic=True)
    case.check(name, ours)
    assert_same_bits("the operation of compiled graphs", run_ours_deterministic(case, mask), ours.values)


def run_ours_deterministic(case: AttentionCase, mask: AttnMask) -> dict[str, Tensor]:
    return run_ours(AttentionCase(case.tensors, case.dense, case.dout, case.dlse, {**case.options, "deterministic": True}), mask).values


@pytest.mark.parametrize("part", range(10))
def test_random_masks(part: int) -> None:
    """50 in each part, 500 in all; every second one deterministic."""
    rng = np.random.default_rng(100 + part)
    for idx in range(50):
        total_q, total_k = (int(x) for x in rng.integers(1, (300, 700)[idx % 2], 2))
        mask = random_mask(rng, total_q, total_k, max_slices=int(rng.integers(1, 30)))
        heads_kv = int(rng.integers(1, 3))
        heads = (heads_kv * int(rng.integers(1, 5)), heads_kv)
        dtype, head_dim, deterministic = DTYPES[idx % 2], (64, 128)[idx // 2 % 2], bool(idx // 4 % 2)
        options: dict[str, Any] = {"softcap": 8.0} if idx % 7 == 0 else {}
        case = make_case(mask, heads, (head_dim, head_dim), dtype, with_dlse=idx % 3 == 0, **options)
        name = f"part {part} mask {idx} {total_q}x{total_k} heads {heads} D {head_dim} {dtype} deterministic={deterministic}"
        try:
            case.check(name, by_the_door(case, mask, deterministic=deterministic))
        except AssertionError as error:
            raise AssertionError(f"{error}\nslices: {mask.slices.tolist()}") from None


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["full", "causal", "inv_causal", "bi_causal"])
def test_lengths_beside_tiles(kind: str, head_dim: int) -> None:
    for total_q in (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257, 384, 385):
        for total_k in (1, 80, 127, 128, 129, 176, 177, 300):
            mask = typed([(0, total_q, 0, total_k, kind)], total_q, total_k)
            case = make_case(mask, (2, 1), (head_dim, head_dim))
            ours = by_the_door(case, mask)
            if total_k == 1:
                take_zero_gradients(ours)
            case.check(f"{kind} {total_q}x{total_k}", ours)


def take_zero_gradients(ours: AttentionResult) -> None:
    """Checks dq and dk of a single key and takes them out of what the rule checks.

    Softmax over one key is 1 whatever q and k are, so both gradients are 0. Plain torch computes that 0 exactly, and twice no error
    leaves only ERROR_FLOOR. A kernel with its own lse and delta gets the rounding of P * (dP - delta), in dk summed over all rows.
    """
    for name in ("dq", "dk"):
        grad = ours.values.pop(name)
        torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0.0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_many_small_documents() -> None:
    borders = np.concatenate([[0], np.cumsum(np.random.default_rng(0).integers(1, 5, 600))])
    mask = builders.from_cu_seqlens(borders, borders, causal=True)
    case = make_case(mask, (4, 2), (128, 128))
    case.check("documents", by_the_door(case, mask))


def test_frames_of_a_video() -> None:
    mask = builders.block_causal_video(5, 313)
    for head_dim in (64, 128):
        case = make_case(mask, (4, 1), (head_dim, head_dim))
        case.check("frames", by_the_door(case, mask))


# ---- heads, widths, options ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 3), (10, 2), (7, 1), (16, 1), (48, 8), (3, 1)])
def test_head_ratios(heads: tuple[int, int], dtype: torch.dtype) -> None:
    for head_dim in (64, 128):
        case = make_case(MIXED, heads, (head_dim, head_dim), dtype)
        case.check(f"{heads}", by_the_door(case, MIXED))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(8, 8), (32, 32), (80, 96), (96, 96), (128, 64), (64, 128), (60, 60), (7, 3)])
def test_widths_in_between(dims: tuple[int, int], deterministic: bool) -> None:
    case = make_case(MIXED, (4, 2), dims)
    case.check(f"{dims}", by_the_door(case, MIXED, deterministic=deterministic))


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "large softcap": {"softcap": 50.0, "softmax_scale": 3.0},
    "negative scale": {"softmax_scale": -0.1},
    "scale 0": {"softmax_scale": 0.0},
    "scale 1": {"softmax_scale": 1.0},
    "sink per head": {"sink_shape": (2, 8)},
    "no sink in the tensor": {"sink_shape": (0, 8)},
    "sink per row": {"sink_shape": (700, 2, 8), "sink_layout": "ssh"},
    "softcap, sink, loss on lse": {"softcap": 9.0, "sink_shape": (1, 8), "with_dlse": True},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str, head_dim: int, deterministic: bool) -> None:
    case = make_case(MIXED, (8, 2), (head_dim, head_dim), **OPTIONS[option])
    case.check(option, by_the_door(case, MIXED, deterministic=deterministic))


def test_sinks_of_minus_infinity_and_far_above_the_scores() -> None:
    for number in (-torch.inf, -1e4, 80.0):
        case = make_case(MIXED, (8, 2), (128, 128), sink_shape=(1, 8))
        case.tensors["sink"].fill_(number)
        found = by_the_door(case, MIXED).values
        assert all(not value.isnan().any() for value in found.values())
        if number < 0:
            plain = by_the_door(AttentionCase({n: case.tensors[n] for n in "qkv"}, case.dense, case.dout, None, {}), MIXED).values
            seen = case.dense.any(1)
            assert torch.equal(found["out"], plain["out"]) and torch.equal(found["lse"][seen], plain["lse"][seen])


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (48, 80)])
def test_max_logits(dims: tuple[int, int], softcap: float) -> None:
    case = make_case(MIXED, (8, 2), dims)
    q, k, v = case.tensors.values()
    scores = q.double().transpose(0, 1) @ k.double().repeat_interleave(4, 1).permute(1, 2, 0) * dims[0] ** -0.5
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    expected = scores.masked_fill(~case.dense, -torch.inf).amax((1, 2))
    for grad in (False, True):
        _, meta = flex_flash_attn_func(q.clone().requires_grad_(grad), k, v, mask=MIXED, softcap=softcap, return_max_logits=True)
        assert meta.max_logits is not None and not meta.max_logits.requires_grad
        torch.testing.assert_close(meta.max_logits.double(), expected, rtol=1e-4, atol=1e-4)
    nothing = AttnMask.from_slices([], 700, 1000)
    _, meta = flex_flash_attn_func(q, k, v, mask=nothing, return_max_logits=True)
    assert meta.max_logits is not None and (meta.max_logits == -torch.inf).all()


@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_max_logits_where_every_score_is_negative(softcap: float) -> None:
    q, k = torch.ones(100, 2, 128, device="cuda", dtype=torch.bfloat16), -torch.ones(256, 1, 128, device="cuda", dtype=torch.bfloat16)
    mask = typed([(0, 100, 0, 256, "full")], 100, 256)
    _, meta = flex_flash_attn_func(q, k, k, mask=mask, softcap=softcap, return_max_logits=True)
    expected = -(128**0.5)
    expected = softcap * float(np.tanh(expected / softcap)) if softcap else expected
    assert meta.max_logits is not None
    torch.testing.assert_close(meta.max_logits, torch.full((2,), expected, device="cuda"), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("softcap", [1e4, 1e6])
def test_softcaps_that_cap_nothing(softcap: float) -> None:
    case = make_case(MIXED, (4, 2), (128, 128), softcap=softcap)
    case.check(f"softcap {softcap}", by_the_door(case, MIXED))


def test_more_query_heads_than_15_bits() -> None:
    num_heads = 32_769
    q = torch.randn(64, num_heads, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(64, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mask = typed([(0, 64, 0, 64, "causal")], 64, 64)

    def gradient(query: Tensor) -> Tensor:
        leaf = query.clone().requires_grad_()
        flex_flash_attn_func(leaf, k, v, mask=mask)[0].sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(gradient(q)[:, -1:], gradient(q[:, -1:]), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_blocks(dtype: torch.dtype) -> None:
    """Masks with few edges take the forward with wider blocks."""
    for mask in (typed([(0, 500, 0, 2560, "full")], 500, 2560), builders.block_causal_video(4, 640)):
        work = prepare(mask.slices, mask.total_q, mask.total_k)
        narrow, chosen = (device_work(work, which, 128, torch.device("cuda", 0)).record for which in ("forward", "forward_any"))
        assert chosen.block_cols > narrow.block_cols
        case = make_case(mask, (4, 2), (128, 128), dtype)
        case.check("wide", by_the_door(case, mask))


def test_sm_margin_changes_no_bit_and_is_checked() -> None:
    case = make_case(MIXED, (8, 2), (128, 128))
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    plain = by_the_door(case, MIXED, deterministic=True).values
    for margin in (1, 17, num_sms - 1):
        assert_same_bits(f"sm_margin={margin}", by_the_door(case, MIXED, deterministic=True, sm_margin=margin).values, plain)
    with pytest.raises(InputError, match=f"sm_margin={num_sms} must be in"):
        by_the_door(case, MIXED, sm_margin=num_sms)


# ---- where tensors lie ----


def head_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def odd_place(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def in_a_fused_row(x: Tensor) -> Tensor:
    wide = torch.full((x.shape[0], x.shape[1] + 3, x.shape[2]), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, 2:-1] = x
    return wide[:, 2:-1]


def every_second_row(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0]


def column_major(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("view", [head_first, odd_place, in_a_fused_row, every_second_row, column_major])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_strides_change_no_bit(view: Any, head_dim: int) -> None:
    case = make_case(MIXED, (4, 2), (head_dim, head_dim))
    plain = by_the_door(case, MIXED, deterministic=True).values
    strided = AttentionCase({name: view(x) for name, x in case.tensors.items()}, case.dense, view(case.dout), None, {})
    assert_same_bits(view.__name__, by_the_door(strided, MIXED, deterministic=True).values, plain)


def test_broadcast_inputs() -> None:
    case = make_case(MIXED, (4, 2), (128, 128))
    tensors = {**case.tensors, "v": case.tensors["v"][:1].expand(1000, 2, 128), "k": case.tensors["k"][:, :1].expand(1000, 2, 128)}
    broadcast = AttentionCase(tensors, case.dense, torch.ones((), dtype=torch.bfloat16, device="cuda").expand(700, 4, 128), None, {})
    broadcast.check("broadcast", by_the_door(broadcast, MIXED))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_nobody_sees_does_not_leak(number: float, head_dim: int, deterministic: bool) -> None:
    """Rows of q and dout that see nothing, rows of k and v that nobody sees, next to rows of the same tiles that count."""
    case = make_case(MIXED, (4, 2), (head_dim, head_dim))
    plain = by_the_door(case, MIXED, deterministic=True).values
    blind, unseen = ~case.dense.any(1), ~case.dense.any(0)
    assert blind.any() and unseen.any()
    tensors = {name: x.clone() for name, x in case.tensors.items()}
    dout = case.dout.clone()
    tensors["q"][blind], dout[blind] = number, number
    tensors["k"][unseen], tensors["v"][unseen] = number, number
    ours = by_the_door(AttentionCase(tensors, case.dense, dout, None, {}), MIXED, deterministic=deterministic).values
    if not deterministic:
        for name in ("dq", "dk", "dv"):  # summed in another order
            torch.testing.assert_close(ours[name], plain.pop(name), rtol=2e-2, atol=2e-2)
    assert_same_bits(f"{number} in rows without part", {name: ours[name] for name in plain}, plain)
    assert is_exact_zero(ours["out"][blind]) and (ours["lse"][blind] == -torch.inf).all() and is_exact_zero(ours["dv"][unseen])


@pytest.mark.parametrize(("total_q", "total_k"), [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_small_and_empty(total_q: int, total_k: int) -> None:
    mask = AttnMask.from_slices([[0, 1, 0, 1, 0, 0]] if total_q == total_k == 1 else [], total_q, total_k)
    case = make_case(mask, (2, 1), (64, 64), sink_shape=(1, 2))
    found = by_the_door(case, mask).values
    assert found["out"].shape == (total_q, 2, 64) and found["dk"].shape == (total_k, 1, 64)
    assert all(value.isfinite().all() for value in found.values())


# ---- steps ----


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 48)])
def test_two_steps_are_one(dims: tuple[int, int], deterministic: bool) -> None:
    """Some keys fresh in fp32, the others merged in; gradients written fresh and added: against all at once."""
    total_q, total_k, cut = 333, 500, 217
    mask = builders.sliding_window(total_q, total_k, None)
    case = make_case(mask, (4, 2), dims)
    q, k, v = (case.tensors[name] for name in "qkv")
    named: dict[str, Any] = {"softmax_scale": 0.2, "softcap": 6.0, "deterministic": deterministic}
    options = AttentionOptions(**named)
    sink = torch.tensor([[0.5, -1.0, 2.0, 0.0]], device="cuda")
    near = [[0, total_q - 9, 0, cut, -(1 << 30), 1 << 30]]
    far = [[3, total_q, 0, total_k - cut, -(1 << 30), 60]]
    both = [near[0], [3, total_q, cut, total_k, -(1 << 30), 60 + cut]]
    whole = attention_forward_fresh(q, k, v, both, options, sink=sink, wants_max_logits=True)
    out, lse, top = attention_forward_fresh(q, k[:cut], v[:cut], near, options, sink=sink, wants_max_logits=True)
    first = out.clone(), lse.clone()
    attention_forward(q, k[cut:], v[cut:], far, out=out, lse=lse, max_logits=top, **named)
    for name, ours, expected in zip(("out", "lse", "max_logits"), (out, lse, top), whole, strict=True):
        assert ours is not None and expected is not None
        torch.testing.assert_close(ours, expected, rtol=2e-3, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}")
    other = attention_forward_fresh(q, k[cut:], v[cut:], far, options)
    merge(*first, *other[:2])
    torch.testing.assert_close(out, first[0], rtol=1e-5, atol=1e-5)  # the kernel's merge and the one of tensors
    torch.testing.assert_close(lse, first[1], rtol=1e-5, atol=1e-5)

    delta = softmax_delta(case.dout, out)
    dq = torch.zeros_like(q, dtype=torch.float32)
    dk, dv = attention_backward_fresh(Rows(q, case.dout, lse, delta), k, v, both, options, dq=dq)
    parts = [torch.full_like(x, 2.0, dtype=torch.float32) for x in (q, k, v)]
    for keys, slices in ((slice(0, cut), near), (slice(cut, total_k), far)):
        grads = dict(zip(("dq", "dk", "dv"), (parts[0], parts[1][keys], parts[2][keys]), strict=True))
        attention_backward(case.dout, q, k[keys], v[keys], lse, delta, slices, **named, **grads)
    for name, ours, expected in zip(("dq", "dk", "dv"), parts, (dq, dk, dv), strict=True):
        torch.testing.assert_close(ours - 2, expected, rtol=5e-3, atol=5e-3, msg=lambda text, name=name: f"{name}: {text}")


def test_delta_of_the_kernel_is_the_formula() -> None:
    case = make_case(MIXED, (4, 2), (128, 128), with_dlse=True)
    q, k, v = (case.tensors[name] for name in "qkv")
    options = AttentionOptions(128**-0.5)
    out, lse, _ = attention_forward_fresh(q, k, v, MIXED.slices, options, out_dtype=q.dtype)
    delta = torch.full_like(lse, torch.nan)
    attention_backward_fresh(Rows(q, case.dout, lse, delta, out, case.dlse), k, v, MIXED.slices, options, dq=torch.zeros_like(q).float())
    torch.testing.assert_close(delta, softmax_delta(case.dout, out, case.dlse), rtol=1e-4, atol=1e-4)


# ---- equal bits ----


@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_bits_over_200_runs_beside_other_work(head_dim: int) -> None:
    mask = typed([(0, 1000, 0, 4096, "full"), (0, 1000, 4096, 5096, "causal")], 1000, 5096)
    case = make_case(mask, (8, 2), (head_dim, head_dim))
    plan = prepare_attention(mask)
    leaves = [x.requires_grad_() for x in case.tensors.values()]
    busy = torch.randn(2048, 2048, device="cuda")
    side, first = torch.cuda.Stream(), None
    for run in range(200):
        with torch.cuda.stream(side):
            busy = (busy @ busy).clamp_(-1, 1)
        out, meta = flex_flash_attn_func(*leaves, plan=plan, deterministic=True, sm_margin=run % 5)
        found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, meta.lse, *torch.autograd.grad(out, leaves, case.dout)), strict=True))
        first = first or found
        assert_same_bits(f"run {run}", found, first)
    loose, _ = flex_flash_attn_func(*leaves, plan=plan)
    assert torch.equal(loose, first["out"] if first else loose)


# ---- refusals leave the context usable ----


def test_refusals_leave_the_device_usable() -> None:
    case = make_case(MIXED, (4, 2), (128, 128))
    q, k, v = case.tensors.values()
    with pytest.raises(InputError, match="k: on cpu"):
        flex_flash_attn_func(q, k.cpu(), v, mask=MIXED)
    with pytest.raises(UnsupportedError, match=r"torch\.float32.*backend='blocked'"):
        flex_flash_attn_func(q.float(), k.float(), v.float(), mask=MIXED)
    with pytest.raises(InputError, match="num_heads_q=3"):
        flex_flash_attn_func(q[:, :3], k, v, mask=MIXED)
    case.check("after refusals", by_the_door(case, MIXED))
