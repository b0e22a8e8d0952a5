"""Planning: host time and memory, balance, key rows moved. Needs no GPU and no ranks.

    python -m benchmarks.bench_plan [--quick] [--csv benchmarks/results/plan.csv]

Each case runs in a process of its own, so that memory is that case's alone: growth of the peak resident set over the state after
imports and after the mask is made. Plan time is the median of three plans of rank 0, caches cold.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.stamp import stamp
from magi_attention.config import ContiguousDispatchAlg, DispatchAlg, DispatchConfig, DistAttnConfig, MinHeapDispatchAlg, ZigzagDispatchAlg
from magi_attention.mask import builders
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.build import plan_attention
from magi_attention.plan.types import DispatchPlan

MILLION = 1_000_000
HEADS = {"num_heads_q": 64, "num_heads_kv": 8, "head_dim": 128}
COLUMNS = (
    "mask",
    "tokens",
    "slices",
    "ranks",
    "dispatch",
    "plan_ms",
    "plan_mb",
    "max_over_mean_area",
    "remote_rows",
    "lower_bound",
    "steps",
)


def long_tailed_documents(total: int, median: float = 1_500, sigma: float = 1.2, seed: int = 0) -> list[int]:
    """cu_seqlens of log-normal documents, each at most a quarter of the tokens, cut to fill `total` exactly."""
    rng = np.random.default_rng(seed)
    cu_seqlens = [0]
    while cu_seqlens[-1] < total:
        length = int(np.clip(rng.lognormal(np.log(median), sigma), 1, total // 4))
        cu_seqlens.append(min(total, cu_seqlens[-1] + length))
    return cu_seqlens


def equal_documents(total: int, num_documents: int) -> list[int]:
    return np.linspace(0, total, num_documents + 1).astype(np.int64).tolist()


def varlen_causal(cu_seqlens: list[int]) -> AttnMask:
    return builders.from_cu_seqlens(cu_seqlens, cu_seqlens, causal=True)


MASKS: dict[str, Callable[[int], AttnMask]] = {
    "causal": lambda total: varlen_causal([0, total]),
    "varlen_causal": lambda total: varlen_causal(long_tailed_documents(total)),
    "varlen_10k_documents": lambda total: varlen_causal(equal_documents(total, 10_000)),
    "window_4096": lambda total: builders.from_cu_seqlens([0, total], [0, total], causal=True, window_size=(4095, 0)),
    "video_1560": lambda total: builders.block_causal_video(num_frames=-(-total // 1560), frame_length=1560, total_tokens=total),
}
ALGORITHMS: dict[str, DispatchAlg] = {
    "contiguous": ContiguousDispatchAlg(),
    "zigzag": ZigzagDispatchAlg(),
    "min_heap": MinHeapDispatchAlg(),
}


def key_intervals(mask: AttnMask, run: np.ndarray) -> np.ndarray:
    """int64 [n, 2], tight key range of every slice under one range of query rows."""
    slices = mask.slices.astype(np.int64)
    q_start, q_end = np.maximum(slices[:, 0], run[0]), np.minimum(slices[:, 1], run[1])
    k_start, k_end = np.maximum(slices[:, 2], q_start + slices[:, 4]), np.minimum(slices[:, 3], q_end + slices[:, 5])
    is_seen = (q_start < q_end) & (k_start < k_end)
    return np.stack([k_start[is_seen], k_end[is_seen]], axis=1)


def lower_bound(mask: AttnMask, dispatch: DispatchPlan) -> int:
    """Key rows that must move for this dispatch: per rank, the union of keys its rows see, without its own. Plain numpy, no solver."""
    num_rows = 0
    for runs in dispatch.rank_runs:
        seen = np.zeros(mask.total_k + 1, np.int32)
        for run in runs:
            intervals = key_intervals(mask, run)
            np.add.at(seen, intervals[:, 0], 1)
            np.add.at(seen, intervals[:, 1], -1)
        is_seen = np.cumsum(seen[:-1]) > 0
        for start, end in runs:
            is_seen[start:end] = False
        num_rows += int(is_seen.sum())
    return num_rows


def measure(mask_name: str, total: int, num_ranks: int, alg_name: str) -> dict[str, object]:
    """One row of the table, measured in this process."""
    mask = MASKS[mask_name](total)
    config = DistAttnConfig(dispatch_config=DispatchConfig(alg=ALGORITHMS[alg_name]))
    base_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(3 if total <= MILLION else 1):
        start = time.perf_counter()
        plan = plan_attention(mask, num_ranks, 0, config, **HEADS)
        seconds.append(time.perf_counter() - start)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base_kb
    areas = plan.rank_areas
    return {
        "mask": mask_name,
        "tokens": total,
        "slices": len(mask.slices),
        "ranks": num_ranks,
        "dispatch": alg_name,
        "plan_ms": round(1e3 * statistics.median(seconds), 1),
        "plan_mb": round(grown_kb / 1024, 1),
        "max_over_mean_area": round(float(areas.max() / areas.mean()), 4),
        "remote_rows": int(plan.rank_recv_rows.sum()),
        "lower_bound": lower_bound(mask, plan.dispatch_q),
        "steps": f"{len(plan.forward)}/{len(plan.backward)}",
    }


def cases(is_quick: bool) -> list[tuple[str, int, int, str]]:
    ranks = (8,) if is_quick else (8, 64, 512)
    rows = [(mask, MILLION, num_ranks, alg) for mask in MASKS for num_ranks in ranks for alg in ALGORITHMS]
    if not is_quick:
        rows += [(mask, 4 * MILLION, 1024, alg) for mask in ("causal", "varlen_causal") for alg in ALGORITHMS]
    return rows


def run_in_own_process(case: tuple[str, int, int, str]) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.bench_plan", "--case", json.dumps(case)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    return json.loads(finished.stdout)


def append(path: Path, row: dict[str, object]) -> None:
    """One more row, with a head when the file is new; at once, so that a run that is stopped keeps what it measured."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 ranks only")
    parser.add_argument("--csv", type=Path, help="append rows to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(*json.loads(args.case))))
        return
    print("  ".join(f"{name:>20s}" if name == "mask" else f"{name:>11s}" for name in COLUMNS))
    facts = stamp()
    for case in cases(args.quick):
        row = run_in_own_process(case)
        print("  ".join(f"{row[name]!s:>20s}" if name == "mask" else f"{row[name]!s:>11s}" for name in COLUMNS), flush=True)
        if args.csv:
            append(args.csv, {**row, **facts})


if __name__ == "__main__":
    main()
