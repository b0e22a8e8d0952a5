"""The CUDA path: side streams, no host wait, buffers kept while in flight. Over gloo on one GPU, over NCCL with a GPU per rank."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from magi_attention.comm import comm_group, gather, gather_rows, group_cast, group_reduce, group_reduce_lse, scatter_reduce_rows
from magi_attention.comm.reference import cast_reference, reduce_lse_reference, reduce_reference
from magi_attention.testing.workers import RankPool
from tests.comm.random_exchanges import assert_same_bits, make_dispatch, make_exchanges, random_rows, random_tensor
from tests.no_host_wait import no_host_wait

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SEEDS = tuple(range(12))


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def cuda_pool(request: pytest.FixtureRequest) -> Iterator[tuple[RankPool, int]]:
    """(pool, ranks): gloo ranks share device 0."""
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL needs a GPU per rank; {torch.cuda.device_count()} here")
    pool = RankPool(request.param)
    yield pool, (2 if request.param == "nccl" else 3)
    pool.close()


def _exchange_behind_work(seed: int, rank: int, num_ranks: int) -> list[torch.Tensor]:
    """Inputs are still being computed when the exchange starts; memory is reused at once afterwards; results are read at once."""
    exchanges = make_exchanges(seed, num_ranks, 2000 if seed % 2 else 40, gaps=seed % 3 == 0)
    exchange = exchanges[rank]
    rows_in, rows_out = [e.num_rows_in for e in exchanges], [e.num_rows_out for e in exchanges]
    k = random_rows(seed, rows_in, (2, 8), torch.bfloat16)[rank].cuda()
    ids = random_rows(seed + 1, rows_in, (), torch.int64)[rank].cuda()
    partials = random_rows(seed + 2, rows_out, (5,), torch.float32)[rank].cuda()
    into = random_rows(seed + 3, rows_in, (5,), torch.float32)[rank].cuda()
    load = torch.ones(2048, 2048, device="cuda")
    for _ in range(4):
        load = load @ load * 0
    late = load.sum()  # zero, but known to the stream only after the matmuls
    cast = group_cast(exchange, [k + late.bfloat16(), ids + late.long()], None)
    reduce = group_reduce(exchange, [partials + late], None, into=[into])
    torch.full((2000, 16), 7.0, device="cuda")  # takes freed memory if there is any
    received_k, received_ids = (x + 0 for x in cast.wait())
    (sums,) = (x.clone() for x in reduce.wait())
    return [received_k.cpu(), received_ids.cpu(), sums.cpu()]


def _many(rank: int, num_ranks: int) -> list[list[torch.Tensor]]:
    return [_exchange_behind_work(seed, rank, num_ranks) for seed in SEEDS]


def _judge(per_rank: list[list[list[torch.Tensor]]], num_ranks: int) -> None:
    for idx, seed in enumerate(SEEDS):
        exchanges = make_exchanges(seed, num_ranks, 2000 if seed % 2 else 40, gaps=seed % 3 == 0)
        rows_in, rows_out = [e.num_rows_in for e in exchanges], [e.num_rows_out for e in exchanges]
        expected = [
            cast_reference(exchanges, random_rows(seed, rows_in, (2, 8), torch.bfloat16)),
            cast_reference(exchanges, random_rows(seed + 1, rows_in, (), torch.int64)),
            reduce_reference(
                exchanges, random_rows(seed + 2, rows_out, (5,), torch.float32), random_rows(seed + 3, rows_in, (5,), torch.float32)
            ),
        ]
        for rank in range(num_ranks):
            for tensor in range(3):
                assert_same_bits(per_rank[rank][idx][tensor], expected[tensor][rank], f"seed {seed} rank {rank} tensor {tensor}")


def test_one_rank() -> None:
    _judge([_many(0, 1)], 1)


def test_many_ranks(cuda_pool: tuple[RankPool, int]) -> None:
    pool, num_ranks = cuda_pool
    _judge(pool.run(num_ranks, _many, timeout_s=120), num_ranks)


def _merge_and_gather(rank: int, num_ranks: int) -> list[torch.Tensor]:
    exchanges = make_exchanges(5, num_ranks, 300)
    rows_in, rows_out = [e.num_rows_in for e in exchanges], [e.num_rows_out for e in exchanges]
    out, lse = (random_rows(7 + i, rows_in, (2, 4)[: 2 - i], torch.float32)[rank].cuda() for i in (0, 1))
    partial_out, partial_lse = (random_rows(9 + i, rows_out, (2, 4)[: 2 - i], torch.float32)[rank].cuda() for i in (0, 1))
    group_reduce_lse(exchanges[rank], partial_out, partial_lse, None, out=out, lse=lse).wait()
    dispatch = make_dispatch(3, num_ranks)
    whole = random_tensor(1, dispatch.total_tokens, (3,), torch.bfloat16)
    gathered = gather_rows(whole[torch.from_numpy(dispatch.position_ids(rank))].cuda(), dispatch, None)
    sums = scatter_reduce_rows(whole.cuda(), dispatch, None)
    assert comm_group(None).backend_for(gathered.device) in ("gloo", "nccl")
    return [x.cpu() for x in (out, lse, gathered, sums)]


def test_merge_and_gather(cuda_pool: tuple[RankPool, int]) -> None:
    pool, num_ranks = cuda_pool
    per_rank = pool.run(num_ranks, _merge_and_gather, timeout_s=120)
    exchanges = make_exchanges(5, num_ranks, 300)
    rows_in, rows_out = [e.num_rows_in for e in exchanges], [e.num_rows_out for e in exchanges]
    own = list(zip(random_rows(7, rows_in, (2, 4), torch.float32), random_rows(8, rows_in, (2,), torch.float32), strict=True))
    partials = list(zip(random_rows(9, rows_out, (2, 4), torch.float32), random_rows(10, rows_out, (2,), torch.float32), strict=True))
    merged = reduce_lse_reference(exchanges, partials, own)
    dispatch = make_dispatch(3, num_ranks)
    whole = random_tensor(1, dispatch.total_tokens, (3,), torch.bfloat16)
    for rank, (out, lse, gathered, sums) in enumerate(per_rank):
        torch.testing.assert_close(out.double(), merged[rank][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), merged[rank][1], rtol=1e-6, atol=1e-5)
        assert_same_bits(gathered, whole, f"gather rank {rank}")
        rows = torch.from_numpy(dispatch.position_ids(rank))
        assert_same_bits(sums, (whole.float() * num_ranks).bfloat16()[rows], f"scatter rank {rank}")


def _gather_in_rounds(rank: int, num_ranks: int) -> list[torch.Tensor]:
    """Rounds follow each other on the streams; memory of one is reused by the next and by others in between."""
    dispatch = make_dispatch(6, num_ranks, max_chunks=400)
    whole = random_tensor(1, dispatch.total_tokens, (32,), torch.float32)
    local = whole[torch.from_numpy(dispatch.position_ids(rank))].cuda()
    with mock.patch.object(gather, "ROUND_BYTES", 1 << 14):
        assert dispatch.total_tokens * 32 * 4 > 4 * gather.ROUND_BYTES
        gathered = gather_rows(local, dispatch, None)
        sums = scatter_reduce_rows(whole.cuda() * (rank + 1), dispatch, None)
    torch.full((1 << 20,), torch.nan, device="cuda")
    return [gathered.cpu(), sums.cpu()]


def test_gather_in_rounds(cuda_pool: tuple[RankPool, int]) -> None:
    pool, num_ranks = cuda_pool
    dispatch = make_dispatch(6, num_ranks, max_chunks=400)
    whole = random_tensor(1, dispatch.total_tokens, (32,), torch.float32)
    total = torch.zeros_like(whole)
    for rank in range(num_ranks):
        total += whole * (rank + 1)
    for rank, (gathered, sums) in enumerate(pool.run(num_ranks, _gather_in_rounds, timeout_s=120)):
        assert_same_bits(gathered, whole, f"gather rank {rank}")
        assert_same_bits(sums, total[torch.from_numpy(dispatch.position_ids(rank))], f"sum rank {rank}")


def test_no_host_wait() -> None:
    """With one rank nothing may make the host wait, once the index tensors are on the device."""
    (exchange,) = make_exchanges(5, 1, 300)
    x = torch.randn(exchange.num_rows_in, 2, 4, device="cuda")
    partial = torch.randn(exchange.num_rows_out, 2, 4, device="cuda")
    for waits_are_errors in (False, True):
        with no_host_wait(waits_are_errors):
            group_cast(exchange, [x, x], None).wait()
            group_reduce(exchange, [partial], None, into=[x]).wait()
            group_reduce_lse(exchange, partial, partial[..., 0].contiguous(), None, out=x, lse=x[..., 0].contiguous()).wait()
