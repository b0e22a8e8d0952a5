"""GroupReduce: partial rows return to their owner and are summed or lse-merged in rank order. Runs a cast's exchange backwards.

Order of accumulation, always: what the target holds, then the partials of rank 0, 1, 2, ... One row gets one addition at a time, so
results are equal to the bit from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from magi_attention.comm.group import CommGroup, comm_group
from magi_attention.comm.launch import Level, check_outputs, check_tensors, flat_level, start, two_levels
from magi_attention.comm.wire import Round, pack, read, recv_order, row_bytes, send_order
from magi_attention.comm.work import CallInfo, HandOver, Stages, Transfer, Work
from magi_attention.errors import InputError
from magi_attention.plan.types import Exchange, HierarchicalExchange

Accumulate = Callable[[Sequence[torch.Tensor], Round, Sequence[torch.Tensor]], None]


def group_reduce(
    exchange: Exchange | HierarchicalExchange,
    partials: Sequence[torch.Tensor],
    group: object,
    *,
    into: Sequence[torch.Tensor],
    timeout_s: float | None = None,
    what: str = "",
) -> Work:
    """Start sending partial sums back over the way their rows came, and add them at the owner during wait().

    Collective: every rank of the group calls it in the same order, also with zero rows. `into` is only touched inside wait(), which
    returns it; works that share `into` add in the order of their waits.

    Args:
        exchange: the CAST's exchange; it is run backwards.
        partials: [num_rows_out, ...] each, float tensors in receive-buffer row order, one device. Not to be written before the wait.
        group: a CommGroup, or anything comm_group takes.
        into: contiguous [num_rows_in, ...] fp32 or fp64 tensors that hold this rank's own contribution.
        timeout_s, what: as in group_cast.

    Raises:
        InputError: tensors or group do not fit the exchange. CommError: the transfer could not be started.
    """
    info = CallInfo("group_reduce", what, timeout_s)
    return _start_reduce(exchange, partials, group, into, info, add_rows, (0.0,) * len(partials))


def group_reduce_lse(
    exchange: Exchange | HierarchicalExchange,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    group: object,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    timeout_s: float | None = None,
    what: str = "",
) -> Work:
    """Like group_reduce for attention partials: at the owner they are merged by their log-sum-exp during wait().

    Args:
        exchange: the CAST's exchange (of the queries); it is run backwards.
        partial_out, partial_lse: [num_rows_out, heads, head_dim] and [num_rows_out, heads] (natural log; -inf with out 0 for an empty row).
        group, timeout_s, what: as in group_reduce.
        out, lse: contiguous fp32 or fp64 [num_rows_in, heads, head_dim] and [num_rows_in, heads], this rank's own partial; merged in place.

    Raises:
        InputError: tensors or group do not fit the exchange. CommError: the transfer could not be started.
    """
    if partial_out.shape[:-1] != partial_lse.shape:
        raise InputError(
            f"partial_lse has shape {tuple(partial_lse.shape)}; it must be partial_out's {tuple(partial_out.shape)} without head_dim"
        )
    info = CallInfo("group_reduce_lse", what, timeout_s)
    return _start_reduce(exchange, (partial_out, partial_lse), group, (out, lse), info, merge_rows, (0.0, float("-inf")))


def _start_reduce(
    exchange: Exchange | HierarchicalExchange,
    partials: Sequence[torch.Tensor],
    group: object,
    into: Sequence[torch.Tensor],
    info: CallInfo,
    accumulate: Accumulate,
    empty: tuple[float, ...],
) -> Work:
    cp_group = comm_group(group)
    targets = [x.detach() for x in into]
    if isinstance(exchange, HierarchicalExchange):
        inter, intra = two_levels(exchange, cp_group)
        device = _check(partials, intra.exchange.num_rows_out, targets, inter.exchange.num_rows_in, cp_group)
        node = cp_group.rank // intra.exchange.cp_size
        stages = _two_level_stages(inter, intra, node, list(partials), targets, info, accumulate, empty)
    else:
        level = flat_level(exchange, cp_group)
        device = _check(partials, exchange.num_rows_out, targets, exchange.num_rows_in, cp_group)
        stages = _stages(level, list(partials), targets, info, accumulate)
    return Work(_result(stages, list(into)), device, "reduce", (*partials, *targets))


def _result(stages: Generator[Transfer | HandOver, None, None], into: list[torch.Tensor]) -> Stages:
    yield from stages
    return into


def _check(
    partials: Sequence[torch.Tensor], num_partial_rows: int, into: Sequence[torch.Tensor], num_rows: int, group: CommGroup
) -> torch.device:
    device = check_tensors("partials", partials, num_partial_rows, group)
    check_tensors("into", into, num_rows, group, device)
    check_outputs("into", into, partials)
    for idx, x in enumerate(into):
        if x.dtype not in (torch.float32, torch.float64):
            raise InputError(f"into[{idx}] is {x.dtype}; partial sums are accumulated in torch.float32 or torch.float64")
    return device


# ---- moving and accumulating ----


def _stages(
    level: Level, partials: list[torch.Tensor], targets: list[torch.Tensor], info: CallInfo, accumulate: Accumulate
) -> Generator[Transfer | HandOver, None, None]:
    payload = yield from _return_payload(level, partials, info)
    yield HandOver((payload,))
    arrived = _Arrived(level, payload, partials)
    for peer in range(level.exchange.cp_size):
        arrived.accumulate(peer, targets, accumulate)


def _return_payload(level: Level, partials: list[torch.Tensor], info: CallInfo) -> Generator[Transfer | HandOver, None, torch.Tensor]:
    """Send partial rows where they came from; the payload that arrives is in the order of our send runs."""
    device = partials[0].device
    width = sum(row_bytes(x) for x in partials)
    payload = torch.empty(send_order(level.exchange, device).num_rows * width, dtype=torch.uint8, device=device)
    yield start(level, payload, pack(recv_order(level.exchange, device), partials), partials, info, backwards=True)
    return payload


class _Arrived:
    """Partial rows of all peers, in wire order."""

    def __init__(self, level: Level, payload: torch.Tensor, like: Sequence[torch.Tensor]) -> None:
        self._order = send_order(level.exchange, payload.device)
        self._parts = read(payload, self._order.num_rows, like)

    def accumulate(self, peer: int, targets: Sequence[torch.Tensor], accumulate: Accumulate) -> None:
        """Join the rows of one peer to `targets`."""
        for one_round in self._order.rounds[peer]:
            accumulate(targets, one_round, [part[one_round.payload] for part in self._parts])


def _two_level_stages(
    inter: Level,
    intra: Level,
    node: int,
    partials: list[torch.Tensor],
    targets: list[torch.Tensor],
    info: CallInfo,
    accumulate: Accumulate,
    empty: tuple[float, ...],
) -> Generator[Transfer | HandOver, None, None]:
    """Partials of one node meet at its relay (in the order of local ranks); the owner then takes one row per node, in node order."""
    payload = yield from _return_payload(intra, partials, info)
    num_local = inter.exchange.num_rows_in
    num_rows = num_local + inter.exchange.num_rows_out
    sums = [torch.full((num_rows, *x.shape[1:]), value, dtype=x.dtype, device=x.device) for x, value in zip(targets, empty, strict=True)]
    arrived = _Arrived(intra, payload, partials)
    for peer in range(intra.exchange.cp_size):
        arrived.accumulate(peer, sums, accumulate)
    own_node = [x[:num_local] for x in sums]
    relayed = [x[num_local:] for x in sums]
    payload = yield from _return_payload(inter, relayed, info)
    yield HandOver((payload, *sums))
    arrived = _Arrived(inter, payload, relayed)
    for peer in range(inter.exchange.cp_size):
        if peer == node and num_local:
            accumulate(targets, Round(slice(0, num_local), ((0, num_local),), None), own_node)
        arrived.accumulate(peer, targets, accumulate)


def add_rows(targets: Sequence[torch.Tensor], one_round: Round, parts: Sequence[torch.Tensor]) -> None:
    """targets[i][row] += parts[i][payload row], in the precision of the target."""
    for target, part in zip(targets, parts, strict=True):
        if one_round.rows is not None:
            target.index_add_(0, one_round.rows, part.to(target.dtype))
        first = 0
        for start_row, num_rows in one_round.runs:
            target[start_row : start_row + num_rows].add_(part[first : first + num_rows])
            first += num_rows


def merge_rows(targets: Sequence[torch.Tensor], one_round: Round, parts: Sequence[torch.Tensor]) -> None:
    """Merge partial (out, lse) rows into target (out, lse) rows."""
    out, lse = targets
    part_out, part_lse = (part.to(target.dtype) for part, target in zip(parts, targets, strict=True))
    if one_round.rows is not None:
        merged_out, merged_lse = merge_partials(out[one_round.rows], lse[one_round.rows], part_out, part_lse)
        out.index_copy_(0, one_round.rows, merged_out)
        lse.index_copy_(0, one_round.rows, merged_lse)
    first = 0
    for start_row, num_rows in one_round.runs:
        rows, taken = slice(start_row, start_row + num_rows), slice(first, first + num_rows)
        out[rows], lse[rows] = merge_partials(out[rows], lse[rows], part_out[taken], part_lse[taken])
        first += num_rows


def merge_partials(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join two normalised partials [rows, heads, head_dim], [rows, heads]. Natural log; two empty ones merge to out 0, lse -inf."""
    top = torch.maximum(lse_a, lse_b)
    top = torch.where(top == float("-inf"), torch.zeros_like(top), top)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    scale = torch.where(total > 0, 1.0 / total, torch.zeros_like(total))
    out = out_a * (weight_a * scale).unsqueeze(-1) + out_b * (weight_b * scale).unsqueeze(-1)
    return out, top + torch.log(total)
