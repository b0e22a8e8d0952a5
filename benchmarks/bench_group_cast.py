"""GroupCast and GroupReduce: bytes per second of one rank, checked first. NCCL with one GPU per rank when there are enough, else gloo.

    python -m benchmarks.bench_group_cast [--ranks 2] [--mib 16] [--csv benchmarks/results/group_cast.csv]

Every rank needs rows of every other rank: k and v, 8 heads of 128 bf16 each, 4 KiB a row together. `run` is the number of consecutive
rows; runs arrive in a shuffled global order, so gather and scatter are both at work, except in the last case, one run in place.
Bytes count once, as received by one rank. The reduce sends fp32 partials back and adds them.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.stamp import stamp
from magi_attention.comm import group_cast, group_reduce
from magi_attention.comm.reference import cast_reference, reduce_reference
from magi_attention.plan.types import Exchange, frozen_array
from magi_attention.testing.workers import RankPool

ROW_SHAPE = (8, 128)
ROW_BYTES = 2 * 8 * 128 * 2
COLUMNS = ("op", "backend", "ranks", "rows", "run", "mib", "ms", "gb_per_s", "check")


def make_exchanges(num_ranks: int, rows_per_peer: int, run: int) -> list[Exchange]:
    """Every rank receives all rows of every other rank; its buffer holds the runs of all of them in a shuffled order."""
    rng = np.random.default_rng(0)
    num_runs = -(-rows_per_peer // run)
    lengths = np.diff(np.append(np.arange(0, rows_per_peer, run), rows_per_peer))
    sends: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    recvs = []
    for destination in range(num_ranks):
        pieces = [(source, idx * run, int(lengths[idx])) for source in range(num_ranks) if source != destination for idx in range(num_runs)]
        layout = rng.permutation(len(pieces)) if num_runs > 1 else np.arange(len(pieces))
        starts = np.zeros(len(pieces), np.int64)
        starts[layout] = np.cumsum([0] + [pieces[idx][2] for idx in layout[:-1]])
        recvs.append([(source, int(start), count) for (source, _, count), start in zip(pieces, starts, strict=True)])
        for source, first, count in pieces:
            sends[source].append((destination, first, count))
    num_out = rows_per_peer * (num_ranks - 1)
    return [
        Exchange(num_ranks, rows_per_peer, num_out, frozen_array(send), frozen_array(recv)) for send, recv in zip(sends, recvs, strict=True)
    ]


def _source(rank: int, num_rows: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn((num_rows, *ROW_SHAPE), generator=generator).bfloat16().to(device) for _ in range(2)]


def _is_right(rank: int, num_ranks: int, run: int, device: str) -> bool:
    """A small exchange of the same kind, against the row-at-a-time reference."""
    num_rows = 2 * run + 3
    exchanges = make_exchanges(num_ranks, num_rows, run)
    sources = [_source(peer, num_rows, "cpu") for peer in range(num_ranks)]
    received = group_cast(exchanges[rank], [x.to(device) for x in sources[rank]], None).wait()
    expected = [cast_reference(exchanges, [pair[idx] for pair in sources]) for idx in (0, 1)]
    is_right = all(torch.equal(received[idx].cpu(), expected[idx][rank]) for idx in (0, 1))
    into = torch.ones((num_rows, *ROW_SHAPE), device=device)
    group_reduce(exchanges[rank], [received[0].float()], None, into=[into]).wait()
    sums = reduce_reference(exchanges, [x.float() for x in expected[0]], [torch.ones((num_rows, *ROW_SHAPE))] * num_ranks)
    return is_right and torch.equal(into.cpu(), sums[rank])


def _times(operation: object, device: str, repeats: int = 7) -> float:
    """Median seconds, after one untimed call; ranks start together."""
    assert callable(operation)
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        operation()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measure(rank: int, num_ranks: int, num_rows: int, run: int, device: str) -> tuple[bool, float, float]:
    """(check passed, seconds of a cast, seconds of a reduce) on this rank."""
    is_right = _is_right(rank, num_ranks, min(run, 16), device)
    exchange = make_exchanges(num_ranks, num_rows, run)[rank]
    source = _source(rank, num_rows, device)
    out = [torch.empty((exchange.num_rows_out, *ROW_SHAPE), dtype=torch.bfloat16, device=device) for _ in range(2)]
    cast_s = _times(lambda: group_cast(exchange, source, None, out=out).wait(), device)
    partials = [x.float() for x in out]
    into = [torch.zeros((num_rows, *ROW_SHAPE), device=device) for _ in range(2)]
    reduce_s = _times(lambda: group_reduce(exchange, partials, None, into=into).wait(), device)
    return is_right, cast_s, reduce_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=float, default=16.0, help="MiB of k and v that one rank receives")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"--ranks {args.ranks}: an exchange needs at least 2")
    is_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= args.ranks
    backend, device = ("nccl", "cuda") if is_cuda else ("gloo", "cpu")
    num_rows = max(1, round(args.mib * 2**20 / ROW_BYTES / (args.ranks - 1)))
    pool = RankPool(backend)
    rows = []
    print("  ".join(f"{name:>12}" for name in COLUMNS))
    for run in (1, 16, 256, num_rows):
        found = pool.run(args.ranks, measure, num_rows, run, device, timeout_s=300)
        check = "ok" if all(is_right for is_right, _, _ in found) else "WRONG"
        for op, column, scale in (("cast", 1, 1), ("reduce", 2, 2)):
            seconds = max(times[column] for times in found)
            moved = num_rows * (args.ranks - 1) * ROW_BYTES * scale
            row = (
                op,
                backend,
                args.ranks,
                num_rows,
                run,
                f"{moved / 2**20:.1f}",
                f"{seconds * 1e3:.2f}",
                f"{moved / seconds / 1e9:.2f}",
                check,
            )
            rows.append(row)
            print("  ".join(f"{value!s:>12}" for value in row), flush=True)
    pool.close()
    if args.csv is not None:
        with args.csv.open("w", newline="") as file:
            facts = stamp(device)
            csv.writer(file).writerows([(*COLUMNS, *facts), *((*row, *facts.values()) for row in rows)])


if __name__ == "__main__":
    main()
