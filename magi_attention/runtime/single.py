"""The plan of one rank that owns everything, so that single-device attention is the same code as distributed attention. Solves nothing."""

from __future__ import annotations

import numpy as np

from magi_attention.kernels.attention import WorkList, clear_prepared, prepare
from magi_attention.kernels.device_mask import DeviceMask, device_mask
from magi_attention.kernels.ops import cast_for_autocast, single_device_attention
from magi_attention.kernels.select import describe as check_tensors
from magi_attention.plan.types import DispatchPlan, Int32Array, RankPlan, StepPlan, frozen_array

# From the kernels, for the public door: single_device_attention is the same attention as one registered operation.
__all__ = [
    "DeviceMask",
    "WorkList",
    "cast_for_autocast",
    "check_tensors",
    "clear_prepared",
    "device_mask",
    "prepare",
    "single_device_attention",
    "single_rank_plan",
]


def single_rank_plan(slices: Int32Array, total_q: int, total_k: int, area: int) -> RankPlan:
    """One local step over `slices`, without any exchange.

    Args:
        slices: int32 [N, 6] in global token ids (AttnMask.slices).
        total_q, total_k: rows and columns of the mask.
        area: its visible pairs (AttnMask.area()).
    """
    dispatch_q = _all_on_one_rank(total_q)
    dispatch_k = dispatch_q if total_k == total_q else _all_on_one_rank(total_k)
    runs = frozen_array(dispatch_k.rank_runs[0])
    step = StepPlan(None, runs, total_k, slices, area)
    zero = frozen_array([0], np.int64)
    return RankPlan(
        cp_rank=0,
        cp_size=1,
        dispatch_q=dispatch_q,
        dispatch_k=dispatch_k,
        num_local_q=total_q,
        num_local_k=total_k,
        forward=(step,),
        backward=(step,),
        rank_areas=frozen_array([area], np.int64),
        rank_recv_rows=zero,
        rank_send_rows=zero,
        reasons=("one rank: everything is local",),
    )


def _all_on_one_rank(total_tokens: int) -> DispatchPlan:
    owner = frozen_array(np.zeros(min(1, total_tokens), np.int32))
    return DispatchPlan(total_tokens, max(1, total_tokens), 1, owner)
