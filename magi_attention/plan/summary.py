"""What a plan costs all ranks, for any number of them in one process: no rank's transfers are made. Prints nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from magi_attention.config import DistAttnConfig
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.build import PlanRequest, build_problem
from magi_attention.plan.cost import StepLoads
from magi_attention.plan.step_choice import PlanProblem, StepChoice, choose_both
from magi_attention.plan.types import DispatchPlan, Int64Array


@dataclass(frozen=True, kw_only=True)
class DirectionSummary:
    """Steps of forward or backward. S remote steps, R ranks.

    Attributes:
        degree: S.
        loads: pairs and rows per step and rank.
        step_times_us: float64 [S + 1, R], predicted, local step first.
        rank_times_us: float64 [R], their sums; the slowest rank is what the group waits for.
        compute_us: float64 [R], time of the same pairs without any exchange.
        recv_bytes, send_bytes: int64 [R]; backward counts k, v out and dk, dv (fp32) back.
    """

    degree: int
    loads: StepLoads
    step_times_us: npt.NDArray[np.float64]
    rank_times_us: npt.NDArray[np.float64]
    compute_us: npt.NDArray[np.float64]
    recv_bytes: Int64Array
    send_bytes: Int64Array


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """One plan as seen from outside.

    Attributes:
        machine: row of the machine table used for times.
        num_slices: of the mask; area: its visible pairs.
        dispatch_q, dispatch_k: owners.
        rank_areas, rank_tokens: int64 [R], visible pairs and query rows.
        rank_recv_rows, rank_send_rows: int64 [R], rows in one cast.
        remote_rows_lower_bound: rows that any dispatch with the same largest query share must move (see `remote_rows_lower_bound`).
        forward, backward: steps and times.
        reasons: what was chosen and why.
    """

    machine: str
    num_slices: int
    area: int
    dispatch_q: DispatchPlan
    dispatch_k: DispatchPlan
    rank_areas: Int64Array
    rank_tokens: Int64Array
    rank_recv_rows: Int64Array
    rank_send_rows: Int64Array
    remote_rows_lower_bound: int
    forward: DirectionSummary
    backward: DirectionSummary
    reasons: tuple[str, ...]

    @property
    def imbalance(self) -> float:
        """Largest over mean area; 1.0 is perfect, also for an empty mask."""
        mean = float(self.rank_areas.mean())
        return float(self.rank_areas.max()) / mean if mean > 0 else 1.0

    @property
    def remote_rows(self) -> int:
        """Rows that travel in one cast, all ranks together."""
        return int(self.rank_recv_rows.sum())


def summarize(mask: AttnMask, cp_size: int, config: DistAttnConfig, request: PlanRequest) -> PlanSummary:
    """Plan for all ranks at once and predict times.

    Args:
        mask: the whole mask.
        cp_size: ranks, R.
        config: dispatch and overlap settings.
        request: head counts, nodes, machine, permutability, given dispatches.

    Raises:
        InputError: as `plan_attention`.
    """
    problem, reasons = build_problem(mask, cp_size, config, request)
    forward, backward = choose_both(problem)
    return PlanSummary(
        machine=request.machine,
        num_slices=len(mask.slices),
        area=int(forward.rank_areas.sum()),
        dispatch_q=problem.dispatch_q,
        dispatch_k=problem.dispatch_k,
        rank_areas=forward.rank_areas,
        rank_tokens=problem.dispatch_q.rank_tokens,
        rank_recv_rows=forward.rank_recv_rows,
        rank_send_rows=forward.rank_send_rows,
        remote_rows_lower_bound=remote_rows_lower_bound(mask, int(problem.dispatch_q.rank_tokens.max(initial=0))),
        forward=_describe(problem, forward, is_backward=False),
        backward=_describe(problem, backward, is_backward=True),
        reasons=(*reasons, forward.reason, backward.reason),
    )


def _describe(problem: PlanProblem, choice: StepChoice, *, is_backward: bool) -> DirectionSummary:
    row_bytes = problem.cost.row_bytes(False)
    return_bytes = problem.cost.row_bytes(True) if is_backward else 0.0
    return DirectionSummary(
        degree=choice.degree,
        loads=choice.loads,
        step_times_us=problem.cost.step_times_us(choice.loads, is_backward=is_backward),
        rank_times_us=choice.rank_times_us,
        compute_us=np.asarray(choice.rank_areas * problem.cost.pair_us(is_backward), np.float64),
        recv_bytes=(choice.rank_recv_rows * row_bytes + choice.rank_send_rows * return_bytes).astype(np.int64),
        send_bytes=(choice.rank_send_rows * row_bytes + choice.rank_recv_rows * return_bytes).astype(np.int64),
    )


def remote_rows_lower_bound(mask: AttnMask, max_rank_tokens: int) -> int:
    """Rows that must travel whatever the dispatch, when no rank owns more than `max_rank_tokens` query rows.

    A key that v queries see is needed by at least ceil(v / max_rank_tokens) ranks, of which one may own it. O(total_k) memory.
    """
    if not max_rank_tokens:
        return 0
    num_viewers = queries_per_key(mask)
    return int(np.maximum(0, -(-num_viewers // max_rank_tokens) - 1).sum())


def queries_per_key(mask: AttnMask) -> Int64Array:
    """int64 [total_k]: how many queries see each key.

    Along the keys of one tightened slice the count is min(q_end - 1, k - lo) - max(q_start, k - hi) + 1, linear in between
    three corners at most; second differences of all slices are summed and integrated twice.
    """
    total = mask.total_k
    slopes = np.zeros(total + 2, np.int64)  # change of slope that takes effect from this key to the next
    jumps = np.zeros(total + 2, np.int64)  # change of value at this key
    q_start, q_end, k_start, k_end, lo, hi = mask.slices.astype(np.int64).T

    def add_limited(corner: Int64Array, first_value: Int64Array, sign: int, *, rises_before: bool) -> None:
        # A function that rises by one a key on one side of the corner and is flat on the other, inside [k_start, k_end).
        corner = np.clip(corner, k_start, k_end - 1)
        rise_start, rise_end = (k_start, corner) if rises_before else (corner, k_end - 1)
        np.add.at(jumps, k_start, sign * first_value)
        np.add.at(slopes, rise_start, sign)
        np.add.at(slopes, rise_end, -sign)
        np.add.at(jumps, k_end, -sign * (first_value + (rise_end - rise_start)))

    # last row: rises until k = q_end - 1 + lo; first row: flat until k = q_start + hi.
    add_limited(q_end - 1 + lo, np.minimum(q_end - 1, k_start - lo), 1, rises_before=True)
    add_limited(q_start + hi, np.maximum(q_start, k_start - hi) - 1, -1, rises_before=False)
    steps = jumps[:total].copy()
    steps[1:] += np.cumsum(slopes)[: max(total - 1, 0)]
    return np.asarray(np.cumsum(steps), np.int64)
