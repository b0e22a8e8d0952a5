"""Command line of the planner: what a mask costs on any number of ranks. Needs no GPU, no ranks and no process group.

python -m magi_attention.plan --docs lengths.txt --ranks 64 --heads 64:8 --head-dim 128 --plot plan.png
python -m magi_attention.plan --cu-seqlens 0,70000,131072 --window 4095,0 --ranks 8
python -m magi_attention.plan --mask mask.json --ranks 1024 --nodes 128 --json
python -m magi_attention.plan --docs lengths.txt --ranks 64 --simulate --plot timeline.png
python -m magi_attention.plan --family documents --sweep-ranks 1,8,64,1024 --machine h200-nvlink --plot sweep.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from magi_attention import config as cfg
from magi_attention.errors import InputError, UnsupportedError
from magi_attention.mask.builders import from_cu_seqlens
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.build import PlanRequest
from magi_attention.plan.cost import DEFAULT_MACHINE, MACHINES
from magi_attention.plan.plot import plot_summary
from magi_attention.plan.simulate_command import add_arguments, numbers_of_ranks, run_calibration, run_simulation, run_sweep
from magi_attention.plan.simulate_report import nodes_of
from magi_attention.plan.simulate_sweep import FAMILIES, family_mask
from magi_attention.plan.summary import DirectionSummary, PlanSummary, summarize

MAX_RANKS = 4_096
ALGORITHMS: dict[str, cfg.DispatchAlg] = {
    alg.name: alg
    for alg in (
        cfg.MinHeapDispatchAlg(),
        cfg.ContiguousDispatchAlg(),
        cfg.ZigzagDispatchAlg(),
        cfg.SortedSequentialSelectAlg(),
        cfg.ToppHeapDispatchAlg(),
        cfg.LBDispatchAlg(),
        cfg.DPDispatchAlg(),
        cfg.BSDispatchAlg(),
    )
}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m magi_attention.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--docs", type=Path, metavar="FILE", help="document lengths in tokens, separated by blanks, commas or lines")
    source.add_argument("--cu-seqlens", metavar="0,A,B,..", help="document borders, or a file with them")
    source.add_argument("--mask", type=Path, metavar="FILE", help="a mask as AttnMask.to_json writes it")
    source.add_argument("--family", choices=list(FAMILIES), help="a mask of --tokens-per-gpu tokens for each rank")
    parser.add_argument("--full", action="store_true", help="documents attend to all of themselves (default: causal)")
    parser.add_argument("--window", metavar="LEFT,RIGHT", help="keys left and right of each query; -1 is unbounded")
    parser.add_argument("--ranks", type=int, help=f"context-parallel ranks, 1..{MAX_RANKS}")
    parser.add_argument("--nodes", type=int, help="machines the ranks are spread over (default 1; --simulate: as many as they fill)")
    parser.add_argument("--heads", default="64:8", metavar="Q:KV", help="query and key heads (default 64:8)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--machine", default=DEFAULT_MACHINE, choices=list(MACHINES), help="whose rates predict the times")
    parser.add_argument("--alg", default="min_heap", choices=list(ALGORITHMS), help="dispatch algorithm")
    parser.add_argument("--chunk-size", type=int, help="tokens per chunk (default: chosen)")
    parser.add_argument("--degree", type=int, help="remote steps (default: chosen by the cost model)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save a picture of the plan")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_arguments(parser)
    args = parser.parse_args(_joined_window(sys.argv[1:] if argv is None else argv))
    sources = (args.docs, args.cu_seqlens, args.mask, args.family)
    if args.calibrate is None and all(given is None for given in sources):
        parser.error("one of the arguments --docs --cu-seqlens --mask --family is required")
    if args.calibrate is None and args.sweep_ranks is None and args.ranks is None:
        parser.error("the following arguments are required: --ranks")
    return args


def _joined_window(argv: list[str]) -> list[str]:
    """`--window -1,0` as `--window=-1,0`: argparse takes a value that starts with a minus for an option."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--window":
            joined[-1] = f"--window={word}"
        else:
            joined.append(word)
    return joined


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise InputError(f"{name}: {error}; write whole numbers separated by blanks, commas or lines") from None


def _read_text(name: str, path: Path, wanted: str = "a text file") -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}={path}: cannot be read ({error}); give {wanted}") from None


def read_mask(args: argparse.Namespace) -> AttnMask:
    """The mask that the arguments describe."""
    if args.family is not None:
        if args.full or args.window:
            raise InputError("--full and --window describe documents; --family already says who sees whom: leave them out")
        return family_mask(args.family, args.ranks * args.tokens_per_gpu)
    if args.mask is not None:
        if args.full or args.window:
            raise InputError("--full and --window describe documents; a --mask file already says who sees whom: leave them out")
        return AttnMask.from_json(_read_text("--mask", args.mask))
    if args.docs is not None:
        lengths = _numbers("--docs", _read_text("--docs", args.docs))
        if min(lengths, default=0) < 0:
            raise InputError(f"--docs: length {min(lengths)} is negative; give the number of tokens of each document, 0 or more")
        cu_seqlens = list(itertools.accumulate(lengths, initial=0))
    else:
        words = args.cu_seqlens.replace(",", " ").split()
        if not words:
            raise InputError("--cu-seqlens is empty; give the borders as 0,A,B,.. or a text file with them")
        is_list = all(word.lstrip("+-").isdigit() for word in words)
        text = args.cu_seqlens if is_list else _read_text("--cu-seqlens", Path(args.cu_seqlens), "numbers as 0,A,B,.. or a text file")
        cu_seqlens = _numbers("--cu-seqlens", text)
    window = (-1, -1) if args.window is None else tuple(_numbers("--window", args.window))
    if len(window) != 2:
        raise InputError(f"--window={args.window!r} must be two numbers LEFT,RIGHT, e.g. 1023,0")
    return from_cu_seqlens(cu_seqlens, cu_seqlens, causal=not args.full, window_size=window)


def read_settings(args: argparse.Namespace) -> tuple[cfg.DistAttnConfig, PlanRequest]:
    """How to plan, for equal numbers of queries and keys on one node."""
    heads = _numbers("--heads", args.heads.replace(":", " "))
    if len(heads) != 2 or min(heads) < 1 or heads[0] % heads[1]:
        raise InputError(f"--heads={args.heads!r} must be query and key heads, the first a multiple of the second, e.g. 64:8")
    config = cfg.DistAttnConfig(
        dispatch_config=cfg.DispatchConfig(alg=ALGORITHMS[args.alg], chunk_size=args.chunk_size),
        overlap_config=cfg.OverlapConfig(degree=args.degree),
    )
    return config, PlanRequest(num_heads_q=heads[0], num_heads_kv=heads[1], head_dim=args.head_dim, machine=args.machine)


def _check_ranks(args: argparse.Namespace) -> None:
    if not 1 <= args.ranks <= MAX_RANKS:
        raise InputError(f"--ranks={args.ranks} must be in 1..{MAX_RANKS}")
    if args.nodes is not None and (args.nodes < 1 or args.ranks % args.nodes):
        raise InputError(f"--nodes={args.nodes} must divide --ranks={args.ranks} evenly")


def run_simulations(args: argparse.Namespace) -> int:
    """--calibrate, --sweep-ranks or --simulate. Returns the exit code."""
    config, request = read_settings(args)
    if args.calibrate is not None:
        if args.simulate or args.sweep_ranks is not None or args.plot is not None:
            raise InputError(
                "--calibrate takes masks and ranks from its file and draws nothing: leave out --simulate, --sweep-ranks, --plot"
            )
        return run_calibration(args, _read_text("--calibrate", args.calibrate, "a CSV file"), MAX_RANKS, config, request)
    if not 1 <= args.tokens_per_gpu < 1 << 30:
        raise InputError(f"--tokens-per-gpu={args.tokens_per_gpu} must be in 1..{(1 << 30) - 1}")
    if args.sweep_ranks is not None:
        if args.family is None or args.ranks is not None or args.nodes is not None:
            raise InputError("--sweep-ranks needs --family and decides ranks and nodes itself: leave out --ranks and --nodes")
        return run_sweep(args, numbers_of_ranks(args.sweep_ranks, MAX_RANKS), config, request)
    _check_ranks(args)
    mask = read_mask(args)
    num_nodes = nodes_of(args.machine, args.ranks) if args.nodes is None else args.nodes
    request = replace(request, num_nodes=num_nodes, is_same_source=mask.total_q == mask.total_k)
    return run_simulation(args, mask, config, request)


def _spread(values: Any) -> dict[str, float]:
    return {"min": float(np.min(values)), "mean": float(np.mean(values)), "max": float(np.max(values))}


def _direction(summary: DirectionSummary) -> dict[str, Any]:
    slowest = float(summary.rank_times_us.max())
    ideal = float(summary.compute_us.mean())
    return {
        "remote_steps": summary.degree,
        "recv_bytes": _spread(summary.recv_bytes),
        "send_bytes": _spread(summary.send_bytes),
        "time_us": slowest,
        "compute_us": _spread(summary.compute_us),
        "efficiency": ideal / slowest if ideal > 0 else 1.0,
    }


def as_json(mask: AttnMask, summary: PlanSummary, plan_ms: float) -> dict[str, Any]:
    """Everything the text shows, as plain numbers."""
    return {
        "mask": {
            "total_q": mask.total_q,
            "total_k": mask.total_k,
            "slices": summary.num_slices,
            "area": summary.area,
            "digest": mask.digest,
        },
        "ranks": summary.dispatch_q.cp_size,
        "machine": summary.machine,
        "plan_ms": plan_ms,
        "chunk_size": summary.dispatch_q.chunk_size,
        "imbalance": summary.imbalance,
        "tokens": _spread(summary.rank_tokens),
        "recv_rows": _spread(summary.rank_recv_rows),
        "send_rows": _spread(summary.rank_send_rows),
        "remote_rows": summary.remote_rows,
        "remote_rows_lower_bound": summary.remote_rows_lower_bound,
        "forward": _direction(summary.forward),
        "backward": _direction(summary.backward),
        "reasons": list(summary.reasons),
    }


def print_text(values: dict[str, Any]) -> None:
    """The summary for people."""
    mask, ranks = values["mask"], values["ranks"]
    pairs = mask["total_q"] * mask["total_k"]
    print(f"mask      {mask['total_q']:,} x {mask['total_k']:,} tokens, {mask['slices']:,} slices, {mask['area']:,} visible pairs", end="")
    print(f" ({mask['area'] / pairs:.2%})" if pairs else "")
    print(f"plan      {ranks} ranks in {values['plan_ms']:.1f} ms, chunks of {values['chunk_size']:,} tokens")
    print(f"balance   largest / mean work {values['imbalance']:.4f}, tokens per rank {_text(values['tokens'])}")
    print(f"traffic   key rows received per rank {_text(values['recv_rows'])}, sent {_text(values['send_rows'])}")
    print(f"          {values['remote_rows']:,} rows in all; no dispatch with such shares can move fewer than", end=" ")
    print(f"{values['remote_rows_lower_bound']:,}")
    for name in ("forward", "backward"):
        part = values[name]
        print(
            f"{name:9s} 1 local + {part['remote_steps']} remote steps, {part['time_us'] / 1e3:,.3f} ms predicted on {values['machine']},",
            end=" ",
        )
        print(f"{part['efficiency']:.1%} of perfect scaling, {part['recv_bytes']['max'] / 2**20:,.1f} MiB into the busiest rank")
    for reason in values["reasons"]:
        print(f"because   {reason}")


def _text(spread: dict[str, float]) -> str:
    return f"{spread['min']:,.0f} / {spread['mean']:,.0f} / {spread['max']:,.0f} (least / mean / most)"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, 2 when the arguments do not describe a plan, 1 when --calibrate finds a prediction too far off."""
    args = parse_args(argv)
    try:
        is_simulated = args.simulate or args.sweep_ranks is not None or args.calibrate is not None
        code = run_simulations(args) if is_simulated else run_plan(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (head, less) has seen enough; nothing more may be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (InputError, UnsupportedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_plan(args: argparse.Namespace) -> int:
    """The summary of one plan."""
    config, request = read_settings(args)
    _check_ranks(args)
    mask = read_mask(args)
    request = replace(request, num_nodes=1 if args.nodes is None else args.nodes, is_same_source=mask.total_q == mask.total_k)
    start = time.perf_counter()
    summary = summarize(mask, args.ranks, config, request)
    values = as_json(mask, summary, 1e3 * (time.perf_counter() - start))
    if args.plot is not None:
        plot_summary(summary, args.plot)
    if args.json:
        print(json.dumps(values, indent=1))
    else:
        print_text(values)
        if args.plot is not None:
            print(f"picture   {args.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
