"""One device without exchange: the kernel on a rank's zigzag rows with all keys at hand, and the whole problem for some heads.

The first is the time that no method can beat where the shares are equal; the second is what results are checked against.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from benchmarks.dist_baselines import shards
from benchmarks.dist_baselines.protocol import Heads, Result
from magi_attention.comm import CommGroup
from magi_attention.kernels.attention import AttentionOptions, Rows, attention_backward_fresh, attention_forward_fresh, prepare
from magi_attention.kernels.ops import single_device_attention
from magi_attention.mask import AttnMask

# Largest distance of a row to the same row of one device, as a share of its norm and the usual norm of a row. Both sides round P, dS
# and the results to the dtype, so this is some of its steps; a tile of keys too many or too few is far above it in most rows.
_ROW_ERROR = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 1e-4, torch.float64: 1e-10}


class KernelAlone:
    """As protocol.LocalAttention, but k and v are those of all tokens, and dk and dv are this rank's part. Sends nothing."""

    def __init__(self, mask: AttnMask, group: CommGroup, heads: Heads, options: AttentionOptions) -> None:
        own = shards.zigzag(mask.total_q, group.size)[group.rank]
        part = shards.part_of(mask, shards.placed(own), [(0, mask.total_k, 0)])
        self.query_rows, self.key_rows = shards.tokens(own), shards.tokens(((0, mask.total_k),))
        self._work, self._options = prepare(part, len(self.query_rows), mask.total_k), dataclasses.replace(options, sm_margin=0)
        self.area = float(shards.area_of(part, len(self.query_rows), mask.total_k))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Result:
        out, lse, _ = attention_forward_fresh(q, k, v, self._work, self._options, out_dtype=q.dtype)
        return Result(out, lse, (q, k, v, out, lse))

    def backward(self, result: Result, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = result.saved
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        rows = Rows(q, dout, lse, torch.empty_like(lse), out)
        dk, dv = attention_backward_fresh(rows, k, v, self._work, self._options, dq=dq, dkv_dtype=k.dtype)
        return dq.to(q.dtype), dk, dv


class SingleRank:
    """out, dq, dk, dv of the whole mask for one key head and its query heads, by one device."""

    def __init__(self, mask: AttnMask, whole: dict[str, Tensor], kv_head: int, options: AttentionOptions) -> None:
        group_size = whole["q"].shape[1] // whole["k"].shape[1]
        of_queries, of_keys = slice(kv_head * group_size, (kv_head + 1) * group_size), slice(kv_head, kv_head + 1)
        self._heads = {"out": of_queries, "dq": of_queries, "dk": of_keys, "dv": of_keys}
        leaves = [whole[name][:, heads].detach().requires_grad_() for name, heads in (("q", of_queries), ("k", of_keys), ("v", of_keys))]
        scale, backend = options.softmax_scale, options.backend
        q, k, v = leaves
        out, _, _ = single_device_attention(q, k, v, mask.slices, softmax_scale=scale, softcap=options.softcap, backend=backend)
        grads = torch.autograd.grad(out, leaves, whole["dout"][:, of_queries])
        self._values = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))

    def error_of(self, name: str, ours: Tensor, rows: Tensor) -> float:
        """Largest distance of these rows over the allowed one; infinite for what is not a number, in any head.

        Args:
            name: out, dq, dk or dv.
            ours: [local rows, all heads, D]; rows: the global token of each.
        """
        if not bool(torch.isfinite(ours).all()):
            return math.inf
        values, ours = self._values[name], ours.detach()
        usual = _norms(values).square().mean().sqrt() if values.numel() else 0.0
        wanted = values[rows]
        error = _norms(ours[:, self._heads[name]] - wanted)
        allowed = _ROW_ERROR[ours.dtype] * (_norms(wanted) + usual)
        ratios = torch.where(error == 0, 0.0, error / allowed)
        return float(ratios.max()) if ratios.numel() else 0.0


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
