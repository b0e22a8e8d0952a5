"""Where steps are cut: sizes, degrees, what greedy hides, what the choice weighs."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention.config import AttnOverlapMode, DistAttnConfig, GreedyOverlapAlg, OverlapConfig
from magi_attention.mask import builders
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.build import PlanRequest, build_problem
from magi_attention.plan.step_choice import PlanProblem, StepChoice, candidate_degrees, choose_both, measure_candidates
from magi_attention.plan.types import DispatchPlan
from tests.plan.plans import contiguous_dispatch, dispatch_of, overlap, plan_all, remote_steps, zigzag_dispatch


def causal(total: int) -> AttnMask:
    return builders.from_cu_seqlens([0, total], [0, total], causal=True)


def problem_of(mask: AttnMask, dispatch: DispatchPlan, config: DistAttnConfig, heads: tuple[int, int, int] = (64, 8, 128)) -> PlanProblem:
    request = PlanRequest(num_heads_q=heads[0], num_heads_kv=heads[1], head_dim=heads[2], dispatch_q=dispatch)
    return build_problem(mask, dispatch.cp_size, config, request)[0]


def choice_of(mask: AttnMask, dispatch: DispatchPlan, config: DistAttnConfig) -> StepChoice:
    return choose_both(problem_of(mask, dispatch, config))[0]


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 7])
def test_equal_parts_are_about_equal_and_whole_tiles(degree: int) -> None:
    total = 8 * 1024
    for plan in plan_all(builders.sliding_window(total, total, None), contiguous_dispatch(total, 4), overlap(degree, min_rows=512)):
        rows = [step.num_keys for step in remote_steps(plan)]
        assert len(rows) == degree and sum(rows) == total * 3 // 4
        mean = total * 3 / 4 / degree
        assert all(abs(count - mean) <= max(128.0, mean / 8) for count in rows), rows
        assert all(count % 128 == 0 for count in rows)


def test_cuts_keep_to_the_edges_of_runs() -> None:
    # Rank 0 needs two runs of 1,000 and 1,040 rows: halving would cut 20 rows into the second one.
    mask = AttnMask.from_ranges([[0, 8], [0, 8]], [[2000, 3000], [4000, 5040]], None, 8000, 8000)
    plan = plan_all(mask, contiguous_dispatch(8000, 8), overlap(2))[0]
    assert sorted(step.k_token_runs.tolist() for step in remote_steps(plan)) == [[[2000, 3000]], [[4000, 5040]]]


@pytest.mark.parametrize("greedy", [False, True])
def test_no_step_is_smaller_than_asked(greedy: bool) -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        total = int(rng.integers(200, 3000))
        dispatch = dispatch_of(rng.integers(0, 3, size=-(-total // 64)), 64, total, 3)
        min_rows = int(rng.integers(1, 400))
        plans = plan_all(causal(total), dispatch, overlap(6, min_rows=min_rows, greedy=greedy))
        for plan in plans:
            rows = [step.num_keys for step in remote_steps(plan) if step.num_keys]
            assert len(rows) <= 1 or min(rows) >= min_rows, rows
        assert max(step.num_keys for plan in plans for step in remote_steps(plan)[-1:]) > 0, "no step is empty on all ranks"


def test_ranks_with_few_rows_join_in_with_none() -> None:
    # Rank 1 needs 1 row, rank 3 needs 64: four steps for all, three of them empty on rank 1.
    mask = AttnMask.from_ranges([[32, 33], [100, 128]], [[0, 1], [0, 64]], None, 128, 128)
    plans = plan_all(mask, contiguous_dispatch(128, 4), overlap(4))
    assert [len(plan.forward) for plan in plans] == [5] * 4
    assert [step.num_keys for step in remote_steps(plans[1])] == [1, 0, 0, 0]
    assert [step.num_keys for step in remote_steps(plans[0])] == [0, 0, 0, 0]
    assert all(step.exchange is not None for plan in plans for step in remote_steps(plan)), "every rank enters"


def test_owners_are_asked_evenly_in_each_step() -> None:
    """Each chunk of a zigzag window has two readers: they take it in different steps."""
    mask, dispatch = builders.sliding_window(1 << 12, 1 << 12, (1 << 8, 0)), zigzag_dispatch(1 << 12, 8)
    loads = choice_of(mask, dispatch, overlap(2)).loads
    assert (loads.send_rows.sum(axis=0) <= 512).all()
    assert loads.send_rows.max() < 512, "no owner sends everything in one step"
    assert loads.send_rows.max(axis=1).sum() <= 1.5 * loads.send_rows.sum(axis=0).max(), loads.send_rows.tolist()


# ---- degrees ----


def test_candidates() -> None:
    assert candidate_degrees(OverlapConfig(enable=False, degree=5)) == [1]
    assert candidate_degrees(OverlapConfig(degree=5)) == [5], "a given degree is kept, whatever the mode"
    assert candidate_degrees(OverlapConfig(degree=5, mode=AttnOverlapMode.STATIC)) == [5]
    assert candidate_degrees(OverlapConfig(dynamic_max_degree=3)) == [1, 2, 3]
    assert candidate_degrees(OverlapConfig(dynamic_max_degree=14)) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14]
    assert candidate_degrees(OverlapConfig(dynamic_max_degree=9, max_num_chunks=2)) == [*range(1, 9), 9]
    assert candidate_degrees(OverlapConfig(dynamic_max_degree=9, max_num_chunks=2, alg=GreedyOverlapAlg())) == [1, 2]


def test_small_work_takes_one_step_and_large_work_many() -> None:
    assert choice_of(causal(4_096), zigzag_dispatch(4_096, 4), DistAttnConfig()).degree == 1, "latency decides"
    assert choice_of(causal(1 << 20), zigzag_dispatch(1 << 20, 8), DistAttnConfig()).degree > 1, "time is equal, memory decides"


def test_choice_is_no_slower_than_any_candidate() -> None:
    for total in (1 << 12, 1 << 15, 1 << 18):
        problem = problem_of(causal(total), contiguous_dispatch(total, 8), DistAttnConfig())
        for is_backward, choice in zip((False, True), choose_both(problem), strict=True):
            candidates = measure_candidates(problem, is_backward=is_backward)
            fastest = min(problem.cost.rank_times_us(loads, is_backward=is_backward).max() for loads in candidates.loads)
            assert choice.rank_times_us.max() <= fastest * 1.005


def test_slow_exchange_changes_the_choice() -> None:
    # A long exchange: in parts, all but the last hide the compute of the part before.
    mask, dispatch = builders.sliding_window(1 << 15, 1 << 15, None), contiguous_dispatch(1 << 15, 8)
    degrees = [
        choice_of(mask, dispatch, DistAttnConfig(overlap_config=OverlapConfig(comm_cost_factor=factor))).degree for factor in (1e-3, 30.0)
    ]
    assert degrees[0] < degrees[1]


def test_reasons_say_what_was_chosen() -> None:
    plans = plan_all(causal(256), contiguous_dispatch(256, 2), overlap(9, min_rows=64))
    assert any("2 remote steps" in reason and "min_chunk_size=64" in reason for reason in plans[0].reasons), plans[0].reasons


def test_reasons_say_why_fewer_steps_came_than_were_asked_for() -> None:
    def reason(config: DistAttnConfig) -> str:
        return choice_of(causal(2048), contiguous_dispatch(2048, 4), config).reason

    assert reason(overlap(3)) == "forward: 3 remote steps (uniform) as configured."
    assert "3 remote steps (greedy) as configured, fewer than the 8 asked for: max_num_chunks=3" in reason(
        overlap(8, greedy=True, max_num_chunks=3, calc_cost_factor=1e-6)
    )
    hidden = reason(overlap(8, greedy=True, calc_cost_factor=1e6))
    assert "1 remote step (greedy)" in hidden and "each step takes what the compute before it hides" in hidden
    assert "best of up to 3" in reason(overlap(None, min_rows=512)) and "min_chunk_size=512" in reason(overlap(None, min_rows=512))
    assert "asked for" not in reason(overlap(None))


# ---- greedy ----


def test_greedy_steps_hide_under_the_step_before() -> None:
    total = 1 << 17
    config = overlap(None, greedy=True, min_rows=512)
    problem = problem_of(causal(total), zigzag_dispatch(total, 8), config)
    choice = choose_both(problem)[0]
    cost, loads = problem.cost, choice.loads
    areas = [loads.local_areas, *loads.areas]
    for step, rows in enumerate(loads.recv_rows):
        exchange = rows * cost.row_us(False, crosses_nodes=False) + cost.start_us(crosses_nodes=False)
        assert (exchange <= areas[step] * cost.pair_us(False)).all(), f"step {step + 1} is not hidden"


def test_greedy_first_step_is_as_large_as_the_local_work() -> None:
    """Little local work hides few rows; more of it hides more."""
    total = 1 << 16
    first_rows = []
    for window in (64, 4_096):
        near = builders.sliding_window(total, total, (window, 0)).slices
        # Rank 7 also reads all of rank 0..6 with its last 512 rows.
        far = np.array([[total - 512, total, 0, total - total // 8 - window, -(1 << 30), 1 << 30]], np.int32)
        mask = AttnMask.from_slices(np.concatenate([near, far]), total, total)
        choice = choice_of(mask, contiguous_dispatch(total, 8), overlap(8, greedy=True))
        first_rows.append(int(choice.loads.recv_rows[0, 7]))
    assert 0 < first_rows[0] < first_rows[1]


def test_greedy_stops_at_its_bound() -> None:
    config = DistAttnConfig(
        overlap_config=OverlapConfig(
            alg=GreedyOverlapAlg(), min_chunk_size=1, max_num_chunks=3, dynamic_max_degree=50, comm_cost_factor=1e6
        )
    )
    assert choice_of(causal(4_096), contiguous_dispatch(4_096, 4), config).degree <= 3
