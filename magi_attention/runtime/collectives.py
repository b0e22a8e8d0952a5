"""The small collectives of the runtime, with lost peers as CommError. Knows no plan and no attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
    with _lost_peers_named("all_reduce", what, tensor, group):
        dist.all_reduce(tensor, dist.ReduceOp.MAX if takes_max else dist.ReduceOp.SUM, group=group)


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup, what: str) -> list[torch.Tensor]:
    """`tensor` of every rank of `group`, in rank order; equal shapes. Collective.

    Args:
        what: the caller's words for the error message.

    Raises:
        CommError: a peer was lost or the group's time ran out.
    """
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    with _lost_peers_named("all_gather", what, tensor, group):
        dist.all_gather(parts, tensor, group=group)
    return parts


@contextlib.contextmanager
def _lost_peers_named(op: str, what: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        num_bytes = tensor.numel() * tensor.element_size()
        raise CommError(
            f"{op} of {what} ({num_bytes} bytes) failed on rank {group.rank()} of {group.size()}: {str(error).splitlines()[0]}; "
            "look at the log of the other ranks first. This group cannot be used again."
        ) from error
