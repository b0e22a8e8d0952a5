"""calc_attn with a key, in the form the other methods have. Plans through the public door and adds nothing to the call."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.dist_baselines.protocol import Heads, Result
from magi_attention.api import DistAttnConfig, DistAttnKey, calc_attn, magi_attn_flex_key
from magi_attention.comm import CommGroup
from magi_attention.kernels.attention import AttentionOptions
from magi_attention.mask import AttnMask


class Magi:
    """See protocol.LocalAttention. Owners of tokens, steps and exchanges are those the planner chooses for the mask."""

    def __init__(self, mask: AttnMask, group: CommGroup, heads: Heads, options: AttentionOptions) -> None:
        self._options = options
        self.key: DistAttnKey = magi_attn_flex_key(
            *mask.to_ranges(),
            mask.total_q,
            mask.total_k,
            heads.num_heads_q,
            heads.num_heads_kv,
            heads.head_dim,
            0,
            None if group.is_single else group.flat,
            DistAttnConfig(kernel_backend=options.backend, deterministic=options.deterministic),
            is_same_source=mask.total_q == mask.total_k,
        )
        plan = self.key.plan
        self.query_rows = plan.dispatch_q.position_ids(plan.cp_rank)
        self.key_rows = plan.dispatch_k.position_ids(plan.cp_rank)
        self.area = float(plan.rank_areas[plan.cp_rank])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Result:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        options = self._options
        leaf_q, leaf_k, leaf_v = leaves
        out, found = calc_attn(leaf_q, leaf_k, leaf_v, self.key, softmax_scale=options.softmax_scale, softcap=options.softcap)
        return Result(out, found.lse, leaves)

    def backward(self, result: Result, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.autograd.grad(result.out, result.saved, dout, retain_graph=True)
        return dq, dk, dv
