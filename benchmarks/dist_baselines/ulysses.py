"""Ulysses attention: an all-to-all gives each rank all tokens of some heads, and one takes the results back. Knows any mask.

Tokens lie in contiguous shares, so that what arrives in the order of the ranks is in the order of the sequence: only the sender sorts by
head. Where there are fewer key heads than ranks, each key head goes to all ranks whose query heads read it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.dist_baselines import shards
from benchmarks.dist_baselines.protocol import Heads, Result
from magi_attention.comm import CommGroup
from magi_attention.errors import InputError
from magi_attention.kernels.attention import (
    AttentionOptions,
    Rows,
    attention_backward_fresh,
    attention_forward_fresh,
    compute_dtype,
    prepare,
)
from magi_attention.mask import AttnMask


class Ulysses:
    """See protocol.LocalAttention. The lse stays with the heads, where the backward needs it.

    Raises:
        InputError: heads that do not divide into equal shares.
    """

    def __init__(self, mask: AttnMask, group: CommGroup, heads: Heads, options: AttentionOptions) -> None:
        _check_heads(heads, group.size)
        self._group, self._options = group, options
        self._copies = max(1, group.size // heads.num_heads_kv)  # ranks that share one key head
        queries, keys = shards.contiguous(mask.total_q, group.size), shards.contiguous(mask.total_k, group.size)
        self.query_rows, self.key_rows = shards.tokens(queries[group.rank]), shards.tokens(keys[group.rank])
        self._num_queries, self._num_keys = ([shards.num_rows(runs) for runs in side] for side in (queries, keys))
        self._work = prepare(mask.slices, mask.total_q, mask.total_k)
        self.area = mask.area() / group.size

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Result:
        moving = [_ToHeads(self._group, x, self._num_keys, self._copies) for x in (k, v)]
        moving.insert(0, _ToHeads(self._group, q, self._num_queries))
        q, k, v = (x.wait() for x in moving)
        out, lse, _ = attention_forward_fresh(q, k, v, self._work, self._options, out_dtype=q.dtype)
        return Result(_ToTokens(self._group, out, self._num_queries).wait(), None, (q, k, v, out, lse))

    def backward(self, result: Result, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = result.saved
        rows = Rows(q, _ToHeads(self._group, dout, self._num_queries).wait(), lse, torch.empty_like(lse), out)
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        sum_dtype = q.dtype if self._copies == 1 else compute_dtype(q.dtype)
        dk, dv = attention_backward_fresh(rows, k, v, self._work, self._options, dq=dq, dkv_dtype=sum_dtype)
        moving = [_ToTokens(self._group, x, self._num_keys) for x in (dk, dv)]
        home = _ToTokens(self._group, dq.to(q.dtype), self._num_queries)
        dk, dv = (self._summed(x.wait()).to(q.dtype) for x in moving)
        return home.wait(), dk, dv

    def _summed(self, x: Tensor) -> Tensor:
        """The gradient of a head from those of its copies."""
        return x if self._copies == 1 else x.unflatten(1, (x.shape[1] // self._copies, self._copies)).sum(2)


def _check_heads(heads: Heads, num_ranks: int) -> None:
    num_q, num_kv = heads.num_heads_q, heads.num_heads_kv
    if num_q % num_ranks:
        raise InputError(
            f"num_heads_q={num_q} does not divide into equal shares for {num_ranks} ranks: Ulysses gives every rank whole heads; "
            "use as many ranks as divide the heads, or a method that divides tokens (ring, all_gather, magi)"
        )
    if num_kv % num_ranks and num_ranks % num_kv:
        raise InputError(
            f"num_heads_kv={num_kv} and {num_ranks} ranks: neither divides the other, so key heads can be neither shared out nor repeated; "
            "use another number of ranks, or a method that divides tokens (ring, all_gather, magi)"
        )


class _ToHeads:
    """[local rows, H, D] on its way to [all rows, H * copies / ranks, D]."""

    def __init__(self, group: CommGroup, x: Tensor, num_rows: list[int], copies: int = 1) -> None:
        self._arrived, self._works = x, list[dist.Work]()
        if group.is_single:
            return
        width = x.shape[1] * copies // group.size
        # To [parts, copies, rows, width, D]: what goes to one rank is in one piece. The only copy, of repeated heads too.
        parts = x.unflatten(1, (x.shape[1] // width, 1, width)).expand(-1, -1, copies, -1, -1)
        self._sent = parts.permute(1, 2, 0, 3, 4).flatten(0, 2).contiguous()
        self._arrived = x.new_empty((sum(num_rows), width, x.shape[2]))
        splits = [x.shape[0]] * group.size
        self._works.append(dist.all_to_all_single(self._arrived, self._sent, num_rows, splits, group=group.flat, async_op=True))

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._arrived


class _ToTokens:
    """[all rows, H / ranks, D] on its way to [local rows, H, D]."""

    def __init__(self, group: CommGroup, x: Tensor, num_rows: list[int]) -> None:
        self._size, self._sent, self._arrived, self._works = group.size, x.contiguous(), x, list[dist.Work]()
        if group.is_single:
            return
        self._own = num_rows[group.rank]
        self._arrived = x.new_empty((group.size * self._own, *x.shape[1:]))
        splits = [self._own] * group.size
        self._works.append(dist.all_to_all_single(self._arrived, self._sent, splits, num_rows, group=group.flat, async_op=True))

    def wait(self) -> Tensor:
        if not self._works:
            return self._arrived
        for work in self._works:
            work.wait()
        return self._arrived.unflatten(0, (self._size, self._own)).transpose(0, 1).flatten(1, 2)
