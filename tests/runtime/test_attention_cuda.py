"""Distributed attention of CUDA tensors: over NCCL with a GPU per rank, over gloo with ranks that share one, in one level and in two."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from magi_attention.comm import comm_group
from magi_attention.config import DistAttnConfig, GrpCollConfig
from magi_attention.runtime.attention import dist_attention
from magi_attention.runtime.tokens import dispatch, undispatch
from magi_attention.testing.workers import RankPool
from tests.kernels.cuda import why_not
from tests.no_host_wait import no_host_wait
from tests.runtime.harness import Problem, assert_near_twins, causal, eager, owners_of, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROBLEM = Problem(causal([300, 20, 1], left=150), 400, chunk_size=16, degree=3, dtype=torch.float64, uses_lse=True, sink_layout="sh")


def attend_on_rank(rank: int, num_ranks: int, num_nodes: int, backend: str) -> list[list[torch.Tensor]]:
    """Whole results and gradients of three calls; the last two may not make the host wait when rows travel by NCCL."""
    problem = Problem(**{**vars(PROBLEM), "num_nodes": num_nodes})
    plan = problem.plan(num_ranks, rank)
    shape = (num_nodes, num_ranks // num_nodes)
    group = comm_group(init_device_mesh("cuda", shape, mesh_dim_names=("inter", "intra")) if num_nodes > 1 else None)
    owners = owners_of(plan.dispatch_q, rank, group=group)
    whole = {name: x.cuda() for name, x in problem.inputs().items()}
    config = DistAttnConfig(kernel_backend="blocked", grpcoll_config=GrpCollConfig(timeout_s=60.0))
    found = []
    for call in range(3):
        leaves = {name: whole[name].clone().requires_grad_() for name in ("q", "k", "v", "sink")}
        with no_host_wait(call > 0 and backend == "nccl"):
            q, k, v = (dispatch(leaves[name], owners) for name in "qkv")
            out, lse, _ = dist_attention(q, k, v, plan, group, config, sink=leaves["sink"], return_max_logits=True)
            out, lse = undispatch(out, owners), undispatch(lse, owners)
            loss = (out * whole["dout"]).sum() + (lse * whole["dlse"]).sum()
            grads = torch.autograd.grad(loss, list(leaves.values()))
            torch.full((1 << 20,), torch.nan, device="cuda")  # takes memory that was freed too early, if there is any
        found.append([x.detach().cpu() for x in (out, lse, *grads)])
    return found


@pytest.mark.parametrize(("backend", "num_ranks", "num_nodes"), [("nccl", 2, 1), ("gloo", 3, 1), ("gloo", 4, 2)])
def test_attention_over_ranks(backend: str, num_ranks: int, num_nodes: int) -> None:
    if backend == "nccl" and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"NCCL needs a GPU per rank; {torch.cuda.device_count()} here")
    pool = RankPool(backend)
    try:
        per_rank = pool.run(num_ranks, attend_on_rank, num_nodes, backend, timeout_s=120)
    finally:
        pool.close()
    exact = reference(PROBLEM)
    for calls in per_rank:
        for name, values in zip(("out", "lse", "dq", "dk", "dv"), zip(*calls, strict=True), strict=False):
            for value in values:
                torch.testing.assert_close(value, exact[name], rtol=0, atol=1e-11)
    for call in range(3):
        shares = sum(calls[call][5] for calls in per_rank)
        torch.testing.assert_close(shares, exact["dsink"], rtol=0, atol=1e-10)


# ---- compiled kernels ----

HALF = Problem(
    causal([900, 70, 1, 300], left=350), 1300, num_heads_q=8, num_heads_kv=2, head_dim=128, dtype=torch.bfloat16, chunk_size=64, degree=3,
    uses_lse=True, sink_layout="sh", deterministic=True,
)  # fmt: skip


def attend_compiled_on_rank(rank: int, num_ranks: int) -> list[dict[str, torch.Tensor]]:
    """Whole results and gradients of three calls, each step merged in place by the kernel."""
    plan = HALF.plan(num_ranks, rank)
    owners = owners_of(plan.dispatch_q, rank)
    whole = {name: x.cuda() for name, x in HALF.inputs().items()}
    config = DistAttnConfig(kernel_backend="ffa", deterministic=True, grpcoll_config=GrpCollConfig(timeout_s=60.0))
    found = []
    for _ in range(3):
        leaves = {name: whole[name].clone().requires_grad_() for name in ("q", "k", "v", "sink")}
        q, k, v = (dispatch(leaves[name], owners) for name in "qkv")
        out, lse, max_logits = dist_attention(q, k, v, plan, None, config, sink=leaves["sink"], return_max_logits=True)
        out, lse = undispatch(out, owners), undispatch(lse, owners)
        loss = (out.float() * whole["dout"].float()).sum() + (lse * whole["dlse"]).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        names = ("out", "lse", "max_logits", "dq", "dk", "dv", "dsink")
        found.append({name: x.detach().cpu() for name, x in zip(names, (out, lse, max_logits, *grads), strict=True)})
    return found


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
@pytest.mark.parametrize(("backend", "num_ranks"), [("nccl", 2), ("gloo", 1), ("gloo", 3)])
def test_compiled_kernels_over_ranks(backend: str, num_ranks: int) -> None:
    if backend == "nccl" and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"NCCL needs a GPU per rank; {torch.cuda.device_count()} here")
    pool = RankPool(backend)
    try:
        per_rank = pool.run(num_ranks, attend_compiled_on_rank, timeout_s=120)
    finally:
        pool.close()
    twins = reference(HALF), eager(HALF)
    for calls in per_rank:
        for call in calls:
            assert all(torch.equal(value, calls[0][name]) for name, value in call.items()), "equal calls differ"
    ours = {name: per_rank[0][0][name] for name in ("out", "lse", "max_logits", "dq", "dk", "dv")}
    ours["dsink"] = torch.stack([calls[0]["dsink"] for calls in per_rank]).sum(0)
    assert_near_twins(ours, twins, f"{num_ranks} ranks, {backend}: ")
