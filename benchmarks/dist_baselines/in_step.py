"""Times of a call that all ranks make together: they start in step, and a call is as slow as its slowest rank. Knows no attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.ffa_timing import Timing, repeats_for, summarise
from magi_attention.comm import CommGroup

_FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU so far
_CYCLES_PER_S = 2e9  # of the SM clock, about; it only sizes a wait
_LONGEST_WAIT_S = 0.05

Work = Callable[[], object]


class Times(NamedTuple):
    """Of this rank alone, and of the slowest rank call by call."""

    own: Timing
    slowest: Timing


def over_ranks(values: Sequence[float], group: CommGroup, device: torch.device, *, takes_sum: bool = False) -> list[float]:
    """Largest of each value (or sum) over the ranks, the same everywhere. Collective."""
    if group.is_single:
        return list(values)
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.SUM if takes_sum else dist.ReduceOp.MAX, group=group.flat)
    return [float(x) for x in found.tolist()]


class InStepTimer:
    """On CUDA, events around each call; before it a buffer larger than the L2 is written, the GPU spins until the host has queued the
    call, and a collective of one number holds the ranks together. Elsewhere the wall clock after a barrier."""

    def __init__(self, group: CommGroup, device: torch.device, target_ms: float) -> None:
        self.group, self.device, self._target_ms = group, device, target_ms
        if device.type == "cuda":
            self._flushed = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
            self._token = torch.zeros(1, device=device)

    def __call__(self, work: Work) -> Times:
        """Medians of 5 to 100 calls, as many on every rank; the first two are not counted. Collective."""
        work()
        call_ms, host_s = over_ranks(self._probe(work), self.group, self.device)
        repeats = repeats_for(call_ms, self._target_ms)
        times_ms = self._on_device(work, repeats, host_s) if self.device.type == "cuda" else self._on_host(work, repeats)
        return Times(summarise(times_ms), summarise(over_ranks(times_ms, self.group, self.device)))

    def _probe(self, work: Work) -> tuple[float, float]:
        """(milliseconds until a call is done, seconds until the host has queued it)."""
        self._wait_for_device()
        self._meet()
        start = time.perf_counter()
        work()
        host_s = time.perf_counter() - start
        self._wait_for_device()
        return (time.perf_counter() - start) * 1e3, host_s

    def _on_host(self, work: Work, repeats: int) -> list[float]:
        times_ms = []
        for _ in range(repeats):
            self._meet()
            start = time.perf_counter()
            work()
            times_ms.append((time.perf_counter() - start) * 1e3)
        return times_ms

    def _on_device(self, work: Work, repeats: int, host_s: float) -> list[float]:
        wait_cycles = int(min(_LONGEST_WAIT_S, 2 * host_s) * _CYCLES_PER_S)
        pairs = []
        for idx in range(repeats):
            self._flushed.fill_(idx)
            torch.cuda._sleep(wait_cycles)
            if not self.group.is_single:
                dist.all_reduce(self._token, group=self.group.flat)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def _meet(self) -> None:
        if not self.group.is_single:
            dist.barrier(group=self.group.flat)

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
