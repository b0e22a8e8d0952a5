"""The exchanges over in-memory lists of every rank's tensors, one row at a time: obvious and slow. Knows no process groups.

The oracle of the transports: a cast must equal it to the bit, a sum too, an lse-merge within rounding.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch

from magi_attention.plan.types import Exchange, HierarchicalExchange


def wire_pairs(exchanges: Sequence[Exchange]) -> list[tuple[int, int, int, int]]:
    """Every moved row as (source rank, source row, destination rank, destination row), in the order destinations receive them."""
    queues: dict[tuple[int, int], deque[int]] = {}
    for source, exchange in enumerate(exchanges):
        for peer, first, num_rows in exchange.send.tolist():
            queues.setdefault((source, peer), deque()).extend(range(first, first + num_rows))
    pairs = []
    for destination, exchange in enumerate(exchanges):
        for source, first, num_rows in exchange.recv.tolist():
            for row in range(first, first + num_rows):
                pairs.append((source, queues[source, destination].popleft(), destination, row))
    left_over = {pair: len(queue) for pair, queue in queues.items() if queue}
    assert not left_over, f"rows sent but never received, by (source, destination): {left_over}"
    return pairs


def cast_reference(exchanges: Sequence[Exchange], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What group_cast gives on each rank, for one tensor per rank. Rows nobody sends are zero."""
    outs = [x.new_zeros((exchange.num_rows_out, *x.shape[1:])) for exchange, x in zip(exchanges, tensors, strict=True)]
    for source, source_row, destination, row in wire_pairs(exchanges):
        outs[destination][row] = tensors[source][source_row]
    return outs


def reduce_reference(exchanges: Sequence[Exchange], partials: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What group_reduce leaves in `into` on each rank, for one tensor per rank. `exchanges` are the cast's."""
    sums = [x.clone() for x in into]
    for source, source_row, destination, row in sorted(wire_pairs(exchanges), key=lambda pair: pair[2]):
        sums[source][source_row] += partials[destination][row].to(sums[source].dtype)
    return sums


def reduce_lse_reference(
    exchanges: Sequence[Exchange], partials: Sequence[tuple[torch.Tensor, torch.Tensor]], own: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What group_reduce_lse leaves in (out, lse) on each rank: all partials of a row merged at once, in float64."""
    sources: list[dict[int, list[tuple[torch.Tensor, torch.Tensor]]]] = [
        {row: [(out[row].double(), lse[row].double())] for row in range(out.shape[0])} for out, lse in own
    ]
    for source, source_row, destination, row in wire_pairs(exchanges):
        out, lse = partials[destination]
        sources[source][source_row].append((out[row].double(), lse[row].double()))
    merged = []
    for (out, lse), by_row in zip(own, sources, strict=True):
        merged_out, merged_lse = torch.zeros_like(out, dtype=torch.float64), torch.full_like(lse, -math.inf, dtype=torch.float64)
        for row, parts in by_row.items():
            lses = torch.stack([part_lse for _, part_lse in parts])  # [parts, heads]
            merged_lse[row] = torch.logsumexp(lses, dim=0)
            weights = torch.where(lses == -math.inf, 0.0, torch.exp(lses - merged_lse[row]))
            merged_out[row] = (torch.stack([part_out for part_out, _ in parts]) * weights.unsqueeze(-1)).sum(0)
        merged.append((merged_out, merged_lse))
    return merged


def two_level_cast_reference(exchanges: Sequence[HierarchicalExchange], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What group_cast gives on each rank of an (inter, intra) mesh, for one tensor per rank."""
    node_size = exchanges[0].intra.cp_size
    num_nodes = exchanges[0].inter.cp_size
    relayed: list[torch.Tensor] = list(tensors)
    for index in range(node_size):
        ranks = [node * node_size + index for node in range(num_nodes)]
        for rank, rows in zip(ranks, cast_reference([exchanges[r].inter for r in ranks], [tensors[r] for r in ranks]), strict=True):
            relayed[rank] = rows
    outs: list[torch.Tensor] = []
    for node in range(num_nodes):
        ranks = list(range(node * node_size, (node + 1) * node_size))
        sources = [torch.cat([tensors[rank], relayed[rank]]) for rank in ranks]
        outs += cast_reference([exchanges[rank].intra for rank in ranks], sources)
    return outs


def two_level_reduce_reference(
    exchanges: Sequence[HierarchicalExchange], partials: Sequence[torch.Tensor], into: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What group_reduce leaves in `into` on each rank of an (inter, intra) mesh: sums per node first, then node by node."""
    node_size = exchanges[0].intra.cp_size
    num_nodes = exchanges[0].inter.cp_size
    node_sums: list[torch.Tensor] = []
    for node in range(num_nodes):
        ranks = list(range(node * node_size, (node + 1) * node_size))
        empty = [into[rank].new_zeros((exchanges[rank].intra.num_rows_in, *into[rank].shape[1:])) for rank in ranks]
        node_sums += reduce_reference([exchanges[rank].intra for rank in ranks], [partials[rank] for rank in ranks], empty)
    sums = [x.clone() for x in into]
    for index in range(node_size):
        ranks = [node * node_size + index for node in range(num_nodes)]
        pairs = wire_pairs([exchanges[rank].inter for rank in ranks])
        for node, rank in enumerate(ranks):
            num_local = exchanges[rank].inter.num_rows_in
            for other, relay in enumerate(ranks):
                if other == node:
                    sums[rank] += node_sums[rank][:num_local]
                for source, source_row, destination, row in pairs:
                    if (source, destination) == (node, other):
                        sums[rank][source_row] += node_sums[relay][exchanges[relay].inter.num_rows_in + row]
    return sums
