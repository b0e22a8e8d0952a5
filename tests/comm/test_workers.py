"""RankPool and run_ranks: results, failures named by rank, time-outs, restart after a failure."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from magi_attention.testing.workers import RankPool, RanksFailed, run_ranks


def _sum_of_ranks(rank: int, num_ranks: int, scale: int) -> tuple[int, torch.Tensor]:
    x = torch.tensor([float(rank * scale)])
    dist.all_reduce(x)
    return os.getpid(), x


def _raise_on_one(rank: int, num_ranks: int, bad_rank: int) -> None:
    if rank == bad_rank:
        raise KeyError("lost the spoon")
    dist.barrier()


def _die_on_one(rank: int, num_ranks: int, bad_rank: int) -> str:
    if rank == bad_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def _sleep_on_one(rank: int, num_ranks: int, bad_rank: int) -> None:
    if rank == bad_rank:
        time.sleep(60)


def test_results_come_in_rank_order_and_processes_are_kept(rank_pool: RankPool) -> None:
    first = rank_pool.run(2, _sum_of_ranks, 10)
    second = rank_pool.run(2, _sum_of_ranks, 1)
    assert [x.item() for _, x in first] == [10.0, 10.0]
    assert [x.item() for _, x in second] == [1.0, 1.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert [x.item() for _, x in rank_pool.run(1, _sum_of_ranks, 7)] == [0.0]


def test_failures_name_rank_and_cause_and_the_pool_recovers(rank_pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)---- rank 1: .*lost the spoon"):
        rank_pool.run(2, _raise_on_one, 1)
    with pytest.raises(RanksFailed, match=r"rank 0: process died: killed by SIGKILL"):
        rank_pool.run(2, _die_on_one, 0)
    with pytest.raises(RanksFailed, match=r"(?s)rank 1: no result after 2 s; it was at.*_sleep_on_one"):
        rank_pool.run(2, _sleep_on_one, 1, timeout_s=2.0)
    assert [x.item() for _, x in rank_pool.run(2, _sum_of_ranks, 3)] == [3.0, 3.0]


def test_outcomes_reports_survivors(rank_pool: RankPool) -> None:
    dead, alive = rank_pool.outcomes(2, _die_on_one, 0)
    assert dead.error is not None and "SIGKILL" in dead.error
    assert (alive.rank, alive.value, alive.error) == (1, "alive", None)


def test_run_ranks_leaves_no_process() -> None:
    ((pid, x),) = run_ranks(1, _sum_of_ranks, 1)
    assert x.item() == 0.0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
