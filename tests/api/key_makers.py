"""Keys and tensors that the tests of the door share. Groups of several ranks are simulated: planning needs no peer."""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.api import DistAttnKey, magi_attn_flex_key, magi_attn_varlen_key
from magi_attention.comm import CommGroup

CU = [0, 137, 137, 300, 512]


def simulated_group(size: int, rank: int = 0) -> CommGroup:
    """A group without processes: enough to plan, useless to send."""
    return CommGroup(rank=rank, size=size, members=tuple(range(size)), backends={"cpu": "gloo"}, identity=-size)


def varlen_key(group: Any = None, **changes: Any) -> DistAttnKey:
    arguments: dict[str, Any] = {
        "cu_seqlens_q": CU, "cu_seqlens_k": CU, "num_heads_q": 4, "num_heads_kv": 2, "head_dim": 16, "pad_size": 0,
        "cp_group_or_mesh": group, "causal": True,
    }  # fmt: skip
    return magi_attn_varlen_key(**(arguments | changes))


def flex_key(group: Any = None, **changes: Any) -> DistAttnKey:
    ranges = [[0, 137], [137, 300], [300, 512]]
    arguments: dict[str, Any] = {
        "q_ranges": ranges, "k_ranges": ranges, "attn_mask_type": "causal", "total_seqlen_q": 512, "total_seqlen_k": 512,
        "num_heads_q": 4, "num_heads_kv": 2, "head_dim": 16, "pad_size": 0, "cp_group_or_mesh": group,
    }  # fmt: skip
    return magi_attn_flex_key(**(arguments | changes))


def local_tensors(rows: int = 512, heads: tuple[int, int] = (4, 2), dim: int = 16, **options: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, num, dim, generator=generator).to(**options) for num in (heads[0], heads[1], heads[1])]
