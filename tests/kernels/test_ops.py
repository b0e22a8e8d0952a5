"""The registered operations: contracts, compilation as one graph, autocast, gradients through both outputs."""

from __future__ import annotations

import pytest
import torch

from magi_attention.kernels.attention import attention_forward
from magi_attention.kernels.ops import flex_attention_op, single_device_attention
from magi_attention.testing.masks import mask_catalogue

pytestmark = pytest.mark.usefixtures("one_thread")

MASK = mask_catalogue()["documents_window_global"]
SLICES = torch.from_numpy(MASK.slices.copy())


def leaves(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((MASK.total_q, 4, 16), (MASK.total_k, 2, 16), (MASK.total_k, 2, 24))
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in (*drawn, torch.randn(2, 4, generator=generator))]


def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    out, lse, max_logits = single_device_attention(q * 1.5, k, v, SLICES, sink=sink, return_max_logits=True)
    assert max_logits is not None
    return (out * out).sum() + lse.sin().sum() + 0 * max_logits.sum()


def test_the_operation_keeps_its_contract() -> None:
    q, k, v, sink = leaves()
    torch.library.opcheck(flex_attention_op, (q, k, v, SLICES, sink, "sh", 0.25, 0.0, True, "auto"))
    torch.library.opcheck(flex_attention_op, (q, k, v, SLICES, None, "sh", 0.25, 5.0, False, "blocked"))


def test_compiles_as_one_graph_with_equal_gradients() -> None:
    eager_leaves, compiled_leaves = leaves(), leaves()
    eager = loss(*eager_leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*compiled_leaves)
    assert torch.equal(eager, compiled)
    for want, got in zip(torch.autograd.grad(eager, eager_leaves), torch.autograd.grad(compiled, compiled_leaves), strict=True):
        assert torch.equal(want, got)


def test_gradcheck_through_out_and_lse() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(5, heads, 3, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    sink = torch.randn(1, 2, generator=generator, dtype=torch.float64, requires_grad=True)

    def attend(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        *qkv, own_sink = inputs
        return single_device_attention(*qkv, [[0, 5, 0, 5, -3, 0]], sink=own_sink, softcap=2.0)[:2]

    assert torch.autograd.gradcheck(attend, (q, k, v, sink))


def test_max_logits_is_detached_and_only_when_asked() -> None:
    q, k, v, _ = leaves()
    assert single_device_attention(q, k, v, SLICES)[2] is None
    max_logits = single_device_attention(q, k, v, SLICES, return_max_logits=True)[2]
    assert max_logits is not None and not max_logits.requires_grad


def test_autocast_casts_and_accumulates_in_fp32() -> None:
    q, k, v, _ = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse, _ = single_device_attention(q, k, v, SLICES)
    want, want_lse, _ = single_device_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), SLICES)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    out.float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_operation_is_the_accumulating_kernel(dtype: torch.dtype) -> None:
    q, k, v, _ = (x.detach() for x in leaves(dtype))
    out, lse, _ = single_device_attention(q, k, v, SLICES)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    own, own_lse = torch.zeros(MASK.total_q, 4, 24, dtype=wide), torch.full((MASK.total_q, 4), -torch.inf, dtype=wide)
    attention_forward(q, k, v, MASK.slices, softmax_scale=0.25, softcap=0.0, out=own, lse=own_lse)
    assert torch.equal(out, own.to(dtype)) and torch.equal(lse, own_lse)
