"""Blocked attention backward over a work list: weights recomputed from lse. Knows nothing of autograd, sinks or ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_attention.kernels.blocked import Block, Heads, compute_dtype, head_major, tile_blocks
from magi_attention.kernels.work import Tile, WorkList


def backward(
    row_tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    work: WorkList,
    scales: tuple[float, float],
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of attention over the work list to grads = (dq, dk, dv); scales = (softmax_scale, softcap).

    row_tensors = (q, dout, lse, delta). Shapes and dtypes as in kernels/attention.py.
    """
    q, dout, lse, delta = row_tensors
    dq, dk, dv = grads
    heads = Heads.of(q, k)
    dtype = compute_dtype(q.dtype)
    keyed = (head_major(k, dtype), head_major(v, dtype), dk.transpose(0, 1), dv.transpose(0, 1))
    for tile in work.tiles:
        rows = _Rows(heads, tile, (q, dout, lse[..., None], delta[..., None]), scales)
        for block in tile_blocks(tile, heads.group_size, dtype, q.device):
            for chunk in block.chunks(heads.num_kv):
                rows.absorb(block, chunk, keyed)
        view = heads.tile_view(dq, tile)
        view.add_(rows.dq.view(view.shape))


class _Rows:
    """Query-side rows of one tile, and their gradient."""

    def __init__(self, heads: Heads, tile: Tile, row_tensors: tuple[Tensor, ...], scales: tuple[float, float]) -> None:
        dtype = compute_dtype(row_tensors[0].dtype)
        self.q, self.dout, self.lse, self.delta = (heads.load_rows(x, tile, dtype) for x in row_tensors)
        # Rows that see no key on any rank have lse = -inf; with 0 instead their weights are exp(-inf - 0) = 0.
        self.lse.masked_fill_(self.lse == float("-inf"), 0)
        self.dq = torch.zeros_like(self.q)
        self.group_size = heads.group_size
        self.softmax_scale, self.softcap = scales
        self.q.mul_(self.softmax_scale / self.softcap if self.softcap else self.softmax_scale)

    def absorb(self, block: Block, chunk: slice, keyed: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        """One block of some heads: adds to own dq and to dkeys, dvalues (head-major views)."""
        keys, values, dkeys, dvalues = keyed
        q, dout = self.q[chunk, block.rows], self.dout[chunk, block.rows]
        block_keys, block_values = block.read(keys, chunk), block.read(values, chunk)
        weights = torch.bmm(q, block_keys.transpose(1, 2))
        slope = None
        if self.softcap:
            # 1 / cosh^2, not 1 - tanh^2: near the cap the difference has no digits left.
            slope = torch.cosh(weights).reciprocal_().square_()
            weights = weights.tanh_().mul_(self.softcap)
        block.mask(weights, self.group_size)
        weights.sub_(self.lse[chunk, block.rows]).exp_()
        block.add_to(dvalues, chunk, weights, dout, 1.0)
        dscores = torch.bmm(dout, block_values.transpose(1, 2)).sub_(self.delta[chunk, block.rows]).mul_(weights)
        if slope is not None:
            dscores.mul_(slope)
        self.dq[chunk, block.rows].baddbmm_(dscores, block_keys, alpha=self.softmax_scale)
        # self.q carries softmax_scale / softcap; the gradient of keys needs softmax_scale.
        block.add_to(dkeys, chunk, dscores, q, self.softcap or 1.0)
