"""Blocked CPU attention against torch's own: flash SDPA on one causal sequence, masked SDPA on packed documents.

    python -m benchmarks.bench_cpu_attention [--quick] [--threads N] [--csv benchmarks/results/cpu_attention.csv]

Both sides run in turn in one process, the best of several rounds counts, and the outputs are compared first. Memory is the growth of
the peak resident set over one forward and backward, inputs and SDPA's mask of booleans left out.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.stamp import stamp
from magi_attention.kernels.ops import single_device_attention
from magi_attention.mask import AttnMask, builders

COLUMNS = (
    "mask",
    "tokens",
    "heads",
    "head_dim",
    "dtype",
    "threads",
    "fwd_ms",
    "torch_fwd_ms",
    "fwd_ratio",
    "fwd_bwd_ms",
    "torch_fwd_bwd_ms",
    "fwd_bwd_ratio",
    "peak_mb",
    "torch_peak_mb",
    "max_difference",
    "commit",
    "machine",
    "torch",
    "python",
)


@dataclass(frozen=True)
class Problem:
    name: str
    mask: AttnMask
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    is_plain_causal: bool


def problems(quick: bool) -> list[Problem]:
    """The two measures of the project, in the shapes they are promised for."""
    causal_tokens, packed_tokens = (1024, 2048) if quick else (4096, 16_384)
    causal = builders.sliding_window(causal_tokens, causal_tokens, (None, 0))
    borders = document_borders(packed_tokens)
    packed = builders.from_cu_seqlens(borders, borders, causal=True)
    found = [Problem("causal", causal, heads, dim, torch.float32, True) for heads, dim in (((8, 8), 64), ((8, 8), 128), ((8, 2), 64))]
    found.append(Problem("causal", causal, (8, 8), 64, torch.bfloat16, True))
    found += [Problem("documents_causal", packed, (2, 2), 64, dtype, False) for dtype in (torch.float32, torch.bfloat16)]
    return found


def document_borders(total: int) -> list[int]:
    """Log-normal lengths, median 1,500, sigma 1.2, each at most a quarter of the tokens."""
    rng = np.random.default_rng(0)
    borders = [0]
    while borders[-1] < total:
        borders.append(min(total, borders[-1] + int(np.clip(rng.lognormal(np.log(1500), 1.2), 1, total // 4))))
    return borders


def attention_pair(problem: Problem) -> tuple[list[Tensor], Callable[..., Tensor], Callable[..., Tensor]]:
    """Leaves [T, H, D] and the two attentions over them, ours and torch's, each -> [T, H, D]."""
    generator = torch.Generator().manual_seed(0)
    total, (num_heads_q, num_heads_kv) = problem.mask.total_q, problem.heads
    shapes = [(total, heads, problem.head_dim) for heads in (num_heads_q, num_heads_kv, num_heads_kv)]
    leaves = [torch.randn(shape, generator=generator).to(problem.dtype).requires_grad_() for shape in shapes]
    dense = None if problem.is_plain_causal else torch.from_numpy(np.array(problem.mask.to_dense()))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return single_device_attention(q, k, v, problem.mask.slices)[0]

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        is_grouped = num_heads_q != num_heads_kv
        return F.scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=dense is None, enable_gqa=is_grouped)[0].transpose(0, 1)

    return leaves, ours, torchs


def timed_ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def peak_mb(work: Callable[[], object]) -> float:
    """Growth of the peak resident set while `work` runs."""

    def resident_mb(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = resident_mb("VmRSS")
    work()
    return max(0.0, resident_mb("VmHWM") - before)


def measure(problem: Problem, rounds: int) -> dict[str, object]:
    leaves, ours, torchs = attention_pair(problem)
    dout = torch.randn(ours(*leaves).shape, generator=torch.Generator().manual_seed(1)).to(problem.dtype)

    def forward(attention: Callable[..., Tensor]) -> Callable[[], object]:
        @torch.no_grad()
        def run() -> Tensor:
            return attention(*leaves)

        return run

    def both(attention: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(*leaves), leaves, dout)

    works = {"fwd_ms": forward(ours), "torch_fwd_ms": forward(torchs), "fwd_bwd_ms": both(ours), "torch_fwd_bwd_ms": both(torchs)}
    difference = float((ours(*leaves) - torchs(*leaves)).detach().abs().max())
    assert difference < 0.05, f"{problem.name}: outputs differ by {difference}"
    memory = {name: peak_mb(both(attention)) for name, attention in (("peak_mb", ours), ("torch_peak_mb", torchs))}
    best = {name: timed_ms(work) for name, work in works.items()}
    for _ in range(rounds - 1):  # in turn, so that other load on the machine meets both sides
        for name, work in works.items():
            best[name] = min(best[name], timed_ms(work))
    rounded = {name: round(value, 1) for name, value in (best | memory).items()}
    return {
        "mask": problem.name,
        "tokens": problem.mask.total_q,
        "heads": "{}/{}".format(*problem.heads),
        "head_dim": problem.head_dim,
        "dtype": str(problem.dtype).removeprefix("torch."),
        **rounded,
        "fwd_ratio": round(best["fwd_ms"] / best["torch_fwd_ms"], 2),
        "fwd_bwd_ratio": round(best["fwd_bwd_ms"] / best["torch_fwd_bwd_ms"], 2),
        "max_difference": f"{difference:.1e}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where = {"threads": args.threads, **stamp()}
    rows = []
    for problem in problems(args.quick):
        rows.append(measure(problem, 2 if args.quick else 5) | where)
        print("  ".join(f"{name}={rows[-1][name]}" for name in COLUMNS[:15]), flush=True)
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        is_new = not args.csv.exists()
        with args.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if is_new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
