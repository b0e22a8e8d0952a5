"""Rows between every pair of ranks, step by step, from the plans of all ranks. Knows no machine, no time and no picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from magi_attention import _native
from magi_attention.plan.step_choice import PlanProblem, StepChoice
from magi_attention.plan.types import Int32Array, Int64Array


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one direction of a layer computes and moves. S remote steps, R ranks, N nodes; rank = node * (R / N) + index in node.

    Attributes:
        areas: int64 [S + 1, R], visible pairs of each step, local step first.
        tokens: int64 [R], query rows.
        rows: int32 [S, R, R], rows[step, owner, receiver] of the cast; the reduce moves the same rows the other way.
        node_rows: int64 [S, R, N], rows that owner sends through the network to each node, once per node; all 0 on one node.
        runs: int64 [S, R], contiguous ranges that each owner sends in a step, all receivers together.
    """

    areas: Int64Array
    tokens: Int64Array
    rows: Int32Array
    node_rows: Int64Array
    runs: Int64Array

    @property
    def num_steps(self) -> int:
        return len(self.rows)

    @property
    def cp_size(self) -> int:
        return len(self.tokens)

    @property
    def num_nodes(self) -> int:
        return int(self.node_rows.shape[2])


def read_traffic(
    problem: PlanProblem, choice: StepChoice, *, is_backward: bool, on_rank: Callable[[int], None] = lambda rank: None
) -> Traffic:
    """Plans of all ranks, reduced to counts. O(S * R * R) memory; `on_rank` is called after each rank.

    Args:
        problem: mask, owners, overlap.
        choice: the split that was chosen for this direction.
        is_backward: which direction's costs cut the steps (greedy splits differ).
    """
    num_ranks, num_nodes, num_steps = problem.cp_size, problem.num_nodes, choice.degree
    rows = np.zeros((num_steps, num_ranks, num_ranks), np.int32)
    node_rows = np.zeros((num_steps, num_ranks, num_nodes), np.int64)
    runs = np.zeros((num_steps, num_ranks), np.int64)
    inputs = problem.solver_inputs([choice.wanted_degree], is_backward=is_backward)
    for rank in range(num_ranks if num_steps else 0):
        found = _native.run("plan_rank", cp_rank=rank, **inputs)
        for step in range(num_steps):
            sent = found[f"{step + 1}_send"].reshape(-1, 3)
            rows[step, rank] = _rows_per_peer(sent, num_ranks)
            runs[step, rank] = len(sent)
            if num_nodes > 1:
                node_rows[step, rank] = _rows_per_peer(found[f"{step + 1}_inter_send"].reshape(-1, 3), num_nodes)
        on_rank(rank)
    return Traffic(
        areas=np.concatenate([choice.loads.local_areas[None], choice.loads.areas]),
        tokens=np.asarray(choice.loads.local_tokens, np.int64),
        rows=rows,
        node_rows=node_rows,
        runs=runs,
    )


def _rows_per_peer(runs: _native.IntArray, num_peers: int) -> Int64Array:
    return np.bincount(runs[:, 0], weights=runs[:, 2], minlength=num_peers).astype(np.int64)
