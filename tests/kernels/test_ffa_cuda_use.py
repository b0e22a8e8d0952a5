"""How compiled kernels are called on a GPU: nothing waits, graphs replay, compilers see one node, streams mix, calls are cheap."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from magi_attention.api import (
    AttnMask,
    InputError,
    calc_attn,
    clear_cache,
    flex_flash_attn_func,
    magi_attn_flex_key,
    prepare_attention,
)
from magi_attention.mask import builders
from tests.kernels.cuda import assert_same_bits, on_gpu
from tests.no_host_wait import no_host_wait

pytestmark = on_gpu
TOTAL = 700
RANGES, TYPES = [[0, 300], [300, 700]], [1, 1]
MASK = AttnMask.from_ranges(RANGES, RANGES, TYPES, TOTAL, TOTAL)


def draw(total: int = TOTAL, heads: tuple[int, int] = (8, 2), head_dim: int = 128, seed: int = 0) -> list[Tensor]:
    """q, k, v that require grad, and dout."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(total, num, head_dim) for num in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, dout = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def run(tensors: list[Tensor], **options: Any) -> dict[str, Tensor]:
    q, k, v, dout = tensors
    out, meta = flex_flash_attn_func(q, k, v, deterministic=True, **options)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), meta.lse.detach(), *grads), strict=True))


# ---- the host never waits ----


@pytest.mark.parametrize("head_dim", [128, 48])
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_host_wait_with_a_plan_from_the_first_call_on(head_dim: int, deterministic: bool) -> None:
    clear_cache()
    plan = prepare_attention(MASK)
    q, k, v, dout = draw(head_dim=head_dim)
    sink = torch.zeros(1, 8, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with no_host_wait():
        for _ in range(2):
            options: dict[str, Any] = {"softcap": 7.0, "return_max_logits": True, "deterministic": deterministic}
            out, meta = flex_flash_attn_func(q, k, v, plan=plan, sink=sink, **options)
            torch.autograd.grad([out, meta.lse], (q, k, v, sink), [dout, torch.ones_like(meta.lse)])


# ---- CUDA graphs ----


def test_a_graph_replays_a_plan_on_new_numbers() -> None:
    plan = prepare_attention(MASK)
    static, other = draw(seed=1), draw(seed=2)
    expected = run(other, plan=plan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(static, plan=plan)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(static, plan=plan)
    with torch.no_grad():
        for target, source in zip(static, other, strict=True):
            target.copy_(source)
    for _ in range(3):
        graph.replay()
    assert_same_bits("replayed", found, expected)


def test_a_plan_that_never_ran_is_refused_in_a_capture() -> None:
    clear_cache()
    plan = prepare_attention(AttnMask.from_slices([[0, TOTAL, 0, TOTAL, -77, 5]], TOTAL, TOTAL))
    q, k, v, _ = draw()
    run(draw(), mask=MASK)  # everything but this plan is warm
    refused = pytest.raises(InputError, match="CUDA graph is being captured; run the same calls once before the capture")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()), torch.no_grad():
        flex_flash_attn_func(q, k, v, plan=plan)
    torch.cuda.synchronize()
    flex_flash_attn_func(q, k, v, plan=plan)


# ---- torch.compile ----


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_as_one_graph(backend: str) -> None:
    if backend == "inductor":
        pytest.importorskip("triton")
    plan = prepare_attention(MASK)
    sink = torch.zeros(2, 8, device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        out, meta = flex_flash_attn_func(q, k, v, plan=plan, sink=sink, softcap=5.0, deterministic=True)
        return out, meta.lse

    found = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend=backend)):
        q, k, v, dout = draw()
        own_sink = sink.clone().requires_grad_()
        out, lse = function(q, k, v, own_sink)
        grads = torch.autograd.grad([out, lse], (q, k, v, own_sink), [dout, torch.ones_like(lse)])
        found.append(dict(zip(("out", "lse", "dq", "dk", "dv", "dsink"), (out, lse, *grads), strict=True)))
    assert_same_bits("compiled", found[1], found[0])


# ---- streams, devices, keys ----


def test_a_fresh_list_is_good_on_every_stream() -> None:
    tensors = draw(2048)
    mask = builders.sliding_window(2048, 2048, (300, 0))
    expected = run(tensors, mask=mask)
    torch.cuda.synchronize()
    for _ in range(5):
        clear_cache()
        plan = prepare_attention(mask)
        streams = [torch.cuda.Stream() for _ in range(3)]
        found = []
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(20_000_000)  # the upload waits behind this
            flex_flash_attn_func(*(x.detach() for x in tensors[:3]), plan=plan)
        for stream in streams[1:]:
            with torch.cuda.stream(stream):
                found.append(run(tensors, plan=plan))
        del plan
        clear_cache()
        torch.full((1 << 22,), -1, dtype=torch.int32, device="cuda")  # takes memory that was freed too early, if there is any
        torch.cuda.synchronize()
        for other in found:
            assert_same_bits("on another stream", other, expected)


def test_tensors_of_another_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    tensors = draw()
    there = [x.detach().to("cuda:1").requires_grad_() for x in tensors[:3]] + [tensors[3].to("cuda:1")]
    expected = run(tensors, mask=MASK)
    found = run(there, mask=MASK)
    assert torch.cuda.current_device() == 0 and found["out"].device == torch.device("cuda:1")
    assert_same_bits("the other device", {name: x.to("cuda:0") for name, x in found.items()}, expected)


def test_calc_attn_of_one_rank_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    key = magi_attn_flex_key(RANGES, RANGES, "causal", TOTAL, TOTAL, 8, 2, 128, 0, None)
    q, k, v, _ = draw()
    expected, expected_meta = flex_flash_attn_func(q, k, v, mask=MASK)
    out, meta = calc_attn(q, k, v, key)
    assert torch.equal(out, expected) and torch.equal(meta.lse, expected_meta.lse)
    monkeypatch.setenv("MAGI_CHECK", "1")
    checked, _ = flex_flash_attn_func(q, k, v, mask=MASK)
    assert torch.equal(checked, expected)


def test_a_default_device_of_the_user_changes_nothing() -> None:
    clear_cache()
    tensors = draw()
    with torch.device("cuda"):
        found = run(tensors, mask=MASK)
    assert_same_bits("default device", found, run(tensors, mask=MASK))


# ---- cost on the host ----


def host_us(call: Callable[[], object]) -> float:
    """Median time of a call on the host, the GPU far from full."""
    times = []
    for idx in range(400):
        if idx % 20 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times[50:]) * 1e6


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
def test_a_call_with_a_plan_costs_40_us_of_the_host(requires_grad: bool, record_property: Callable[[str, object], None]) -> None:
    plan = prepare_attention(builders.sliding_window(256, 256, (None, 0)))
    q, k, v, _ = (x.detach().requires_grad_(requires_grad) for x in draw(256))
    spent = host_us(lambda: flex_flash_attn_func(q, k, v, plan=plan))
    record_property("host_us", spent)
    print(f"forward with a plan, requires_grad={requires_grad}: {spent:.1f} us")
    assert spent <= 40


# ---- long ----


def test_keys_beyond_31_bits_of_elements() -> None:
    """k and v of 2^31 elements and more; documents at the start, across the border and at the end equal their own runs."""
    heads, total = 16, (1 << 20) + 300
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs a GPU with 60 GiB")
    q, k, v, dout = (x.detach() for x in draw(total, (heads, heads)))
    borders = [(0, 200), ((1 << 20) - 150, (1 << 20) + 90), (total - 130, total)]
    slices = np.array([[a, b, a, b, -(1 << 30), 0] for a, b in borders], np.int32)
    mask = AttnMask.from_slices(slices, total, total)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = flex_flash_attn_func(*leaves, mask=mask, deterministic=True)
    grads = torch.autograd.grad(out, leaves, dout)
    for a, b in borders:
        own = [x[a:b].detach().clone().requires_grad_() for x in leaves]
        expected, _ = flex_flash_attn_func(*own, mask=builders.sliding_window(b - a, b - a, (None, 0)))
        wanted = torch.autograd.grad(expected, own, dout[a:b].clone())
        for name, ours, want in zip(("out", "dq", "dk", "dv"), (out[a:b], *(g[a:b] for g in grads)), (expected, *wanted), strict=True):
            error = (ours.float() - want.float()).abs().max().item()
            assert error <= 2**-7 * want.float().abs().max().item(), (name, a, error)
