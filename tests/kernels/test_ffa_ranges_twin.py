"""Masks of range tensors that the host does not read, on host memory: lists of the device planner's twin, late reports, poison, graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from magi_attention.api import AttnMask, InputError, flex_flash_attn_func, prepare_attention
from magi_attention.api.device_ranges import ranges_on_device, slices_on_device
from magi_attention.kernels import device_mask as planned
from magi_attention.kernels import ffa_device, ffa_device_work, ffa_launch, ops
from magi_attention.kernels.attention import AttentionOptions, attention_forward_fresh
from magi_attention.kernels.device_mask import DeviceMask, check_reports, device_mask
from magi_attention.kernels.ffa_device import uploaded
from magi_attention.kernels.ffa_forward import ForwardCall, ForwardForm
from magi_attention.kernels.ops import single_device_attention
from magi_attention.mask.typed_ranges import bands_from_types
from magi_attention.runtime.direct import Request, attend_directly
from magi_attention.testing.masks import random_typed_ranges
from tests.kernels.problems import make_case, typed
from tests.kernels.twin_library import install_twin, needs_compiler, remove_twin

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]

WRONG = [  # (q_ranges, k_ranges, types) of 20 queries and 20 keys, and what is told
    (([[0, 21]], [[0, 20]], [0]), "reaches outside"),
    (([[0, 20]], [[0, 21]], [0]), "reaches outside"),
    (([[-1, 3]], [[0, 20]], [0]), "reaches outside"),
    (([[9, 3]], [[0, 20]], [0]), "reversed"),
    (([[0, 20]], [[9, 3]], [1]), "reversed"),
    (([[0, 20]], [[0, 20]], [4]), "attn_type_map: a type is unknown"),
    (([[0, 20]], [[0, 20]], [-1]), "attn_type_map: a type is unknown"),
]


@pytest.fixture(autouse=True)
def twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ffa_device_work._symbols.cache_clear()
    install_twin(monkeypatch)
    yield
    remove_twin()
    ffa_device_work._symbols.cache_clear()


def on_host(q_ranges: Any, k_ranges: Any, types: Any, totals: tuple[int, int], dtype: torch.dtype = torch.int64) -> DeviceMask:
    """What device_mask makes of tensors on a GPU, made of tensors on the host."""
    return DeviceMask(*totals, tuple(torch.tensor(np.array(x), dtype=dtype).contiguous() for x in (q_ranges, k_ranges, types)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_random_ranges(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    for idx in range(15):
        totals = (int(rng.integers(1, 90)), int(rng.integers(1, 90)))
        ranges = random_typed_ranges(rng, *totals, max_slices=8)
        mask = AttnMask.from_slices(bands_from_types(*ranges), *totals)
        on_device = on_host(*ranges, totals, dtype)
        case = make_case(mask, (4, 2), (64, 64), with_dlse=True)
        request = Request(deterministic=bool(idx % 2))

        def attend(
            q: Tensor, k: Tensor, v: Tensor, sink: None, on_device: DeviceMask = on_device, request: Request = request
        ) -> tuple[Tensor, ...]:
            found = attend_directly(q, k, v, sink, on_device, request)
            assert found is not None
            return found[0], found[1]

        case.check(f"set {idx}", case.run(attend))
    check_reports()


@pytest.mark.parametrize("wrong, told", WRONG)
def test_a_wrong_range_poisons_and_is_told_by_the_next_call(wrong: tuple[Any, Any, Any], told: str) -> None:
    q = torch.randn(20, 2, 64).bfloat16().requires_grad_()
    mask, right = on_host(*wrong, (20, 20)), on_host([[0, 20]], [[0, 20]], [0], (20, 20))
    for _ in range(2):  # every launch with the list tells, not the first alone
        out, lse, top = attend_directly(q, q, q, None, mask, Request(return_max_logits=True)) or (q, q, q)
        assert out.isnan().all() and lse.isnan().all() and top is not None and top.isnan().all()
        with pytest.raises(InputError, match=told):
            attend_directly(q, q, q, None, right, Request())
    found = attend_directly(q, q, q, None, right, Request())  # told once
    assert found is not None and found[0].isfinite().all()
    check_reports()


@pytest.mark.parametrize("wrong, told", WRONG)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_a_wrong_range_are_poisoned(wrong: tuple[Any, Any, Any], told: str, deterministic: bool) -> None:
    q, k, v = (torch.randn(20, 2, 64).bfloat16().requires_grad_() for _ in range(3))
    found = attend_directly(q, k, v, None, on_host(*wrong, (20, 20)), Request(deterministic=deterministic))
    assert found is not None
    with pytest.raises(InputError, match=told):  # the backward looks first
        torch.autograd.grad(found[0].float().sum(), (q, k, v), retain_graph=True)
    grads = torch.autograd.grad(found[0].float().sum(), (q, k, v))
    assert all(grad.isnan().all() for grad in grads)
    with pytest.raises(InputError, match=told):
        check_reports()


def test_several_wrong_lists_are_told_together() -> None:
    q = torch.randn(20, 2, 64).bfloat16()
    outside, unknown = (on_host(*wrong, (20, 20)) for wrong in (([[0, 21]], [[0, 20]], [0]), ([[0, 20]], [[0, 20]], [4])))
    attend_directly(q, q, q, None, outside, Request())
    forward = ForwardCall(ForwardForm(q, q, q, AttentionOptions(1.0), q.dtype), unknown)  # the launch itself looks at no report
    forward.fresh(q, q, q, None, False)
    with pytest.raises(InputError, match=r"outside of q or k.*attn_type_map: a type is unknown"):
        check_reports()
    check_reports()


@pytest.mark.parametrize("types_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backward_reads_the_ranges_of_its_forward(types_dtype: torch.dtype, deterministic: bool) -> None:
    q = torch.randn(20, 2, 64).bfloat16().requires_grad_()
    found = []
    for is_written in (False, True):
        mask = on_host([[0, 12], [12, 20]], [[0, 12], [3, 20]], [1, 0], (20, 20), torch.int32)
        mask.tensors = (*mask.tensors[:2], mask.tensors[2].to(types_dtype))
        out, _, _ = attend_directly(q, q, q, None, mask, Request(deterministic=deterministic)) or (q, q, q)
        for x in mask.tensors if is_written else ():
            x.numpy()[:] = 0  # no version counter tells
        found.append(torch.autograd.grad(out.float().square().sum(), q, retain_graph=True)[0])
        kept: Any = out.grad_fn
        assert not kept.held[0].derived, "a list of some MiB would live as long as the graph"
        assert torch.equal(torch.autograd.grad(out.float().square().sum(), q)[0], found[-1])
    assert torch.equal(*found) and found[0].count_nonzero()


def test_ranges_are_taken_anew_at_each_call() -> None:
    """Nothing that PyTorch knows of a tensor says that its content is what it was."""
    with FakeTensorMode():  # stands for a GPU
        pairs = torch.empty(3, 2, dtype=torch.int32, device="cuda")
        masks = [ranges_on_device(pairs, pairs, None, 5, 5) for _ in range(2)]
    assert masks[0] is not None and masks[1] is not None and masks[0] is not masks[1]
    assert masks[0].derived is not masks[1].derived and masks[0].calls is not masks[1].calls


def test_ranges_made_in_inference_mode_serve_training() -> None:
    q = torch.randn(20, 2, 64).bfloat16().requires_grad_()
    given = ([[0, 20]], [[0, 20]], [1], (20, 20))
    with torch.inference_mode():
        made = on_host(*given)
    grads = []
    for mask in (made, on_host(*given)):
        out, _, _ = attend_directly(q, q, q, None, mask, Request()) or (q, q, q)
        grads.append(torch.autograd.grad(out.float().sum(), q)[0])
    assert torch.equal(*grads)


def test_what_outlives_a_call_in_inference_mode_is_no_tensor_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "_reports", {})
    monkeypatch.setattr(ffa_launch, "_counters", ffa_launch._Counters())
    cpu, mask = torch.device("cpu"), typed([(0, 20, 0, 20, "causal")], 20, 20)
    q = torch.randn(20, 2, 64).bfloat16().requires_grad_()
    with torch.inference_mode():
        attend_directly(q, q, q, None, on_host([[0, 20]], [[0, 20]], [4], (20, 20)), Request())
        lists = uploaded(np.zeros(3, np.int32), cpu, "a list").tensor
        slices = prepare_attention(mask).slices
    kept = (planned._reports["cpu"]._memory, ffa_launch.counter(cpu, 0), lists, slices)
    assert not any(x is None or x.is_inference() for x in kept)
    with pytest.raises(InputError, match="a type is unknown"):
        check_reports()
    single_device_attention(q, q, q, slices)[0].float().sum().backward()  # as in a compiled graph, which saves the slices


def test_slices_on_another_gpu_come_to_the_one_of_q() -> None:
    with FakeTensorMode():
        slices = torch.empty(3, 6, dtype=torch.int32, device="cuda:1")
        q, k = (torch.empty(rows, 2, 64, device="cuda:0") for rows in (20, 10))
        found = ops._records(slices, q, k)
    assert isinstance(found, DeviceMask) and found.tensors[0].device == q.device and (found.total_q, found.total_k) == (20, 10)


def test_a_capture_is_looked_for_on_the_device_that_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def switched(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(ffa_device, "_current_device", lambda: current[0])
    monkeypatch.setattr(ffa_device, "_is_capturing", lambda: current[0] == 1)
    monkeypatch.setattr(torch.cuda, "device", switched)
    found = [ffa_device.is_capturing(torch.device(name)) for name in ("cuda:1", "cuda:0", "cuda", "cpu")]
    assert found == [True, False, False, False] and current == [0]


def test_what_the_planner_does_not_read_goes_to_the_host() -> None:
    pairs = torch.zeros(3, 2, dtype=torch.int32, device="meta")
    assert device_mask((pairs, pairs), 5, 5) is not None and device_mask((pairs, pairs, pairs[:, 0].long()), 5, 5) is not None
    for tensors in (
        (pairs, pairs.long()),
        (pairs.float(), pairs.float()),
        (pairs, pairs[:2]),
        (pairs, pairs, pairs),
        (pairs, torch.zeros(3, 2, dtype=torch.int32)),
        (torch.zeros(3, 2, dtype=torch.int32),) * 2,
        (torch.zeros(3, 6, dtype=torch.int64, device="meta"),),
    ):
        assert device_mask(tensors, 5, 5) is None


def test_slices_of_ranges_are_those_of_the_host() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        ranges = random_typed_ranges(rng, 90, 70)
        tensors = [torch.from_numpy(x.copy()) for x in ranges]
        assert np.array_equal(slices_on_device(*tensors).numpy(), bands_from_types(*ranges))
    assert slices_on_device(tensors[0], tensors[1], None).shape == (len(ranges[0]), 6)
    unknown = slices_on_device(torch.tensor([[0, 5]]), torch.tensor([[0, 5]]), torch.tensor([4]))
    assert unknown[0, 0] == -1
    with pytest.raises(InputError, match=r"k_ranges: torch\.float32"):
        slices_on_device(tensors[0], tensors[1].float(), None)


def test_the_operation_walks_slices_on_a_gpu_there(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = typed([(0, 30, 0, 20, "full"), (30, 40, 5, 45, "causal")], 40, 50)
    case = make_case(mask, (4, 2), (64, 64))
    q, k, v = case.tensors.values()
    slices = torch.from_numpy(mask.slices.copy())
    expected = single_device_attention(q, k, v, slices)
    monkeypatch.setattr(ops, "_records", lambda slices, q, k: DeviceMask(len(q), len(k), (slices,)))
    found = single_device_attention(q, k, v, slices)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    monkeypatch.setattr("magi_attention.kernels.attention.choose", lambda *_: "blocked")  # which the host reads them for
    blocked = attention_forward_fresh(q, k, v, DeviceMask(40, 50, (slices,)), AttentionOptions(64**-0.5))
    torch.testing.assert_close(blocked[0], expected[0].float(), rtol=2e-2, atol=2e-2)
    out, _ = flex_flash_attn_func(q, k, v, mask=mask)
    assert torch.equal(out, expected[0])
