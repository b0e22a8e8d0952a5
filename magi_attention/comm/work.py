"""A started exchange: waits with a deadline, keeps its buffers alive, turns lost peers into CommError. Knows no row plan.

An exchange is written as a generator that yields each Transfer it must wait for and returns its result. On the CPU it stops at the
first transfer and goes on inside Work.wait(). On CUDA it runs ahead on a side stream, since waiting there only orders streams; what
must run on the stream of the caller of wait() comes after a HandOver.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from magi_attention.errors import CommError

_REPORT_S = 1.0  # how long a failed rank looks for the reports of the others


@dataclass(frozen=True)
class CallInfo:
    """What an error message says about an exchange: `what` is the caller's words (step, tensors), `op` ours.

    timeout_s None: the process group's own time-out is the only limit.
    """

    op: str
    what: str
    timeout_s: float | None


@dataclass(frozen=True)
class HandOver:
    """The rest of the generator runs on the stream that waits; `tensors` were made on the side stream and are read there."""

    tensors: Sequence[torch.Tensor]


class Transfer:
    """One all-to-all-v of bytes in flight on one process group; `group` None copies inside this rank."""

    def __init__(
        self,
        recv: torch.Tensor,
        send: torch.Tensor,
        recv_bytes: Sequence[int],
        send_bytes: Sequence[int],
        group: dist.ProcessGroup | None,
        info: CallInfo,
    ) -> None:
        self._group = group
        self._info = info
        self._recv_bytes = tuple(recv_bytes)
        self._send_bytes = tuple(send_bytes)
        self._buffers = (recv, send)  # alive until the wait
        self._work: dist.Work | None = None
        if group is None:
            recv.copy_(send)
            return
        try:
            self._work = dist.all_to_all_single(recv, send, list(recv_bytes), list(send_bytes), group=group, async_op=True)
        except (RuntimeError, ValueError) as error:
            raise self._comm_error(error) from error

    def wait(self) -> None:
        """Block until the rows are here (CPU) or order the current stream after their arrival (CUDA over NCCL).

        Raises:
            CommError: a peer was lost or the time ran out.
        """
        if self._work is None:
            return
        try:
            limit_s = self._info.timeout_s
            if limit_s is None or (self._buffers[0].is_cuda and _is_stream_ordered(self._group)):
                self._work.wait()  # torch keeps the deadline of the process group
            else:
                self._work.wait(datetime.timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise self._comm_error(error) from error
        self._work = None
        self._buffers = ()  # type: ignore[assignment]

    def _comm_error(self, error: Exception) -> CommError:
        assert self._group is not None
        return comm_error(self._info, self._group, error, self._recv_bytes, self._send_bytes)


def _is_stream_ordered(group: dist.ProcessGroup | None) -> bool:
    return "nccl" in str(dist.get_backend_config(group))


Stages = Generator[Transfer | HandOver, None, list[torch.Tensor]]


class Work:
    """Handle of a started exchange. Every rank must wait for its works in the same order."""

    def __init__(self, stages: Stages, device: torch.device, direction: str, kept: Sequence[torch.Tensor] = ()) -> None:
        self._stages = stages
        self._pending: Transfer | HandOver | None = None
        self._result: list[torch.Tensor] | None = None
        self._error: CommError | None = None
        self._kept = tuple(kept)  # inputs stay alive while in flight
        self._arrival: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._issue_stream = torch.cuda.current_stream(device)
            side = _side_stream(device, direction)
            side.wait_stream(self._issue_stream)
            with torch.cuda.stream(side):
                self._advance()
                while isinstance(self._pending, Transfer):
                    self._pending.wait()
                    self._advance()
                self._arrival = side.record_event()
        else:
            self._advance()

    def wait(self) -> list[torch.Tensor]:
        """Finish the exchange and return its tensors; on CUDA without blocking the host. Later calls return the same tensors.

        Raises:
            CommError: a peer was lost or the time ran out; every later call raises the same.
        """
        if self._error is not None:
            raise self._error
        try:
            if self._arrival is not None:
                self._order_streams()
            while self._pending is not None:
                if isinstance(self._pending, Transfer):
                    self._pending.wait()
                self._advance()
        except CommError as error:
            self._error = error
            raise
        finally:
            self._kept = ()
        assert self._result is not None
        return self._result

    def _advance(self) -> None:
        try:
            self._pending = next(self._stages)
        except StopIteration as end:
            self._pending, self._result = None, end.value

    def _order_streams(self) -> None:
        """The waiting stream reads what the side stream wrote; the issuing stream may reuse the inputs' memory."""
        assert self._arrival is not None
        waiting = torch.cuda.current_stream(self._issue_stream.device)
        waiting.wait_event(self._arrival)
        self._issue_stream.wait_event(self._arrival)
        handed = self._pending.tensors if isinstance(self._pending, HandOver) else (self._result or ())
        for tensor in handed:
            tensor.record_stream(waiting)
        self._arrival = None

    def __del__(self) -> None:
        arrival = getattr(self, "_arrival", None)
        if arrival is not None:  # dropped without a wait: the inputs' memory must not be reused too early
            self._issue_stream.wait_event(arrival)


@functools.cache
def _side_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """One stream per direction, so that the cast of the next step and the reduce of the last do not queue behind each other."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


# ---- what a failed rank can still say ----


def comm_error(
    info: CallInfo, group: dist.ProcessGroup, cause: Exception, recv_bytes: Sequence[int] = (), send_bytes: Sequence[int] = ()
) -> CommError:
    """The error of an exchange that broke, naming rank, op, step, bytes, time-out and, as far as they can be known, the lost peers."""
    rank, size = group.rank(), group.size()
    members = _members(group)
    expected = [f"rank {peer} ({amount} bytes)" for peer, amount in enumerate(recv_bytes) if peer != rank]
    silent = _silent_ranks(group, rank, size)
    limit = "of the process group" if info.timeout_s is None else f"{info.timeout_s:g} s (or the process group's, if shorter)"
    lines = [
        f"{info.op} for {info.what or 'an unnamed exchange'} failed on rank {rank} of {size} (global ranks {members}), "
        f"sending {sum(send_bytes)} bytes, receiving {sum(recv_bytes)} bytes, timeout {limit}: {_first_line(cause)}"
    ]
    if expected:
        lines.append(f"It was receiving from {', '.join(expected)}.")
    if silent:
        lines.append(f"Not heard of since: {', '.join(f'rank {peer}' for peer in silent)} (lost, late, or not in this exchange).")
    lines.append(
        "Look at the log of those ranks first; if they are only slow, raise GrpCollConfig.timeout_s and the timeout of "
        "init_process_group or new_group. This group cannot be used again."
    )
    return CommError("\n".join(lines))


def _members(group: dist.ProcessGroup) -> list[int] | str:
    try:
        return list(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return "unknown"


def _first_line(cause: Exception) -> str:
    text = str(cause).strip().splitlines()
    return text[0] if text else type(cause).__name__


def _silent_ranks(group: dist.ProcessGroup, rank: int, size: int) -> list[int]:
    """Ranks that did not report this failure in the group's store. On a thread: the store may be lost too, and would block."""
    found: list[list[int]] = []

    def look() -> None:
        with contextlib.suppress(Exception):  # no store, or its host is gone: then we only know less
            store = group.get_group_store() if hasattr(group, "get_group_store") else None
            if store is None:
                return
            store.set(f"magi_comm_failed/{rank}", "1")
            deadline = time.monotonic() + _REPORT_S
            silent = [peer for peer in range(size) if peer != rank]
            while silent and time.monotonic() < deadline:
                silent = [peer for peer in silent if not store.check([f"magi_comm_failed/{peer}"])]
                time.sleep(0.02)
            found.append(silent)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(timeout=2 * _REPORT_S)
    return found[0] if found else []
