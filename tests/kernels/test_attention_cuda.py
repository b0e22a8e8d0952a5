"""Attention on a CUDA device of one rank: once a mask is known, a call makes the host wait for nothing, forward or backward."""

from __future__ import annotations

import pytest
import torch

from magi_attention.api import AttnMask, flex_flash_attn_func, prepare_attention
from magi_attention.testing.masks import mask_catalogue
from tests.kernels.cuda import on_gpu
from tests.no_host_wait import no_host_wait

pytestmark = on_gpu
HOLES = AttnMask.from_ranges([[3, 60], [3, 60], [90, 300]], [[0, 40], [200, 300], [7, 217]], ["full", "full", "causal"], 320, 300)
NAMES = ("window_global", "block_map_unmerged", "documents_causal", "no_slices")
MASKS = {"holes": HOLES, **{name: mask_catalogue()[name] for name in NAMES}}


def draw(mask: AttnMask) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((mask.total_q, 4, 32), (mask.total_k, 2, 32), (mask.total_k, 2, 16), (2, 4))
    return [torch.randn(shape, generator=generator, device="cuda").requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", MASKS)
def test_no_host_wait_with_a_plan(name: str) -> None:
    plan, leaves = prepare_attention(MASKS[name]), draw(MASKS[name])
    found = []
    for waits_are_errors in (False, True):
        with torch.autocast("cuda", torch.bfloat16), no_host_wait(waits_are_errors):
            options = {"softcap": 20.0, "return_max_logits": True, "deterministic": True}
            out, meta = flex_flash_attn_func(*leaves[:3], plan=plan, sink=leaves[3], **options)
            found.append([out, meta.lse, *torch.autograd.grad(out.float().square().sum() + meta.lse.sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_no_host_wait_with_unchanged_range_tensors() -> None:
    leaves = [x.detach().to(torch.bfloat16).requires_grad_() for x in draw(HOLES)[:3]]
    ranges = [torch.tensor(values, device="cuda") for values in ([[3, 60], [90, 300]], [[0, 40], [7, 217]], [0, 1])]
    for waits_are_errors in (False, True):
        with no_host_wait(waits_are_errors):
            out, _ = flex_flash_attn_func(*leaves, *ranges)
            torch.autograd.grad(out.float().square().sum(), leaves)
