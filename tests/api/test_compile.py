"""flex_flash_attn_func under torch.compile(fullgraph=True): one graph, the same bits, errors from the running graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from magi_attention.api import AttnMask, InputError, clear_cache, flex_flash_attn_func, prepare_attention

RANGES, TYPES = [[0, 12], [12, 40]], [1, 1]
PLAN = prepare_attention(AttnMask.from_ranges(RANGES, RANGES, TYPES, 40, 40))
TABLE = torch.randint(-1, 10, (10, 2, 3), generator=torch.Generator().manual_seed(0))

FORMS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[torch.Tensor, ...]]] = {
    "plan": (lambda: {"plan": PLAN}, ()),
    "lists": (lambda: {"q_ranges": RANGES, "k_ranges": RANGES, "attn_type_map": TYPES}, ()),
    "tensors": (lambda r, t: {"q_ranges": r, "k_ranges": r, "attn_type_map": t}, (torch.tensor(RANGES), torch.tensor(TYPES).int())),
    "table per key head": (lambda t: {"index_attn_indices": t, "q_block_size": 4, "k_block_size": 4}, (TABLE,)),
}


def leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((40, 4, 8), (40, 2, 8), (40, 2, 8), (2, 4))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("form", FORMS)
def test_one_graph_and_the_same_bits(form: str) -> None:
    mask_of, tensors = FORMS[form]

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        out, meta = flex_flash_attn_func(q * 2, k, v, sink=sink, softcap=5.0, return_max_logits=True, **mask_of(*tensors))
        assert meta.max_logits is not None
        return out.square().sum() + meta.lse.sum() + meta.max_logits.sum()

    eager_leaves, compiled_leaves = leaves(), leaves()
    eager = loss(*eager_leaves, *tensors)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*compiled_leaves, *tensors)
    assert torch.equal(eager, compiled)
    expected, got = torch.autograd.grad(eager, eager_leaves), torch.autograd.grad(compiled, compiled_leaves)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_ranges_are_read_when_the_graph_runs() -> None:
    clear_cache()
    q, k, v, _ = leaves()
    compiled = torch.compile(lambda r: flex_flash_attn_func(q, k, v, r, r)[0], fullgraph=True, backend="aot_eager")
    for ranges in ([[0, 40], [40, 40]], [[0, 12], [12, 40]]):
        assert torch.equal(compiled(torch.tensor(ranges)), flex_flash_attn_func(q, k, v, ranges, ranges)[0])
    with pytest.raises(InputError, match=r"q_ranges\[1\]=\[12, 41\) ends past"):
        compiled(torch.tensor([[0, 12], [12, 41]]))
