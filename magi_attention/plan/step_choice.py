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
_SAME_TIME = 1.005  # predictions closer than this are equal; memory decides


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

    @property
    def is_greedy(self) -> bool:
        return isinstance(self.overlap.alg, GreedyOverlapAlg) and self.overlap.enable

    def solver_inputs(self, degrees: list[int], *, is_backward: bool) -> SolverInputs:
        """The arrays of plan_loads and plan_rank in the solver. Costs travel as integer femtoseconds."""
        crosses_nodes = self.num_nodes > 1
        pair_us, row_us = self.cost.pair_us(is_backward), self.cost.row_us(is_backward, crosses_nodes=crosses_nodes)
        return {
            "slices": self.mask.slices,
            "cp_size": self.cp_size,
            **ownership_arrays("q", self.dispatch_q),
            **ownership_arrays("k", self.dispatch_k),
            "num_nodes": self.num_nodes,
            "min_rows": self.overlap.min_chunk_size if self.overlap.enable else 1,
            "is_greedy": int(self.is_greedy),
            "pair_cost_fs": int(pair_us * _FEMTOSECONDS_PER_US),
            "row_cost_fs": int(row_us * _FEMTOSECONDS_PER_US),
            "start_cost_fs": int(self.cost.start_us(crosses_nodes=crosses_nodes) * _FEMTOSECONDS_PER_US),
            "degrees": np.array(degrees, np.int64),
        }


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Splits that were measured. wanted: degrees asked for; degrees: remote steps that came of them; loads: of each."""

    wanted: list[int]
    degrees: list[int]
    loads: list[StepLoads]
    rank_areas: Int64Array
    rank_recv_rows: Int64Array
    rank_send_rows: Int64Array


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


def choose_both(problem: PlanProblem) -> tuple[StepChoice, StepChoice]:
    """Forward and backward. Equal parts do not depend on costs, so they are measured once; greedy parts differ by direction.

    Raises:
        InputError: dispatches that do not fit the mask, ranks that do not fill nodes.
    """
    _check(problem)
    forward = measure_candidates(problem, is_backward=False)
    backward = measure_candidates(problem, is_backward=True) if problem.is_greedy else forward
    return choose_steps(problem, forward, is_backward=False), choose_steps(problem, backward, is_backward=True)


def measure_candidates(problem: PlanProblem, *, is_backward: bool) -> Candidates:
    """Loads of all ranks for every candidate degree."""
    wanted = candidate_degrees(problem.overlap)
    found = _native.run("plan_loads", **problem.solver_inputs(wanted, is_backward=is_backward))
    return Candidates(
        wanted=wanted,
        degrees=[int(degree) for degree in found["step_degrees"]],
        loads=[_read_loads(found, index, problem) for index in range(len(wanted))],
        rank_areas=frozen_array(found["areas"], np.int64),
        rank_recv_rows=frozen_array(found["recv_rows"], np.int64),
        rank_send_rows=frozen_array(found["send_rows"], np.int64),
    )


def choose_steps(problem: PlanProblem, candidates: Candidates, *, is_backward: bool) -> StepChoice:
    """Smallest predicted time of the slowest rank; within half a percent of it the smallest receive buffers, then the fewest steps."""
    times = [problem.cost.rank_times_us(loads, is_backward=is_backward) for loads in candidates.loads]
    limit = min(float(time.max()) for time in times) * _SAME_TIME
    fast = [index for index, time in enumerate(times) if float(time.max()) <= limit]
    best = min(fast, key=lambda index: (_rows_in_flight(candidates.loads[index]), index))
    degree, direction = candidates.degrees[best], "backward" if is_backward else "forward"
    return StepChoice(
        wanted_degree=candidates.wanted[best],
        degree=degree,
        rank_areas=candidates.rank_areas,
        rank_recv_rows=candidates.rank_recv_rows,
        rank_send_rows=candidates.rank_send_rows,
        loads=candidates.loads[best],
        rank_times_us=times[best],
        reason=_reason(problem, direction, candidates, degree, float(times[best].max())),
    )


def _rows_in_flight(loads: StepLoads) -> int:
    """Most rows any rank holds at once: those it computes with and those that arrive meanwhile."""
    rows = loads.recv_rows
    if not len(rows):
        return 0
    return int((rows[:-1] + rows[1:]).max()) if len(rows) > 1 else int(rows.max())


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


def _reason(problem: PlanProblem, direction: str, candidates: Candidates, degree: int, time_us: float) -> str:
    overlap = problem.overlap
    if degree == 0:
        return f"{direction}: no rank needs remote keys, so nothing is exchanged."
    steps = f"{degree} remote step{'s' if degree > 1 else ''} ({overlap.alg.name})"
    if not overlap.enable:
        return f"{direction}: {steps} because overlap is off."
    most = max(candidates.degrees)
    asked = overlap.dynamic_max_degree if overlap.degree is None else overlap.degree
    limits = f", fewer than the {asked} asked for: {_limit(problem, candidates.wanted[-1], most, asked)}" if most < asked else ""
    if overlap.degree is not None:
        return f"{direction}: {steps} as configured{limits}."
    machine = problem.cost.machine.name
    return f"{direction}: {steps}, best of up to {most} on {machine}: {time_us:.0f} us predicted on the slowest rank{limits}."


def _limit(problem: PlanProblem, wanted: int, most: int, asked: int) -> str:
    """Why no split has the number of steps that was asked for."""
    overlap = problem.overlap
    if wanted < asked and most == wanted:
        return f"max_num_chunks={overlap.max_num_chunks}"
    rows = f"rows do not suffice for min_chunk_size={overlap.min_chunk_size}"
    return f"each step takes what the compute before it hides, or {rows}" if problem.is_greedy else rows
