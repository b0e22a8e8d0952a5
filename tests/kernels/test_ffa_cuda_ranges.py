"""Range tensors on a GPU that the host never reads: right masks, no wait, late reports, graphs that read them anew, cost on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from magi_attention.api import AttnMask, InputError, clear_cache, flex_flash_attn_func
from magi_attention.kernels.ffa_device import is_capturing
from magi_attention.kernels.ops import single_device_attention
from magi_attention.mask.typed_ranges import bands_from_types
from magi_attention.testing.masks import random_typed_ranges
from tests.kernels.cuda import assert_same_bits, on_cuda, on_gpu
from tests.kernels.problems import make_case
from tests.no_host_wait import no_host_wait

__all__ = ["on_cuda"]
pytestmark = [*on_gpu, pytest.mark.usefixtures("on_cuda")]
RANGES, TYPES = [[0, 300], [300, 650], [300, 700]], [1, 1, 0]
K_RANGES = [[0, 300], [300, 650], [0, 30]]
TOTAL = 700
WRONG = [  # in place of the above, and what is told
    ({"ranges": [[0, 300], [300, 650], [300, 701]]}, "reaches outside of q or k"),
    ({"ranges": [[-1, 300], [300, 650], [300, 700]]}, "reaches outside of q or k"),
    ({"k_ranges": [[0, 300], [300, 701], [0, 30]]}, "reaches outside of q or k"),
    ({"k_ranges": [[0, 300], [300, 650], [30, 0]]}, "a range is reversed"),
    ({"types": [1, 1, 4]}, "attn_type_map: a type is unknown"),
    ({"types": [1, -1, 0]}, "attn_type_map: a type is unknown"),
]


def fresh(dtype: torch.dtype = torch.int32, ranges: Any = RANGES, k_ranges: Any = K_RANGES, types: Any = TYPES) -> list[Tensor]:
    return [torch.tensor(np.array(x), device="cuda", dtype=dtype) for x in (ranges, k_ranges, types)]


def draw(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(TOTAL, num, 128) for num in (8, 2, 2, 8)]
    q, k, v, dout = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def run(tensors: list[Tensor], *ranges: Any, **options: Any) -> dict[str, Tensor]:
    q, k, v, dout = tensors
    out, meta = flex_flash_attn_func(q, k, v, *ranges, deterministic=True, **options)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), meta.lse.detach(), *grads), strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_random_ranges(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    for idx in range(30):
        totals = (int(rng.integers(1, 500)), int(rng.integers(1, 500)))
        ranges = random_typed_ranges(rng, *totals, max_slices=20)
        on_device = fresh(dtype, *ranges)
        case = make_case(AttnMask.from_slices(bands_from_types(*ranges), *totals), (4, 2), (64, 64), with_dlse=True)

        def attend(q: Tensor, k: Tensor, v: Tensor, sink: None, on_device: list[Tensor] = on_device, idx: int = idx) -> tuple[Tensor, ...]:
            out, meta = flex_flash_attn_func(q, k, v, *on_device, deterministic=bool(idx % 2))
            return out, meta.lse

        case.check(f"set {idx}: {[x.tolist() for x in ranges]}", case.run(attend))


def test_no_host_wait_with_new_tensors_each_time() -> None:
    clear_cache()
    tensors, given = draw(), [fresh() for _ in range(4)]
    torch.cuda.synchronize()
    with no_host_wait():
        found = [run(tensors, *ranges) for ranges in given]
        found.append(run(tensors, *given[-1]))
    for other in found[1:]:
        assert_same_bits("the same ranges in other tensors", other, found[0])


OTHER = {"k_ranges": [[0, 300], [300, 650], [660, 690]], "types": [0, 0, 0]}


def counted(ranges: list[Tensor]) -> Callable[[], None]:
    def write() -> None:
        for x, value in zip(ranges, fresh(**OTHER), strict=True):
            x.copy_(value)

    return write


def through_data(ranges: list[Tensor]) -> Callable[[], None]:
    def write() -> None:
        for x, value in zip(ranges, fresh(**OTHER), strict=True):
            x.data.copy_(value)

    return write


def by_replay(ranges: list[Tensor]) -> Callable[[], None]:
    given, graph = fresh(**OTHER), torch.cuda.CUDAGraph()
    kept = [x.clone() for x in ranges]
    with torch.cuda.graph(graph):
        for x, value in zip(ranges, given, strict=True):
            x.copy_(value)
    for x, value in zip(ranges, kept, strict=True):  # a capture runs nothing, but this must not depend on it
        x.copy_(value)

    def write() -> None:
        assert given
        graph.replay()

    return write


@pytest.mark.parametrize("way", [counted, through_data, by_replay])
def test_every_write_is_seen_by_the_next_call_and_by_no_backward_before(way: Any) -> None:
    tensors, ranges = draw(), fresh()
    before, after = run(tensors, *fresh()), run(tensors, *fresh(**OTHER))
    assert not torch.equal(before["out"], after["out"])
    write = way(ranges)
    versions = [x._version for x in ranges]
    assert_same_bits("before the write", run(tensors, *ranges), before)
    q, k, v, dout = tensors
    out, _ = flex_flash_attn_func(q, k, v, *ranges, deterministic=True)
    write()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert way is counted or versions == [x._version for x in ranges], "no counter tells, or this tests nothing"
    expected = {name: before[name] for name in ("dq", "dk", "dv")}
    assert_same_bits("a backward after the write", dict(zip(expected, grads, strict=True)), expected)
    assert_same_bits("after the write", run(tensors, *ranges), after)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_write_behind_both_passes_on_another_stream_changes_nothing(dtype: torch.dtype) -> None:
    tensors, expected = draw(), run(draw(), *fresh())
    ranges = [x.repeat_interleave(2, 0)[::2] for x in fresh(dtype)]  # copied by the call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q, k, v, dout = tensors
        out, _ = flex_flash_attn_func(q, k, v, *ranges, deterministic=True)
        for x in ranges:
            x.data.zero_()
        noise = [torch.full((64,), 7, dtype=dtype, device="cuda") for _ in range(50)]  # over freed memory, if any was
    grads = torch.autograd.grad(out, (q, k, v), dout)
    torch.cuda.current_stream().wait_stream(stream)
    assert len(noise) == 50
    found = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    assert_same_bits("on a side stream", found, {name: expected[name] for name in found})


def test_ranges_and_reports_of_inference_mode_serve_training() -> None:
    tensors, expected = draw(), run(draw(), *fresh())
    with torch.inference_mode():
        ranges = fresh()
        flex_flash_attn_func(*(x.detach() for x in tensors[:3]), *ranges)
    assert_same_bits("training", run(tensors, *ranges), expected)


def test_graphs_of_autograd_hold_no_lists() -> None:
    tensors, ranges = draw(), fresh()
    q, k, v, dout = tensors
    run(tensors, *ranges)
    torch.cuda.synchronize()
    outs, before = [], torch.cuda.memory_allocated()
    for _ in range(8):
        outs.append(flex_flash_attn_func(q, k, v, *ranges))
        torch.autograd.grad(outs[-1][0], (q, k, v), dout, retain_graph=True)
    of_results = sum(out.nbytes + meta.lse.nbytes for out, meta in outs)
    assert torch.cuda.memory_allocated() - before - of_results < 8 * 8192


def test_slices_and_ranges_elsewhere_than_q() -> None:
    q, k, v, _ = (x.detach() for x in draw())
    slices = torch.from_numpy(bands_from_types(*(np.array(x) for x in (RANGES, K_RANGES, TYPES))))
    on_host = single_device_attention(q.cpu(), k.cpu(), v.cpu(), slices.cuda())
    torch.testing.assert_close(on_host[0].cuda(), flex_flash_attn_func(q, k, v, *fresh())[0], rtol=2e-2, atol=2e-2)
    if torch.cuda.device_count() < 2:
        return
    expected, _ = flex_flash_attn_func(q, k, v, *fresh())
    assert torch.equal(single_device_attention(q, k, v, slices.to("cuda:1"))[0], expected)
    by_the_host, _ = flex_flash_attn_func(q, k, v, *(x.to("cuda:1") for x in fresh()))  # whose tiles may be others
    torch.testing.assert_close(by_the_host, expected, rtol=2e-2, atol=2e-2)
    others = [x.to("cuda:1") for x in (q, k, v, *fresh())]
    assert torch.equal(flex_flash_attn_func(*others)[0].cpu(), expected.cpu())
    stream = torch.cuda.Stream("cuda:1")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device("cuda:1"), torch.cuda.graph(graph, stream=stream), torch.cuda.device("cuda:0"):
        torch.zeros(1, device="cuda:1")  # a graph of nothing is warned of
        assert is_capturing(torch.device("cuda:1")) and not is_capturing(torch.device("cuda:0"))


@pytest.mark.parametrize("wrong, told", WRONG)
def test_wrong_ranges_give_nan_and_an_error_at_the_next_call(wrong: dict[str, Any], told: str) -> None:
    clear_cache()
    tensors, right, ranges = draw(), fresh(), fresh(**wrong)
    q, k, v, dout = tensors
    expected = run(tensors, *right)
    out, meta = flex_flash_attn_func(q, k, v, *ranges, deterministic=True)
    torch.cuda.synchronize()
    assert out.isnan().all() and meta.lse.isnan().all()
    with pytest.raises(InputError, match=rf"{told}.*earlier call"):  # the backward looks too, before it runs
        torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    grads = torch.autograd.grad(out, (q, k, v), dout)  # told once; what runs with such ranges stays NaN, and tells again
    torch.cuda.synchronize()
    assert all(grad.isnan().all() for grad in grads)
    with pytest.raises(InputError, match=rf"{told}.*earlier call"):
        run(tensors, *right)
    assert_same_bits("after the report", run(tensors, *right), expected)


def test_a_host_that_runs_ahead_gets_nan_and_the_error_later() -> None:
    tensors, right, ranges = draw(), fresh(), fresh(**WRONG[0][0])
    expected = run(tensors, *right)
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 29)  # about a third of a second, in which nothing can be told
    found = run(tensors, *ranges)
    torch.cuda.synchronize()
    assert all(found[name].isnan().all() for name in found)
    with pytest.raises(InputError, match="earlier call"):
        run(tensors, *right)
    assert_same_bits("after the report", run(tensors, *right), expected)


def test_check_mode_reads_ranges_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI_CHECK", "1")
    with pytest.raises(InputError, match=r"q_ranges\[2\]=\[300, 701\)"):
        run(draw(), *fresh(ranges=[[0, 300], [300, 650], [300, 701]]))


def test_compiled_graphs_read_them_on_the_gpu() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, *ranges: Tensor) -> tuple[Tensor, Tensor]:
        out, meta = flex_flash_attn_func(q, k, v, *ranges, deterministic=True)
        return out, meta.lse

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, v, dout = draw()
    for waits_are_errors in (False, True):
        ranges = fresh()
        with no_host_wait(waits_are_errors):
            out, lse = compiled(q, k, v, *ranges)
            grads = torch.autograd.grad(out, (q, k, v), dout)
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True))
    assert_same_bits("compiled", found, run([q, k, v, dout], *ranges))


def test_a_graph_reads_its_ranges_at_each_replay() -> None:
    q, k, v, _ = (x.detach() for x in draw())
    ranges = fresh()
    expected, _ = flex_flash_attn_func(q, k, v, *fresh(types=[0, 0, 0], k_ranges=[[0, 300], [300, 650], [650, 700]]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flex_flash_attn_func(q, k, v, *ranges)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = flex_flash_attn_func(q, k, v, *ranges)
    ranges[2].zero_()
    ranges[1][2] = torch.tensor([650, 700], device="cuda")
    graph.replay()
    assert torch.equal(out, expected)
    ranges[2].fill_(9)
    graph.replay()
    torch.cuda.synchronize()
    assert out.isnan().all()
    with pytest.raises(InputError, match=r"attn_type_map: a type is unknown.*earlier call"):  # a replay tells as well
        flex_flash_attn_func(q, k, v, *fresh())


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("is_new", [False, True], ids=["the same tensors", "new tensors"])
def test_a_call_with_ranges_costs_80_us_of_the_host(
    is_new: bool, requires_grad: bool, record_property: Callable[[str, object], None]
) -> None:
    q, k, v, _ = (x.detach().requires_grad_(requires_grad) for x in draw())
    given = [fresh() for _ in range(400)] if is_new else [fresh()] * 400
    times = []
    for idx, ranges in enumerate(given):
        if idx % 20 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        flex_flash_attn_func(q, k, v, *ranges)
        times.append(time.perf_counter() - start)
    spent = statistics.median(times[50:]) * 1e6
    record_property("host_us", spent)
    print(f"forward with range tensors, new={is_new}, requires_grad={requires_grad}: {spent:.1f} us")
    assert spent <= (100 if requires_grad else 80)  # with the copy for the backward and a node of autograd
