"""Blocked attention forward over a work list: online softmax per query tile. Knows nothing of autograd, sinks or ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_attention.kernels.blocked import Block, Heads, compute_dtype, head_major, tile_blocks
from magi_attention.kernels.work import Tile, WorkList


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: WorkList,
    scales: tuple[float, float],
    running: tuple[Tensor, Tensor],
    max_logits: Tensor | None,
) -> None:
    """Merge attention over the work list into running = (out, lse), in place; scales = (softmax_scale, softcap).

    Shapes and dtypes as in kernels/attention.py. Rows of tiles that see no key are not touched.
    """
    softmax_scale, softcap = scales
    heads = Heads.of(q, k)
    dtype = compute_dtype(q.dtype)
    keys, values = head_major(k, dtype), head_major(v, dtype)
    for tile in work.tiles:
        # With a cap, cap * tanh(scale * q.k / cap): the inner factor rides on q.
        rows = heads.load_rows(q, tile, dtype).mul_(softmax_scale / softcap if softcap else softmax_scale)
        state = _State(heads, tile, running, max_logits)
        for block in tile_blocks(tile, heads.group_size, dtype, q.device):
            for chunk in block.chunks(heads.num_kv):
                scores = torch.bmm(rows[chunk, block.rows], block.read(keys, chunk).transpose(1, 2))
                if softcap:
                    scores.tanh_().mul_(softcap)
                block.mask(scores, heads.group_size)
                state.absorb(scores, block, chunk, block.read(values, chunk))
        state.store()


class _State:
    """Running sum of values, top score and sum of weights of one tile, read from and written back to (out, lse).

    A partial (out, lse) is the weight 1 at score lse on the value out, so merging into it is continuing from it.
    The lowest finite number stands for a top of -inf: differences then never are -inf - -inf.
    """

    def __init__(self, heads: Heads, tile: Tile, running: tuple[Tensor, Tensor], max_logits: Tensor | None) -> None:
        out, lse = running
        self.out, self.lse = heads.tile_view(out, tile), heads.tile_view(lse[..., None], tile)
        self.group_size = heads.group_size
        self.max_logits = None if max_logits is None else max_logits.view(heads.num_kv, heads.group_size)
        self.acc = torch.empty(self.out.shape, dtype=out.dtype, device=out.device).copy_(self.out).flatten(1, 2)
        top = torch.empty(self.lse.shape, dtype=lse.dtype, device=lse.device).copy_(self.lse).flatten(1, 2)
        self.weight = (top != float("-inf")).to(lse.dtype)
        self.top = top.clamp_(min=torch.finfo(lse.dtype).min)

    def absorb(self, scores: Tensor, block: Block, chunk: slice, values: Tensor) -> None:
        """Take in scores [heads, rows, keys] (overwritten) of a block and its values [heads, keys, Dv]."""
        top, weight, acc = self.top[chunk, block.rows], self.weight[chunk, block.rows], self.acc[chunk, block.rows]
        block_top = scores.amax(-1, keepdim=True)
        if self.max_logits is not None:
            own = self.max_logits[chunk]
            torch.maximum(own, block_top.view(own.shape[0], -1, self.group_size).amax(1), out=own)
        new_top = torch.maximum(top, block_top)
        decay = torch.sub(top, new_top).exp_()
        scores.sub_(new_top).exp_()
        weight.mul_(decay).add_(scores.sum(-1, keepdim=True))
        acc.mul_(decay).baddbmm_(scores, values)
        top.copy_(new_top)

    def store(self) -> None:
        """Normalise and write back; rows that saw nothing keep out = 0 and lse = -inf (lowest + log 0)."""
        self.out.copy_(self.acc.div_(self.weight.clamp(min=torch.finfo(self.weight.dtype).tiny)).view(self.out.shape))
        self.lse.copy_(self.top.add_(self.weight.log_()).view(self.lse.shape))
