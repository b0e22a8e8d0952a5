"""The N cases that concern one device, on CPU tensors, at the catalogue's sizes unless the README of this folder says otherwise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from magi_attention.api import DistAttnConfig, InputError, calc_attn, flex_flash_attn_func, magi_attn_flex_key
from magi_attention.kernels.ops import single_device_attention
from magi_attention.mask import AttnMask, builders
from magi_attention.testing.numerics import assert_close_to_reference, assert_lse_close, check_against_mask
from tests.cases.single import by_the_door, case_of, check, is_exact_zero, run_both
from tests.kernels.problems import attend, block_map_mask, causal, run_ours, typed

pytestmark = pytest.mark.usefixtures("one_thread")

BACKENDS = ("auto", "blocked")  # those that a CPU has


@pytest.mark.parametrize("backend", BACKENDS)
def test_n01_natural_log(backend: str) -> None:
    zeros = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    keys = zeros[:, :2].expand(8, -1, -1)
    mask = typed([(0, 1, 0, 8, "full")], 1, 8)
    for lse in (attend(zeros, keys, keys, mask, backend=backend)[1], flex_flash_attn_func(zeros, keys, keys, mask=mask)[1].lse):
        torch.testing.assert_close(lse, torch.full((1, 8), 2.0794415), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sink_shape", [None, (2, 8)])
def test_n02_lse_is_differentiable(sink_shape: tuple[int, ...] | None) -> None:
    """loss = 0.5 * out.sum() + lse.sum()"""
    mask = causal(256)
    case = case_of(mask, sink_shape=sink_shape)
    case = type(case)(case.tensors, case.dense, torch.full_like(case.dout, 0.5), torch.ones(256, 8), {})
    ours = run_both(case, mask)
    case.check("N02", ours)
    without = type(case)(case.tensors, case.dense, case.dout, None, {})
    assert not torch.equal(by_the_door(without, mask).values["dk"], ours.values["dk"])
    leaves = {name: x.clone().requires_grad_() for name, x in case.tensors.items()}
    out, meta = flex_flash_attn_func(leaves["q"], leaves["k"], leaves["v"], mask=mask, sink=leaves.get("sink"))
    (0.5 * out.sum() + meta.lse.sum()).backward()  # the loss as it is written
    assert all(torch.equal(x.grad, ours.values[f"d{name}"]) for name, x in leaves.items())


def test_n03_causal_with_fewer_keys() -> None:
    ours = check("N03", typed([(0, 8, 0, 5, "causal")], 8, 5)).values
    assert (ours["lse"][:3] == -torch.inf).all() and is_exact_zero(ours["out"][:3]) and torch.isfinite(ours["lse"][3:]).all()


def small_documents_twin(case: dict[str, Tensor], lengths: np.ndarray, dtype: torch.dtype) -> dict[str, Tensor]:
    """Causal attention of many tiny documents in `dtype`, one dense batch per length."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    leaves = {name: case[name].to(dtype).requires_grad_() for name in ("q", "k", "v")}
    out, lse = torch.zeros(case["q"].shape, dtype=dtype), torch.zeros(case["q"].shape[:2], dtype=dtype)
    for length in range(1, 5):
        rows = torch.from_numpy(starts[lengths == length][:, None] + np.arange(length))
        q, k, v = (leaves[name][rows].transpose(1, 2) for name in ("q", "k", "v"))  # [documents, heads, length, D]
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        out = out.index_put((rows,), (torch.softmax(scores, -1) @ v).transpose(1, 2))
        lse = lse.index_put((rows,), torch.logsumexp(scores.detach(), -1).transpose(1, 2))
    grads = torch.autograd.grad(out, list(leaves.values()), case["dout"].to(dtype))
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def test_n07_fifteen_thousand_documents() -> None:
    lengths = np.random.default_rng(0).integers(1, 5, 15_000)
    total = int(lengths.sum())
    borders = np.concatenate([[0], np.cumsum(lengths)])
    mask = builders.from_cu_seqlens(borders, borders, causal=True)
    assert (total, mask.area()) == (37_473, 74_992)
    generator = torch.Generator().manual_seed(0)
    heads = {"q": 2, "k": 1, "v": 1, "dout": 2}
    case = {name: torch.randn(total, num_heads, 64, generator=generator).bfloat16() for name, num_heads in heads.items()}
    leaves = [case[name].clone().requires_grad_() for name in ("q", "k", "v")]
    out, meta = flex_flash_attn_func(*leaves, mask=mask)
    ours = {"out": out, **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, case["dout"]), strict=True))}
    reference, eager = small_documents_twin(case, lengths, torch.float64), small_documents_twin(case, lengths, torch.bfloat16)
    assert_lse_close("N07 lse", meta.lse, reference["lse"])
    for name, value in ours.items():
        assert_close_to_reference(f"N07 {name}", value, reference[name], eager[name], "forward" if name == "out" else "backward")


def head_first(x: Tensor) -> Tensor:
    """The same values, stored as (H, T, D)."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("which", [("q", "k", "v"), ("v",), ("dout",)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_n08_transposed_views(which: tuple[str, ...], dtype: torch.dtype) -> None:
    mask = builders.from_cu_seqlens([0, 100, 333], [0, 100, 333], causal=True)
    case = case_of(mask, dtype=dtype)
    plain = run_both(case, mask)
    tensors = {name: head_first(x) if name in which else x for name, x in case.tensors.items()}
    strided = type(case)(tensors, case.dense, head_first(case.dout) if "dout" in which else case.dout, None, {})
    ours = run_both(strided, mask)
    assert torch.equal(ours.values["out"], plain.values["out"]) and torch.equal(ours.values["lse"], plain.values["lse"])
    assert all(x.isfinite().all() for x in ours.values.values())
    case.check("N08", ours)


def test_n08_views_of_a_fused_projection() -> None:
    mask = causal(200)
    fused = torch.randn(200, 8 * 32, generator=torch.Generator().manual_seed(0))
    q, k, v = fused[:, :128].view(200, 4, 32), fused[:, 128:192].view(200, 2, 32), fused[:, 192:].view(200, 2, 32)
    assert not k.is_contiguous()
    assert torch.equal(attend(q, k, v, mask)[0], attend(q.contiguous(), k.contiguous(), v.contiguous(), mask)[0])
    every_second = torch.randn(200, 2, 64)[..., ::2]
    assert torch.equal(attend(q, every_second, v, mask)[0], attend(q, every_second.contiguous(), v, mask)[0])


def test_n10_broadcast_and_strided_dout() -> None:
    mask = causal(256)
    case = case_of(mask)
    found = []
    for dout in (torch.ones((), dtype=torch.bfloat16).expand(256, 8, 128), torch.randn(256, 8, 256).bfloat16()[..., ::2]):
        strided = type(case)(case.tensors, case.dense, dout, None, {})
        found.append(run_both(strided, mask).values)
        strided.check("N10", run_ours(strided, mask))
    leaves = {name: x.clone().requires_grad_() for name, x in case.tensors.items()}
    flex_flash_attn_func(*leaves.values(), mask=mask)[0].sum().backward()
    assert all(torch.equal(x.grad, found[0][f"d{name}"]) for name, x in leaves.items())


def test_n11_padding_rows(poisoned_memory: str) -> None:
    borders = [0, 144, 432, 944]
    mask = AttnMask.from_slices(builders.from_cu_seqlens(borders, borders, causal=True).slices, 946, 946)
    ours = check("N11", mask).values
    assert all(is_exact_zero(ours[name][944:]) for name in ("out", "dq", "dk", "dv"))
    x = torch.randn(946, 16)
    assert torch.isfinite(ours["dk"].flatten(1).float().T @ x).all()


@pytest.mark.parametrize("deterministic", [True, False])
def test_n14_equal_to_the_bit_over_200_runs(deterministic: bool) -> None:
    mask = typed([(0, 1000, 0, 4096, "full"), (0, 1000, 4096, 5096, "causal")], 1000, 5096)
    case = case_of(mask, (1, 1), (16, 16))
    first = by_the_door(case, mask, deterministic=deterministic)
    case.check("N14", first)
    for _ in range(199 if deterministic else 1):
        again = by_the_door(case, mask, deterministic=deterministic).values
        assert all(torch.equal(value, first.values[name]) for name, value in again.items())


def test_n17_the_checker_names_the_first_wrong_cell(capsys: pytest.CaptureFixture[str]) -> None:
    mask = block_map_mask(False)

    def verdict(slices: np.ndarray) -> Any:
        return check_against_mask(lambda q, k, v: single_device_attention(q, k, v, slices)[0], mask)

    assert verdict(mask.slices).passed and "PASS" in capsys.readouterr().out
    wrong = mask.slices.copy()
    wrong[3, 3] -= 1
    found = verdict(wrong)
    cell = (int(wrong[3, 0]), int(wrong[3, 3]))
    assert not found.passed and found.first_cell == cell and found.num_cells == 128
    assert f"FAIL: first at query {cell[0]}, key {cell[1]}: hidden, the mask says visible" in capsys.readouterr().out


@pytest.mark.parametrize(("num_heads_q", "num_heads_kv"), [(3, 2), (33, 2), (8, 0)])
def test_n18_head_counts_that_do_not_divide(num_heads_q: int, num_heads_kv: int) -> None:
    q, k = torch.zeros(4, num_heads_q, 8), torch.zeros(4, num_heads_kv, 8)
    words = f"num_heads_q={num_heads_q}, num_heads_kv={num_heads_kv}"
    for call in (
        lambda: single_device_attention(q, k, k, causal(4).slices),
        lambda: flex_flash_attn_func(q, k, k, mask=causal(4)),
    ):
        with pytest.raises(InputError, match=words):
            call()
    with pytest.raises(InputError, match=f"num_heads_kv={num_heads_kv}"):
        magi_attn_flex_key([[0, 4]], [[0, 4]], "causal", 4, 4, num_heads_q, num_heads_kv, 8, 0, None)


@pytest.mark.parametrize("heads", [(8, 8), (4, 2), (9, 3), (40, 8), (28, 4), (16, 2), (96, 8), (16, 1)])
@pytest.mark.parametrize("window", [None, (64, 0)], ids=["causal", "window"])
def test_n19_head_ratios(heads: tuple[int, int], window: tuple[int, int] | None) -> None:
    """Head packing is the library's choice: the flag of the original is taken, ignored and changes no bit."""
    mask = causal(300) if window is None else builders.sliding_window(300, 300, window)
    case = case_of(mask, heads, (64, 64))
    ours = run_both(case, mask)
    case.check("N19", ours)
    for pack_gqa in (True, False):
        with pytest.warns(DeprecationWarning, match="pack_gqa is ignored"):
            packed = by_the_door(case, mask, pack_gqa=pack_gqa)
        assert all(torch.equal(value, ours.values[name]) for name, value in packed.values.items())


@pytest.mark.parametrize("head_dim", [32, 60, 64, 80, 96, 128, 192, 256, 512])
def test_n21_head_dims(head_dim: int) -> None:
    check("N21", causal(300), (4, 2), (head_dim, head_dim))
    check("N21 other width of v", causal(65), (2, 1), (head_dim, 40))


def extra_peak_bytes(total: int) -> int:
    """Growth of the peak resident size over one forward and backward of `total` causal tokens."""
    mask = causal(total)
    leaves = [torch.randn(total, 1, 32, requires_grad=True) for _ in range(3)]

    def resident(field: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # the peak starts again from what is resident now
    before = resident("VmRSS")
    flex_flash_attn_func(*leaves, mask=mask)[0].sum().backward()
    return max(0, resident("VmHWM") - before)


def test_n21_memory_is_linear() -> None:
    extra_peak_bytes(1024)  # allocator and library warm-up
    one, two = extra_peak_bytes(16_384), extra_peak_bytes(32_768)
    assert two < 32_768**2 / 16, f"{two} bytes for 32,768 tokens: a score matrix has {4 * 32_768**2}"
    assert two <= 3 * max(one, 16 << 20), f"peak grew from {one} to {two} bytes"


@pytest.mark.parametrize("softcap", [30.0, 50.0])
def test_n23_softcap_after_scale(softcap: float) -> None:
    q = torch.full((1, 1, 4), 10.0)
    _, meta = flex_flash_attn_func(q, q, q, mask=causal(1), softmax_scale=0.25, softcap=softcap)  # score 400, scaled to 100
    assert float(meta.lse) == pytest.approx({30.0: 29.92374, 50.0: 48.20138}[softcap], abs=2e-5)


@pytest.mark.parametrize("softcap", [30.0, 50.0])
@pytest.mark.parametrize("sink_shape", [None, (1, 8)], ids=["plain", "sink"])
@pytest.mark.parametrize("window", [None, (31, 0)], ids=["causal", "window"])
def test_n23_scores_up_to_200(softcap: float, sink_shape: tuple[int, ...] | None, window: tuple[int, int] | None) -> None:
    mask = causal(200) if window is None else builders.sliding_window(200, 200, window)
    plain = case_of(mask, sink_shape=sink_shape)
    q, k = (plain.tensors[name].transpose(0, 1).double() for name in ("q", "k"))
    scores = (q @ k.repeat_interleave(4, 0).transpose(1, 2)).masked_fill(~plain.dense, 0)
    scale = 200 / float(scores.abs().max())
    assert float(scores.max()) * scale > 150 and float(scores.min()) * scale < -150
    if sink_shape is not None:  # as large as the capped scores, so that every row has a share in dsink
        plain.tensors["sink"].copy_(torch.linspace(0.5 * softcap, 0.9 * softcap, 8))
    case = type(plain)(plain.tensors, plain.dense, plain.dout, None, {"softcap": softcap, "softmax_scale": scale})
    case.check("N23", run_both(case, mask))
    with pytest.raises(InputError, match=r"softcap=-1\.0"):
        by_the_door(type(plain)(plain.tensors, plain.dense, plain.dout, None, {"softcap": -1.0}), mask)


@pytest.mark.parametrize("softmax_scale", [1.0, 0.0625])
def test_n24_given_scales(softmax_scale: float) -> None:
    """The public function, the registered operation, the path of keys with one rank, and each by every backend a CPU has."""
    mask = causal(200)
    case = case_of(mask, softmax_scale=softmax_scale)
    twins = case.reference(), case.eager()
    case.check("N24 main path", run_both(case, mask), *twins)
    for backend in BACKENDS:
        config = DistAttnConfig(kernel_backend=backend)
        key = magi_attn_flex_key([[0, 200]], [[0, 200]], "causal", 200, 200, 8, 2, 128, 0, None, config)

        def by_key(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, softmax_scale: float, key: Any = key) -> tuple[Tensor, Tensor]:
            out, meta = calc_attn(q, k, v, key, sink, softmax_scale)
            return out, meta.lse

        def by_op(q: Tensor, k: Tensor, v: Tensor, backend: str = backend, **options: Any) -> tuple[Tensor, Tensor]:
            return attend(q, k, v, mask, backend=backend, **options)

        case.check(f"N24 key, {backend}", case.run(by_key), *twins)
        case.check(f"N24 operation, {backend}", case.run(by_op), *twins)


def test_n25_dtypes() -> None:
    q, k = torch.randn(16, 8, 128), torch.randn(16, 2, 128)
    mask = causal(16)
    for call in (attend, lambda *tensors: flex_flash_attn_func(*tensors[:3], mask=tensors[3])):
        with pytest.raises(InputError, match=r"^k: dtype torch\.float32, but q has torch\.bfloat16"):
            call(q.bfloat16(), k, k.bfloat16(), mask)
        assert (
            call(q, k, k, mask)[0].dtype == torch.float32
        )  # a dtype of the CPU path; on a GPU tests/kernels/test_select.py has the refusal
    leaves = [x.clone().requires_grad_() for x in (q, k, k)]
    with torch.autocast("cpu", torch.bfloat16):
        out, meta = flex_flash_attn_func(*leaves, mask=mask)
    assert (out.dtype, meta.lse.dtype) == (torch.bfloat16, torch.float32)  # documented: cast, as torch's own attention does
    cast = [x.bfloat16().requires_grad_() for x in (q, k, k)]
    plain, _ = flex_flash_attn_func(*cast, mask=mask)
    assert torch.equal(out, plain)
    for wide, narrow in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(plain.sum(), cast), strict=True):
        assert wide.dtype == torch.float32 and torch.equal(wide, narrow.float())


@pytest.mark.parametrize("sink_layout", ["sh", "ssh"])
def test_n26_sink_by_hand(sink_layout: str) -> None:
    q = torch.zeros(8, 1, 64)
    k, v = torch.zeros(8, 1, 64), torch.ones(8, 1, 64)
    sink = torch.ones((1, 1) if sink_layout == "sh" else (8, 1, 1), requires_grad=True)
    out, meta = flex_flash_attn_func(q, k, v, mask=typed([(0, 8, 0, 8, "full")], 8, 8), sink=sink, sink_layout=sink_layout)
    torch.testing.assert_close(meta.lse, torch.full((8, 1), 2.371951), rtol=0, atol=1e-5)
    torch.testing.assert_close(out, torch.full((8, 1, 64), 0.746388), rtol=0, atol=1e-5)
    (dsink,) = torch.autograd.grad(out, sink, torch.ones_like(out))
    expected = torch.full_like(sink, -12.114740 * (8 if sink_layout == "sh" else 1))  # one for all rows, or one for each
    torch.testing.assert_close(dsink, expected, rtol=1e-6, atol=0)
    assert math.isclose(float(meta.lse[0].detach()), math.log(8 + math.e), rel_tol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "lse_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_n30_shapes_and_dtypes_of_results(dtype: torch.dtype, lse_dtype: torch.dtype) -> None:
    q, k, v = torch.randn(5, 3, 8, dtype=dtype), torch.randn(5, 3, 8, dtype=dtype), torch.randn(5, 3, 6, dtype=dtype)
    key = magi_attn_flex_key([[0, 5]], [[0, 5]], "causal", 5, 5, 3, 3, 8, 0, None)
    for out, meta in (
        flex_flash_attn_func(q, k, v, [[0, 5]], [[0, 5]], [1], return_max_logits=True),
        calc_attn(q, k, v, key, return_max_logits=True),
    ):
        lse, max_logits = meta.lse, meta.max_logits
        assert (out.shape, out.dtype, out.is_contiguous()) == ((5, 3, 6), dtype, True)
        assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((5, 3), lse_dtype, True)
        assert max_logits is not None and (max_logits.shape, max_logits.dtype) == ((3,), lse_dtype)
