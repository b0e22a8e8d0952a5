"""What a wrong call meets: local errors before any message, and in check mode the same error on every rank."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from magi_attention.config import DistAttnConfig
from magi_attention.errors import CommError, InputError, UnsupportedError
from magi_attention.runtime.attention import dist_attention
from magi_attention.runtime.collectives import all_gather, all_reduce
from magi_attention.runtime.single import single_rank_plan
from magi_attention.testing.workers import RankPool
from tests.runtime.harness import Problem, causal, forward_on_rank, small

BASE = Problem(causal([40, 24]), 64, chunk_size=8, degree=2)
PLAN = single_rank_plan(BASE.mask.slices, 64, 64, BASE.mask.area())


def tensors(num_tokens: int = 64, num_heads_kv: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(num_tokens, heads, 16) for heads in (4, num_heads_kv, num_heads_kv)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[:63], k, v), r"q has 63 rows.* rank 0 of 1 64 tokens"),
        (lambda q, k, v: (q, k[:10], v[:10]), r"k has 10 rows"),
        (lambda q, k, v: (q, k, v[:10]), r"v: 10 rows"),
        (lambda q, k, v: (q[None], k, v), r"q: shape \[1, 64, 4, 16\] has 4 dimensions"),
        (lambda q, k, v: (q.bfloat16(), k, v), r"k: dtype torch.float32, but q has torch.bfloat16"),
        (lambda q, k, v: (q[:, :3], k, v), r"num_heads_q=3, num_heads_kv=2"),
        (lambda q, k, v: (q, k[..., :8], v), r"k: head_dim 8"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), r"q: dtype torch.int32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        dist_attention(*change(*tensors()), PLAN)  # type: ignore[operator]


def test_sinks_that_do_not_fit_are_named() -> None:
    q, k, v = tensors()
    with pytest.raises(InputError, match="sink_layout"):
        dist_attention(q, k, v, PLAN, sink=torch.zeros(1, 4), sink_layout="hs")
    with pytest.raises(InputError, match="sink"):
        dist_attention(q, k, v, PLAN, sink=torch.zeros(1, 3))
    with pytest.raises(InputError, match="sink"):
        dist_attention(q, k, v, PLAN, sink=torch.zeros(63, 1, 4), sink_layout="ssh")


def test_a_kernel_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="ffa"):
        dist_attention(*tensors(), PLAN, config=DistAttnConfig(kernel_backend="ffa"))


def test_a_group_of_another_size_is_refused() -> None:
    plan = BASE.plan(2, 0)
    q, k, v = tensors(plan.num_local_q)
    with pytest.raises(InputError, match="rank 0 of 2"):
        dist_attention(q, k, v, plan)


def outcome_on_rank(rank: int, num_ranks: int, case: str) -> str:
    """The error of one call in check mode, or "none"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAGI_CHECK", "1")
        plan = BASE.plan(num_ranks, rank)
        q, k, v = tensors(plan.num_local_q, 1 if case == "heads" and rank == 1 else 2)
        k.requires_grad_("requires grad" not in case or (case == "k requires grad" and rank == 0))
        q.requires_grad_(case == "q requires grad" and rank == 0)
        sink = torch.zeros(1, 4, requires_grad=case == "sink requires grad" and rank == 0)
        if case == "mask" and rank == 1:
            plan = small(BASE, slices=causal([20, 44])).plan(num_ranks, rank, dispatch_q=plan.dispatch_q, dispatch_k=plan.dispatch_k)
        if case == "nan in q" and rank == 1:
            q[3] = torch.nan
        scale = 0.5 if case == "scale" and rank == 0 else 1.0
        try:
            with torch.set_grad_enabled(case != "grad mode" or rank == 0):
                out, _, _ = dist_attention(q, k, v, plan, sink=sink, softmax_scale=scale)
            if case == "nan in dout":
                out.backward(torch.full_like(out, torch.nan if rank == 0 else 1.0))
        except (InputError, FloatingPointError) as error:
            return str(error)
    return "none"


@pytest.mark.parametrize("case", ("heads", "k requires grad", "q requires grad", "sink requires grad", "grad mode", "mask", "scale"))
def test_ranks_that_disagree_all_hear_of_it(rank_pool: RankPool, case: str) -> None:
    first, second = rank_pool.run(2, outcome_on_rank, case)
    assert first == second
    assert "disagree" in first


@pytest.mark.parametrize(("case", "words"), [("nan in q", "out .* on rank 1"), ("nan in dout", "dout .* on rank 0")])
def test_a_nan_is_named_on_every_rank(rank_pool: RankPool, case: str, words: str) -> None:
    first, second = rank_pool.run(2, outcome_on_rank, case)
    assert first == second
    assert re.search(words, first), first


def test_check_mode_lets_right_calls_pass(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, outcome_on_rank, "right") == ["none", "none"]


def test_broken_plans_are_refused_in_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI_CHECK", "1")
    step = PLAN.forward[0]
    past_the_end = np.array([[0, 65, 0, 64, -1000, 0]], np.int32)
    for broken in (dataclasses.replace(step, num_keys=63), dataclasses.replace(step, slices=past_the_end)):
        with pytest.raises(AssertionError, match="forward step 0 of rank 0"):
            dist_attention(*tensors(), dataclasses.replace(PLAN, forward=(broken,)))


def test_one_rank_in_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI_CHECK", "1")
    call = forward_on_rank(BASE, 0, 1)
    call.backward()
    assert np.isfinite(call.arrays()["dq"]).all()


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("all_reduce", lambda group: all_reduce(torch.zeros(3), group, "the loss")),
        ("all_gather", lambda group: all_gather(torch.zeros(3), group, "the loss")),
    ],
)
def test_lost_peers_of_small_collectives_are_comm_errors(monkeypatch: pytest.MonkeyPatch, op: str, call: Callable[[Any], object]) -> None:
    def lost(*args: object, **options: object) -> None:
        raise RuntimeError("Connection closed by peer\nand more")

    monkeypatch.setattr(dist, op, lost)
    group = mock.Mock(**{"rank.return_value": 1, "size.return_value": 3})
    with pytest.raises(CommError, match=rf"{op} of the loss \(12 bytes\) failed on rank 1 of 3: Connection closed by peer; look"):
        call(group)
