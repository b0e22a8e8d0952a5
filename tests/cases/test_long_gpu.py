"""N05: more than 2^31 elements in q. Needs a GPU with room for about 40 GB; checks values by sub-tensors, not just finiteness."""

from __future__ import annotations

import pytest
import torch

from magi_attention.api import AttnMask, flex_flash_attn_func
from magi_attention.mask import builders
from tests.kernels.cuda import why_not

HEADS_Q, HEADS_KV, HEAD_DIM, DOCUMENT = 64, 8, 128, 4096
NEEDED_BYTES = 60 * 2**30


def run(tensors: list[torch.Tensor], dout: torch.Tensor, mask: AttnMask) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, meta = flex_flash_attn_func(*leaves, mask=mask)
    return [out.detach(), meta.lse.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.gpu
@pytest.mark.timeout(280)
@pytest.mark.parametrize("total", [262_143, 262_144, 262_145, 300_000])
def test_n05_offsets_beyond_32_bits(total: int) -> None:
    if why_not():
        pytest.skip(why_not())
    if torch.cuda.get_device_properties(0).total_memory < NEEDED_BYTES:
        pytest.skip(f"needs a GPU with {NEEDED_BYTES >> 30} GiB")
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((HEADS_Q, HEAD_DIM), (HEADS_KV, HEAD_DIM), (HEADS_KV, HEAD_DIM), (HEADS_Q, HEAD_DIM))
    drawn = [torch.randn(total, *shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    tensors, dout = drawn[:3], drawn[3]
    # Documents before, across and after the element 2^31 of q; the rest of the rows see nothing, which saves time, not memory.
    crossing = 2**31 // (HEADS_Q * HEAD_DIM)
    starts = [0, crossing - 3 * DOCUMENT // 2, crossing - DOCUMENT // 2]
    documents = [(start, min(start + DOCUMENT, total)) for start in starts]
    if total - crossing > 2 * DOCUMENT:
        documents.append((total - DOCUMENT, total))
    records = [[start, end, start, end, -(1 << 30), 0] for start, end in documents]
    found = run(tensors, dout, AttnMask.from_slices(records, total, total))
    seen = torch.zeros(total, dtype=torch.bool, device="cuda")
    for start, end in documents:
        seen[start:end] = True
        length = end - start
        parts = [x[start:end].clone() for x in tensors]
        expected = run(parts, dout[start:end].clone(), builders.from_cu_seqlens([0, length], [0, length], causal=True))
        for name, whole, part in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
            # The same documents in other tiles: sums differ in the last fp32 bits, results by one rounding to bf16.
            error = (whole[start:end].float() - part.float()).abs().max().item()
            assert error <= 2**-7 * part.float().abs().max().item(), (name, start, error)
    assert (found[0][~seen] == 0).all() and (found[1][~seen] == -torch.inf).all()
    assert all((grad[~seen] == 0).all() for grad in found[2:])
