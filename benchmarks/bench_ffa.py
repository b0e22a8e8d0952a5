"""Attention on one GPU: TFLOP/s of our kernels and of every installed baseline, checked against float64 first.

    python -m benchmarks.bench_ffa --csv benchmarks/results/ffa.csv              masks x sizes, heads 48/8 and 16/16, head_dim 128, bf16
    python -m benchmarks.bench_ffa --masks causal --sizes 8k,64k --dims 64,128 --passes fwd,bwd,bwd_det --providers ours,cudnn
    python -m benchmarks.bench_ffa --gate                                        measure, then fail unless the milestone is met
    python -m benchmarks.bench_ffa --from benchmarks/results/ffa.csv --gate      the same on recorded rows; needs no GPU
    python -m benchmarks.bench_ffa --host-cost                                   microseconds of host time per call

fwd is the forward without autograd, bwd the gradients of q, k and v alone, bwd_det the same with deterministic=True. FLOPs are
4 * visible pairs * query heads * head_dim, times 2.5 backward. Times are medians of CUDA events with a cold L2, see ffa_timing.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import ffa_host_cost
from benchmarks.ffa_cells import DTYPES, HEADS, MASKS, OPS, SIZED_MASKS, SIZES, Cell, cells, flops
from benchmarks.ffa_check import Problem, check, draw, poison_freed_memory
from benchmarks.ffa_gate import GATES, judge, report
from benchmarks.ffa_providers import DEFAULT_PROVIDERS, PROVIDERS, Attend, Provider, reason_not_installed, takes
from benchmarks.ffa_rows import ANCHORS_CSV, Row, append_rows, read_anchors, read_rows, summary
from benchmarks.ffa_timing import CudaTimer, HostTimer, Timing
from benchmarks.stamp import stamp

_SLOW_FLOPS_PER_S = 2e14  # a careful guess of a provider's speed, for the budget only
_CALLS_PER_TIMING = 10
_REFERENCE_S_PER_SCORE = 1.6e-10  # both twins of the check, forward and backward, from their bytes and operations on an H200
_START_S = 45.0  # compiling one FlexAttention problem


@dataclass
class Session:
    """What every measurement shares.

    Attributes:
        facts: commit, machine and versions of each row.
        deadline: time.monotonic() after which nothing new starts.
        left_out: what the deadline cost, one line each.
    """

    device: str
    timer: Callable[[Callable[[], object]], Timing]
    facts: dict[str, Any]
    deadline: float = float("inf")
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class ContextLost(RuntimeError):
    """A kernel broke the CUDA context: every later call of this process would fail for that reason."""


# ---- one row ----


def measure(problem: Problem, provider: Provider, op: str, session: Session) -> Row:
    """Check, then time; a row says why when either could not be done.

    Raises:
        ContextLost: with the row as its argument.
    """
    try:
        attend = provider.prepare(problem, op)
        poison_freed_memory(problem)
        work, results = _forward(problem, attend) if op == "fwd" else _backward(problem, attend)
        verdict = check(problem, results)
        is_right = verdict.error_ratio <= provider.most_error
        note = "" if is_right else f"error {verdict.error_ratio:.2f} x the allowed one in {verdict.worst}"
        if not note and op == "bwd_det" and not _repeats_to_the_bit(work):
            note = "two runs differ although deterministic=True"
        if note:
            return _row(problem, provider, op, session, status="wrong", note=note, error_ratio=verdict.error_ratio)
        return _row(problem, provider, op, session, timing=session.timer(work), error_ratio=verdict.error_ratio)
    except Exception as error:  # a baseline may refuse or break in any way; the row says how, the others go on
        lines = str(error).splitlines() or [""]
        row = _row(problem, provider, op, session, status="failed", note=f"{type(error).__name__}: {lines[0][:300]}")
        if session.device == "cuda":
            _require_context(row)
        return row


def _require_context(row: Row) -> None:
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise ContextLost(row) from error


def _forward(problem: Problem, attend: Attend) -> tuple[Callable[[], object], dict[str, Tensor | None]]:
    @torch.no_grad()
    def work() -> tuple[Tensor, Tensor | None]:
        return attend(problem.q, problem.k, problem.v)

    out, lse = work()
    return work, {"out": out, "lse": lse}


def _backward(problem: Problem, attend: Attend) -> tuple[Callable[[], tuple[Tensor, ...]], dict[str, Tensor | None]]:
    leaves = (problem.q, problem.k, problem.v)
    out, _ = attend(*leaves)

    def work() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, problem.dout, retain_graph=True)

    return work, dict(zip(("dq", "dk", "dv"), work(), strict=True))


def _repeats_to_the_bit(work: Callable[[], object]) -> bool:
    first, second = work(), work()
    assert isinstance(first, tuple) and isinstance(second, tuple)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _row(
    problem: Problem,
    provider: Provider,
    op: str,
    session: Session,
    *,
    timing: Timing | None = None,
    status: str = "ok",
    note: str = "",
    error_ratio: float = 0.0,
) -> Row:
    cell, area = problem.cell, problem.mask.area()
    ms, spread_pct, repeats = timing or Timing(0.0, 0.0, 0)
    return Row(
        **{name: getattr(cell, name) for name in ("mask", "tokens", "heads", "head_dim", "dtype")},
        op=op,
        provider=provider.name,
        status=status,
        ms=round(ms, 5),
        spread_pct=round(spread_pct, 1),
        repeats=repeats,
        tflops=round(flops(area, cell.num_heads_q, cell.head_dim, op) / ms / 1e9, 2) if ms else 0.0,
        area=area,
        error_ratio=round(error_ratio, 3),
        note=note,
        provider_version=provider.version(),
        **session.facts,
    )


# ---- the grid ----


def expected_s(problem: Problem, provider: Provider, op: str) -> float:
    """About what a row costs, the first reference of its cell included."""
    cell = problem.cell
    timing = flops(problem.mask.area(), cell.num_heads_q, cell.head_dim, op) / _SLOW_FLOPS_PER_S * _CALLS_PER_TIMING + 0.3
    group_size = cell.num_heads_q // cell.num_heads_kv
    reference = 0.0 if problem.references else _REFERENCE_S_PER_SCORE * cell.tokens**2 * group_size
    return timing + reference + (_START_S if provider.is_slow_to_start else 0.0)


def run(grid: Sequence[Cell], providers: Sequence[Provider], ops: Sequence[str], session: Session, args: argparse.Namespace) -> None:
    """All quick providers over the whole grid first, then those that compile for each problem; fills session.rows and left_out."""
    for is_slow in (False, True):
        own = [provider for provider in providers if provider.is_slow_to_start == is_slow]
        for cell in grid if own else ():
            layout = cell.layout()
            wanted = [
                (x, op) for x in own if takes(x, cell, layout, args.flex_sizes) for op in ops if op != "bwd_det" or x.has_deterministic
            ]
            if not wanted:
                continue
            if time.monotonic() > session.deadline:
                session.left_out += [f"{provider.name} {op} {cell}" for provider, op in wanted]
                continue
            _run_cell(draw(cell, session.device), wanted, session, args.csv)


def _run_cell(problem: Problem, wanted: Sequence[tuple[Provider, str]], session: Session, path: Path | None) -> None:
    for provider, op in wanted:
        if time.monotonic() + expected_s(problem, provider, op) > session.deadline:
            session.left_out.append(f"{provider.name} {op} {problem.cell}")
            continue
        lost = None
        try:
            row = measure(problem, provider, op, session)
        except ContextLost as error:
            row, lost = error.args[0], error
        session.rows.append(row)
        if path is not None:
            append_rows(path, [row])
        print(_line(row), flush=True)
        if lost is not None:
            raise SystemExit(
                f"the CUDA context is lost after {row.provider} {row.op} {problem.cell}; nothing later can run in this process"
            )


def _line(row: Row) -> str:
    start = f"{row.mask:<19}{row.tokens:>7}{row.heads:>7} d{row.head_dim:<4}{row.dtype:<9} {row.op:<8}{row.provider:<11}"
    if row.status != "ok":
        return f"{start}{row.status}: {row.note}"
    return f"{start}{row.ms:>9.4f} ms ±{row.spread_pct:>4.1f} %{row.tflops:>8.1f} TFLOP/s  x{row.repeats:<4}error {row.error_ratio:.2f}"


# ---- the command ----


def _size(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def _heads(text: str) -> tuple[int, int]:
    num_heads_q, num_heads_kv = (int(number) for number in text.split("/"))
    if num_heads_kv < 1 or num_heads_q < num_heads_kv or num_heads_q % num_heads_kv:
        raise ValueError
    return num_heads_q, num_heads_kv


def _list_of(kind: Callable[[str], object], allowed: Sequence[object] | None = None) -> Callable[[str], tuple[object, ...]]:
    """An argparse type: values separated by commas."""

    def parse(text: str) -> tuple[object, ...]:
        try:
            values = tuple(kind(part) for part in text.split(",") if part)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} cannot be read") from None
        wrong = [value for value in values if allowed is not None and value not in allowed]
        if wrong or not values:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(map(str, allowed or ['at least one value']))}")
        return values

    return parse


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--masks", type=_list_of(str, MASKS), default=tuple(SIZED_MASKS), help=f"of {', '.join(MASKS)}; the docs_ ones have their own size")
    add("--sizes", type=_list_of(_size), default=SIZES, help="tokens, e.g. 8k,65536")
    add("--heads", type=_list_of(_heads), default=HEADS[:2], help="query/key heads, e.g. 48/8,16/16")
    add("--dims", type=_list_of(int), default=(128,))
    add("--dtypes", type=_list_of(str, DTYPES), default=DTYPES[:1])
    add("--passes", type=_list_of(str, OPS), default=OPS)
    add("--providers", type=_list_of(str, tuple(PROVIDERS)), default=DEFAULT_PROVIDERS)
    add("--flex-sizes", type=_list_of(_size), default=(16_384,), help="FlexAttention compiles for every problem: only at these sizes")
    add("--budget-seconds", type=float, default=float("inf"), help="start nothing that would end later; says what it left out")
    add("--csv", type=Path, help="append every row to this file as it is measured")
    add("--commit", help="of the measured tree, when it is a copy without .git")
    add("--from", dest="source", type=Path, help="take the rows of this file instead of measuring")
    add("--gate", nargs="*", choices=GATES, help="exit with 1 unless these promises hold in the selected cells; milestone by default")
    add("--host-cost", action="store_true", help="measure host time per call instead, see ffa_host_cost.py")
    return parser.parse_args(argv)


def _measured(grid: Sequence[Cell], args: argparse.Namespace) -> list[Row]:
    providers = [PROVIDERS[name] for name in args.providers]
    for provider in providers:
        reason = reason_not_installed(provider)
        print(f"{provider.name}: {provider.version() if reason is None else f'not installed ({reason})'}", flush=True)
    installed = [provider for provider in providers if reason_not_installed(provider) is None]
    is_cuda = torch.cuda.is_available()
    session = Session("cuda" if is_cuda else "cpu", CudaTimer() if is_cuda else HostTimer(), facts(args.commit))
    session.deadline = time.monotonic() + args.budget_seconds
    run(grid, installed, args.passes, session, args)
    if session.left_out:
        print(f"left out for --budget-seconds {args.budget_seconds:g}, {len(session.left_out)} rows:", *session.left_out, sep="\n  ")
    return session.rows


def facts(commit: str | None) -> dict[str, str]:
    """Columns commit, machine, torch, python of every row."""
    found = stamp("cuda" if torch.cuda.is_available() else "cpu")
    return found | {"commit": commit} if commit else found


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when a gate is missed."""
    args = arguments(argv)
    needs_cuda = args.host_cost or (args.source is None and set(args.providers) != {"blocked"})
    if needs_cuda and not torch.cuda.is_available():
        raise SystemExit(
            f"bench_ffa measures CUDA kernels, and torch {torch.__version__} sees no CUDA device here; "
            "--from FILE shows recorded rows without one"
        )
    if args.host_cost:
        return ffa_host_cost.main(args.csv, facts(args.commit), args.gate is not None)
    grid = cells(args.masks, args.sizes, args.heads, args.dims, args.dtypes)
    anchors = read_anchors(ANCHORS_CSV)
    if args.source and not args.source.exists():
        raise SystemExit(f"bench_ffa --from {args.source}: no such file; recorded rows are in benchmarks/results")
    rows = read_rows(args.source) if args.source else _measured(grid, args)
    selected = set(grid)
    shown = [row for row in rows if _cell_of(row) in selected]
    print("", *summary(shown, anchors), sep="\n")
    if args.gate is None:
        return 0
    results = [report(gate, judge(gate, rows, anchors, selected)) for gate in args.gate or ("milestone",)]
    for _, lines in results:
        print(*lines, sep="\n")
    return 0 if all(is_met for is_met, _ in results) else 1


def _cell_of(row: Row) -> Cell:
    return Cell(row.mask, row.tokens, *_heads(row.heads), row.head_dim, row.dtype)


if __name__ == "__main__":
    sys.exit(main())
