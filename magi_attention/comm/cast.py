"""GroupCast: every owner sends each needed row to exactly the ranks that need it. Knows no masks and no attention."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from magi_attention.comm.group import CommGroup, comm_group
from magi_attention.comm.launch import Level, check_outputs, check_tensors, flat_level, start, two_levels
from magi_attention.comm.wire import pack, receive_buffer, recv_order, send_order, unpack
from magi_attention.comm.work import CallInfo, HandOver, Stages, Transfer, Work
from magi_attention.errors import InputError
from magi_attention.plan.types import Exchange, HierarchicalExchange


def group_cast(
    exchange: Exchange | HierarchicalExchange,
    tensors: Sequence[torch.Tensor],
    group: object,
    *,
    out: Sequence[torch.Tensor] | None = None,
    timeout_s: float | None = None,
    what: str = "",
) -> Work:
    """Start a cast of the rows of several tensors in one all-to-all-v (two for a hierarchical exchange).

    Collective: every rank of the group calls it in the same order, also with zero rows. Moves bytes; results are equal to the bit.

    Args:
        exchange: this rank's view of the row plan; hierarchical needs a 2-D mesh.
        tensors: [num_rows_in, ...] each, any dtypes and trailing shapes (the same on every rank), one device. Not to be written before
            the wait.
        group: a CommGroup, or anything comm_group takes.
        out: contiguous [num_rows_out, ...] tensors to fill, dtypes like `tensors`; rows the exchange does not cover keep their values.
            None allocates them, with zeros in rows that are not covered.
        timeout_s: seconds after which the wait raises CommError; the process group's own time-out holds too, and alone with None (and
            over NCCL, where waiting does not block).
        what: the caller's words for error messages, e.g. "step 2 of the forward, k and v".

    Returns:
        Work whose wait() gives the tensors in receive-buffer row order.

    Raises:
        InputError: tensors or group do not fit the exchange. CommError: the transfer could not be started.
    """
    cp_group = comm_group(group)
    info = CallInfo("group_cast", what, timeout_s)
    if isinstance(exchange, HierarchicalExchange):
        inter, intra = two_levels(exchange, cp_group)
        device, outs = _prepare(tensors, out, exchange.inter.num_rows_in, intra.exchange, cp_group)
        return Work(_two_level_stages(inter, intra, list(tensors), outs, info), device, "cast", (*tensors, *outs))
    level = flat_level(exchange, cp_group)
    device, outs = _prepare(tensors, out, exchange.num_rows_in, exchange, cp_group)
    return Work(_stages(level, list(tensors), outs, info), device, "cast", (*tensors, *outs))


def _prepare(
    tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None, num_rows_in: int, last: Exchange, group: CommGroup
) -> tuple[torch.device, list[torch.Tensor]]:
    device = check_tensors("tensors", tensors, num_rows_in, group)
    if out is None:
        allocate = torch.empty if recv_order(last, device).covers_buffer else torch.zeros
        return device, [allocate((last.num_rows_out, *x.shape[1:]), dtype=x.dtype, device=device) for x in tensors]
    check_tensors("out", out, last.num_rows_out, group, device)
    check_outputs("out", out, tensors)
    for idx, (given, x) in enumerate(zip(out, tensors, strict=True)):
        if given.dtype != x.dtype:
            raise InputError(f"out[{idx}] is {given.dtype}, tensors[{idx}] {x.dtype}; a cast moves bytes, so they must be equal")
    return device, list(out)


def _stages(level: Level, tensors: list[torch.Tensor], outs: list[torch.Tensor], info: CallInfo) -> Stages:
    yield from _move(level, tensors, outs, info)
    return outs


def _move(
    level: Level, tensors: list[torch.Tensor], outs: list[torch.Tensor], info: CallInfo
) -> Generator[Transfer | HandOver, None, None]:
    device = outs[0].device
    order = recv_order(level.exchange, device)
    payload = receive_buffer(order, outs)
    yield start(level, payload, pack(send_order(level.exchange, device), tensors), tensors, info)
    unpack(order, payload, outs)


def _two_level_stages(inter: Level, intra: Level, tensors: list[torch.Tensor], outs: list[torch.Tensor], info: CallInfo) -> Stages:
    """A row crosses nodes once per node that needs it, then fans out from [local rows, relayed rows]."""
    num_local, num_relayed = inter.exchange.num_rows_in, inter.exchange.num_rows_out
    sources = [torch.empty((num_local + num_relayed, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in tensors]
    yield from _move(inter, tensors, [source[num_local:] for source in sources], info)
    for source, x in zip(sources, tensors, strict=True):
        source[:num_local].copy_(x.detach())
    yield from _move(intra, sources, outs, info)
    return outs
