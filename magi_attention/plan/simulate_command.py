"""Simulation on the command line: arguments, tables, progress. Makes no plan and no simulation itself."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.build import PlanRequest
from magi_attention.plan.plot_timeline import plot_layer, plot_sweep
from magi_attention.plan.simulate_movers import MOVER_NAMES
from magi_attention.plan.simulate_report import SimulatedLayer, as_json, print_text, simulate_layer
from magi_attention.plan.simulate_sweep import (
    CALIBRATION_COLUMNS,
    CALIBRATION_LIMIT,
    FAMILIES,
    PUBLISHED_VARLEN_CAUSAL_FORWARD,
    MeasuredTime,
    predicted_over_measured,
    read_measured_times,
    sweep,
)

_PROGRESS_RANKS = 128  # plans take long enough to be told about from here on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of simulations."""
    group = parser.add_argument_group("simulation", "event simulation of one layer on all ranks; not yet calibrated on GPUs")
    group.add_argument("--simulate", action="store_true", help="streams, links and steps of every rank instead of the plan's summary")
    group.add_argument("--sweep-ranks", metavar="1,2,4,..", help="TFLOP/s per GPU against ranks for --family, on nodes of 8")
    group.add_argument("--tokens-per-gpu", type=int, default=8_192, help="for --family (default 8192)")
    group.add_argument(
        "--mover", default="auto", choices=MOVER_NAMES, help="what moves rows inside a node (default: by machine and run length)"
    )
    group.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE.csv",
        help=f"predicted / measured for rows with the columns {','.join(CALIBRATION_COLUMNS)}: mask one of {', '.join(FAMILIES)}; tokens "
        f"in all; heads as 64:8; direction forward or backward. Exit code 1 when one is off by more than {CALIBRATION_LIMIT:.0%}",
    )


def numbers_of_ranks(text: str, max_ranks: int) -> list[int]:
    """Ascending numbers of ranks.

    Raises:
        InputError: not numbers, none, or outside 1..max_ranks.
    """
    try:
        ranks = sorted({int(word) for word in text.replace(",", " ").split()})
    except ValueError as error:
        raise InputError(f"--sweep-ranks: {error}; give numbers as 1,2,4,8") from None
    if not ranks or ranks[0] < 1 or ranks[-1] > max_ranks:
        raise InputError(f"--sweep-ranks={text!r} must be numbers in 1..{max_ranks}, e.g. 1,2,4,8")
    return ranks


def run_simulation(args: argparse.Namespace, mask: AttnMask, config: DistAttnConfig, request: PlanRequest) -> int:
    """Simulates one mask; prints and draws."""
    start = time.perf_counter()

    def tell(rank: int) -> None:
        if args.ranks >= _PROGRESS_RANKS and (rank + 1) % _PROGRESS_RANKS == 0:
            print(f"plans of {rank + 1} of {args.ranks} ranks, {time.perf_counter() - start:.1f} s", file=sys.stderr)

    layer = simulate_layer(mask, args.ranks, config, request, mover=args.mover, on_rank=tell)
    if args.plot is not None:
        plot_layer(layer, args.plot)
    values = as_json(layer)
    if args.json:
        print(json.dumps(values, indent=1))
    else:
        print_text(values)
        if args.plot is not None:
            print(f"picture   {args.plot}")
    return 0


def run_sweep(args: argparse.Namespace, ranks: list[int], config: DistAttnConfig, request: PlanRequest) -> int:
    """Simulates one family for several numbers of ranks; prints a table and draws a curve."""
    start = time.perf_counter()

    def tell(layer: SimulatedLayer) -> None:
        print(f"simulated {layer.forward.traffic.cp_size} ranks, {time.perf_counter() - start:.1f} s", file=sys.stderr)

    layers = sweep(args.family, ranks, args.tokens_per_gpu, config, request, mover=args.mover, on_layer=tell)
    rows = [_sweep_row(layer) for layer in layers]
    title = f"{args.family}, {args.tokens_per_gpu:,} tokens and heads {args.heads} per GPU on {request.machine}; simulated, not calibrated"
    if args.plot is not None:
        plot_sweep(rows, PUBLISHED_VARLEN_CAUSAL_FORWARD, title, args.plot)
    if args.json:
        published = {str(ranks): value for ranks, value in PUBLISHED_VARLEN_CAUSAL_FORWARD.items()}
        print(json.dumps({"title": title, "rows": rows, "published_magi_attention_varlen_causal_forward": published}, indent=1))
        return 0
    print(title)
    print(f"{'ranks':>6s} {'nodes':>6s} {'fwd TFLOP/s':>12s} {'exposed':>8s} {'bwd TFLOP/s':>12s} {'exposed':>8s}  peer fwd, as published")
    for row in rows:
        peer = PUBLISHED_VARLEN_CAUSAL_FORWARD.get(row["ranks"])
        print(f"{row['ranks']:6,d} {row['nodes']:6,d}", end=" ")
        for name in ("forward", "backward"):
            print(f"{row[f'{name}_tflops']:12,.0f} {row[f'{name}_exposed_share']:8.1%}", end=" ")
        print(f" {peer:.0f}" if peer else " -")
    print("peer: MagiAttention, varlen causal, TFLOP/s per GPU as its authors published; not measured here, other documents")
    if args.plot is not None:
        print(f"picture   {args.plot}")
    return 0


def _sweep_row(layer: SimulatedLayer) -> dict[str, Any]:
    row: dict[str, Any] = {"ranks": layer.forward.traffic.cp_size, "nodes": layer.num_nodes}
    for name, direction in layer.directions().items():
        timeline = direction.timeline
        rank = int(np.argmax(timeline.end_us))
        row[f"{name}_ms"] = timeline.time_us / 1e3
        row[f"{name}_tflops"] = direction.tflops_per_gpu
        row[f"{name}_exposed_share"] = 1.0 - float(timeline.work_us[:, rank].sum()) / timeline.time_us
        row[f"{name}_steps"] = direction.traffic.num_steps
    return row


def run_calibration(args: argparse.Namespace, text: str, max_ranks: int, config: DistAttnConfig, request: PlanRequest) -> int:
    """Prints predicted / measured of every row of the file; 1 when one is off by more than the limit."""
    measured = read_measured_times(text, max_ranks)

    def tell(row: MeasuredTime) -> None:
        if row.ranks >= _PROGRESS_RANKS:
            print(f"simulated {row.mask}, {row.ranks} ranks", file=sys.stderr)

    ratios = predicted_over_measured(measured, config, request, mover=args.mover, on_row=tell)
    worst = max(range(len(ratios)), key=lambda idx: abs(ratios[idx] - 1.0))
    is_within = abs(ratios[worst] - 1.0) <= CALIBRATION_LIMIT
    if args.json:
        rows = [vars(row) | {"predicted_over_measured": ratio} for row, ratio in zip(measured, ratios, strict=True)]
        print(json.dumps({"rows": rows, "worst": worst, "is_within_limit": is_within}, indent=1))
        return 0 if is_within else 1
    print(
        f"{'mask':13s} {'tokens':>10s} {'ranks':>6s} {'heads':>7s} {'direction':9s} {'measured ms':>12s} {'predicted':>10s} {'ratio':>6s}"
    )
    for row, ratio in zip(measured, ratios, strict=True):
        heads = f"{row.heads[0]}:{row.heads[1]}"
        print(f"{row.mask:13s} {row.tokens:10,d} {row.ranks:6,d} {heads:>7s} {row.direction:9s} ", end="")
        print(f"{row.milliseconds:12,.3f} {row.milliseconds * ratio:10,.3f} {ratio:6.3f}")
    row = measured[worst]
    print(f"worst     {row.mask} {row.direction} on {row.ranks} ranks: {ratios[worst]:.3f}, ", end="")
    print("within" if is_within else "beyond", f"{CALIBRATION_LIMIT:.0%}")
    return 0 if is_within else 1
