"""Pictures of a simulated layer: streams of two ranks over time, and speed against ranks. Needs matplotlib; simulates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from magi_attention.plan.plot import DOTS_PER_INCH, start_figure
from magi_attention.plan.simulate_report import SimulatedDirection, SimulatedLayer, slowest_rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"attention": "#6f97e0", "cast": "#6acc65", "reduce": "#d65f5f", "waiting": "#d9d9d9"}
_MIN_LABEL_SHARE = 0.02  # of the axis: narrower bars have no room for a number


def plot_layer(layer: SimulatedLayer, path: str | Path) -> None:
    """Saves the streams of the slowest and of a median rank, forward above backward (PNG, SVG or PDF by the name's ending)."""
    figure = start_figure(path, 12, 9)
    axes = figure.subplots(4, 1)
    row = 0
    for name, direction in layer.directions().items():
        timeline = direction.timeline
        slowest = slowest_rank(direction)[0]
        median = int(np.argsort(timeline.end_us, kind="stable")[(len(timeline.end_us) - 1) // 2])
        for kind, rank in (("slowest", slowest), ("median", median)):
            _draw_rank(axes[row], direction, rank)
            text = f"{name}, {kind} rank {rank}: {timeline.end_us[rank] / 1e3:,.3f} ms"
            axes[row].set_title(f"{text} (group: {direction.tflops_per_gpu:,.0f} TFLOP/s per GPU)", loc="left", fontsize=10)
            row += 1
    axes[-1].set_xlabel("ms from the start of the layer; numbers are steps, 0 is local; transfers are the sending side")
    figure.suptitle(f"simulated on {layer.machine}, {layer.forward.traffic.cp_size} ranks, not calibrated on GPUs", fontsize=11)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_rank(axes: Axes, direction: SimulatedDirection, rank: int) -> None:
    timeline, steps = direction.timeline, direction.traffic.num_steps
    total = max(timeline.time_us, 1e-9) / 1e3
    rows = [("attention", timeline.attention_start_us[:, rank], timeline.attention_end_us[:, rank], 0)]
    rows.append(("cast", timeline.cast_us[:, rank, 0], timeline.cast_us[:, rank, 1], 1))
    rows.append(("reduce", timeline.reduce_us[:, rank, 0], timeline.reduce_us[:, rank, 1], 1))
    waits = [(ready / 1e3, (begin - ready) / 1e3) for ready, begin in zip(timeline.ready_us[:, rank], rows[0][1], strict=True)]
    axes.broken_barh(waits, (-0.4, 0.8), facecolors=_COLOURS["waiting"])
    if direction.reduces:
        begin = timeline.attention_end_us[-1, rank] / 1e3
        axes.broken_barh([(begin, timeline.end_us[rank] / 1e3 - begin)], (1.6, 0.8), facecolors=_COLOURS["waiting"])
    for y, (name, begins, ends, first_step) in enumerate(rows):
        for idx, (begin, end) in enumerate(zip(begins / 1e3, ends / 1e3, strict=True)):
            if not np.isfinite(begin):
                continue
            axes.broken_barh([(begin, end - begin)], (y - 0.4, 0.8), facecolors=_COLOURS[name], edgecolor="white", linewidth=0.5)
            if end - begin > _MIN_LABEL_SHARE * total:
                axes.text((begin + end) / 2, y, str(idx + first_step), ha="center", va="center", fontsize=8)
    for step in range(steps):
        axes.plot([timeline.arrival_us[step, rank] / 1e3], [1], marker="|", color="black", markersize=14)
    axes.axvline(timeline.end_us[rank] / 1e3, color="black", linewidth=0.8)
    axes.set_yticks([0, 1, 2], ["attention (grey: waits)", "cast (|: rows are here)", "reduce (grey: last ones on their way)"], fontsize=8)
    axes.set_ylim(2.6, -0.6)
    axes.set_xlim(0, total * 1.01)


def plot_sweep(rows: Sequence[dict[str, float]], published: dict[int, float], title: str, path: str | Path) -> None:
    """Saves TFLOP/s per GPU against ranks: both directions, and published forward figures as their own marks.

    Args:
        rows: ranks, forward_tflops, backward_tflops of each.
        published: ranks -> TFLOP/s per GPU of the peer, not measured here.
    """
    figure = start_figure(path, 9, 5.5)
    axes = figure.subplots()
    ranks = [row["ranks"] for row in rows]
    for name, colour in (("forward", "attention"), ("backward", "reduce")):
        values = [row[f"{name}_tflops"] for row in rows]
        axes.plot(ranks, values, marker="o", color=_COLOURS[colour], label=f"{name}, simulated")
        for x, y in zip(ranks, values, strict=True):
            axes.annotate(f"{y:.0f}", (x, y), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8)
    axes.plot(list(published), list(published.values()), "k^--", label="MagiAttention varlen causal forward, as published")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{rank:,}" for rank in ranks])
    axes.set_ylim(0, 1.15 * max([*published.values(), *(row["forward_tflops"] for row in rows)]))
    axes.set_xlabel("ranks")
    axes.set_ylabel("TFLOP/s per GPU")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize=8)
    figure.savefig(path, dpi=DOTS_PER_INCH)
