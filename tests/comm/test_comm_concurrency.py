"""Many exchanges, two in flight, disjoint groups at once, alternating plans, beside the user's own collectives; deadlines."""

from __future__ import annotations

import datetime
import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from magi_attention.comm import agree, comm_group, group_cast, group_reduce
from magi_attention.comm.reference import cast_reference, reduce_reference
from magi_attention.comm.work import CallInfo, Transfer
from magi_attention.config import GrpCollConfig
from magi_attention.errors import CommError
from magi_attention.testing.workers import RankPool
from tests.comm.random_exchanges import assert_same_bits, make_exchanges, random_rows

Found = list[tuple[str, int, int, torch.Tensor]]  # (what, seed, rank in the group, tensor)


def _rows(seed: int, num_ranks: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Sources, partials and accumulators of every rank for the exchanges of this seed."""
    exchanges = make_exchanges(seed, num_ranks)
    rows_in, rows_out = [e.num_rows_in for e in exchanges], [e.num_rows_out for e in exchanges]
    return (
        random_rows(seed, rows_in, (3,), torch.float32),
        random_rows(seed + 1, rows_out, (3,), torch.float32),
        random_rows(seed + 2, rows_in, (3,), torch.float32),
    )


def _judge(found: Found, num_ranks: int) -> None:
    for what, seed, rank, ours in found:
        exchanges = make_exchanges(seed, num_ranks)
        sources, partials, into = _rows(seed, num_ranks)
        expected = cast_reference(exchanges, sources) if what == "cast" else reduce_reference(exchanges, partials, into)
        assert_same_bits(ours, expected[rank], f"{what} seed {seed} rank {rank}")


def _steps_like_a_backward(rank: int, num_ranks: int, num_steps: int) -> Found:
    """The cast of step i + 1 and the reduce of step i - 1 are both in flight while step i computes."""
    found: Found = []
    cast = reduce = None
    for step in range(num_steps + 1):
        exchange = make_exchanges(step, num_ranks)[rank]
        sources, partials, into = (rows[rank] for rows in _rows(step, num_ranks))
        next_cast = group_cast(exchange, [sources], None, what=f"step {step}") if step < num_steps else None
        if cast is not None:
            found.append(("cast", step - 1, rank, cast.wait()[0]))
        next_reduce = group_reduce(exchange, [partials], None, into=[into], what=f"step {step}") if step < num_steps else None
        if reduce is not None:
            found.append(("reduce", step - 1, rank, reduce.wait()[0]))
        cast, reduce = next_cast, next_reduce
    return found


def test_two_exchanges_in_flight_for_many_steps(rank_pool: RankPool) -> None:
    for found in rank_pool.run(3, _steps_like_a_backward, 60):
        assert len(found) == 120
        _judge(found, 3)


def _two_groups(rank: int, num_ranks: int, num_steps: int) -> Found:
    """Groups {0, 2} and {1, 3} work at once, at their own pace, with the user's all-reduces over everybody in between."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    cp_group = comm_group(groups[rank % 2])
    assert (cp_group.rank, cp_group.size, cp_group.members) == (rank // 2, 2, ((0, 2), (1, 3))[rank % 2])
    assert comm_group(groups[rank % 2]) is cp_group
    found: Found = []
    for step in range(num_steps):
        seed = step * 2 + rank % 2
        exchange = make_exchanges(seed, 2)[cp_group.rank]
        sources, partials, into = (rows[cp_group.rank] for rows in _rows(seed, 2))
        theirs = torch.full((1000,), float(rank + step))
        all_reduce = dist.all_reduce(theirs, async_op=True)
        cast = group_cast(exchange, [sources], cp_group)
        reduce = group_reduce(exchange, [partials], groups[rank % 2], into=[into])
        found.append(("cast", seed, cp_group.rank, cast.wait()[0]))
        assert all_reduce is not None
        all_reduce.wait()
        assert bool((theirs == 6 + 4 * step).all())
        found.append(("reduce", seed, cp_group.rank, reduce.wait()[0]))
    return found


def test_two_groups_at_once_beside_user_collectives(rank_pool: RankPool) -> None:
    for found in rank_pool.run(4, _two_groups, 50):
        assert len(found) == 100
        _judge(found, 2)


def _alternating(rank: int, num_ranks: int, num_steps: int) -> Found:
    """Two plans taken in turn, both in the same group, second use of each from the cached index tensors."""
    exchanges = [make_exchanges(seed, num_ranks)[rank] for seed in (3, 4)]
    found: Found = []
    for step in range(num_steps):
        seed = 3 + step % 2
        sources, partials, into = (rows[rank] for rows in _rows(seed, num_ranks))
        found.append(("cast", seed, rank, group_cast(exchanges[seed - 3], [sources], None).wait()[0]))
        found.append(("reduce", seed, rank, group_reduce(exchanges[seed - 3], [partials], None, into=[into]).wait()[0]))
    return found


def test_alternating_plans(rank_pool: RankPool) -> None:
    for found in rank_pool.run(4, _alternating, 20):
        _judge(found, 4)


# ---- lost and late peers ----


OPS = ("group_cast", "group_reduce", "agree")


def _failure_of(op: str, rank: int, num_ranks: int, group: dist.ProcessGroup, timeout_s: float | None) -> tuple[str, float]:
    """Text of the CommError of one operation and how long it took."""
    exchange = make_exchanges(0, num_ranks)[rank]
    sources, partials, into = (rows[rank] for rows in _rows(0, num_ranks))
    start = time.monotonic()
    try:
        if op == "group_cast":
            group_cast(exchange, [sources], group, timeout_s=timeout_s, what="step 2, k and v").wait()
        elif op == "group_reduce":
            group_reduce(exchange, [partials], group, into=[into], timeout_s=timeout_s, what="step 2, k and v").wait()
        else:
            agree(group, "step 2, k and v", b"same", "same", timeout_s=timeout_s)
    except CommError as error:
        return str(error), time.monotonic() - start
    return "finished", time.monotonic() - start


def _with_bad_rank(rank: int, num_ranks: int, bad_rank: int, how: str, timeout_s: float) -> list[tuple[str, float]]:
    """One good exchange on each of three groups of everybody; then `bad_rank` dies, or comes late to the next one of each."""
    groups = [dist.new_group(list(range(num_ranks))) for _ in OPS]
    for group in groups:
        group_cast(make_exchanges(0, num_ranks)[rank], [_rows(0, num_ranks)[0][rank]], group, timeout_s=30, what="step 1").wait()
    if rank == bad_rank and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == bad_rank:
        time.sleep(3 * len(OPS) * timeout_s)
    return [_failure_of(op, rank, num_ranks, group, timeout_s) for op, group in zip(OPS, groups, strict=True)]


def _judge_failures(per_rank: dict[int, list[tuple[str, float]]], timeout_s: float) -> None:
    for rank, failures in per_rank.items():
        for op, (text, seconds) in zip(OPS, failures, strict=True):
            assert text.startswith(f"{op} for step 2, k and v failed on rank {rank} of 3 (global ranks [0, 1, 2]), sending "), text
            assert f"timeout {timeout_s:g} s" in text and "bytes" in text and "raise GrpCollConfig.timeout_s" in text
            assert "Not heard of since: rank 1" in text, text  # on a loaded machine another late one may follow
            assert seconds < timeout_s + 5.0


def test_survivors_of_a_killed_rank_end_with_an_error_that_names_it(rank_pool: RankPool) -> None:
    outcomes = rank_pool.outcomes(3, _with_bad_rank, 1, "killed", 5.0)
    assert "SIGKILL" in (outcomes[1].error or "")
    _judge_failures({rank: outcomes[rank].value for rank in (0, 2)}, 5.0)


def test_ranks_that_wait_for_a_late_one_end_with_an_error_that_names_it(rank_pool: RankPool) -> None:
    per_rank = rank_pool.run(3, _with_bad_rank, 1, "late", 1.0)
    _judge_failures({rank: per_rank[rank] for rank in (0, 2)}, 1.0)


def _late_without_a_limit(rank: int, num_ranks: int, group_timeout_s: float, late_s: float) -> tuple[str, float]:
    group = dist.new_group(list(range(num_ranks)), timeout=datetime.timedelta(seconds=group_timeout_s))
    _failure_of("agree", rank, num_ranks, group, None)  # both ranks are connected
    if rank == 1:
        time.sleep(late_s)
    return _failure_of("group_cast", rank, num_ranks, group, GrpCollConfig().timeout_s)


def test_without_a_limit_a_rank_may_be_as_late_as_the_process_group_allows(rank_pool: RankPool) -> None:
    (text, seconds), _ = rank_pool.run(2, _late_without_a_limit, 60.0, 2.0)
    assert text == "finished" and seconds >= 1.5
    (text, seconds), _ = rank_pool.run(2, _late_without_a_limit, 1.0, 4.0)
    assert "timeout of the process group: " in text and "timeout of init_process_group or new_group" in text and seconds < 4.0


def test_without_a_limit_the_wait_has_no_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may compute for as long as its process group allows, hours if the caller said so: nothing shorter is in the way."""
    work = mock.Mock()
    monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **options: work)
    rows = torch.zeros(4, dtype=torch.uint8)
    Transfer(rows, rows.clone(), [4], [4], mock.Mock(), CallInfo("group_cast", "", GrpCollConfig().timeout_s)).wait()
    assert work.wait.call_args_list == [mock.call()]


def _wait_again(rank: int, num_ranks: int) -> list[str]:
    group = dist.new_group(list(range(num_ranks)))
    if rank == 1:
        time.sleep(3)
    work = group_cast(make_exchanges(0, num_ranks)[rank], [_rows(0, num_ranks)[0][rank]], group, timeout_s=0.3, what="a wait")
    texts = []
    for _ in range(2):
        try:
            work.wait()
        except CommError as error:
            texts.append(str(error))
    return texts


def test_a_failed_work_raises_the_same_error_again(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, _wait_again)[0]
    assert first == second and "group_cast for a wait failed on rank 0 of 2" in first
