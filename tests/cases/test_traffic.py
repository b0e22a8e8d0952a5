"""Cases D19 and D20: several groups at work at the same time, and our exchanges beside those of the user and of FSDP."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from magi_attention import api
from magi_attention.comm import comm_group
from magi_attention.testing.workers import RankPool
from tests.runtime.harness import Problem, as_numpy, assert_parity, causal, forward_on_rank, small

CONCURRENT = Problem(causal([40, 24]), 64, num_heads_q=2, num_heads_kv=1, head_dim=8, chunk_size=4, degree=2)
NUM_SEEDS = 3  # steps repeat this many problems, so that each step can be compared to the bit with a checked one

Arrays = dict[str, np.ndarray]


def calls_on_group(group: Any, problem: Problem, num_steps: int, first_seed: int) -> list[Arrays]:
    """Results of the first NUM_SEEDS steps; every later step must repeat one of them."""
    found: list[Arrays] = []
    own = comm_group(group)
    for step in range(num_steps):
        call = forward_on_rank(small(problem, seed=first_seed + step % NUM_SEEDS), own.rank, own.size, group=own)
        call.backward()
        arrays = call.arrays()
        if step < NUM_SEEDS:
            found.append(arrays)
        else:
            assert all(np.array_equal(array, found[step % NUM_SEEDS][name]) for name, array in arrays.items()), f"step {step}"
    return found


# ---- D19 ----


def two_groups_on_rank(rank: int, num_ranks: int, num_steps: int, num_nodes: int) -> list[Arrays]:
    """Even and odd ranks each work on their own sequence at the same time; flat, or as 2 x 2 meshes with the two-level transport."""
    grid = [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    if num_nodes > 1:
        group = DeviceMesh("cpu", grid, mesh_dim_names=("parity", "inter", "intra"))["inter", "intra"]
    else:
        group = [dist.new_group(list(range(first, num_ranks, 2))) for first in (0, 1)][rank % 2]
    return calls_on_group(group, small(CONCURRENT, num_nodes=num_nodes), num_steps, first_seed=100 * (rank % 2))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_nodes", (1, 2), ids=("flat", "two_levels"))
def test_d19_two_groups_at_once(rank_pool: RankPool, num_nodes: int) -> None:
    per_rank = rank_pool.run(8, two_groups_on_rank, 50, num_nodes, timeout_s=120)
    for parity in (0, 1):
        for seed in range(NUM_SEEDS):
            problem = small(CONCURRENT, seed=100 * parity + seed)
            assert_parity(problem, [per_rank[rank][seed] for rank in range(parity, 8, 2)])


def mesh_on_rank(rank: int, num_ranks: int, num_steps: int, is_cp_outermost: bool) -> tuple[int, list[Arrays]]:
    """cp 2 x tp 4; every tp rank has its own heads (here: its own seeds)."""
    shape, names = ((2, 4), ("cp", "tp")) if is_cp_outermost else ((4, 2), ("tp", "cp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    tp_rank = mesh["tp"].get_local_rank()
    return tp_rank, calls_on_group(mesh["cp"].get_group(), CONCURRENT, num_steps, first_seed=100 * tp_rank)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_cp_outermost", (True, False), ids=("cp_outermost", "cp_innermost"))
def test_d19_context_and_tensor_parallel(rank_pool: RankPool, is_cp_outermost: bool) -> None:
    per_rank = rank_pool.run(8, mesh_on_rank, 50, is_cp_outermost, timeout_s=120)
    for wanted in range(4):
        parts = [found for tp_rank, found in per_rank if tp_rank == wanted]
        assert len(parts) == 2
        for seed in range(NUM_SEEDS):
            assert_parity(small(CONCURRENT, seed=100 * wanted + seed), [part[seed] for part in parts])


# ---- D20 ----


class Layer(torch.nn.Module):
    """Attention with its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 64)
        self.project = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, key: api.DistAttnKey) -> torch.Tensor:
        q, k, v = (part.unflatten(1, (-1, 8)) for part in self.qkv(x).split([32, 16, 16], 1))
        return x + self.project(api.calc_attn(q, k, v, key)[0].flatten(1))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor, key: api.DistAttnKey) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, key)
        return x


def one_step(model: torch.nn.Module, key: api.DistAttnKey, seed: int, dtype: torch.dtype) -> Arrays:
    """out of the whole sequence, and each parameter's gradient as the framework leaves it."""
    whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model.zero_grad()
    out = model(api.dispatch(whole, key), key)
    out.square().sum().backward()
    found = {"out": api.undispatch(out.detach(), key)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    return {name: as_numpy(tensor) for name, tensor in found.items()}


def make_key() -> api.DistAttnKey:
    return api.magi_attn_varlen_key([0, 40, 64], [0, 40, 64], 4, 2, 8, 0, None, causal=True, chunk_size=4)


def alone_on_rank(rank: int, num_ranks: int, dtype: torch.dtype) -> list[Arrays]:
    return [one_step(Model().to(dtype), make_key(), seed, dtype) for seed in range(NUM_SEEDS)]


def beside_other_traffic_on_rank(rank: int, num_ranks: int, num_steps: int) -> list[Arrays]:
    """A sharded model whose all-gathers, and an all-reduce of the user, are in flight while our exchanges run."""
    model, other = Model(), dist.new_group(list(range(num_ranks)))
    mesh = init_device_mesh("cpu", (num_ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    key, found = make_key(), []
    for step in range(num_steps):
        for layer in model.layers:
            layer.unshard(async_op=True)  # all-gathers of all layers start now; each is waited for when its layer runs
        summed = torch.full((5000,), float(rank + step))
        work = dist.all_reduce(summed, group=other, async_op=True)
        arrays = one_step(model, key, step % NUM_SEEDS, torch.float32)
        work.wait()
        assert float(summed[-1]) == num_ranks * (num_ranks - 1) / 2 + num_ranks * step
        if step < NUM_SEEDS:
            found.append(arrays)
        else:
            assert all(np.array_equal(array, found[step % NUM_SEEDS][name]) for name, array in arrays.items()), f"step {step}"
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("num_ranks", "num_steps"), [(2, 200), (8, 25)])
def test_d20_beside_fsdp_and_collectives_of_the_user(rank_pool: RankPool, num_ranks: int, num_steps: int) -> None:
    (exact,) = rank_pool.run(1, alone_on_rank, torch.float64)
    (alone,) = rank_pool.run(1, alone_on_rank, torch.float32)
    for found in rank_pool.run(num_ranks, beside_other_traffic_on_rank, num_steps, timeout_s=120):
        for ours, one, reference in zip(found, alone, exact, strict=True):
            for name, array in ours.items():
                scale = 1 if name == "out" else num_ranks  # the framework averages gradients over ranks
                budget = 2 * np.abs(one[name] - reference[name]).max() + 1e-5
                assert np.abs(array * scale - reference[name]).max() <= budget, f"{name} on {num_ranks} ranks"
