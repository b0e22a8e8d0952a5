"""From a mask to one rank's plan, and to a summary of all ranks. Decides by calling the solver; knows no torch, group or kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from magi_attention import _native
from magi_attention.arguments import count
from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.cost import DEFAULT_MACHINE, CostModel, find_machine
from magi_attention.plan.dispatch import dispatch_keys, solve_dispatch
from magi_attention.plan.exchange import read_exchange
from magi_attention.plan.step_choice import PlanProblem, StepChoice, choose_both
from magi_attention.plan.types import DispatchPlan, HierarchicalExchange, RankPlan, StepPlan, frozen_array

MAX_WIDTH = 1 << 16  # of heads and head_dim: the cost of a pair then fits the solver's integers, whatever the cost factors


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan is made for, besides mask and ranks; fields as the arguments of `plan_attention`."""

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    num_nodes: int = 1
    is_same_source: bool = True
    is_q_permutable: bool = True
    is_k_permutable: bool = True
    dispatch_q: DispatchPlan | None = None
    dispatch_k: DispatchPlan | None = None
    machine: str = DEFAULT_MACHINE


def plan_attention(
    mask: AttnMask,
    cp_size: int,
    cp_rank: int,
    config: DistAttnConfig,
    *,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    num_nodes: int = 1,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    dispatch_q: DispatchPlan | None = None,
    dispatch_k: DispatchPlan | None = None,
    machine: str = DEFAULT_MACHINE,
) -> RankPlan:
    """Everything `cp_rank` executes for one mask. Equal inputs give plans that fit together on all ranks, without a message.

    Args:
        mask: the whole mask; padded by the caller when config asks for even shares.
        cp_size, cp_rank: size of the context-parallel group, our index in it.
        config: dispatch and overlap settings.
        num_heads_q, num_heads_kv, head_dim: for the cost model only.
        num_nodes: above 1 every exchange also gets its two-level form; rank = node * (cp_size / num_nodes) + index.
        is_same_source: queries and keys are the same tokens and have the same owners.
        is_q_permutable, is_k_permutable: False keeps that side in contiguous order over the ranks.
        dispatch_q, dispatch_k: owners decided before (a new mask on an old dispatch); None solves them.
        machine: row of `plan.cost.MACHINES` whose rates decide the number of steps.

    Raises:
        InputError: rank or sizes that do not fit, an unknown machine, a dispatch of other sizes.
    """
    request = PlanRequest(
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        num_nodes=num_nodes,
        is_same_source=is_same_source,
        is_q_permutable=is_q_permutable,
        is_k_permutable=is_k_permutable,
        dispatch_q=dispatch_q,
        dispatch_k=dispatch_k,
        machine=machine,
    )
    if not 0 <= cp_rank < cp_size:
        raise InputError(f"cp_rank={cp_rank!r} must be in [0, cp_size={cp_size})")
    problem, reasons = build_problem(mask, cp_size, config, request)
    forward, backward = choose_both(problem)
    forward_steps = build_steps(problem, forward, cp_rank, is_backward=False)
    is_same_split = forward.wanted_degree == backward.wanted_degree and not problem.is_greedy
    backward_steps = forward_steps if is_same_split else build_steps(problem, backward, cp_rank, is_backward=True)
    return RankPlan(
        cp_rank=cp_rank,
        cp_size=cp_size,
        dispatch_q=problem.dispatch_q,
        dispatch_k=problem.dispatch_k,
        num_local_q=int(problem.dispatch_q.rank_tokens[cp_rank]),
        num_local_k=int(problem.dispatch_k.rank_tokens[cp_rank]),
        forward=forward_steps,
        backward=backward_steps,
        rank_areas=forward.rank_areas,
        rank_recv_rows=forward.rank_recv_rows,
        rank_send_rows=forward.rank_send_rows,
        reasons=(*reasons, forward.reason, backward.reason, *_order_reason(config)),
    )


def _order_reason(config: DistAttnConfig) -> tuple[str, ...]:
    return ("deterministic: steps merge and ranks add in a fixed order, equal to the bit from run to run",) if config.deterministic else ()


def build_problem(mask: AttnMask, cp_size: int, config: DistAttnConfig, request: PlanRequest) -> tuple[PlanProblem, tuple[str, ...]]:
    """Owners of both sides (solved unless given) and the cost model: what all ranks decide alike. Also why, a sentence each."""
    if request.is_same_source and mask.total_q != mask.total_k:
        raise InputError(
            f"is_same_source=True needs as many keys as queries; total_q={mask.total_q}, total_k={mask.total_k}; "
            "pass is_same_source=False for cross attention"
        )
    for name in ("num_heads_q", "num_heads_kv", "head_dim"):
        count(name, getattr(request, name), 1, MAX_WIDTH)
    reasons: tuple[str, ...] = ()
    dispatch_q, dispatch_k = request.dispatch_q, request.dispatch_k
    if dispatch_q is None:
        is_permutable = request.is_q_permutable and (request.is_k_permutable or not request.is_same_source)
        dispatch_q, reasons = solve_dispatch(
            mask, cp_size, config.dispatch_config, is_permutable=is_permutable, is_same_source=request.is_same_source
        )
    if dispatch_k is None:
        dispatch_k = (
            dispatch_q
            if request.is_same_source
            else dispatch_keys(mask, dispatch_q, config.dispatch_config, is_permutable=request.is_k_permutable)
        )
    if dispatch_q.cp_size != cp_size:
        raise InputError(f"dispatch_q has cp_size={dispatch_q.cp_size}; the plan is for cp_size={cp_size}")
    overlap = config.overlap_config
    cost = CostModel(
        machine=find_machine(request.machine),
        num_heads_q=request.num_heads_q,
        num_heads_kv=request.num_heads_kv,
        head_dim=request.head_dim,
        calc_factor=overlap.calc_cost_factor,
        comm_factor=overlap.comm_cost_factor,
        is_overlapped=overlap.enable,
    )
    problem = PlanProblem(mask=mask, dispatch_q=dispatch_q, dispatch_k=dispatch_k, overlap=overlap, cost=cost, num_nodes=request.num_nodes)
    return problem, reasons


def build_steps(problem: PlanProblem, choice: StepChoice, cp_rank: int, *, is_backward: bool) -> tuple[StepPlan, ...]:
    """The rank's steps for a chosen split, local step first. Only this rank's transfers are made."""
    inputs = problem.solver_inputs([choice.wanted_degree], is_backward=is_backward)
    found = _native.run("plan_rank", cp_rank=cp_rank, **inputs)
    degree = int(found["degree"][0])
    assert degree == choice.degree, f"the split has {degree} steps, the choice {choice.degree}"
    return tuple(_read_step(found, step, problem) for step in range(degree + 1))


def _read_step(found: dict[str, _native.IntArray], step: int, problem: PlanProblem) -> StepPlan:
    prefix = f"{step}_"
    runs = frozen_array(found[prefix + "k_runs"].reshape(-1, 2))
    hierarchical = None
    if step and problem.num_nodes > 1:
        node_size = problem.cp_size // problem.num_nodes
        hierarchical = HierarchicalExchange(
            inter=read_exchange(found, prefix + "inter_", problem.num_nodes),
            intra=read_exchange(found, prefix + "intra_", node_size),
        )
    return StepPlan(
        exchange=read_exchange(found, prefix, problem.cp_size) if step else None,
        k_token_runs=runs,
        num_keys=int(np.diff(runs, axis=1).sum()),
        slices=frozen_array(found[prefix + "slices"].reshape(-1, 6)),
        area=int(found[prefix + "area"][0]),
        hierarchical=hierarchical,
    )
