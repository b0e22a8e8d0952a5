"""The way from the public door to the C ABI and back, on host memory: work lists, padding, strides, sinks, signs, merges, gradients.

The kernels are the slow twin of ffa_twin.cpp; what a GPU computes is tested in test_ffa_cuda.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from magi_attention.api import AttnMask, InputError, UnsupportedError, flex_flash_attn_func, prepare_attention
from magi_attention.kernels import ffa_work
from magi_attention.kernels.attention import (
    AttentionOptions,
    Rows,
    attention_backward,
    attention_backward_fresh,
    attention_forward,
    attention_forward_fresh,
    softmax_delta,
)
from magi_attention.runtime import attention as runtime_attention
from magi_attention.testing.masks import mask_catalogue, random_mask
from magi_attention.testing.numerics import AttentionCase, AttentionResult
from tests.cases.single import is_exact_zero
from tests.kernels.problems import make_case, run_ours, typed
from tests.kernels.twin_library import install_twin, needs_compiler, remove_twin

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]
MASK = typed([(0, 30, 0, 20, "full"), (3, 60, 40, 97, "causal"), (61, 66, 50, 90, "inv_causal")], 70, 100)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    yield install_twin(monkeypatch)
    remove_twin()


def by_the_door(case: AttentionCase, mask: AttnMask, **changes: Any) -> AttentionResult:
    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
        out, meta = flex_flash_attn_func(q, k, v, mask=mask, **options, **changes)
        return out, meta.lse

    return case.run(attend)


@pytest.mark.parametrize("name", mask_catalogue())
def test_masks_of_the_catalogue(name: str, launches: list[str]) -> None:
    mask = mask_catalogue()[name]
    case = make_case(mask, (4, 2), (64, 64), sink_shape=(2, 4), with_dlse=True)
    ours = by_the_door(case, mask)
    case.check(name, ours)
    assert launches == (["forward", "backward"] if mask.total_q and mask.total_k else [])
    for key, value in run_ours(case, mask).values.items():
        assert torch.equal(value, ours.values[key]), f"the operation of compiled graphs differs in {key}"


def test_random_masks() -> None:
    rng = np.random.default_rng(0)
    for idx in range(40):
        mask = random_mask(rng, int(rng.integers(1, 90)), int(rng.integers(1, 90)))
        case = make_case(mask, (2, 1), (64, 64), torch.float16)
        case.check(f"set {idx}: {mask.slices.tolist()}", by_the_door(case, mask, deterministic=bool(idx % 2)))


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "negative scale": {"softmax_scale": -0.3},
    "negative scale and softcap": {"softmax_scale": -0.3, "softcap": 2.0},
    "scale 0": {"softmax_scale": 0.0},
    "sink per head": {"sink_shape": (2, 6)},
    "no sink in the tensor": {"sink_shape": (0, 6)},
    "sink per row": {"sink_shape": (70, 1, 6), "sink_layout": "ssh"},
    "loss on lse": {"with_dlse": True, "sink_shape": (1, 6)},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (32, 32), (80, 96), (128, 64), (40, 128), (7, 3)])
def test_head_dims_up_to_128(dims: tuple[int, int], deterministic: bool, launches: list[str]) -> None:
    case = make_case(MASK, (3, 1), dims)
    case.check(f"{dims}", by_the_door(case, MASK, deterministic=deterministic))
    assert launches == ["forward", "backward"]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dims", [(64, 64), (48, 80)])
def test_options(option: str, dims: tuple[int, int]) -> None:
    case = make_case(MASK, (6, 2), dims, **OPTIONS[option])
    case.check(option, by_the_door(case, MASK))


def head_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def odd_place(x: Tensor) -> Tensor:
    """The same values one element after an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def column_major(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def wide_rows(x: Tensor) -> Tensor:
    """Row stride of no multiple of 16 bytes."""
    return torch.nn.functional.pad(x.flatten(1), (0, 3))[:, :-3].view(x.shape)


@pytest.mark.parametrize("view", [head_first, odd_place, column_major, wide_rows])
def test_views_give_the_bits_of_contiguous_tensors(view: Any) -> None:
    case = make_case(MASK, (4, 2), (64, 64))
    plain = by_the_door(case, MASK)
    tensors = {name: view(x) for name, x in case.tensors.items()}
    strided = AttentionCase(tensors, case.dense, view(case.dout), None, {})
    assert all(torch.equal(value, plain.values[name]) for name, value in by_the_door(strided, MASK).values.items())


def test_broadcast_inputs_and_one_head() -> None:
    case = make_case(MASK, (1, 1), (64, 64))
    broadcast = AttentionCase(
        {**case.tensors, "v": case.tensors["v"][:1].expand(100, 1, 64)},
        case.dense, torch.ones((), dtype=torch.bfloat16).expand(70, 1, 64), None, {},
    )  # fmt: skip
    broadcast.check("broadcast", by_the_door(broadcast, MASK))
    q = torch.randn(70, 4, 64).bfloat16()[:, 2:3]  # one head of several: its own stride means nothing
    k = case.tensors["k"]
    one, _ = flex_flash_attn_func(q, k, k, mask=MASK)
    assert torch.equal(one, flex_flash_attn_func(q.contiguous(), k, k, mask=MASK)[0])


@pytest.mark.parametrize("total_q, total_k", [(0, 5), (5, 0), (0, 0)])
def test_empty_sides(total_q: int, total_k: int, launches: list[str]) -> None:
    mask = AttnMask.from_slices([], total_q, total_k)
    case = make_case(mask, (2, 1), (64, 64), sink_shape=(1, 2))
    ours = by_the_door(case, mask).values
    assert launches == [] and is_exact_zero(ours["out"]) and is_exact_zero(ours["dk"]) and is_exact_zero(ours["dv"])
    assert torch.equal(ours["lse"], case.tensors["sink"].expand(total_q, 2))


@pytest.mark.parametrize("dims", [(64, 64), (48, 80)])
@pytest.mark.parametrize("softmax_scale", [0.2, -0.2])
def test_two_steps_are_one(dims: tuple[int, int], softmax_scale: float) -> None:
    """Fresh results of some keys with the others merged in, against all keys at once; gradients likewise."""
    case = make_case(MASK, (4, 2), dims)
    q, k, v = (case.tensors[name] for name in "qkv")
    options = AttentionOptions(softmax_scale, 3.0)
    named: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": 3.0}
    sink = torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    near = [[0, 30, 0, 20, -1000, 1000]]
    far = MASK.slices[MASK.slices[:, 2] >= 40] - np.array([0, 0, 40, 40, 40, 40], np.int32)
    far[:, 4:] = np.where(np.abs(far[:, 4:]) > 1 << 20, MASK.slices[MASK.slices[:, 2] >= 40][:, 4:], far[:, 4:])
    whole = attention_forward_fresh(q, k, v, MASK.slices, options, sink=sink, wants_max_logits=True)
    out, lse, top = attention_forward_fresh(q, k[:40], v[:40], near, options, sink=sink, wants_max_logits=True)
    assert out.dtype == torch.float32
    attention_forward(q, k[40:], v[40:], far, out=out, lse=lse, max_logits=top, **named)
    for ours, expected in zip((out, lse, top), whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)

    delta = softmax_delta(case.dout, out)
    dq = torch.zeros_like(q, dtype=torch.float32)
    dk, dv = attention_backward_fresh(Rows(q, case.dout, lse, delta), k, v, MASK.slices, options, dq=dq)
    parts = [torch.full_like(x, 2.0, dtype=torch.float32) for x in (q, k, v)]
    for keys, slices in ((slice(0, 40), near), (slice(40, 100), far)):
        grads = dict(zip(("dq", "dk", "dv"), (parts[0], parts[1][keys], parts[2][keys]), strict=True))
        attention_backward(case.dout, q, k[keys], v[keys], lse, delta, slices, **named, **grads)
    for ours, expected in zip(parts, (dq, dk, dv), strict=True):
        torch.testing.assert_close(ours - 2, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softmax_scale", [0.2, -0.2])
def test_running_results_at_odd_places_are_merged_into(softmax_scale: float) -> None:
    """Kernels write 16 bytes at once; views into a flat buffer start at any float."""
    case = make_case(MASK, (4, 2), (64, 64))
    q, k, v = (case.tensors[name] for name in "qkv")
    named: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": 0.0}
    found = []
    for place in (torch.Tensor.contiguous, odd_place):
        starts = (torch.zeros(q.shape), torch.full((70, 4), -0.5), torch.full((4,), -1.0))
        out, lse, top = (place(x) for x in starts)
        attention_forward(q, k, v, MASK.slices, out=out, lse=lse, max_logits=top, **named)
        delta = softmax_delta(case.dout, out)
        grads = [place(torch.full(x.shape, 2.0)) for x in (q, k, v)]
        attention_backward(case.dout, q, k, v, lse, delta, MASK.slices, **named, **dict(zip(("dq", "dk", "dv"), grads, strict=True)))
        found.append([out, lse, top, *grads])
    assert found[1][0].data_ptr() % 16 and found[1][1].data_ptr() % 16
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[1][2], torch.full((4,), -1.0)) and (found[1][3] != 2).any()


def test_the_general_way_of_one_rank_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    case = make_case(MASK, (4, 2), (64, 64), sink_shape=(1, 4), with_dlse=True)
    direct = by_the_door(case, MASK)
    monkeypatch.setenv("MAGI_CHECK", "1")  # looks at every number between the steps, so it does not go directly
    general = by_the_door(case, MASK)
    assert launches == ["forward", "backward"] * 2
    assert all(torch.equal(value, direct.values[name]) for name, value in general.values.items())


def test_without_grad_the_same_bits_and_max_logits() -> None:
    case = make_case(MASK, (4, 2), (64, 64))
    q, k, v = case.tensors.values()
    out, meta = flex_flash_attn_func(q, k, v, mask=MASK, return_max_logits=True)
    scores = q.float().transpose(0, 1) @ k.float().repeat_interleave(2, 1).permute(1, 2, 0) / 8
    assert meta.max_logits is not None
    torch.testing.assert_close(meta.max_logits, scores.masked_fill(~case.dense, -torch.inf).amax((1, 2)))
    again, again_meta = flex_flash_attn_func(q.clone().requires_grad_(), k, v, mask=MASK, return_max_logits=True)
    assert torch.equal(out, again) and again_meta.max_logits is not None and not again_meta.max_logits.requires_grad
    assert not out.requires_grad and again.requires_grad


def test_partial_needs_and_no_second_derivative() -> None:
    case = make_case(MASK, (4, 2), (64, 64), sink_shape=(1, 4))
    full = by_the_door(case, MASK).values
    for name in case.tensors:
        leaves = {key: x.clone().requires_grad_(key == name) for key, x in case.tensors.items()}
        out, _ = flex_flash_attn_func(leaves["q"], leaves["k"], leaves["v"], sink=leaves["sink"], mask=MASK)
        (grad,) = torch.autograd.grad(out, [leaves[name]], case.dout)
        torch.testing.assert_close(grad, full[f"d{name}"], rtol=1e-5, atol=1e-5)
    q = case.tensors["q"].clone().requires_grad_()
    out, _ = flex_flash_attn_func(q, case.tensors["k"], case.tensors["v"], mask=MASK)
    (grad,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        grad.float().sum().backward()


def test_autocast_and_functional_gradients() -> None:
    case = make_case(MASK, (4, 2), (64, 64))
    q, k, v = case.tensors.values()
    expected, _ = flex_flash_attn_func(q, k, v, mask=MASK)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = flex_flash_attn_func(q.float(), k.float(), v.float(), mask=MASK)
    assert torch.equal(out, expected)
    gradient = torch.func.grad(lambda x: flex_flash_attn_func(x, k, v, mask=MASK)[0].float().sum())(q)
    leaf = q.clone().requires_grad_()
    (same,) = torch.autograd.grad(flex_flash_attn_func(leaf, k, v, mask=MASK)[0].float().sum(), leaf)
    assert torch.equal(gradient, same)


def test_compiles_as_one_graph(launches: list[str]) -> None:
    plan = prepare_attention(MASK)
    case = make_case(MASK, (4, 2), (48, 64), sink_shape=(1, 4))

    def loss(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        out, meta = flex_flash_attn_func(q, k, v, plan=plan, sink=sink, deterministic=True, sm_margin=0)
        return out.float().square().sum() + meta.lse.sum()

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in case.tensors.values()]
        found.append([*torch.autograd.grad(function(*leaves), leaves)])
    assert launches == ["forward", "backward"] * 2
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_sm_margin_leaves_one() -> None:
    q = torch.zeros(70, 1, 64, dtype=torch.bfloat16)
    k = torch.zeros(100, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"sm_margin=1 must be in \[0, 0\]"):
        flex_flash_attn_func(q, k, k, mask=MASK, sm_margin=1)


def test_lists_are_made_once_and_the_backward_list_only_for_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    real = ffa_work.tile_work
    monkeypatch.setattr(
        ffa_work, "tile_work", lambda *a, transposed, **more: made.append(transposed) or real(*a, transposed=transposed, **more)
    )
    plan = prepare_attention(AttnMask.from_slices([[0, 33, 0, 33, -7, 5]], 33, 33))
    x = torch.zeros(33, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        flex_flash_attn_func(x, x, x, plan=plan)
    assert made == [False]
    for _ in range(2):
        flex_flash_attn_func(x, x, x, plan=plan)[0].sum().backward()
    assert made == [False, True]
    flex_flash_attn_func(x, x, x, plan=plan, deterministic=True)[0].sum().backward()
    assert made == [False, True, False]
    assert runtime_attention.prepare(plan.mask.slices, 33, 33) is plan.work
