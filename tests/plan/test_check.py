"""The checks themselves: each way to break a plan is found, and the text says where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from magi_attention.mask import builders
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.check import PlanError, check_own_plan, check_plans
from magi_attention.plan.types import Exchange, RankPlan, StepPlan, frozen_array
from tests.plan.plans import contiguous_dispatch, overlap, plan_all


def mask_and_plans(num_nodes: int = 1) -> tuple[AttnMask, list[RankPlan]]:
    mask = builders.sliding_window(96, 96, (None, 0))
    return mask, plan_all(mask, contiguous_dispatch(96, 4), overlap(2), num_nodes=num_nodes)


def with_step(plan: RankPlan, index: int, **changes: object) -> RankPlan:
    """The plan with one forward step changed."""
    steps = list(plan.forward)
    steps[index] = dataclasses.replace(steps[index], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(plan, forward=tuple(steps))


def changed_exchange(step: StepPlan, **changes: object) -> Exchange:
    assert step.exchange is not None
    return dataclasses.replace(step.exchange, **changes)  # type: ignore[arg-type]


def drop_slice(plan: RankPlan) -> RankPlan:
    return with_step(plan, 1, slices=plan.forward[1].slices[1:])


def double_slice(plan: RankPlan) -> RankPlan:
    return with_step(plan, 1, slices=np.repeat(plan.forward[1].slices, 2, axis=0))


def widen_band(plan: RankPlan) -> RankPlan:
    slices = plan.forward[0].slices.copy()
    slices[0, 5] += 1
    return with_step(plan, 0, slices=slices)


def wrong_area(plan: RankPlan) -> RankPlan:
    return with_step(plan, 1, area=plan.forward[1].area - 1)


def shifted_keys(plan: RankPlan) -> RankPlan:
    # Both ends still agree in numbers, but the buffer claims other tokens than the neighbours': the local slices move with it.
    return with_step(plan, 1, k_token_runs=plan.forward[1].k_token_runs + 1)


def repeated_keys(plan: RankPlan) -> RankPlan:
    return with_step(plan, 2, k_token_runs=plan.forward[1].k_token_runs)


def outside_rows(plan: RankPlan) -> RankPlan:
    slices = plan.forward[1].slices.copy()
    slices[-1, 3] = plan.forward[1].num_keys + 1
    return with_step(plan, 1, slices=slices)


def receive_hole(plan: RankPlan) -> RankPlan:
    step = plan.forward[1]
    assert step.exchange is not None
    return with_step(plan, 1, exchange=changed_exchange(step, recv=step.exchange.recv[:-1]))


def send_outside(plan: RankPlan) -> RankPlan:
    step = plan.forward[1]
    send = frozen_array(np.array([[0, plan.num_local_k - 1, 2]]))
    return with_step(plan, 1, exchange=changed_exchange(step, send=send))


def stated_area(plan: RankPlan) -> RankPlan:
    return dataclasses.replace(plan, rank_areas=plan.rank_areas + 1)


OWN = [
    (drop_slice, "rank 3 forward step 1"),
    (double_slice, "rank 3 forward step 1"),
    (widen_band, "rank 3 forward step 0"),
    (wrong_area, "rank 3 forward step 1"),
    (shifted_keys, "rank 3 forward"),
    (repeated_keys, "rank 3 forward"),
    (outside_rows, "rank 3 forward step 1"),
    (receive_hole, "rank 3 forward step 1"),
    (send_outside, "rank 3 forward step 1"),
    (stated_area, "rank 3 forward"),
]


@pytest.mark.parametrize(("damage", "where"), OWN, ids=[damage.__name__ for damage, _ in OWN])
def test_one_rank_finds_damage(damage: Callable[[RankPlan], RankPlan], where: str) -> None:
    mask, plans = mask_and_plans()
    check_own_plan(mask, plans[3])
    with pytest.raises(PlanError, match=where):
        check_own_plan(mask, damage(plans[3]))


@pytest.mark.parametrize("damage", [damage for damage, _ in OWN], ids=[damage.__name__ for damage, _ in OWN])
def test_all_ranks_find_damage(damage: Callable[[RankPlan], RankPlan]) -> None:
    mask, plans = mask_and_plans()
    with pytest.raises(PlanError):
        check_plans(mask, [*plans[:3], damage(plans[3])])


def test_ends_that_disagree_are_named() -> None:
    mask, plans = mask_and_plans()
    step = plans[0].forward[1]
    assert step.exchange is not None
    send = step.exchange.send.copy()
    send[-1, 2] -= 1
    with pytest.raises(PlanError, match=rf"rank 0 sends \d+ rows to rank {send[-1, 0]}.*expected"):
        check_plans(mask, [with_step(plans[0], 1, exchange=changed_exchange(step, send=send)), *plans[1:]])


def test_different_numbers_of_steps_are_named() -> None:
    mask, plans = mask_and_plans()
    with pytest.raises(PlanError, match="numbers of steps differ"):
        check_plans(mask, [dataclasses.replace(plans[0], forward=plans[0].forward[:-1]), *plans[1:]])


def test_a_broken_relay_is_named() -> None:
    mask, plans = mask_and_plans(num_nodes=2)
    check_plans(mask, plans)
    step = plans[3].forward[1]
    assert step.hierarchical is not None
    recv = step.hierarchical.intra.recv.copy()
    recv[[0, -1], 1] = recv[[-1, 0], 1]
    broken = dataclasses.replace(step.hierarchical, intra=dataclasses.replace(step.hierarchical.intra, recv=recv))
    with pytest.raises(PlanError, match="node 1"):
        check_plans(mask, [*plans[:3], with_step(plans[3], 1, hierarchical=broken)])


def test_plan_of_another_mask_names_the_cells() -> None:
    _, plans = mask_and_plans()
    other = builders.sliding_window(96, 96, (40, 0))
    with pytest.raises(PlanError, match="of which the mask has"):
        check_own_plan(other, plans[3])
