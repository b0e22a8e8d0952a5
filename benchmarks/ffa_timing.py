"""Times of one call: medians over cold caches, on the device's own clock. Knows nothing of attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

_FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU so far
_CYCLES_PER_S = 2e9  # of the SM clock, about; it only sizes a wait
_LONGEST_WAIT_S = 0.02


class Timing(NamedTuple):
    """Median milliseconds, (90th - 10th percentile) / median in percent, and how many calls."""

    ms: float
    spread_pct: float
    repeats: int


def summarise(times_ms: list[float]) -> Timing:
    """Of one or more times."""
    low, median, high = np.percentile(times_ms, (10, 50, 90))
    return Timing(float(median), float((high - low) / median * 100) if median else 0.0, len(times_ms))


def repeats_for(call_ms: float, target_ms: float) -> int:
    """Calls that fill about target_ms, 5 to 100."""
    return int(min(100, max(5, target_ms / max(call_ms, 1e-3))))


class CudaTimer:
    """Events around each call. Before each, a buffer larger than the L2 is written, and the GPU spins until the host has queued the
    call, so that neither warm caches nor launch gaps are in the number."""

    def __init__(self) -> None:
        size = max(_FLUSH_BYTES, 4 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
        self._flushed = torch.empty(size, dtype=torch.uint8, device="cuda")

    def __call__(self, work: Callable[[], object], target_ms: float = 200.0) -> Timing:
        """Of `work`, which queues on the current stream; the first calls are not counted."""
        work()
        call_ms, host_s = self._probe(work)
        wait_cycles = int(min(_LONGEST_WAIT_S, 2 * host_s) * _CYCLES_PER_S)
        for _ in range(repeats_for(call_ms, target_ms / 4) if call_ms < target_ms / 10 else 1):
            work()
        pairs = []
        for idx in range(repeats_for(call_ms, target_ms)):
            self._flushed.fill_(idx)
            torch.cuda._sleep(wait_cycles)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return summarise([start.elapsed_time(end) for start, end in pairs])

    @staticmethod
    def _probe(work: Callable[[], object]) -> tuple[float, float]:
        """(milliseconds until a call is done, seconds until the host has queued it)."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        host_s = time.perf_counter() - start
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3, host_s


class HostTimer:
    """Wall clock around each call, for devices that compute before the call returns."""

    def __call__(self, work: Callable[[], object], target_ms: float = 200.0) -> Timing:
        times: list[float] = []
        work()
        while len(times) < 3 or (sum(times) < target_ms and len(times) < 100):
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e3)
        return summarise(times)
