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
from tests.no_host_wait import no_host_wait
from tests.runtime.harness import Problem, causal, owners_of, reference

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
