"""Exchanges made by hand from a random ownership, without the planner: what the comm tests move. Same seed, same exchanges, any process."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from magi_attention.plan.types import DispatchPlan, Exchange, HierarchicalExchange, frozen_array

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.uint8, torch.complex64, torch.float16)


def _pieces(rng: np.random.Generator, num_rows: int, *, repeats: bool) -> list[tuple[int, int]]:
    """Some (first row, number of rows) runs of a buffer, in random order; disjoint unless `repeats`."""
    if num_rows == 0 or rng.random() < 0.15:
        return []
    cuts = np.unique(np.concatenate([[0, num_rows], rng.integers(0, num_rows + 1, size=rng.integers(0, 8))]))
    runs = [(a, b - a) for a, b in itertools.pairwise(cuts.tolist()) if rng.random() < 0.6]
    if repeats and runs:
        runs.append(runs[0])
    if rng.random() < 0.5:
        rng.shuffle(runs)
    return runs


def make_exchanges(seed: int, cp_size: int, max_rows: int = 40, *, repeats: bool = False, gaps: bool = False) -> list[Exchange]:
    """One Exchange per rank. `repeats`: a row may be wanted twice by one rank. `gaps`: receive buffers have rows nobody fills."""
    rng = np.random.default_rng(seed)
    num_rows = [0 if rng.random() < 0.15 else int(rng.integers(1, max_rows)) for _ in range(cp_size)]
    send: list[list[tuple[int, int, int]]] = [[] for _ in range(cp_size)]
    recv: list[list[tuple[int, int, int]]] = []
    rows_out = []
    for destination in range(cp_size):
        wanted = [(source, *piece) for source in range(cp_size) for piece in _pieces(rng, num_rows[source], repeats=repeats)]
        layout = rng.permutation(len(wanted)) if rng.random() < 0.7 else np.arange(len(wanted))
        place, end = {}, 0
        for idx in layout:
            end += int(rng.integers(0, 3)) if gaps else 0
            place[int(idx)] = end
            end += wanted[idx][2]
        rows_out.append(end + (2 if gaps else 0))
        recv.append([(source, place[idx], count) for idx, (source, _, count) in enumerate(wanted)])
        for source, first, count in wanted:
            send[source].append((destination, first, count))
    return [Exchange(cp_size, num_rows[rank], rows_out[rank], _records(send[rank]), _records(recv[rank])) for rank in range(cp_size)]


def _records(runs: list[tuple[int, int, int]]) -> np.ndarray:
    return frozen_array(np.array(runs, dtype=np.int32).reshape(-1, 3))


def make_two_level(seed: int, num_nodes: int, node_size: int, max_rows: int = 30) -> tuple[list[Exchange], list[HierarchicalExchange]]:
    """The same needs as flat exchanges and as two-level ones, one of each per rank. Receive buffers ascend by (owner, row)."""
    rng = np.random.default_rng(seed)
    cp_size = num_nodes * node_size
    num_rows = [0 if rng.random() < 0.15 else int(rng.integers(1, max_rows)) for _ in range(cp_size)]
    needs = [
        [np.flatnonzero(rng.random(num_rows[owner]) < rng.choice([0.0, 0.3, 0.9])) for owner in range(cp_size)] for _ in range(cp_size)
    ]
    by_node = [
        [np.unique(np.concatenate([needs[node * node_size + i][owner] for i in range(node_size)])) for owner in range(cp_size)]
        for node in range(num_nodes)
    ]
    offsets = [np.cumsum([0] + [len(rows) for rows in need]) for need in needs]
    flat, two_level = [], []
    for rank in range(cp_size):
        node, index = divmod(rank, node_size)
        send = [(peer, int(row), 1) for peer in range(cp_size) for row in needs[peer][rank]]
        recv = [(owner, int(offsets[rank][owner]), len(needs[rank][owner])) for owner in range(cp_size) if len(needs[rank][owner])]
        flat.append(Exchange(cp_size, num_rows[rank], int(offsets[rank][-1]), _records(send), _records(recv)))

        inter_send = [(other, int(row), 1) for other in range(num_nodes) if other != node for row in by_node[other][rank]]
        inter_recv, relay_start, end = [], {}, 0
        for other in range(num_nodes):
            owner = other * node_size + index
            if other != node:
                relay_start[owner] = end
                inter_recv.append((other, end, len(by_node[node][owner])))
                end += len(by_node[node][owner])
        inter = Exchange(num_nodes, num_rows[rank], end, _records(inter_send), _records([run for run in inter_recv if run[2]]))
        intra_send = []
        for peer in range(node_size):
            for other in range(num_nodes):
                owner = other * node_size + index
                wanted = needs[node * node_size + peer][owner]
                places = wanted if other == node else num_rows[rank] + relay_start[owner] + np.searchsorted(by_node[node][owner], wanted)
                intra_send += [(peer, int(row), 1) for row in places]
        intra_recv = [
            (i, int(offsets[rank][o * node_size + i]), len(needs[rank][o * node_size + i]))
            for i in range(node_size)
            for o in range(num_nodes)
        ]
        intra = Exchange(
            node_size, num_rows[rank] + end, int(offsets[rank][-1]), _records(intra_send), _records([run for run in intra_recv if run[2]])
        )
        two_level.append(HierarchicalExchange(inter, intra))
    return flat, two_level


def make_dispatch(seed: int, cp_size: int, max_chunks: int = 12) -> DispatchPlan:
    """Random owners of random chunks; often some rank owns nothing, sometimes there is no token at all."""
    rng = np.random.default_rng(seed)
    chunk_size = int(rng.integers(1, 9))
    num_chunks = int(rng.integers(0, max_chunks))
    total = max(0, num_chunks * chunk_size - int(rng.integers(0, chunk_size)))
    return DispatchPlan(total, chunk_size, cp_size, frozen_array(rng.integers(0, cp_size, size=num_chunks)))


def random_tensor(seed: int, num_rows: int, trailing: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[num_rows, *trailing] of any dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((num_rows, *trailing), generator=generator, dtype=torch.float64) * 8
    return values > 0 if dtype == torch.bool else (values.abs() if dtype == torch.uint8 else values).to(dtype)


def random_rows(seed: int, num_rows: list[int], trailing: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """random_tensor for every rank."""
    return [random_tensor(seed * 1000 + rank, count, trailing, dtype) for rank, count in enumerate(num_rows)]


def assert_same_bits(ours: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """Equal dtype, shape and bytes."""
    assert ours.dtype == expected.dtype and ours.shape == expected.shape, (
        f"{where}: {ours.dtype} {ours.shape}, {expected.dtype} {expected.shape}"
    )
    same = ours.contiguous().view(-1).view(torch.uint8) == expected.contiguous().view(-1).view(torch.uint8)
    assert bool(same.all()), f"{where}: first different byte {int((~same).nonzero()[0])}; {ours} against {expected}"
