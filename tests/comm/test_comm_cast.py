"""group_cast against the row-at-a-time reference, to the bit: random exchanges, every dtype, gaps, views, two levels, one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from magi_attention.comm import group_cast
from magi_attention.comm.reference import cast_reference, two_level_cast_reference
from magi_attention.errors import InputError
from magi_attention.plan.types import Exchange
from magi_attention.testing.workers import RankPool
from tests.comm.random_exchanges import DTYPES, assert_same_bits, make_exchanges, make_two_level, random_rows

SEEDS = tuple(range(24))
TRAILING = ((), (3,), (2, 4), (5,), (0,), (1,))


def _inputs(seed: int, num_rows: list[int]) -> list[list[torch.Tensor]]:
    """[tensor][rank]: one to three tensors with different dtypes and row shapes."""
    rng = np.random.default_rng(seed + 10_000)
    count = int(rng.integers(1, 4))
    return [
        random_rows(seed * 7 + idx, num_rows, TRAILING[rng.integers(len(TRAILING))], DTYPES[rng.integers(len(DTYPES))])
        for idx in range(count)
    ]


def _cast_many(rank: int, num_ranks: int, gaps: bool) -> list[list[torch.Tensor]]:
    found = []
    for seed in SEEDS:
        exchanges = make_exchanges(seed, num_ranks, repeats=seed % 3 == 0, gaps=gaps)
        inputs = _inputs(seed, [exchange.num_rows_in for exchange in exchanges])
        found.append(group_cast(exchanges[rank], [x[rank] for x in inputs], None, timeout_s=30, what=f"seed {seed}").wait())
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("gaps", [False, True])
def test_random_casts_equal_the_reference(rank_pool: RankPool, num_ranks: int, gaps: bool) -> None:
    per_rank = rank_pool.run(num_ranks, _cast_many, gaps)
    for idx, seed in enumerate(SEEDS):
        exchanges = make_exchanges(seed, num_ranks, repeats=seed % 3 == 0, gaps=gaps)
        inputs = _inputs(seed, [exchange.num_rows_in for exchange in exchanges])
        for tensor, rows in enumerate(inputs):
            for rank, expected in enumerate(cast_reference(exchanges, rows)):
                assert_same_bits(per_rank[rank][idx][tensor], expected, f"seed {seed} rank {rank} tensor {tensor}")


def _cast_views_into_out(rank: int, num_ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Strided rows (a slice of fused qkv), requires_grad inputs, and given outputs that keep their uncovered rows."""
    found = []
    for seed in SEEDS[:8]:
        exchange = make_exchanges(seed, num_ranks, gaps=True)[rank]
        qkv = random_rows(seed, [exchange.num_rows_in] * num_ranks, (3, 2, 4), torch.float32)[rank].requires_grad_()
        out = [torch.full((exchange.num_rows_out, 2, 4), 7.0) for _ in range(2)]
        work = group_cast(exchange, [qkv[:, 1], qkv[:, 2].transpose(1, 2).contiguous().transpose(1, 2)], None, out=out)
        k, v = work.wait()
        assert k is out[0] and v is out[1] and work.wait()[0] is k
        found.append((k, v))
    return found


def test_strided_inputs_and_given_outputs(rank_pool: RankPool) -> None:
    per_rank = rank_pool.run(3, _cast_views_into_out)
    for idx, seed in enumerate(SEEDS[:8]):
        exchanges = make_exchanges(seed, 3, gaps=True)
        qkv = [random_rows(seed, [e.num_rows_in] * 3, (3, 2, 4), torch.float32)[rank] for rank, e in enumerate(exchanges)]
        covered = cast_reference(exchanges, [torch.ones(e.num_rows_in, 1, 1, dtype=torch.bool) for e in exchanges])
        for tensor in (0, 1):
            for rank, expected in enumerate(cast_reference(exchanges, [x[:, tensor + 1] for x in qkv])):
                assert_same_bits(per_rank[rank][idx][tensor], torch.where(covered[rank], expected, 7.0), f"seed {seed} rank {rank}")


def _cast_two_level(rank: int, num_ranks: int, shape: tuple[int, int]) -> list[list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("inter", "intra"))
    found = []
    for seed in SEEDS[:12]:
        flat, two_level = make_two_level(seed, *shape)
        rows = [exchange.num_rows_in for exchange in flat]
        tensors = [random_rows(seed, rows, (2, 3), torch.bfloat16)[rank], random_rows(seed + 1, rows, (), torch.int64)[rank]]
        first = group_cast(two_level[rank], tensors, mesh)
        second = group_cast(flat[rank], tensors, mesh)
        found.append([*first.wait(), *second.wait()])
    return found


@pytest.mark.parametrize("shape", [(2, 2)])
def test_two_level_casts_equal_flat_ones(rank_pool: RankPool, shape: tuple[int, int]) -> None:
    per_rank = rank_pool.run(4, _cast_two_level, shape)
    for idx, seed in enumerate(SEEDS[:12]):
        flat, two_level = make_two_level(seed, *shape)
        rows = [exchange.num_rows_in for exchange in flat]
        for tensor, inputs in enumerate((random_rows(seed, rows, (2, 3), torch.bfloat16), random_rows(seed + 1, rows, (), torch.int64))):
            expected = cast_reference(flat, inputs)
            by_level = two_level_cast_reference(two_level, inputs)
            for rank in range(4):
                assert_same_bits(by_level[rank], expected[rank], f"references, seed {seed} rank {rank}")
                assert_same_bits(per_rank[rank][idx][tensor], expected[rank], f"two levels, seed {seed} rank {rank}")
                assert_same_bits(per_rank[rank][idx][2 + tensor], expected[rank], f"flat, seed {seed} rank {rank}")


def test_one_rank_without_torch_distributed() -> None:
    for seed in SEEDS:
        (exchange,) = make_exchanges(seed, 1, gaps=True)
        x = random_rows(seed, [exchange.num_rows_in], (4,), torch.float32)
        assert_same_bits(group_cast(exchange, x, None).wait()[0], cast_reference([exchange], x)[0], f"seed {seed}")


def test_a_whole_buffer_of_one_tensor_is_not_copied_twice() -> None:
    exchange = Exchange(1, 4, 4, np.array([[0, 0, 4]], np.int32), np.array([[0, 0, 4]], np.int32))
    x, out = torch.randn(4, 3), torch.empty(4, 3)
    assert_same_bits(group_cast(exchange, [x], None, out=[out]).wait()[0], x, "in place")


@pytest.mark.parametrize(
    ("tensors", "out", "text"),
    [
        ([], None, r"tensors is empty"),
        ([torch.zeros(())], None, r"tensors\[0\] has shape \(\)"),
        ([torch.zeros(4, 2), torch.zeros(5, 2)], None, r"tensors\[1\] has shape \(5, 2\); its first dimension must be the 4 rows"),
        ([torch.zeros(4, 2)], [], r"out is empty"),
        ([torch.zeros(4, 2)], [torch.zeros(4, 2), torch.zeros(4, 2)], r"out has 2 tensors for 1 inputs"),
        ([torch.zeros(4, 2)], [torch.zeros(4, 3)], r"out\[0\] has row shape \(3,\), its input \(2,\)"),
        ([torch.zeros(4, 2)], [torch.zeros(2, 4).t()], r"out\[0\] .*must be contiguous"),
        ([torch.zeros(4, 2)], [torch.zeros(4, 2, dtype=torch.float64)], r"out\[0\] is torch.float64, tensors\[0\] torch.float32"),
    ],
)
def test_bad_arguments_raise_before_anything_moves(tensors: list[torch.Tensor], out: list[torch.Tensor] | None, text: str) -> None:
    exchange = Exchange(1, 4, 4, np.array([[0, 0, 4]], np.int32), np.array([[0, 0, 4]], np.int32))
    with pytest.raises(InputError, match=text):
        group_cast(exchange, tensors, None, out=out)


def test_exchange_of_another_group_size_raises() -> None:
    with pytest.raises(InputError, match="planned for 2 ranks but the group has 1"):
        group_cast(make_exchanges(0, 2)[0], [torch.zeros(1)], None)
    with pytest.raises(InputError, match="hierarchical but the group of global ranks \\[0\\] is flat"):
        group_cast(make_two_level(0, 2, 2)[1][0], [torch.zeros(1)], None)
