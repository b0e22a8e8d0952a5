"""The loss over tokens that are spread over ranks, with groups as callers hold them. Knows no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from magi_attention.comm import comm_group
from magi_attention.runtime import loss
from magi_attention.runtime.graphs import outside_graphs

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


@outside_graphs
def reduce_loss(
    loss_sum: torch.Tensor,
    count: torch.Tensor | int,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    grad_reduction: str = "avg",
) -> torch.Tensor:
    """The mean loss over all tokens of the group, equal on every rank; 0 when no rank counts a token. Collective; its backward is not.

    Args:
        loss_sum: floating point scalar, the sum of this rank's token losses (0 when it has none).
        count: tokens in that sum, e.g. (labels != -100).sum().
        group: the ranks that share the batch; None is the default group, or this process alone without torch.distributed.
        grad_reduction: what is done to parameter gradients over the group afterwards: "avg" (DDP, FSDP and most trainers: the
            gradient is scaled by the group's size, which the average divides away) or "sum" (no scaling).

    Returns:
        A scalar of loss_sum's dtype, or fp32 when that is smaller. Reduced as said, parameter gradients are those of the mean loss of
        the whole batch on one rank, however unevenly tokens are spread.

    Raises:
        InputError: loss_sum is no floating point scalar, count is not one number, or another grad_reduction.
    """
    cp_group = comm_group(group)
    flat = None if cp_group.is_single else cp_group.flat
    return loss.reduce_loss(loss_sum, count, flat, grad_reduction=grad_reduction)
