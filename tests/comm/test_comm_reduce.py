"""group_reduce equals the reference to the bit, group_reduce_lse within rounding; both repeat to the bit; two levels."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from magi_attention.comm import group_reduce, group_reduce_lse, reduce
from magi_attention.comm.reduce import merge_partials
from magi_attention.comm.reference import reduce_lse_reference, reduce_reference, two_level_reduce_reference
from magi_attention.errors import InputError
from magi_attention.plan.types import Exchange, HierarchicalExchange
from magi_attention.testing.workers import RankPool
from tests.comm.random_exchanges import assert_same_bits, make_exchanges, make_two_level, random_rows

SEEDS = tuple(range(16))
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64))  # partial, into


def _sizes(exchanges: list[Exchange]) -> tuple[list[int], list[int]]:
    return [e.num_rows_in for e in exchanges], [e.num_rows_out for e in exchanges]


def _sum_inputs(seed: int, exchanges: list[Exchange]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Per tensor (partials of every rank, into of every rank)."""
    rows_in, rows_out = _sizes(exchanges)
    found = []
    for idx, (partial_dtype, into_dtype) in enumerate(DTYPES):
        trailing = ((2, 3), (5,), ())[idx]
        found.append(
            (random_rows(seed + idx, rows_out, trailing, partial_dtype), random_rows(seed + 50 + idx, rows_in, trailing, into_dtype))
        )
    return found


def _max_rows(seed: int) -> int:
    return 400 if seed % 4 == 0 else 40  # long runs take another path than short ones


def _reduce_many(rank: int, num_ranks: int) -> list[list[torch.Tensor]]:
    found = []
    for seed in SEEDS:
        exchanges = make_exchanges(seed, num_ranks, _max_rows(seed), repeats=seed % 2 == 0, gaps=seed % 3 == 0)
        inputs = _sum_inputs(seed, exchanges)
        into = [own[rank].clone() for _, own in inputs]
        work = group_reduce(exchanges[rank], [partials[rank] for partials, _ in inputs], None, into=into, timeout_s=30, what=f"seed {seed}")
        result = work.wait()
        assert all(x is y for x, y in zip(result, into, strict=True))
        found.append(into)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_random_sums_equal_the_reference(rank_pool: RankPool, num_ranks: int) -> None:
    per_rank = rank_pool.run(num_ranks, _reduce_many)
    for idx, seed in enumerate(SEEDS):
        exchanges = make_exchanges(seed, num_ranks, _max_rows(seed), repeats=seed % 2 == 0, gaps=seed % 3 == 0)
        for tensor, (partials, into) in enumerate(_sum_inputs(seed, exchanges)):
            for rank, expected in enumerate(reduce_reference(exchanges, partials, into)):
                assert_same_bits(per_rank[rank][idx][tensor], expected, f"seed {seed} rank {rank} tensor {tensor}")


def _count_payload_copies(rank: int, num_ranks: int) -> int:
    """bf16 beside fp32 in rows of 6 bytes: the fp32 half must be copied out of the payload to be read."""
    exchange = make_exchanges(2, num_ranks)[rank]
    partials = [torch.ones(exchange.num_rows_out, 1, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    into = [torch.zeros(exchange.num_rows_in, 1) for _ in partials]
    with mock.patch.object(reduce, "read", wraps=reduce.read) as watched:
        group_reduce(exchange, partials, None, into=into).wait()
    assert torch.equal(into[0], into[1])
    return watched.call_count


def test_a_payload_is_read_once_and_not_once_per_peer(rank_pool: RankPool) -> None:
    assert rank_pool.run(4, _count_payload_copies) == [1] * 4


def _lse_inputs(seed: int, num_rows: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Partials as attention makes them: an empty row has lse -inf and out 0."""
    found = []
    for out, lse in zip(
        random_rows(seed, num_rows, (2, 4), torch.float32), random_rows(seed + 1, num_rows, (2,), torch.float32), strict=True
    ):
        is_empty = torch.arange(lse.numel()).view(lse.shape) % 3 == seed % 3
        found.append((out.masked_fill(is_empty.unsqueeze(-1), 0.0), lse.masked_fill(is_empty, -math.inf)))
    return found


def _merge_many(rank: int, num_ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for seed in SEEDS:
        exchanges = make_exchanges(seed, num_ranks, _max_rows(seed), repeats=seed % 2 == 0)
        rows_in, rows_out = _sizes(exchanges)
        repeats = []
        for _ in range(2):
            out, lse = (x.clone() for x in _lse_inputs(seed + 100, rows_in)[rank])
            partial_out, partial_lse = _lse_inputs(seed, rows_out)[rank]
            group_reduce_lse(exchanges[rank], partial_out, partial_lse, None, out=out, lse=lse, timeout_s=30).wait()
            repeats.append((out, lse))
        assert all(torch.equal(x, y) for x, y in zip(*repeats, strict=True))
        found.append(repeats[0])
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_random_merges_equal_the_reference(rank_pool: RankPool, num_ranks: int) -> None:
    per_rank = rank_pool.run(num_ranks, _merge_many)
    for idx, seed in enumerate(SEEDS):
        exchanges = make_exchanges(seed, num_ranks, _max_rows(seed), repeats=seed % 2 == 0)
        rows_in, rows_out = _sizes(exchanges)
        expected = reduce_lse_reference(exchanges, _lse_inputs(seed, rows_out), _lse_inputs(seed + 100, rows_in))
        for rank in range(num_ranks):
            out, lse = per_rank[rank][idx]
            assert torch.equal(lse == -math.inf, expected[rank][1] == -math.inf)
            assert bool((out[lse == -math.inf] == 0).all())
            torch.testing.assert_close(out.double(), expected[rank][0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse.double(), expected[rank][1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("num_rows", [0, 4])
@pytest.mark.parametrize("trailing", [(0,), (2, 0), (3,)])
def test_rows_of_nothing_are_summed_like_others(num_rows: int, trailing: tuple[int, ...]) -> None:
    runs = np.array([[0, 0, num_rows]] if num_rows else np.zeros((0, 3)), np.int32)
    into = [torch.zeros(num_rows, *trailing) for _ in range(2)]
    partials = [torch.ones(num_rows, *trailing), torch.ones(num_rows, *trailing, dtype=torch.bfloat16)]
    sums = group_reduce(Exchange(1, num_rows, num_rows, runs, runs), partials, None, into=into).wait()
    assert all(torch.equal(x, torch.ones(num_rows, *trailing)) for x in sums)


def test_merge_identities() -> None:
    out, lse = torch.randn(5, 2, 3), torch.randn(5, 2)
    empty_out, empty_lse = torch.zeros(5, 2, 3), torch.full((5, 2), -math.inf)
    merged_out, merged_lse = merge_partials(out, lse, empty_out, empty_lse)
    assert torch.equal(merged_out, out) and torch.equal(merged_lse, lse)
    merged_out, merged_lse = merge_partials(empty_out, empty_lse, empty_out, empty_lse)
    assert torch.equal(merged_out, empty_out) and torch.equal(merged_lse, empty_lse)
    merged_out, merged_lse = merge_partials(out, lse, out, lse)
    assert torch.equal(merged_out, out)
    torch.testing.assert_close(merged_lse, lse + math.log(2.0))


def _two_level(rank: int, num_ranks: int) -> list[list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    found = []
    for seed in SEEDS:
        flat, two_level = make_two_level(seed, 2, 2)
        rows_in, rows_out = _sizes(flat)
        partials, into = random_rows(seed, rows_out, (3,), torch.bfloat16)[rank], random_rows(seed + 1, rows_in, (3,), torch.float32)[rank]
        by_level = into.clone()
        group_reduce(two_level[rank], [partials], mesh, into=[by_level]).wait()
        out, lse = (x.clone() for x in _lse_inputs(seed + 100, rows_in)[rank])
        group_reduce_lse(two_level[rank], *_lse_inputs(seed, rows_out)[rank], mesh, out=out, lse=lse).wait()
        found.append([by_level, out, lse])
    return found


def test_two_level_sums_and_merges(rank_pool: RankPool) -> None:
    per_rank = rank_pool.run(4, _two_level)
    for idx, seed in enumerate(SEEDS):
        flat: list[Exchange]
        two_level: list[HierarchicalExchange]
        flat, two_level = make_two_level(seed, 2, 2)
        rows_in, rows_out = _sizes(flat)
        partials, into = random_rows(seed, rows_out, (3,), torch.bfloat16), random_rows(seed + 1, rows_in, (3,), torch.float32)
        flat_sums = reduce_reference(flat, [x.double() for x in partials], [x.double() for x in into])
        merged = reduce_lse_reference(flat, _lse_inputs(seed, rows_out), _lse_inputs(seed + 100, rows_in))
        for rank, expected in enumerate(two_level_reduce_reference(two_level, partials, into)):
            by_level, out, lse = per_rank[rank][idx]
            assert_same_bits(by_level, expected, f"seed {seed} rank {rank}")
            torch.testing.assert_close(by_level.double(), flat_sums[rank], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(out.double(), merged[rank][0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse.double(), merged[rank][1], rtol=1e-6, atol=1e-5)


def test_bad_arguments_raise_before_anything_moves() -> None:
    (exchange,) = make_exchanges(1, 1)
    partial, into = torch.zeros(exchange.num_rows_out, 2, 4), torch.zeros(exchange.num_rows_in, 2, 4)
    with pytest.raises(InputError, match=r"into\[0\] is torch.bfloat16; partial sums are accumulated in torch.float32 or"):
        group_reduce(exchange, [partial], None, into=[into.bfloat16()])
    with pytest.raises(InputError, match=r"partials\[0\] has shape .*; its first dimension must be the \d+ rows"):
        group_reduce(exchange, [torch.zeros(exchange.num_rows_out + 1, 2, 4)], None, into=[into])
    with pytest.raises(InputError, match=r"partial_lse has shape .*; it must be partial_out's"):
        group_reduce_lse(exchange, partial, torch.zeros(exchange.num_rows_out, 3), None, out=into, lse=into[..., 0])
