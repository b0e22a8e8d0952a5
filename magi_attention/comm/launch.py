"""Checks the arguments of an exchange and starts its all-to-all-v. Knows row counts and groups, not what the rows mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from magi_attention.comm.group import CommGroup
from magi_attention.comm.wire import row_bytes
from magi_attention.comm.work import CallInfo, Transfer
from magi_attention.errors import InputError
from magi_attention.plan.types import Exchange, HierarchicalExchange


@dataclass(frozen=True)
class Level:
    """One exchange on one process group (None: this rank alone)."""

    exchange: Exchange
    group: dist.ProcessGroup | None


def flat_level(exchange: Exchange, group: CommGroup) -> Level:
    """The exchange on all ranks of the group.

    Raises:
        InputError: the exchange was planned for another number of ranks.
    """
    if exchange.cp_size != group.size:
        raise InputError(
            f"exchange is planned for {exchange.cp_size} ranks but the group has {group.size} (global ranks {list(group.members)}); "
            "use the group the plan was made for, or plan again"
        )
    return Level(exchange, None if group.is_single else group.flat)


def two_levels(exchange: HierarchicalExchange, group: CommGroup) -> tuple[Level, Level]:
    """(between nodes, inside the node).

    Raises:
        InputError: the group is not a 2-D mesh, or has another shape than the exchange.
    """
    if not group.is_two_level:
        raise InputError(
            f"exchange is hierarchical but the group of global ranks {list(group.members)} is flat; pass the 2-D mesh (inter, intra) the "
            "plan was made for"
        )
    planned = (exchange.inter.cp_size, exchange.intra.cp_size)
    if planned != (group.num_nodes, group.size // group.num_nodes):
        raise InputError(
            f"exchange is planned for a mesh of shape {planned} but the group's is {(group.num_nodes, group.size // group.num_nodes)}; "
            "use the mesh the plan was made for, or plan again"
        )
    return Level(exchange.inter, group.inter), Level(exchange.intra, group.intra)


def check_tensors(
    name: str, tensors: Sequence[torch.Tensor], num_rows: int, group: CommGroup, device: torch.device | None = None
) -> torch.device:
    """The one device of `tensors`, which all have `num_rows` rows.

    Raises:
        InputError: no tensor, a scalar, a wrong number of rows, several devices, or a device the group does not serve.
    """
    if not tensors:
        raise InputError(f"{name} is empty; pass at least one tensor (all ranks the same number of them)")
    device = tensors[0].device if device is None else device
    for idx, x in enumerate(tensors):
        if x.dim() == 0 or x.shape[0] != num_rows:
            raise InputError(f"{name}[{idx}] has shape {tuple(x.shape)}; its first dimension must be the {num_rows} rows of the exchange")
        if x.device != device:
            raise InputError(f"{name}[{idx}] is on {x.device} but the exchange runs on {device}; move it there")
    if not group.is_single:
        group.backend_for(device)
    return device


def check_outputs(name: str, outputs: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> None:
    """Outputs are contiguous, as many as `like`, with the same trailing shapes.

    Raises:
        InputError: otherwise.
    """
    if len(outputs) != len(like):
        raise InputError(f"{name} has {len(outputs)} tensors for {len(like)} inputs; pass one for each")
    for idx, (out, x) in enumerate(zip(outputs, like, strict=True)):
        if out.shape[1:] != x.shape[1:]:
            raise InputError(f"{name}[{idx}] has row shape {tuple(out.shape[1:])}, its input {tuple(x.shape[1:])}; they must be equal")
        if not out.is_contiguous():
            raise InputError(f"{name}[{idx}] of shape {tuple(out.shape)} and strides {out.stride()} must be contiguous")


def start(
    level: Level, recv: torch.Tensor, send: torch.Tensor, like: Sequence[torch.Tensor], info: CallInfo, *, backwards: bool = False
) -> Transfer:
    """Start moving a payload of rows shaped `like`; `backwards` runs the transposed exchange."""
    width = sum(row_bytes(x) for x in like)
    to, from_ = level.exchange.send_counts, level.exchange.recv_counts
    if backwards:
        to, from_ = from_, to
    return Transfer(recv, send, [count * width for count in from_], [count * width for count in to], level.group, info)
