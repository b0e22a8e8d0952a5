"""The N cases that concern one device, on CPU tensors. Head counts are scaled down before lengths; the ids are the cases'."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from magi_attention.errors import InputError
from magi_attention.kernels.ops import single_device_attention
from magi_attention.mask import AttnMask, builders
from magi_attention.testing.numerics import assert_close_to_reference, assert_lse_close, check_against_mask
from tests.kernels.problems import attend, block_map_mask, causal, check, make_case, run_ours, typed

pytestmark = pytest.mark.usefixtures("one_thread")


def test_n01_natural_log() -> None:
    zeros = torch.zeros(1, 2, 16)
    _, lse = attend(zeros, zeros.expand(8, -1, -1), zeros.expand(8, -1, -1), typed([(0, 1, 0, 8, "full")], 1, 8))
    torch.testing.assert_close(lse, torch.full((1, 2), 2.0794415), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sink_shape", [None, (2, 4)])
def test_n02_lse_is_differentiable(sink_shape: tuple[int, ...] | None) -> None:
    mask = causal(256)
    case = make_case(mask, (4, 2), (64, 64), torch.bfloat16, sink_shape=sink_shape)
    case = type(case)(case.tensors, case.dense, torch.full_like(case.dout, 0.5), torch.ones(256, 4), {})
    ours = run_ours(case, mask)
    case.check("N02", ours)
    without = type(case)(case.tensors, case.dense, case.dout, None, {})
    assert not torch.equal(run_ours(without, mask).values["dk"], ours.values["dk"])


def test_n03_causal_with_fewer_keys() -> None:
    ours = check("N03", typed([(0, 8, 0, 5, "causal")], 8, 5)).values
    assert (ours["lse"][:3] == -torch.inf).all() and (ours["out"][:3] == 0).all() and torch.isfinite(ours["lse"][3:]).all()


def small_documents_twin(case: dict[str, Tensor], lengths: np.ndarray, dtype: torch.dtype) -> dict[str, Tensor]:
    """Causal attention of many tiny documents in `dtype`, one dense batch per length."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    leaves = {name: case[name].to(dtype).requires_grad_() for name in ("q", "k", "v")}
    out, lse = torch.zeros(case["q"].shape, dtype=dtype), torch.zeros(case["q"].shape[:2], dtype=dtype)
    for length in range(1, 5):
        rows = torch.from_numpy(starts[lengths == length][:, None] + np.arange(length))
        q, k, v = (leaves[name][rows].transpose(1, 2) for name in ("q", "k", "v"))  # [documents, heads, length, D]
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
    case = {name: torch.randn(total, 1, 32, generator=generator).bfloat16() for name in ("q", "k", "v", "dout")}
    leaves = [case[name].clone().requires_grad_() for name in ("q", "k", "v")]
    out, lse = attend(*leaves, mask)
    ours = {"out": out, **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, case["dout"]), strict=True))}
    reference, eager = small_documents_twin(case, lengths, torch.float64), small_documents_twin(case, lengths, torch.bfloat16)
    assert_lse_close("N07 lse", lse, reference["lse"])
    for name, value in ours.items():
        assert_close_to_reference(f"N07 {name}", value, reference[name], eager[name], "forward" if name == "out" else "backward")


def head_first(x: Tensor) -> Tensor:
    """The same values, stored as (H, T, D)."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("which", [("q", "k", "v"), ("v",), ("dout",)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_n08_transposed_views(which: tuple[str, ...], dtype: torch.dtype) -> None:
    mask = builders.from_cu_seqlens([0, 100, 333], [0, 100, 333], causal=True)
    case = make_case(mask, (4, 2), (64, 64), dtype)
    plain = run_ours(case, mask)
    tensors = {name: head_first(x) if name in which else x for name, x in case.tensors.items()}
    strided = type(case)(tensors, case.dense, head_first(case.dout) if "dout" in which else case.dout, None, {})
    ours = run_ours(strided, mask)
    assert torch.equal(ours.values["out"], plain.values["out"]) and torch.equal(ours.values["lse"], plain.values["lse"])
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
    case = make_case(mask, (4, 2), (64, 64))
    for dout in (torch.ones((), dtype=torch.bfloat16).expand(256, 4, 64), torch.randn(256, 4, 128).bfloat16()[..., ::2]):
        strided = type(case)(case.tensors, case.dense, dout, None, {})
        strided.check("N10", run_ours(strided, mask))
    leaves = [x.clone().requires_grad_() for x in case.tensors.values()]
    attend(*leaves, mask)[0].sum().backward()
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in leaves)


def test_n11_padding_rows(poisoned_memory: str) -> None:
    borders = [0, 144, 432, 944]
    mask = AttnMask.from_slices(builders.from_cu_seqlens(borders, borders, causal=True).slices, 946, 946)
    ours = check("N11", mask, (2, 1), (64, 64)).values
    assert all((ours[name][944:] == 0).all() for name in ("out", "dq", "dk", "dv"))
    x = torch.randn(946, 16)
    assert torch.isfinite(ours["dk"].flatten(1).float().T @ x).all()


def test_n14_equal_to_the_bit_over_200_runs() -> None:
    mask = typed([(0, 1000, 0, 4096, "full"), (0, 1000, 4096, 5096, "causal")], 1000, 5096)
    case = make_case(mask, (1, 1), (16, 16))
    first = run_ours(case, mask).values
    for _ in range(199):
        again = run_ours(case, mask).values
        assert all(torch.equal(value, first[name]) for name, value in again.items())


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
    with pytest.raises(InputError, match=f"num_heads_q={num_heads_q}, num_heads_kv={num_heads_kv}"):
        single_device_attention(q, k, k, causal(4).slices)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (9, 3), (5, 1), (7, 1), (8, 1), (12, 1), (16, 1)])
def test_n19_head_ratios(heads: tuple[int, int]) -> None:
    check("N19 causal", causal(300), heads, (32, 32))
    check("N19 window", builders.sliding_window(300, 300, (64, 0)), heads, (32, 32))


@pytest.mark.parametrize("head_dim", [32, 60, 64, 80, 96, 128, 192, 256, 512])
def test_n21_head_dims(head_dim: int) -> None:
    check("N21", causal(130), (2, 1), (head_dim, head_dim))
    check("N21 other width of v", causal(65), (2, 1), (head_dim, 40))


def extra_peak_bytes(total: int) -> int:
    """Growth of the peak resident size over one forward and backward of `total` causal tokens."""
    mask = builders.sliding_window(total, total, (512, 0))
    leaves = [torch.randn(total, 1, 32, requires_grad=True) for _ in range(3)]

    def resident(field: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # the peak starts again from what is resident now
    before = resident("VmRSS")
    attend(*leaves, mask)[0].sum().backward()
    return max(0, resident("VmHWM") - before)


def test_n21_memory_is_linear() -> None:
    extra_peak_bytes(1024)  # allocator and library warm-up
    one, two = extra_peak_bytes(8_192), extra_peak_bytes(16_384)
    assert two < 16_384**2 / 4, f"{two} bytes for 16,384 tokens: a score matrix has {4 * 16_384**2}"
    assert two <= 3 * max(one, 16 << 20), f"peak grew from {one} to {two} bytes"


@pytest.mark.parametrize("softcap", [30.0, 50.0])
def test_n23_softcap_after_scale(softcap: float) -> None:
    q = torch.full((1, 1, 4), 10.0)
    _, lse = attend(q, q, q, causal(1), softmax_scale=0.25, softcap=softcap)
    assert float(lse) == pytest.approx({30.0: 29.92374, 50.0: 48.20138}[softcap], abs=1e-4)
    for mask, sink_shape in ((causal(200), None), (causal(200), (1, 4)), (builders.sliding_window(200, 200, (31, 0)), None)):
        # scores of N(0, 1) inputs of width 64 have deviation 8; a scale of 6 brings the largest near 200
        check("N23", mask, (4, 2), (64, 64), sink_shape=sink_shape, softcap=softcap, softmax_scale=6.0)


@pytest.mark.parametrize("softmax_scale", [1.0, 0.0625])
@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_n24_given_scales(softmax_scale: float, backend: str) -> None:
    mask = causal(200)
    case = make_case(mask, (4, 2), (64, 64), softmax_scale=softmax_scale)
    q, k, v = case.tensors.values()
    reference, eager = case.reference(), case.eager()
    out, lse = attend(q, k, v, mask, softmax_scale=softmax_scale, backend=backend)
    assert_close_to_reference("N24 out", out, reference.values["out"], eager.values["out"])
    assert_lse_close("N24 lse", lse, reference.values["lse"])
    case.check("N24", run_ours(case, mask), reference, eager)


def test_n25_dtypes() -> None:
    q, k = torch.randn(16, 2, 8), torch.randn(16, 2, 8)
    mask = causal(16)
    with pytest.raises(InputError, match=r"^k: dtype torch\.float32, but q has torch\.bfloat16"):
        attend(q.bfloat16(), k, k.bfloat16(), mask)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(q, k, k, mask)[0].dtype == torch.bfloat16  # documented: cast, as torch's own attention does
    assert attend(q, k, k, mask)[0].dtype == torch.float32  # fp32 is a dtype of the CPU path; on a GPU test_select has the refusal


def test_n26_sink_by_hand() -> None:
    q = torch.zeros(8, 1, 64)
    k, v = torch.zeros(8, 1, 64), torch.ones(8, 1, 64)
    sink = torch.ones(1, 1, requires_grad=True)
    out, lse = attend(q, k, v, typed([(0, 8, 0, 8, "full")], 8, 8), sink=sink)
    torch.testing.assert_close(lse, torch.full((8, 1), 2.371951), rtol=0, atol=1e-5)
    torch.testing.assert_close(out, torch.full((8, 1, 64), 0.746388), rtol=0, atol=1e-5)
    (dsink,) = torch.autograd.grad(out, sink, torch.ones_like(out))
    assert float(dsink) == pytest.approx(8 * -12.114740, rel=1e-5)
    assert math.isclose(float(lse[0].detach()), math.log(8 + math.e), rel_tol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "lse_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_n30_shapes_and_dtypes_of_results(dtype: torch.dtype, lse_dtype: torch.dtype) -> None:
    q, k, v = torch.randn(5, 3, 8, dtype=dtype), torch.randn(5, 3, 8, dtype=dtype), torch.randn(5, 3, 6, dtype=dtype)
    out, lse, max_logits = single_device_attention(q, k, v, causal(5).slices, return_max_logits=True)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((5, 3, 6), dtype, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((5, 3), lse_dtype, True)
    assert max_logits is not None and (max_logits.shape, max_logits.dtype) == ((3,), lse_dtype)
