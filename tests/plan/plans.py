"""Plans for tests: all ranks of one mask, random owners. Knows no device."""

from __future__ import annotations

import numpy as np

from magi_attention.config import DistAttnConfig, GreedyOverlapAlg, OverlapConfig, UniformOverlapAlg
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.build import plan_attention
from magi_attention.plan.types import DispatchPlan, RankPlan, StepPlan, frozen_array

HEADS = {"num_heads_q": 8, "num_heads_kv": 2, "head_dim": 64}
CHUNK_SIZES = (1, 3, 8, 16, 61, 1000)


def overlap(degree: int | None = None, *, min_rows: int = 1, greedy: bool = False, **fields: object) -> DistAttnConfig:
    """A config with a fixed or free number of remote steps, tiny steps allowed."""
    alg = GreedyOverlapAlg() if greedy else UniformOverlapAlg()
    return DistAttnConfig(overlap_config=OverlapConfig(degree=degree, min_chunk_size=min_rows, alg=alg, **fields))  # type: ignore[arg-type]


def dispatch_of(owners: list[int] | np.ndarray, chunk_size: int, total: int, cp_size: int) -> DispatchPlan:
    return DispatchPlan(total, chunk_size, cp_size, frozen_array(np.asarray(owners, np.int32)))


def random_dispatch(rng: np.random.Generator, total: int, cp_size: int) -> DispatchPlan:
    """Any owner for any chunk; about one in four leaves some ranks without a token."""
    chunk_size = int(rng.choice(CHUNK_SIZES))
    num_used = cp_size if rng.random() < 0.75 else int(rng.integers(1, cp_size + 1))
    return dispatch_of(rng.integers(0, num_used, size=-(-total // chunk_size)), chunk_size, total, cp_size)


def contiguous_dispatch(total: int, cp_size: int) -> DispatchPlan:
    chunk_size = max(1, -(-total // cp_size))
    return dispatch_of(np.arange(-(-total // chunk_size)), chunk_size, total, cp_size)


def zigzag_dispatch(total: int, cp_size: int) -> DispatchPlan:
    assert total % (2 * cp_size) == 0
    return dispatch_of([*range(cp_size), *reversed(range(cp_size))], total // (2 * cp_size), total, cp_size)


def plan_all(
    mask: AttnMask, dispatch_q: DispatchPlan, config: DistAttnConfig, *, dispatch_k: DispatchPlan | None = None, num_nodes: int = 1
) -> list[RankPlan]:
    """The plans of all ranks, each made on its own as ranks do."""
    return [
        plan_attention(
            mask,
            dispatch_q.cp_size,
            rank,
            config,
            **HEADS,
            num_nodes=num_nodes,
            is_same_source=dispatch_k is None,
            dispatch_q=dispatch_q,
            dispatch_k=dispatch_k,
        )
        for rank in range(dispatch_q.cp_size)
    ]


def remote_steps(plan: RankPlan) -> tuple[StepPlan, ...]:
    return plan.forward[1:]
