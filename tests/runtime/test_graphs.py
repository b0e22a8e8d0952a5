"""How autograd uses distributed attention: interleaving, checkpointing, partial requirements, layouts, autocast, poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from magi_attention.comm import comm_group
from magi_attention.runtime.attention import dist_attention
from magi_attention.runtime.single import single_rank_plan
from magi_attention.testing.workers import RankPool
from tests.poison import NUMBERS
from tests.runtime.harness import Problem, assert_parity, causal, forward_on_rank, full, poisoned_on_rank, run_on_rank, small

BASE = Problem(causal([30, 50, 16], left=20), 96, chunk_size=8, degree=2, uses_lse=True)
OTHER = small(BASE, slices=full(96, 96), num_heads_q=6, num_heads_kv=3, head_dim=8, seed=5, sink_layout="sh")
CROSS = small(BASE, slices=full(96, 41), total_k=41, seed=9)


def interleaved_on_rank(rank: int, num_ranks: int) -> list[dict[str, np.ndarray]]:
    first, second, third = (forward_on_rank(problem, rank, num_ranks) for problem in (BASE, OTHER, CROSS))
    first.backward()
    third.backward()
    second.backward()
    return [call.arrays() for call in (first, second, third)]


@pytest.mark.parametrize("num_ranks", (1, 2, 3))
def test_interleaved_micro_batches(rank_pool: RankPool, num_ranks: int) -> None:
    apart = rank_pool.run(num_ranks, run_on_rank, [BASE, OTHER, CROSS])
    together = rank_pool.run(num_ranks, interleaved_on_rank)
    for expected, got in zip(apart, together, strict=True):
        for idx in range(3):
            assert all(expected[idx][name].tobytes() == got[idx][name].tobytes() for name in expected[idx])


def checkpointed_on_rank(rank: int, num_ranks: int, use_reentrant: bool) -> list[tuple[np.ndarray, ...]]:
    """Gradients of two checkpointed calls whose backward runs in forward order, then of the same without checkpointing."""
    found = []
    for uses_checkpoint in (True, False):
        losses, leaves = [], []
        for problem in (BASE, OTHER):
            call = forward_on_rank(problem, rank, num_ranks)  # only to get local leaves
            own = [leaf.detach().clone().requires_grad_() for name, leaf in call.leaves.items() if name != "sink"]

            def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any = call.plan) -> torch.Tensor:
                out, lse, _ = dist_attention(q, k, v, plan)
                return out.square().sum() + torch.where(lse.isfinite(), lse, 0).sum()

            losses.append(checkpoint(run, *own, use_reentrant=use_reentrant) if uses_checkpoint else run(*own))
            leaves.append(own)
        for loss in losses:
            loss.backward()
        found.append(tuple(leaf.grad.numpy().copy() for own in leaves for leaf in own))
    return found


@pytest.mark.parametrize("use_reentrant", (True, False), ids=("reentrant", "not_reentrant"))
def test_activation_checkpointing(rank_pool: RankPool, use_reentrant: bool) -> None:
    for with_checkpoint, without in rank_pool.run(2, checkpointed_on_rank, use_reentrant):
        assert all(np.array_equal(a, b) for a, b in zip(with_checkpoint, without, strict=True))


def partial_on_rank(rank: int, num_ranks: int) -> dict[str, list[np.ndarray | None]]:
    """Gradients with only some inputs requiring one, in a group where the others agree."""
    found = {}
    for wanted in ("qkv", "q", "k", "v", "kv"):
        call = forward_on_rank(BASE, rank, num_ranks)
        own = {name: leaf.detach().clone().requires_grad_(name in wanted) for name, leaf in call.leaves.items()}
        out, _, _ = dist_attention(own["q"], own["k"], own["v"], call.plan)
        out.backward(call.dout)
        found[wanted] = [None if own[name].grad is None else own[name].grad.numpy().copy() for name in "qkv"]
    return found


def test_only_asked_gradients_are_returned(rank_pool: RankPool) -> None:
    for found in rank_pool.run(2, partial_on_rank):
        for wanted, grads in found.items():
            for name, grad, whole in zip("qkv", grads, found["qkv"], strict=True):
                assert (grad is not None) == (name in wanted)
                assert grad is None or np.array_equal(grad, whole), f"d{name} when only {wanted} require it"


def layouts_on_rank(rank: int, num_ranks: int) -> dict[str, list[np.ndarray]]:
    """The same numbers in other strides: transposed, sliced out of a fused tensor, broadcast dout, every second column."""
    call = forward_on_rank(BASE, rank, num_ranks)
    q, k, v = (call.leaves[name].detach() for name in "qkv")

    def run(views: Callable[[torch.Tensor], torch.Tensor], dout: torch.Tensor) -> list[np.ndarray]:
        own = [views(x).requires_grad_() for x in (q, k, v)]
        out, lse, _ = dist_attention(own[0], own[1], own[2], call.plan)
        grads = torch.autograd.grad(out, own, dout)
        return [x.detach().numpy().copy() for x in (out, lse, *grads)]

    def fused(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)], 2)[:, :, x.shape[2] : 2 * x.shape[2]].detach()

    def strided(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(2, 2)[..., ::2].detach()

    wide = call.dout.repeat_interleave(2, 2)[..., ::2]
    return {
        "contiguous": run(torch.clone, call.dout),
        "heads first": run(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1).detach(), call.dout),
        "fused": run(fused, call.dout),
        "every second column": run(strided, wide),
        "ones": run(torch.clone, torch.ones_like(call.dout)),
        "broadcast": run(torch.clone, torch.ones(1, 1, 1).expand_as(call.dout)),
    }


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_strides_change_nothing(rank_pool: RankPool, num_ranks: int) -> None:
    for found in rank_pool.run(num_ranks, layouts_on_rank):
        for name in ("heads first", "fused", "every second column"):
            assert all(np.array_equal(a, b) for a, b in zip(found[name], found["contiguous"], strict=True)), name
        assert all(np.array_equal(a, b) for a, b in zip(found["broadcast"], found["ones"], strict=True))


def shared_on_rank(rank: int, num_ranks: int) -> float:
    """One tensor used as q, k and v, and its result used twice."""
    problem = small(BASE, num_heads_q=2, num_heads_kv=2, dtype=torch.float64)
    call = forward_on_rank(problem, rank, num_ranks)
    apart = [call.leaves["q"].detach().clone().requires_grad_() for _ in range(3)]
    out, lse, _ = dist_attention(*apart, call.plan)
    (2 * (out * call.dout).sum() + lse.sum()).backward()
    one = apart[0].detach().clone().requires_grad_()
    out, lse, _ = dist_attention(one, one, one, call.plan)
    ((out * call.dout).sum() + (call.dout * out).sum() + lse.sum()).backward()
    return float((one.grad - sum(x.grad for x in apart)).abs().max())


def test_one_tensor_in_several_roles(rank_pool: RankPool) -> None:
    assert max(rank_pool.run(2, shared_on_rank)) < 1e-12


def autocast_on_rank(rank: int, num_ranks: int) -> tuple[str, str, bool]:
    problem = small(BASE, dtype=torch.float32)
    call = forward_on_rank(problem, rank, num_ranks)
    own = [call.leaves[name].detach().clone().requires_grad_() for name in "qkv"]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse, _ = dist_attention(*own, call.plan)
        (out.float() * call.dout).sum().backward()  # backward inside the context must not lower its fp32 sums
    halved = [leaf.detach().to(torch.bfloat16).requires_grad_() for leaf in own]
    plain, _, _ = dist_attention(*halved, call.plan)
    (plain.float() * call.dout).sum().backward()
    same = all(torch.equal(a.grad, b.grad.float()) for a, b in zip(own, halved, strict=True)) and torch.equal(out, plain)
    return str(out.dtype), str(lse.dtype), same


def test_autocast_casts_the_inputs(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, autocast_on_rank) == [("torch.bfloat16", "torch.float32", True)] * 2


@pytest.mark.parametrize("number", NUMBERS)
def test_uninitialised_memory_never_shows(rank_pool: RankPool, number: str) -> None:
    """Rows outside every slice, ranks without work and empty buffers, with new memory full of NaN or of +inf."""
    holes = small(BASE, slices=[[10, 30, 0, 20, -1000, 0], [50, 52, 90, 96, -1000, 1000]])
    problems = [holes, BASE, OTHER, small(BASE, slices=[])]
    per_rank = rank_pool.run(3, poisoned_on_rank, problems, number)
    for problem, parts in zip(problems, zip(*per_rank, strict=True), strict=True):
        assert_parity(problem, parts)


def test_one_rank_needs_no_torch_distributed() -> None:
    """D27: in this process torch.distributed is not initialised; equal to the single-device plan to the bit."""
    assert not dist.is_initialized()
    call = forward_on_rank(BASE, 0, 1)
    call.backward()
    mask = BASE.mask
    plan = single_rank_plan(mask.slices, mask.total_q, mask.total_k, mask.area())
    single = forward_on_rank(BASE, 0, 1, plan=plan)
    single.backward()
    ours, plain = call.arrays(), single.arrays()
    assert all(ours[name].tobytes() == plain[name].tobytes() for name in ours)
    assert not dist.is_initialized()


def test_later_layers_plan_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A07: with the same plan no slice is looked at again, forward or backward."""
    call = forward_on_rank(BASE, 0, 1)
    call.backward()
    monkeypatch.setattr("magi_attention.runtime.attention.prepare", None)
    monkeypatch.setattr("magi_attention._native.run", None)
    again = forward_on_rank(BASE, 0, 1, plan=call.plan)
    again.backward()
    assert np.array_equal(again.arrays()["dk"], call.arrays()["dk"])


def two_level_on_rank(rank: int, num_ranks: int, problems: list[Problem]) -> list[dict[str, np.ndarray]]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("inter", "intra"))
    found = []
    for problem in problems:
        plan = problem.plan(num_ranks, rank)
        assert all(step.hierarchical is not None for step in (*plan.forward[1:], *plan.backward[1:]))
        call = forward_on_rank(problem, rank, num_ranks, group=comm_group(mesh), plan=plan)
        call.backward()
        found.append(call.arrays())
    return found


def test_two_level_mesh(rank_pool: RankPool) -> None:
    problems = [small(problem, num_nodes=2) for problem in (BASE, OTHER, CROSS, small(BASE, slices=[]))]
    per_rank = rank_pool.run(4, two_level_on_rank, problems)
    for problem, parts in zip(problems, zip(*per_rank, strict=True), strict=True):
        assert_parity(problem, parts, "2 x 2 mesh: ")
