"""The all-reduces of the runtime, with lost peers as CommError. Knows no plan and no attention."""

from __future__ import annotations

import torch
import torch.distributed as dist

from magi_attention.errors import CommError


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, what: str, *, takes_max: bool = False) -> None:
    """Sum (or maximum) of `tensor` over the ranks of `group`, in place. Collective.

    Args:
        what: the caller's words for the error message.

    Raises:
        CommError: a peer was lost or the group's time ran out.
    """
    try:
        dist.all_reduce(tensor, dist.ReduceOp.MAX if takes_max else dist.ReduceOp.SUM, group=group)
    except (RuntimeError, ValueError) as error:
        num_bytes = tensor.numel() * tensor.element_size()
        raise CommError(
            f"all_reduce of {what} ({num_bytes} bytes) failed on rank {group.rank()} of {group.size()}: {str(error).splitlines()[0]}; "
            "look at the log of the other ranks first. This group cannot be used again."
        ) from error
