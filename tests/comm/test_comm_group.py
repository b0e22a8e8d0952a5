"""The group record: process groups, meshes, one rank, wrong groups; agreement between ranks; gather and its transpose."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from magi_attention.comm import SINGLE, agree, comm_group, gather, gather_rows, scatter_reduce_rows
from magi_attention.errors import InputError
from magi_attention.plan.types import DispatchPlan, frozen_array
from magi_attention.testing.workers import RankPool
from tests.comm.random_exchanges import assert_same_bits, make_dispatch, random_tensor


def test_without_torch_distributed_there_is_one_rank_and_no_communicator() -> None:
    assert comm_group(None) is SINGLE and SINGLE.is_single and not SINGLE.is_two_level
    assert comm_group(SINGLE) is SINGLE
    with pytest.raises(InputError, match="no communicator"):
        _ = SINGLE.flat
    with pytest.raises(InputError, match=r"torch.distributed is not initialised"):
        comm_group("cp")
    agree(None, "mask", b"1", "one")


def _message(group: object) -> str:
    try:
        comm_group(group)
    except InputError as error:
        return str(error)
    return "no error"


def _groups_of_four(rank: int, num_ranks: int) -> dict[str, object]:
    world = comm_group(None)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    two_level = comm_group(mesh)
    strips = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    one_d = comm_group(strips["cp"])
    thin = comm_group(init_device_mesh("cpu", (1, 4), mesh_dim_names=("inter", "intra")))
    pair = dist.new_group([0, 1])
    alone = dist.new_group([rank], use_local_synchronization=True)
    gone = dist.new_group([0, 1, 2, 3])
    gone_record = comm_group(gone)
    dist.destroy_process_group(gone)
    facts: dict[str, object] = {
        "world": (world.rank, world.size, world.members, world.num_nodes, world.backends["cpu"], world.flat is dist.group.WORLD),
        "two_level": (two_level.rank, two_level.size, two_level.num_nodes, two_level.is_two_level, two_level.members),
        "two_level_groups": (two_level.inter is mesh.get_group(0), two_level.intra is mesh.get_group(1), two_level.flat.size()),
        "one_d": (one_d.rank, one_d.size, one_d.members),
        "thin": (thin.rank, thin.size, thin.num_nodes),
        "same": (comm_group(dist.group.WORLD) is world, comm_group(mesh) is two_level, comm_group(strips["cp"]) is one_d),
        "identities": len({world.identity, two_level.identity, one_d.identity, gone_record.identity}),
        "alone": (comm_group(alone).is_single, comm_group(alone).members),
        "pair": _message(pair),
        "gone": _message(gone),
        "type": _message("cp"),
        "3d": _message(init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))),
        "cuda": "",
    }
    try:
        world.backend_for(torch.device("meta"))
    except InputError as error:
        facts["cuda"] = str(error)
    del gone, pair
    gc.collect()
    try:
        _ = gone_record.flat
        facts["gone_record"] = "alive"
    except InputError as error:
        facts["gone_record"] = str(error)
    return facts


def test_groups_and_meshes(rank_pool: RankPool) -> None:
    for rank, facts in enumerate(rank_pool.run(4, _groups_of_four)):
        assert facts["world"] == (rank, 4, (0, 1, 2, 3), 1, "gloo", True)
        assert facts["two_level"] == (rank, 4, 2, True, (0, 1, 2, 3))
        assert facts["two_level_groups"] == (True, True, 4)
        assert facts["one_d"] == (rank % 2, 2, (rank // 2 * 2, rank // 2 * 2 + 1))
        assert facts["thin"] == (rank, 4, 1)
        assert facts["same"] == (True, True, True)
        assert facts["identities"] == 4
        assert facts["alone"] == (True, (rank,))
        expected = (
            "no error" if rank < 2 else f"cp_group_or_mesh does not contain this process (global rank {rank}); pass the group this rank"
        )
        assert str(facts["pair"]).startswith(expected)
        assert "no longer knows" in str(facts["gone"])
        assert "'cp' is a str; it must be a torch.distributed.ProcessGroup, a DeviceMesh" in str(facts["type"])
        assert "has 3 dimensions; it must have one, or two (inter, intra)" in str(facts["3d"])
        assert "tensor on meta: the group of global ranks [0, 1, 2, 3] only serves" in str(facts["cuda"])
        assert "was destroyed" in str(facts["gone_record"])


def _mesh_beside_others(rank: int, num_ranks: int) -> tuple[int, tuple[int, ...], int]:
    """A (inter, intra) part of a larger mesh: its flat group is made by its members alone."""
    whole = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "inter", "intra"))
    part = comm_group(whole["inter", "intra"])
    ones = torch.ones(1)
    dist.all_reduce(ones, group=part.flat)
    return part.num_nodes, part.members, int(ones)


def test_submesh(rank_pool: RankPool) -> None:
    assert rank_pool.run(4, _mesh_beside_others) == [(2, (0, 1, 2, 3), 4)] * 4


# ---- agreement ----


def _agree(rank: int, num_ranks: int, values: tuple[str, ...]) -> str:
    try:
        agree(None, "mask of the key", values[rank].encode(), lambda: f"mask {values[rank]}", timeout_s=20)
    except InputError as error:
        return str(error)
    return "agreed"


def test_disagreement_is_the_same_error_on_every_rank(rank_pool: RankPool) -> None:
    assert rank_pool.run(3, _agree, ("a", "a", "a")) == ["agreed"] * 3
    texts = rank_pool.run(3, _agree, ("a", "b", "a"))
    assert len(set(texts)) == 1
    assert "disagree" in texts[0]
    assert "  - ranks 0, 2: mask of the key: mask a\n  - rank 1: mask of the key: mask b" in texts[0]


def _agree_on_labels(rank: int, num_ranks: int) -> str:
    try:
        agree(None, f"call {rank}", b"same", "same", timeout_s=20)
    except InputError as error:
        return str(error)
    return "agreed"


def test_ranks_at_different_calls_disagree(rank_pool: RankPool) -> None:
    texts = rank_pool.run(2, _agree_on_labels)
    assert len(set(texts)) == 1 and "rank 0: call 0: same" in texts[0] and "rank 1: call 1: same" in texts[0]


# ---- gather ----

GATHER_SEEDS = tuple(range(12))
GATHER_DTYPES = (torch.int64, torch.bfloat16, torch.bool, torch.float32)


def _gather(rank: int, num_ranks: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    found = []
    for seed in GATHER_SEEDS:
        dispatch = make_dispatch(seed, num_ranks)
        whole = random_tensor(seed, dispatch.total_tokens, (3,) if seed % 2 else (), GATHER_DTYPES[seed % 4])
        local = whole[torch.from_numpy(dispatch.position_ids(rank))]
        partials = random_tensor(seed + 100 + rank, dispatch.total_tokens, (2,), torch.bfloat16)
        sums = scatter_reduce_rows(partials, dispatch, None)
        doubles = scatter_reduce_rows(partials.double(), dispatch, None)
        found.append((gather_rows(local, dispatch, None), sums, doubles))
    return found


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_gather_and_scatter_reduce(rank_pool: RankPool, num_ranks: int) -> None:
    per_rank = rank_pool.run(num_ranks, _gather)
    for idx, seed in enumerate(GATHER_SEEDS):
        dispatch = make_dispatch(seed, num_ranks)
        whole = random_tensor(seed, dispatch.total_tokens, (3,) if seed % 2 else (), GATHER_DTYPES[seed % 4])
        partials = [random_tensor(seed + 100 + rank, dispatch.total_tokens, (2,), torch.bfloat16) for rank in range(num_ranks)]
        total, total_double = (torch.zeros(dispatch.total_tokens, 2, dtype=dtype) for dtype in (torch.float32, torch.float64))
        for partial in partials:
            total += partial
            total_double += partial
        for rank in range(num_ranks):
            rows = torch.from_numpy(dispatch.position_ids(rank))
            gathered, sums, doubles = per_rank[rank][idx]
            assert_same_bits(gathered, whole, f"gather seed {seed} rank {rank}")
            assert_same_bits(sums, total.bfloat16()[rows], f"sum seed {seed} rank {rank}")
            assert_same_bits(doubles, total_double[rows], f"fp64 sum seed {seed} rank {rank}")


class _NewStorages(TorchDispatchMode):
    """Bytes of every storage that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known]
        self.sizes += [x.untyped_storage().nbytes() for x in made]
        return result


ROUND_BYTES = 1 << 16


def _gather_in_rounds(rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """New storages of a gather and of its transpose, after checking both; in every second dispatch the last rank owns nothing."""
    for seed in range(6):
        owners = np.random.default_rng(seed).integers(0, num_ranks - seed % 2, 250)
        dispatch = DispatchPlan(4000, 16, num_ranks, frozen_array(owners))
        whole = random_tensor(seed, 4000, (32,), torch.float32)
        local = whole[torch.from_numpy(dispatch.position_ids(rank))]
        in_one = gather_rows(local, dispatch, None), scatter_reduce_rows(whole * (rank + 1), dispatch, None)
        partial = whole * (rank + 1)
        with mock.patch.object(gather, "ROUND_BYTES", ROUND_BYTES):
            with _NewStorages() as forward:
                gathered = gather_rows(local, dispatch, None)
            with _NewStorages() as backward:
                sums = scatter_reduce_rows(partial, dispatch, None)
        assert torch.equal(gathered, in_one[0]) and torch.equal(gathered, whole) and torch.equal(sums, in_one[1]), f"seed {seed}"
    return forward.sizes, backward.sizes


def test_a_large_gather_holds_only_its_result_and_a_round(rank_pool: RankPool) -> None:
    """Not the tensor once more to send and once more to receive."""
    whole_bytes = 4000 * 32 * 4
    for forward, backward in rank_pool.run(4, _gather_in_rounds):
        assert sorted(forward)[-1] == whole_bytes, "the result"
        assert sorted(forward)[-2] <= 1.5 * ROUND_BYTES
        local_bytes = sorted(backward)[-1]
        assert local_bytes < whole_bytes / 2 and sorted(backward)[-3] <= 1.5 * ROUND_BYTES, "fp32 sums and their copy, then rounds"


def test_gather_refuses_wrong_rows() -> None:
    dispatch = make_dispatch(1, 1)
    with pytest.raises(InputError, match=r"x_local has shape .*; its first dimension must be \d+ rows by the dispatch plan"):
        gather_rows(torch.zeros(dispatch.total_tokens + 1), dispatch, None)
    with pytest.raises(InputError, match=r"x_global_partial is torch.int64; only floating point"):
        scatter_reduce_rows(torch.zeros(dispatch.total_tokens, dtype=torch.int64), dispatch, None)
    with pytest.raises(InputError, match="planned for 2 ranks but the group has 1"):
        gather_rows(torch.zeros(int(make_dispatch(1, 2).rank_tokens[0])), make_dispatch(1, 2), None)
