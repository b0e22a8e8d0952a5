"""Context parallel attention: two ranks on this machine, outputs and gradients equal to one device.

torchrun --nproc-per-node 2 examples/04_two_ranks.py
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from magi_attention.api import calc_attn, dispatch, flex_flash_attn_func, magi_attn_varlen_key, undispatch


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same global tensors on every rank
    cu_seqlens = [0, 137, 2178, 2267]
    num_heads_q, num_heads_kv, head_dim = 4, 2, 32
    shapes = ((2267, num_heads_q, head_dim), (2267, num_heads_kv, head_dim), (2267, num_heads_kv, head_dim))
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)

    key = magi_attn_varlen_key(cu_seqlens, cu_seqlens, num_heads_q, num_heads_kv, head_dim, 0, dist.group.WORLD, causal=True)
    out_local, _ = calc_attn(dispatch(q, key), dispatch(k, key), dispatch(v, key), key)
    out = undispatch(out_local, key)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))

    lengths = [[start, end] for start, end in itertools.pairwise(cu_seqlens)]
    expected, _ = flex_flash_attn_func(q, k, v, lengths, lengths, [1] * len(lengths))
    expected_grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for name, ours, reference in zip(("out", "dq", "dk", "dv"), (out, *grads), (expected, *expected_grads), strict=True):
        error = (ours - reference).abs().max().item()
        assert error < 1e-4, (name, error)
        if dist.get_rank() == 0:
            print(f"{name:3s} equals one device within {error:.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
