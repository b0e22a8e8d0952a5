"""All-gather attention: every rank gets all keys and values, and attends with its own rows. Knows any mask; tokens lie in zigzag order.

The gathered buffer keeps the order of the ranks: the mask is cut to it, so that nothing is copied into another order. Backward, k and v
are gathered again, and a reduce-scatter brings fp32 dk and dv home.

Two forms. AllGather waits for the keys, then is one launch whose results need no merge. OverlappedAllGather attends to its own keys
while the others arrive, and computes their gradients while the reduce-scatter runs, for the price of a second launch into fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.dist_baselines import shards
from benchmarks.dist_baselines.protocol import Heads, Result
from magi_attention.comm import CommGroup
from magi_attention.kernels.attention import (
    AttentionOptions,
    Rows,
    WorkList,
    attention_backward_fresh,
    attention_forward,
    attention_forward_fresh,
    compute_dtype,
    prepare,
)
from magi_attention.mask import AttnMask

# Newer torch has them under other names and warns of the old ones.
_all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class AllGather:
    """See protocol.LocalAttention."""

    _has_overlap = False

    def __init__(self, mask: AttnMask, group: CommGroup, heads: Heads, options: AttentionOptions) -> None:
        self._group, self._options = group, options
        queries = shards.zigzag(mask.total_q, group.size)[group.rank]
        keys = shards.zigzag(mask.total_k, group.size)
        self.query_rows, self.key_rows = shards.tokens(queries), shards.tokens(keys[group.rank])
        self._share = max(shards.num_rows(runs) for runs in keys)  # collectives of equal shares; at most two rows of it are padding
        self._local: WorkList | None = None
        gathered = list(range(group.size))
        placed_q, num_q = shards.placed(queries), len(self.query_rows)
        if self._has_overlap and not group.is_single:
            gathered = [rank for rank in gathered if rank != group.rank]
            own = shards.part_of(mask, placed_q, shards.placed(keys[group.rank]))
            self._local = prepare(own, num_q, len(self.key_rows))
        placed_k = [run for rank in gathered for run in shards.placed(keys[rank], rank * self._share)]
        num_k = len(self.key_rows) if group.is_single else self._share * group.size
        self._gathered = prepare(shards.part_of(mask, placed_q, placed_k), num_q, num_k)
        lists = [work for work in (self._local, self._gathered) if work is not None]
        self.area = float(sum(shards.area_of(work.slices, work.total_q, work.total_k) for work in lists))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Result:
        arriving = _Gather(self._group, k, v, self._share)
        if self._local is None:
            out, lse, _ = attention_forward_fresh(q, *arriving.wait(), self._gathered, self._options, out_dtype=q.dtype)
        else:
            out, lse, _ = attention_forward_fresh(q, k, v, self._local, self._options)
            attention_forward(q, *arriving.wait(), self._gathered, out=out, lse=lse, **dataclasses.asdict(self._options))
            out = out.to(q.dtype)
        return Result(out, lse, (q, k, v, out, lse))

    def backward(self, result: Result, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = result.saved
        arriving = _Gather(self._group, k, v, self._share)
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        rows = Rows(q, dout, lse, torch.empty_like(lse), out)
        sum_dtype = q.dtype if self._group.is_single else compute_dtype(q.dtype)
        partials = attention_backward_fresh(rows, *arriving.wait(), self._gathered, self._options, dq=dq, dkv_dtype=sum_dtype)
        leaving = _ScatterSum(self._group, partials, len(self.key_rows))
        if self._local is None:
            dk, dv = leaving.wait()
        else:
            rows = dataclasses.replace(rows, out=None)  # delta is known from here on
            own = attention_backward_fresh(rows, k, v, self._local, self._options, dq=dq)
            dk, dv = (x.add_(y) for x, y in zip(own, leaving.wait(), strict=True))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class OverlappedAllGather(AllGather):
    """See above. Forward the own keys come first, backward last: the fp32 gradients are twice the bytes of what is gathered."""

    _has_overlap = True


class _Gather:
    """k and v of all ranks on their way, [ranks * share, Hkv, D] each."""

    def __init__(self, group: CommGroup, k: Tensor, v: Tensor, share: int) -> None:
        self._whole = (k, v)
        self._works: list[dist.Work] = []
        if group.is_single:
            return
        self._sent = [_filled_up(x, share) for x in (k, v)]
        whole_k, whole_v = (x.new_empty((share * group.size, *x.shape[1:])) for x in (k, v))
        self._whole = (whole_k, whole_v)
        for whole, sent in zip(self._whole, self._sent, strict=True):
            self._works.append(_all_gather(whole, sent, group=group.flat, async_op=True))

    def wait(self) -> tuple[Tensor, Tensor]:
        for work in self._works:
            work.wait()
        return self._whole


class _ScatterSum:
    """Partial dk and dv of all keys on their way to the owners, which get the sums of their `num_rows` rows."""

    def __init__(self, group: CommGroup, partials: tuple[Tensor, Tensor], num_rows: int) -> None:
        self._partials, self._sums, self._num_rows = partials, list(partials), num_rows
        self._works: list[dist.Work] = []
        if group.is_single:
            return
        self._sums = [x.new_empty((x.shape[0] // group.size, *x.shape[1:])) for x in partials]
        for total, partial in zip(self._sums, partials, strict=True):
            self._works.append(_reduce_scatter(total, partial.contiguous(), group=group.flat, async_op=True))

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return [total[: self._num_rows] for total in self._sums]


def _filled_up(x: Tensor, num_rows: int) -> Tensor:
    """x itself, contiguous, or a copy with rows of zeros after it."""
    if x.shape[0] == num_rows:
        return x.contiguous()
    longer = x.new_zeros((num_rows, *x.shape[1:]))
    longer[: x.shape[0]] = x
    return longer
