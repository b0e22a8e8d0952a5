"""Attention over several ranks: calc_attn beside ring, all-gather and Ulysses, all on the kernels of this package, in one process.

    python -m benchmarks.bench_dist --csv benchmarks/results/dist.csv                     one rank per GPU, 32k to 256k tokens
    python -m benchmarks.bench_dist --masks causal --sizes 64k --heads 64/8 --methods magi,ring --passes bwd
    torchrun --nproc-per-node 8 -m benchmarks.bench_dist --csv benchmarks/results/dist.csv
    python -m benchmarks.bench_dist --ranks 4 --sizes 512                                 without GPUs: gloo, small heads, fp32

A method is timed after its out, dq, dk and dv have agreed with one rank that computes the whole problem for the last key head, and after
the areas of all ranks have added up to the mask's. The time of a call is that of its slowest rank. TFLOP/s count the work of the mask,
divided by the ranks. `kernel` is one GPU without exchange on its zigzag rows; `ratio` is the rate of a method over that one's.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.dist_baselines import METHODS, Heads, LocalAttention, MethodMaker, Result, options_for
from benchmarks.dist_baselines.alone import KernelAlone, SingleRank
from benchmarks.dist_baselines.in_step import InStepTimer, over_ranks
from benchmarks.ffa_cells import DTYPES, SIZED_MASKS, Cell, cells, flops
from benchmarks.ffa_timing import Timing
from benchmarks.stamp import stamp
from magi_attention.comm import CommGroup, comm_group
from magi_attention.errors import InputError, UnsupportedError
from magi_attention.kernels.attention import AttentionOptions
from magi_attention.mask import AttnMask
from magi_attention.testing.workers import RankPool

MASKS = ("full", "causal", "varlen_causal", "frame_causal")
PASSES = ("fwd", "bwd")
KERNEL = "kernel"
_TIME_LIMIT = datetime.timedelta(minutes=5)  # of one collective: the others may wait for a rank that checks a long sequence


@dataclass(frozen=True)
class Row:
    """One method in one cell and pass.

    Attributes:
        tflops: per rank. balance: largest area of a rank over the mean. error_ratio: largest row error over the allowed one.
        status: ok, refused (the method cannot do it) or wrong; only ok has times.
    """

    mask: str
    tokens: int
    heads: str
    head_dim: int
    dtype: str
    ranks: int
    collectives: str
    op: str
    method: str
    status: str = "ok"
    ms: float = 0.0
    spread_pct: float = 0.0
    repeats: int = 0
    tflops: float = 0.0
    kernel_tflops: float = 0.0
    ratio: float = 0.0
    balance: float = 0.0
    error_ratio: float = 0.0
    note: str = ""

    @property
    def line(self) -> str:
        start = f"{self.mask:<14}{self.tokens:>7}{self.heads:>7} d{self.head_dim:<4}{self.ranks} ranks  {self.op:<4} {self.method:<19}"
        if self.status != "ok":
            return f"{start}{self.status}: {self.note}"
        rate = f"{self.ms:>10.3f} ms ±{self.spread_pct:>4.1f} %{self.tflops:>9.2f} TFLOP/s  {self.ratio:>5.3f} of the kernel"
        return f"{start}{rate}  balance {self.balance:.3f}  error {self.error_ratio:.2f}  x{self.repeats}"


@dataclass
class Problem:
    """A cell with whole tensors, equal on every rank, and what all methods of it share."""

    cell: Cell
    mask: AttnMask
    group: CommGroup
    options: AttentionOptions
    whole: dict[str, Tensor]
    timer: InStepTimer
    reference: SingleRank
    kernel_tflops: dict[str, float] = field(default_factory=dict)  # by pass

    @property
    def device(self) -> torch.device:
        return self.whole["q"].device

    @property
    def heads(self) -> Heads:
        return Heads(self.cell.num_heads_q, self.cell.num_heads_kv, self.cell.head_dim)

    def row(self, op: str, method: str, **found: Any) -> Row:
        cell = self.cell
        facts = {name: getattr(cell, name) for name in ("mask", "tokens", "heads", "head_dim", "dtype")}
        collectives = "none" if self.group.is_single else self.group.backend_for(self.device)
        if collectives == "nccl":
            collectives += " " + ".".join(map(str, torch.cuda.nccl.version()))
        return Row(**facts, ranks=self.group.size, collectives=collectives, op=op, method=method, **found)

    def tflops(self, area: float, op: str, ms: float) -> float:
        return flops(1, self.cell.num_heads_q, self.cell.head_dim, op) * area / ms / 1e9 if ms else 0.0


def draw(cell: Cell, timer: InStepTimer, options: AttentionOptions) -> Problem:
    """Random normal tensors, the same on every rank of one kind of device, and the single-rank result."""
    group, device = timer.group, timer.device
    generator = torch.Generator(device).manual_seed(0)
    heads, mask = Heads(cell.num_heads_q, cell.num_heads_kv, cell.head_dim), cell.layout().mask()
    kind = {"generator": generator, "device": device, "dtype": getattr(torch, cell.dtype)}
    whole = {name: torch.randn((cell.tokens, *shape), **kind) for name, shape in heads.shapes.items()}
    reference = SingleRank(mask, whole, cell.num_heads_kv - 1, options)
    return Problem(cell, mask, group, options, whole, timer, reference)


# ---- one method in one cell ----


class LocalCall:
    """A method with this rank's rows of the tensors, and the result of one forward."""

    def __init__(self, problem: Problem, method: LocalAttention) -> None:
        self._method = method
        self._rows_q, self._rows_k = (torch.from_numpy(rows.copy()).to(problem.device) for rows in (method.query_rows, method.key_rows))
        rows = {"q": self._rows_q, "k": self._rows_k, "v": self._rows_k, "dout": self._rows_q}
        self._local = {name: x[rows[name]] for name, x in problem.whole.items()}
        _leave_nan_behind(self._local)
        self.result = self.forward()

    def forward(self) -> Result:
        return self._method.forward(self._local["q"], self._local["k"], self._local["v"])

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._method.backward(self.result, self._local["dout"])

    def works(self, ops: Iterable[str]) -> dict[str, Callable[[], object]]:
        return {op: self.forward if op == "fwd" else self.backward for op in ops}

    def error_ratio(self, reference: SingleRank) -> float:
        dq, dk, dv = self.backward()
        found = (("out", self.result.out, self._rows_q), ("dq", dq, self._rows_q), ("dk", dk, self._rows_k), ("dv", dv, self._rows_k))
        return max(reference.error_of(name, ours, rows) for name, ours, rows in found)


def _leave_nan_behind(tensors: dict[str, Tensor]) -> None:
    """In memory that is free for results, so that what a method does not write shows."""
    blocks = [torch.full_like(x, float("nan"), dtype=dtype) for x in tensors.values() for dtype in (x.dtype, torch.float32)]
    del blocks


def measure_kernel(problem: Problem, ops: Sequence[str]) -> list[Row]:
    """One GPU without exchange, the mean rate of all ranks; fills problem.kernel_tflops."""
    alone = KernelAlone(problem.mask, problem.group, problem.heads, problem.options)
    call = LocalCall(problem, alone)
    rows = []
    for op, work in call.works(ops).items():
        own, slowest = problem.timer(work)
        area, ms = over_ranks([alone.area, own.ms], problem.group, problem.device, takes_sum=True)
        problem.kernel_tflops[op] = problem.tflops(area, op, ms)
        balance = over_ranks([alone.area], problem.group, problem.device)[0] * problem.group.size / max(area, 1)
        rows.append(_timed(problem, op, KERNEL, slowest, balance=balance, tflops=problem.kernel_tflops[op]))
    return rows


def measure(problem: Problem, name: str, make: MethodMaker, ops: Sequence[str]) -> list[Row]:
    """Check, then time. Collective; every rank returns the same rows."""
    group, area = problem.group, problem.mask.area()
    try:
        method = make(problem.mask, group, problem.heads, problem.options)
    except (InputError, UnsupportedError) as error:  # from arguments alone, so on every rank
        return [problem.row(op, name, status="refused", note=str(error)) for op in ops]
    call = LocalCall(problem, method)
    total = over_ranks([method.area], group, problem.device, takes_sum=True)[0]
    largest, error_ratio = over_ranks([method.area, call.error_ratio(problem.reference)], group, problem.device)
    note = ""
    if round(total) != area:
        note = f"the ranks compute {total:.0f} pairs, the mask has {area}"
    elif not error_ratio <= 1.0:
        note = f"a row is {error_ratio:.2f} x the allowed distance from the single-rank result"
    if note:
        return [problem.row(op, name, status="wrong", note=note, error_ratio=round(error_ratio, 3)) for op in ops]
    shown = {"balance": largest * group.size / max(area, 1), "error_ratio": error_ratio}
    return [_timed(problem, op, name, problem.timer(work).slowest, **shown) for op, work in call.works(ops).items()]


def _timed(problem: Problem, op: str, name: str, timing: Timing, **found: float) -> Row:
    kernel_tflops = problem.kernel_tflops.get(op, 0.0)
    tflops = found.pop("tflops", problem.tflops(problem.mask.area() / problem.group.size, op, timing.ms))
    numbers = {
        "tflops": tflops,
        "kernel_tflops": kernel_tflops,
        "ratio": tflops / kernel_tflops if kernel_tflops else 0.0,
        **found,
    }
    return problem.row(
        op,
        name,
        ms=round(timing.ms, 5),
        spread_pct=round(timing.spread_pct, 1),
        repeats=timing.repeats,
        **{key: round(value, 4) for key, value in numbers.items()},
    )


# ---- all cells, on one rank ----


def run_on_rank(rank: int, num_ranks: int, args: argparse.Namespace) -> list[Row]:
    """Every cell with every method; the first rank prints and writes each row as it is measured."""
    group = comm_group(None)
    device = torch.device("cuda", torch.cuda.current_device()) if args.is_cuda else torch.device("cpu")
    facts = stamp(device.type) | ({"commit": args.commit} if args.commit else {})
    deadline, rows = time.monotonic() + args.budget_seconds, list[Row]()
    if rank == 0:  # more ranks than GPUs run without them, which the reader should know
        print(f"{num_ranks} ranks, {dist.get_backend()}, {facts['machine']}, commit {facts['commit']}", flush=True)

    def keep(found: list[Row]) -> None:
        rows.extend(found)
        if rank == 0:
            print(*(row.line for row in found), sep="\n", flush=True)
            if args.csv is not None:
                append_rows(args.csv, found, facts)

    timer = InStepTimer(group, device, args.target_ms)
    grid = cells(args.masks, args.sizes, args.heads, (args.head_dim,), (args.dtype,))
    for idx, cell in enumerate(grid):
        if over_ranks([float(time.monotonic() > deadline)], group, device)[0]:
            if rank == 0:
                print(f"left out for --budget-seconds {args.budget_seconds:g}:", *map(str, grid[idx:]), sep="\n  ", flush=True)
            break
        heads = Heads(cell.num_heads_q, cell.num_heads_kv, cell.head_dim)
        problem = draw(cell, timer, options_for(heads, args.kernel_backend, args.sm_margin))
        keep(measure_kernel(problem, args.passes))
        for name in args.methods:
            keep(measure(problem, name, METHODS[name], args.passes))
        del problem  # before the next one is drawn
    return rows


def append_rows(path: Path, rows: Sequence[Row], facts: dict[str, str]) -> None:
    """With a header when the file is new."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*(column.name for column in dataclasses.fields(Row)), *facts])
        if is_new:
            writer.writeheader()
        writer.writerows([dataclasses.asdict(row) | facts for row in rows])


def summary(rows: Sequence[Row]) -> list[str]:
    """calc_attn beside the best of the others, one line for each cell and pass that has both."""
    lines = []
    timed = [row for row in rows if row.status == "ok"]
    for own in (row for row in timed if row.method == "magi"):
        alike = [row for row in timed if row.method not in ("magi", KERNEL) and _cell_of(row) == _cell_of(own)]
        if alike:
            best = min(alike, key=lambda row: row.ms)
            lines.append(
                f"{own.mask:<14}{own.tokens:>7}{own.heads:>7} {own.op:<4} magi {own.ratio:.3f} of the kernel, best other {best.method} "
                f"{best.ratio:.3f}: {best.ms / own.ms:.3f} x its speed"
            )
    return lines


def _cell_of(row: Row) -> tuple[object, ...]:
    return (row.mask, row.tokens, row.heads, row.head_dim, row.dtype, row.ranks, row.op)


# ---- the command ----


def _listed(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def values(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(","))

    return values


def _size(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def _heads(text: str) -> tuple[int, int]:
    num_heads_q, num_heads_kv = (int(number) for number in text.split("/"))
    if num_heads_kv < 1 or num_heads_q < 1 or num_heads_q % num_heads_kv:
        raise ValueError(text)
    return num_heads_q, num_heads_kv


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, help="processes to start; all GPUs by default, 2 without; under torchrun its own number holds")
    add("--masks", type=_listed(str), default=MASKS, help=f"of {', '.join(SIZED_MASKS)}")
    add("--sizes", type=_listed(_size), help="tokens in all, e.g. 32k,65536")
    add("--heads", type=_listed(_heads), help="query/key heads, e.g. 64/8,16/16")
    add("--head-dim", type=int)
    add("--dtype", choices=(*DTYPES, "float32", "float64"))
    add("--methods", type=_listed(str), default=tuple(METHODS), help=f"of {', '.join(METHODS)}")
    add("--passes", type=_listed(str), default=PASSES, help="fwd,bwd")
    add("--kernel-backend", default="auto", help="auto, ffa or blocked, of every method")
    add("--sm-margin", type=int, default=0, help="multiprocessors the kernels of all methods but magi leave to NCCL")
    add("--target-ms", type=float, default=300.0, help="calls of one measurement fill about so much time, 5 to 100 of them")
    add("--budget-seconds", type=float, default=float("inf"), help="start no cell after that; says what it left out")
    add("--csv", type=Path, help="append every row to this file as it is measured")
    add("--commit", help="of the measured tree, when it is a copy without .git")
    args = parser.parse_args(argv)
    for name, allowed in (("masks", SIZED_MASKS), ("methods", METHODS), ("passes", PASSES)):
        wrong = [value for value in getattr(args, name) if value not in allowed]
        if wrong:
            parser.error(f"--{name} {','.join(wrong)}: choose from {', '.join(allowed)}")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if _is_torchrun() else args.ranks or num_gpus or 2
    args.is_cuda = 0 < num_ranks <= num_gpus
    args.ranks = num_ranks
    _fill_in(args, ((32_768, 65_536, 131_072, 262_144), ((64, 8), (16, 16)), 128, DTYPES[0]) if args.is_cuda else _SMALL)
    return args


_SMALL = ((1024,), ((4, 2),), 32, "float32")  # what gloo and the blocked path do in seconds


def _fill_in(args: argparse.Namespace, defaults: tuple[object, ...]) -> None:
    for name, value in zip(("sizes", "heads", "head_dim", "dtype"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)


def _is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _run_under_torchrun(backend: str, args: argparse.Namespace) -> list[Row]:
    if args.is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=_TIME_LIMIT)
    rows = run_on_rank(dist.get_rank(), dist.get_world_size(), args)
    dist.barrier()
    own = dist.get_rank() == 0
    dist.destroy_process_group()
    return rows if own else []


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when a method was wrong."""
    args = arguments(argv)
    backend = "nccl" if args.is_cuda else "gloo"
    if _is_torchrun():
        rows = _run_under_torchrun(backend, args)
    else:
        pool = RankPool(backend)
        rows = pool.run(args.ranks, run_on_rank, args, timeout_s=min(args.budget_seconds, 86_400.0) + _TIME_LIMIT.total_seconds())[0]
        pool.close()
    print("", *summary(rows), sep="\n")
    return 1 if any(row.status == "wrong" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
