"""Attention with any mask on one device, checked against dense float64 attention.

python examples/02_single_device.py
"""

from __future__ import annotations

import torch

from magi_attention.api import AttnMask, flex_flash_attn_func


def main() -> None:
    torch.manual_seed(0)
    total, num_heads_q, num_heads_kv, head_dim = 600, 4, 2, 64
    q = torch.randn(total, num_heads_q, head_dim, requires_grad=True)
    k = torch.randn(total, num_heads_kv, head_dim, requires_grad=True)
    v = torch.randn(total, num_heads_kv, head_dim, requires_grad=True)

    # A causal document of 200 tokens, then 400 tokens that see each other and the first document; types: 0 full, 1 causal.
    q_ranges, k_ranges, types = [[0, 200], [200, 600]], [[0, 200], [0, 600]], [1, 0]
    out, meta = flex_flash_attn_func(q, k, v, q_ranges, k_ranges, types)
    out.sum().backward()
    assert q.grad is not None

    mask = torch.from_numpy(AttnMask.from_ranges(q_ranges, k_ranges, types, total, total).to_dense())
    group_size = num_heads_q // num_heads_kv
    k64, v64 = (x.detach().double().repeat_interleave(group_size, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.detach().double(), k64) * head_dim**-0.5
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v64)
    error = (out.detach().double() - expected).abs().max().item()
    print(f"out {tuple(out.shape)}, lse {tuple(meta.lse.shape)}, largest error against float64 {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    main()
