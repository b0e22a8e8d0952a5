"""Run one function on N local processes joined by torch.distributed. Knows nothing of attention, plans or tests.

Starting a process and importing torch takes seconds, so a RankPool keeps its processes and gives every call a fresh default
process group on them. run_ranks is a pool for one call. A call that fails or runs out of time ends every process of its pool.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_START_TIMEOUT_S = 180.0  # interpreter start and torch import on a loaded machine; not part of a call's own time
_GRACE_S = 1.0  # after the first failure: time for the other ranks to say what they saw
_BROKEN_LINKS = ("connection closed", "connection reset", "broken pipe")


class RanksFailed(RuntimeError):
    """At least one rank raised, died or ran out of time. The text has each such rank with its traceback."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended: `value` is what the worker returned, or `error` says why there is none."""

    rank: int
    value: Any = None
    error: str | None = None


@dataclass(frozen=True)
class _Call:
    """One worker call as a child process needs it. `worker_and_args` is pickled so that sys.path can be set before it is read."""

    rank: int
    num_ranks: int
    store_path: str
    timeout_s: float
    ends_together: bool
    sys_path: list[str]
    worker_and_args: bytes


@dataclass
class _Child:
    process: BaseProcess
    connection: Connection
    stack_path: Path


def run_ranks(num_ranks: int, worker: Callable[..., Any], *args: Any, timeout_s: float = 60.0, backend: str = "gloo") -> list[Any]:
    """Call worker(rank, num_ranks, *args) on `num_ranks` new processes that share one default process group.

    Args:
        num_ranks: processes to start, 1 or more.
        worker: a function importable by name in another process (not a lambda or a nested function).
        args: anything picklable, the same for every rank.
        timeout_s: seconds the call may take after all processes have started.
        backend: backend of the default process group; with "nccl" rank i uses CUDA device i.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RanksFailed: a rank raised, died or ran out of time. Every process has been ended by then.
    """
    with contextlib.closing(RankPool(backend)) as pool:
        return pool.run(num_ranks, worker, *args, timeout_s=timeout_s)


class RankPool:
    """Processes kept alive between calls; grows to the largest number of ranks asked for. Not thread-safe."""

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._children: list[_Child] = []
        self._folder = tempfile.TemporaryDirectory(prefix="magi_ranks_")
        self._num_calls = 0

    def run(self, num_ranks: int, worker: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Like run_ranks, on this pool's processes."""
        outcomes = self._call(num_ranks, worker, args, timeout_s, ends_together=True)
        if any(outcome.error for outcome in outcomes):
            self._end_children()
            name = getattr(worker, "__qualname__", repr(worker))
            raise RanksFailed(f"{name} on {num_ranks} ranks failed:\n{_failure_report(outcomes)}")
        return [outcome.value for outcome in outcomes]

    def outcomes(self, num_ranks: int, worker: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[RankOutcome]:
        """Like run, but waits for every rank and returns how each ended, for tests in which a rank is meant to fail.

        The processes are ended afterwards, since a broken group cannot be closed in step.
        """
        outcomes = self._call(num_ranks, worker, args, timeout_s, ends_together=False)
        self._end_children()
        return outcomes

    def close(self) -> None:
        """End every process and remove the pool's files. The pool may not be used afterwards."""
        for child in self._children:
            with contextlib.suppress(OSError):
                child.connection.send_bytes(b"")
        for child in self._children:
            child.process.join(timeout=5.0)
        self._end_children()
        self._folder.cleanup()

    def _call(
        self, num_ranks: int, worker: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, *, ends_together: bool
    ) -> list[RankOutcome]:
        assert num_ranks >= 1, f"num_ranks={num_ranks}"
        pickled = pickle.dumps((worker, args))  # before any process starts: a worker that cannot travel fails here
        self._start_children(num_ranks)
        self._num_calls += 1
        store_path = str(Path(self._folder.name) / f"store_{self._num_calls}")
        for rank, child in enumerate(self._children[:num_ranks]):
            call = _Call(rank, num_ranks, store_path, timeout_s, ends_together, list(sys.path), pickled)
            with contextlib.suppress(OSError):  # a process that ended since the last call is reported by _collect
                child.connection.send_bytes(pickle.dumps(call))
        outcomes = _collect(self._children[:num_ranks], timeout_s, stop_early=ends_together)
        Path(store_path).unlink(missing_ok=True)
        return outcomes

    def _start_children(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        started = []
        for rank in range(len(self._children), num_ranks):
            ours, theirs = context.Pipe()
            stack_path = Path(self._folder.name) / f"stack_{rank}"
            process = context.Process(target=_serve, args=(theirs, rank, self._backend, str(stack_path)), daemon=True, name=f"rank{rank}")
            process.start()
            theirs.close()
            started.append(_Child(process, ours, stack_path))
        self._children += started
        failed = [outcome for outcome in _collect(started, _START_TIMEOUT_S, stop_early=True) if outcome.error]
        if failed:
            self._end_children()
            raise RanksFailed(f"{len(failed)} of {num_ranks} processes did not start:\n{_failure_report(failed)}")

    def _end_children(self) -> None:
        for child in self._children:
            if child.process.is_alive():
                child.process.kill()
        for child in self._children:
            child.process.join()
            child.connection.close()
        self._children = []


# ---- the side that waits ----


def _collect(children: list[_Child], timeout_s: float, *, stop_early: bool) -> list[RankOutcome]:
    """One outcome per child; with `stop_early` the first failure leaves the others only _GRACE_S."""
    deadline = time.monotonic() + timeout_s
    limit_text = f"no result after {timeout_s:g} s"
    outcomes: dict[int, RankOutcome] = {}
    while len(outcomes) < len(children):
        waiting = {child.connection: rank for rank, child in enumerate(children) if rank not in outcomes}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            outcomes[rank] = _receive(rank, children[rank])
            if outcomes[rank].error and stop_early and deadline > time.monotonic() + _GRACE_S:
                deadline = time.monotonic() + _GRACE_S
                limit_text = f"still running {_GRACE_S:g} s after the first failure"
    for rank in range(len(children)):
        if rank not in outcomes:
            outcomes[rank] = RankOutcome(rank, error=f"{limit_text}; it was at\n{_stack_of(children[rank])}")
    return [outcomes[rank] for rank in range(len(children))]


def _receive(rank: int, child: _Child) -> RankOutcome:
    try:
        is_ok, payload = pickle.loads(child.connection.recv_bytes())
    except (EOFError, OSError):
        child.process.join(timeout=5.0)
        code = child.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return RankOutcome(rank, error=f"process died: {how}")
    return RankOutcome(rank, value=payload) if is_ok else RankOutcome(rank, error=payload)


def _stack_of(child: _Child) -> str:
    """Ask the child's signal handler for its Python stacks; works while the child blocks inside a C++ call."""
    if child.process.pid is None or not child.process.is_alive():
        return "(process ended)"
    child.stack_path.write_text("")
    os.kill(child.process.pid, signal.SIGUSR1)
    for _ in range(20):
        time.sleep(0.05)
        text = child.stack_path.read_text()
        if text:
            time.sleep(0.05)
            return child.stack_path.read_text()
    return "(no stack: the process did not answer)"


def _failure_report(outcomes: list[RankOutcome]) -> str:
    """Likely causes first: dead processes, then exceptions, then links that broke because of them, then ranks still waiting."""

    def order(outcome: RankOutcome) -> int:
        text = (outcome.error or "").lower()
        if text.startswith("process died"):
            return 0
        if "it was at\n" in text:
            return 3
        return 2 if any(words in text for words in _BROKEN_LINKS) else 1

    failed = sorted((outcome for outcome in outcomes if outcome.error), key=order)
    return "\n".join(f"---- rank {outcome.rank}: {outcome.error}" for outcome in failed)


# ---- the side that works ----


def _serve(connection: Connection, rank: int, backend: str, stack_path: str) -> None:
    torch.set_num_threads(1)  # ranks share the machine's cores
    with open(stack_path, "a") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        connection.send_bytes(pickle.dumps((True, None)))
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError, KeyboardInterrupt):
                return  # the parent is gone
            if not message:
                return
            connection.send_bytes(_answer(pickle.loads(message), backend))


def _answer(call: _Call, backend: str) -> bytes:
    try:
        sys.path += [entry for entry in call.sys_path if entry not in sys.path]
        worker, args = pickle.loads(call.worker_and_args)
        timeout = datetime.timedelta(seconds=call.timeout_s)
        url = f"file://{call.store_path}"
        dist.init_process_group(backend, init_method=url, rank=call.rank, world_size=call.num_ranks, timeout=timeout)
        value = worker(call.rank, call.num_ranks, *args)
        answer = pickle.dumps((True, value))
        if call.ends_together:
            dist.barrier()
            dist.destroy_process_group()
        return answer
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
