"""A problem of the harness as a user runs it: key, dispatch, calc_attn, undispatch, whole gradients. Rank functions for the cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from magi_attention import api
from magi_attention.testing.workers import RankPool
from tests.runtime.harness import Problem, as_numpy, assert_near_twins, eager, reference

Arrays = dict[str, np.ndarray]


def run_with_key(problem: Problem, key: api.DistAttnKey) -> Arrays:
    """out, lse, dq, dk, dv in global order, whole on every rank."""
    whole = {name: x.requires_grad_(name in "qkv") for name, x in problem.inputs().items()}
    local = [api.dispatch(whole[name], key) for name in "qkv"]
    out_local, meta = api.calc_attn(*local, key, softmax_scale=problem.softmax_scale, softcap=problem.softcap)
    out = api.undispatch(out_local, key)
    grads = torch.autograd.grad(out, [whole[name] for name in "qkv"], whole["dout"])
    found = {"out": out, "lse": api.undispatch(meta.lse, key), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    return {name: as_numpy(tensor) for name, tensor in found.items()}


def documents_on_rank(rank: int, num_ranks: int, problem: Problem, cu_seqlens: list[int], masks: Sequence[dict[str, Any]]) -> list[Arrays]:
    """One run per entry of `masks` (causal, window_size, ... of the key), each planned anew."""
    found = []
    for options in masks:
        api.clear_cache()
        heads = (problem.num_heads_q, problem.num_heads_kv, problem.head_dim)
        key = api.magi_attn_varlen_key(cu_seqlens, cu_seqlens, *heads, 0, None, **options)
        assert key.pad_size == 0 and key.plan.rank_areas.sum() == problem.mask.area()
        found.append(run_with_key(problem, key))
    return found


def check_documents(
    rank_pool: RankPool, rank_counts: Sequence[int], problem: Problem, cu_seqlens: list[int], masks: Sequence[dict[str, Any]]
) -> None:
    """Rule NUM at each number of ranks for each way to say the mask; every rank has the whole result, the same to the bit."""
    twins = reference(problem), eager(problem)
    for num_ranks in rank_counts:
        first, *others = rank_pool.run(num_ranks, documents_on_rank, problem, cu_seqlens, masks, timeout_s=120)
        for idx, options in enumerate(masks):
            assert all(np.array_equal(found[idx][name], array) for found in others for name, array in first[idx].items()), "ranks differ"
            ours = {name: torch.from_numpy(array) for name, array in first[idx].items()}
            assert len(ours["out"]) == cu_seqlens[-1] and ours["out"].abs().max() > 0 and ours["lse"].isfinite().all()
            assert_near_twins(ours, twins, f"{options} on {num_ranks} ranks: ")
