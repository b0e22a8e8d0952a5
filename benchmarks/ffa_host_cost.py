"""Host time of a call of flex_flash_attn_func: wall clock until it returns, the GPU not waited for, and whether the host had to wait.

Run by `python -m benchmarks.bench_ffa --host-cost [--csv benchmarks/results/ffa_host.csv] [--gate]`. The problem is small, so that the
GPU is never behind and the queue never full.
"""

from __future__ import annotations

import csv
import itertools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_plan import long_tailed_documents
from magi_attention.api import AttnMask, flex_flash_attn_func, prepare_attention

COLUMNS = ("case", "calls", "median_us", "p90_us", "host_waits", "limit_us", "commit", "machine", "torch", "python")
_TOKENS, _HEADS, _HEAD_DIM = 2048, (8, 2), 128
_CALLS, _CALLS_BETWEEN_WAITS = 500, 50
_LIMIT_PLAN_US, _LIMIT_RANGES_US = 40.0, 80.0


@dataclass(frozen=True)
class Case:
    """`call` is timed; `before` runs untimed ahead of each call. limit_us is 0 where nothing is promised."""

    name: str
    call: Callable[[], object]
    before: Callable[[], object]
    limit_us: float


@dataclass(frozen=True)
class HostCost:
    """Microseconds; host_waits is None, or what made the host wait for the GPU."""

    median_us: float
    p90_us: float
    host_waits: str | None

    def is_within(self, limit_us: float) -> bool:
        return not limit_us or (self.host_waits is None and self.median_us <= limit_us)


def _nothing() -> None:
    """Most cases need nothing before a call."""


def cases(device: str = "cuda") -> list[Case]:
    """A prebuilt plan, and range tensors of the device: unchanged, rewritten in place, and new ones in every call."""
    borders = long_tailed_documents(_TOKENS)
    ranges = torch.tensor(list(itertools.pairwise(borders)), dtype=torch.int32, device=device)
    types = torch.ones(len(ranges), dtype=torch.int32, device=device)
    plan = prepare_attention(AttnMask.from_ranges(ranges.cpu(), ranges.cpu(), types.cpu(), _TOKENS, _TOKENS))
    num_heads_q, num_heads_kv = _HEADS
    shapes = [(_TOKENS, num_heads, _HEAD_DIM) for num_heads in (num_heads_q, num_heads_kv, num_heads_kv)]
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, _ = flex_flash_attn_func(*leaves, plan=plan)
    dout = torch.randn_like(out)
    source, fresh = ranges.clone(), [ranges, ranges, types]

    def renew() -> None:
        fresh[:] = [ranges.clone(), ranges.clone(), types.clone()]

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def attend_ranges() -> object:
        return flex_flash_attn_func(q, k, v, ranges, ranges, types)

    return [
        Case("plan, forward", lambda: flex_flash_attn_func(q, k, v, plan=plan), _nothing, _LIMIT_PLAN_US),
        Case("plan, forward that records autograd", lambda: flex_flash_attn_func(*leaves, plan=plan), _nothing, 0.0),
        Case("plan, backward", backward, _nothing, 0.0),
        Case("range tensors unchanged, forward", attend_ranges, _nothing, _LIMIT_RANGES_US),
        Case("range tensors rewritten, forward", attend_ranges, lambda: ranges.copy_(source), _LIMIT_RANGES_US),
        Case("range tensors new, forward", lambda: flex_flash_attn_func(q, k, v, *fresh), renew, _LIMIT_RANGES_US),
    ]


def measure(case: Case, num_calls: int = _CALLS) -> HostCost:
    times = []
    for idx in range(num_calls + 10):
        if idx % _CALLS_BETWEEN_WAITS == 0:
            torch.cuda.synchronize()
        case.before()
        start = time.perf_counter()
        case.call()
        if idx >= 10:
            times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    median_us, p90_us = np.percentile(times, (50, 90))
    return HostCost(float(median_us), float(p90_us), _reason_to_wait(case))


def _reason_to_wait(case: Case) -> str | None:
    case.before()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is new, once
        torch.cuda.set_sync_debug_mode("error")
    try:
        case.call()
    except RuntimeError as error:
        return (str(error).splitlines() or ["an error without text"])[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def main(path: Path | None, facts: dict[str, str], is_gate: bool) -> int:
    """Print and append one row per case; 1 when `is_gate` and a promise is missed."""
    is_met, rows = True, []
    for case in cases():
        found = measure(case)
        is_met &= found.is_within(case.limit_us)
        promise = f"promised {case.limit_us:.0f}" if case.limit_us else ""
        waits = found.host_waits or "no"
        print(f"{case.name:<38}{found.median_us:>8.1f} us (p90 {found.p90_us:.1f})  host waits: {waits}  {promise}", flush=True)
        row = (case.name, _CALLS, f"{found.median_us:.1f}", f"{found.p90_us:.1f}", waits, f"{case.limit_us:.0f}")
        rows.append((*row, *facts.values()))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([*([COLUMNS] if is_new else []), *rows])
    print("host cost: every promise is kept" if is_met else "host cost: MISSED")
    return 0 if is_met or not is_gate else 1
