"""Ring attention: keys and values go round the ranks, one hop a step, while each rank attends to those it holds. Knows any mask.

Tokens lie in zigzag order. A hop is one batch of sends and receives that is in flight during the kernel of the present step; the
kernel merges into a running fp32 out and lse. Backward, k and v go round again, and fp32 dk and dv follow them one step behind, each
rank adding its share, until they are home.
"""

from __future__ import annotations

import dataclasses

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

Pair = tuple[Tensor, Tensor]  # of keys and of values

_KEYS, _GRADS = 0, 2  # tags: two tensors each, so that gloo never mistakes one for the other


class Ring:
    """See protocol.LocalAttention. In step s a rank holds the keys of the rank s places before it."""

    def __init__(self, mask: AttnMask, group: CommGroup, heads: Heads, options: AttentionOptions) -> None:
        self._group, self._options = group, options
        own = shards.zigzag(mask.total_q, group.size)[group.rank]
        keys = shards.zigzag(mask.total_k, group.size)
        owners = [(group.rank - step) % group.size for step in range(group.size)]
        self.query_rows, self.key_rows = shards.tokens(own), shards.tokens(keys[group.rank])
        self._num_keys = [shards.num_rows(keys[owner]) for owner in owners]
        parts = [shards.part_of(mask, shards.placed(own), shards.placed(keys[owner])) for owner in owners]
        self._steps: list[WorkList] = [prepare(part, len(self.query_rows), n) for part, n in zip(parts, self._num_keys, strict=True)]
        self.area = float(sum(shards.area_of(work.slices, work.total_q, work.total_k) for work in self._steps))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Result:
        is_alone = len(self._steps) == 1
        held, out, lse = (k, v), None, None
        for step, work in enumerate(self._steps):
            hop = self._hop_of_keys(step + 1, held)
            if out is None or lse is None:
                out_dtype = q.dtype if is_alone else None
                out, lse, _ = attention_forward_fresh(q, *held, work, self._options, out_dtype=out_dtype)
            elif len(work.slices):
                attention_forward(q, *held, work, out=out, lse=lse, **dataclasses.asdict(self._options))
            if hop is not None:
                held = hop.wait()
        assert out is not None
        out = out.to(q.dtype)
        return Result(out, lse, (q, k, v, out, lse))

    def backward(self, result: Result, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = result.saved
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        rows = Rows(q, dout, lse, torch.empty_like(lse), out)
        sum_dtype = q.dtype if len(self._steps) == 1 else compute_dtype(q.dtype)
        held = (k, v)
        following: _Hop | None = None  # dk and dv of the keys that this step holds, from the rank before
        for step, work in enumerate(self._steps):
            hop = self._hop_of_keys(step + 1, held)
            own = None
            if step == 0 or len(work.slices):
                own = attention_backward_fresh(rows, *held, work, self._options, dq=dq, dkv_dtype=sum_dtype)
                rows = dataclasses.replace(rows, out=None)  # delta is known from here on
            if following is None:
                assert own is not None
                sums = own
            else:
                sums = following.wait()
                if own is not None:
                    torch._foreach_add_(sums, own)
            if hop is not None:
                held = hop.wait()
            if len(self._steps) > 1:  # the keys of the next step, or after the last one our own
                following = _Hop(self._group, sums, self._num_keys[(step + 1) % len(self._steps)], _GRADS)
        if following is not None:
            sums = following.wait()
        dk, dv = (x.to(k.dtype) for x in sums)
        return dq.to(q.dtype), dk, dv

    def _hop_of_keys(self, step: int, held: Pair) -> _Hop | None:
        """Starts the hop that brings the keys of `step`."""
        return _Hop(self._group, held, self._num_keys[step], _KEYS) if step < len(self._steps) else None


class _Hop:
    """Tensors on their way to the next rank, those of the rank before arriving. Whoever has no rows to send or get leaves that out."""

    def __init__(self, group: CommGroup, sent: Pair, num_rows: int, first_tag: int) -> None:
        self._sent = [x.contiguous() for x in sent]  # alive until they have left
        self._arriving = [x.new_empty((num_rows, *x.shape[1:])) for x in sent]
        after, before = (group.members[(group.rank + turn) % group.size] for turn in (1, -1))
        ends = [(dist.isend, x, after, tag) for tag, x in enumerate(self._sent, first_tag)]
        ends += [(dist.irecv, x, before, tag) for tag, x in enumerate(self._arriving, first_tag)]
        batch = [dist.P2POp(start, x, peer, group.flat, tag) for start, x, peer, tag in ends if x.numel()]
        self._works = dist.batch_isend_irecv(batch) if batch else []

    def wait(self) -> Pair:
        """What arrived; over NCCL this orders streams and the host goes on."""
        for work in self._works:
            work.wait()
        self._sent = []
        first, second = self._arriving
        return first, second
