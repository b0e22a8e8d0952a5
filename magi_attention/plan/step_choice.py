"""In how many steps the remote keys arrive: loads of every candidate from the solver, the best by the cost model. Builds no transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from magi_attention import _native
from magi_attention.config import GreedyOverlapAlg, OverlapConfig
from magi_attention.errors import InputError
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.cost import CostModel, StepLoads
from magi_attention.plan.exchange import ownership_arrays
from magi_attention.plan.types import DispatchPlan, Int64Array, frozen_array

SolverInputs: TypeAlias = dict[str, "_native.IntArray | int"]

_FEMTOSECONDS_PER_US = 1e9


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """What all ranks know: the mask, the owners of its rows, and how steps may be cut."""

    mask: AttnMask
    dispatch_q: DispatchPlan
    dispatch_k: DispatchPlan
    overlap: OverlapConfig
    cost: CostModel
    num_nodes: int = 1

    @property
    def cp_size(self) -> int:
        return self.dispatch_q.cp_size

    def solver_inputs(self, degrees: list[int], *, is_backward: bool) -> SolverInputs:
        """The arrays of plan_loads and plan_rank in the solver. Costs travel as integer femtoseconds."""
        crosses_nodes = self.num_nodes > 1
        is_greedy = isinstance(self.overlap.alg, GreedyOverlapAlg) and self.overlap.enable
        pair_us, row_us = self.cost.pair_us(is_backward), self.cost.row_us(is_backward, crosses_nodes=crosses_nodes)
        return {
            "slices": self.mask.slices,
            "cp_size": self.cp_size,
            **ownership_arrays("q", self.dispatch_q),
            **ownership_arrays("k", self.dispatch_k),
            "num_nodes": self.num_nodes,
            "min_rows": self.overlap.min_chunk_size if self.overlap.enable else 1,
            "is_greedy": int(is_greedy),
            "pair_cost_fs": int(pair_us * _FEMTOSECONDS_PER_US),
            "row_cost_fs": int(row_us * _FEMTOSECONDS_PER_US),
            "start_cost_fs": int(self.cost.start_us(crosses_nodes=crosses_nodes) * _FEMTOSECONDS_PER_US),
            "degrees": np.array(degrees, np.int64),
        }


@dataclass(frozen=True, kw_only=True)
class StepChoice:
    """The chosen split of one direction and what it costs.

    Attributes:
        wanted_degree: what to ask the solver for; degree: the remote steps that come of it.
        rank_areas, rank_recv_rows, rank_send_rows: int64 [R], of the whole plan.
        loads: per step; rank_times_us: float64 [R], predicted.
        reason: why this degree, one sentence.
    """

    wanted_degree: int
    degree: int
    rank_areas: Int64Array
    rank_recv_rows: Int64Array
    rank_send_rows: Int64Array
    loads: StepLoads
    rank_times_us: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    reason: str


def candidate_degrees(overlap: OverlapConfig) -> list[int]:
    """Degrees to compare: the given one, or all up to 8 and then every fourth part more, up to the bound."""
    if not overlap.enable:
        return [1]
    is_greedy = isinstance(overlap.alg, GreedyOverlapAlg)
    if overlap.degree is not None:
        return [min(overlap.degree, overlap.max_num_chunks) if is_greedy else overlap.degree]
    bound = min(overlap.dynamic_max_degree, overlap.max_num_chunks) if is_greedy else overlap.dynamic_max_degree
    degrees = [1]
    while degrees[-1] < bound:
        degrees.append(min(bound, degrees[-1] + max(1, degrees[-1] // 4)))
    return degrees


def choose_steps(problem: PlanProblem, *, is_backward: bool) -> StepChoice:
    """The candidate with the smallest predicted time of the slowest rank; the fewest steps among equals."""
    _check(problem)
    wanted = candidate_degrees(problem.overlap)
    found = _native.run("plan_loads", **problem.solver_inputs(wanted, is_backward=is_backward))
    best, times = -1, []
    candidates = [_read_loads(found, index, problem) for index in range(len(wanted))]
    for index, loads in enumerate(candidates):
        times.append(problem.cost.rank_times_us(loads, is_backward=is_backward))
        if best < 0 or times[index].max() < times[best].max():
            best = index
    degree = int(found["step_degrees"][best])
    areas, recv_rows, send_rows = (frozen_array(found[name], np.int64) for name in ("areas", "recv_rows", "send_rows"))
    return StepChoice(
        wanted_degree=wanted[best],
        degree=degree,
        rank_areas=areas,  # type: ignore[arg-type]
        rank_recv_rows=recv_rows,  # type: ignore[arg-type]
        rank_send_rows=send_rows,  # type: ignore[arg-type]
        loads=candidates[best],
        rank_times_us=times[best],
        reason=_reason(problem, "backward" if is_backward else "forward", wanted, degree, float(times[best].max())),
    )


def _check(problem: PlanProblem) -> None:
    for side, dispatch, total in (
        ("q", problem.dispatch_q, problem.mask.total_q),
        ("k", problem.dispatch_k, problem.mask.total_k),
    ):
        if dispatch.total_tokens < total:
            raise InputError(f"dispatch_{side} has total_tokens={dispatch.total_tokens}; the mask has total_{side}={total}")
        if dispatch.cp_size != problem.cp_size:
            raise InputError(f"dispatch_{side} has cp_size={dispatch.cp_size}; the plan is for cp_size={problem.cp_size}")
    if problem.num_nodes < 1 or problem.cp_size % problem.num_nodes:
        raise InputError(f"num_nodes={problem.num_nodes} must divide cp_size={problem.cp_size}; all nodes have the same number of ranks")


def _read_loads(found: dict[str, _native.IntArray], index: int, problem: PlanProblem) -> StepLoads:
    def table(name: str) -> Int64Array:
        return np.asarray(found[f"{index}_{name}"], np.int64).reshape(-1, problem.cp_size)

    has_nodes = problem.num_nodes > 1
    return StepLoads(
        local_areas=np.asarray(found["local_areas"], np.int64),
        local_tokens=problem.dispatch_q.rank_tokens,
        areas=table("areas"),
        recv_rows=table("recv_rows"),
        send_rows=table("send_rows"),
        node_recv_rows=table("node_recv_rows") if has_nodes else None,
        node_send_rows=table("node_send_rows") if has_nodes else None,
    )


def _reason(problem: PlanProblem, direction: str, wanted: list[int], degree: int, time_us: float) -> str:
    overlap = problem.overlap
    if degree == 0:
        return f"{direction}: no rank needs remote keys, so nothing is exchanged."
    steps = f"{degree} remote step{'s' if degree > 1 else ''} ({overlap.alg.name})"
    if not overlap.enable:
        return f"{direction}: {steps} because overlap is off."
    if len(wanted) == 1:
        short = f", fewer than degree={wanted[0]} because rows do not suffice for min_chunk_size={overlap.min_chunk_size}"
        return f"{direction}: {steps} as configured{short if degree < wanted[0] else ''}."
    return f"{direction}: {steps}, the fastest of up to {wanted[-1]} on {problem.cost.machine.name}: {time_us:.0f} us predicted on the slowest rank."
