"""Pictures of a plan: who owns which tokens, how even the work is, who sends how much. Needs matplotlib; knows no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from magi_attention.errors import UnsupportedError
from magi_attention.mask.plot import require_picture_ending
from magi_attention.plan.types import DispatchPlan, Int64Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from magi_attention.plan.summary import PlanSummary

_MAX_LABELLED_RANKS = 16
DOTS_PER_INCH = 130


def start_figure(path: str | Path, width: float, height: float) -> Figure:
    """An empty figure, sizes in inches, that can be saved under `path`.

    Raises:
        InputError: a name whose ending is no picture's.
        UnsupportedError: matplotlib is missing.
    """
    # Built without pyplot: no global state, no display, safe in any thread.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise UnsupportedError(f"pictures need matplotlib ({error}); pip install 'magi-attention[plot]'") from None
    figure = NewFigure(figsize=(width, height), layout="constrained")
    require_picture_ending(path, FigureCanvasAgg(figure))
    return figure


def _rank_ticks(num_ranks: int) -> npt.NDArray[np.int64]:
    return np.arange(0, num_ranks, max(1, -(-num_ranks // _MAX_LABELLED_RANKS)))


def _owners_height(num_ranks: int) -> float:
    return min(10.0, 1.4 + 0.28 * num_ranks)


def draw_owners(axes: Axes, dispatch: DispatchPlan, title: str) -> None:
    """One row per rank, a bar for every token range it owns."""
    from matplotlib import colormaps

    colours = colormaps["tab20"]
    for rank, runs in enumerate(dispatch.rank_runs):
        bars = [(int(start), int(end - start)) for start, end in runs]
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colours(rank % 20))
    axes.set_xlim(0, max(1, dispatch.total_tokens))
    axes.set_ylim(dispatch.cp_size - 0.4, -0.6)
    axes.set_yticks(_rank_ticks(dispatch.cp_size))
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("global token")
    axes.set_ylabel("rank")
    plural = "" if dispatch.chunk_size == 1 else "s"
    axes.set_title(f"{title} (chunks of {dispatch.chunk_size:,} token{plural})")


def draw_per_rank(axes: Axes, values: dict[str, npt.NDArray[np.float64]], label: str, title: str) -> None:
    """One group of bars per rank, one colour per named series; the legend gives largest / mean. Lines when bars would be too thin."""
    num_ranks = len(next(iter(values.values())))
    width = 0.8 / len(values)
    ranks = np.arange(num_ranks)
    for idx, (name, series) in enumerate(values.items()):
        mean = float(series.mean()) if num_ranks else 0.0
        text = f"{name}: largest / mean {float(series.max()) / mean:.3f}" if mean > 0 else f"{name}: nothing"
        if num_ranks <= 8 * _MAX_LABELLED_RANKS:
            axes.bar(ranks + (idx - (len(values) - 1) / 2) * width, series, width, label=text)
        else:
            axes.plot(ranks, series, linewidth=1, label=text)
    axes.set_xticks(_rank_ticks(num_ranks))
    # Room above the highest bar for the legend, so that it hides none.
    highest = max((float(series.max()) for series in values.values() if series.size), default=0.0)
    axes.set_ylim(0, 1.2 * highest or 1.0)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("rank")
    axes.set_ylabel(label)
    axes.set_title(title)
    axes.legend(loc="upper right", ncols=len(values), fontsize=8)


def draw_work(axes: Axes, areas: dict[str, Int64Array]) -> None:
    """Visible pairs per rank of several assignments, in units that keep the numbers short."""
    largest = max((int(values.max()) for values in areas.values() if values.size), default=0)
    divisor, unit = next(scale for scale in ((1e6, " (millions)"), (1e3, " (thousands)"), (1.0, "")) if largest >= scale[0] or not scale[1])
    scaled = {name: values / divisor for name, values in areas.items()}
    draw_per_rank(axes, scaled, f"visible pairs{unit}", "attention work per rank")


def plot_owners(dispatch: DispatchPlan, path: str | Path, title: str = "owner of each token") -> None:
    """Saves who owns which tokens (PNG, SVG or PDF by the name's ending)."""
    figure = start_figure(path, 9, _owners_height(dispatch.cp_size))
    draw_owners(figure.add_subplot(), dispatch, title)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def plot_areas(areas: dict[str, Int64Array], path: str | Path) -> None:
    """Saves visible pairs per rank for several assignments, by name: int64 [R] each."""
    figure = start_figure(path, 9, 4)
    draw_work(figure.add_subplot(), areas)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def plot_traffic(rows: Int64Array, path: str | Path) -> None:
    """Saves the traffic matrix: rows int64 [R, R], rows[sender, receiver] key rows sent in one forward."""
    num_ranks = rows.shape[0]
    figure = start_figure(path, 6.2, 5.2)
    axes = figure.add_subplot()
    image = axes.imshow(rows, cmap="viridis")
    if num_ranks <= _MAX_LABELLED_RANKS:
        dark_below = rows.max() * 0.6
        for (sender, receiver), count in np.ndenumerate(rows):
            colour = "white" if count < dark_below else "black"
            axes.text(receiver, sender, f"{count:,}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(_rank_ticks(num_ranks))
    axes.set_yticks(_rank_ticks(num_ranks))
    axes.set_xlabel("receiving rank")
    axes.set_ylabel("sending rank")
    axes.set_title(f"key rows sent in one forward: {int(rows.sum()):,}")
    figure.colorbar(image, label="rows", format="{x:,.0f}")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def plot_summary(summary: PlanSummary, path: str | Path) -> None:
    """Saves one picture of a plan: owners, work, rows in and out, predicted times per rank."""
    num_ranks = summary.dispatch_q.cp_size
    height = _owners_height(num_ranks)
    figure = start_figure(path, 10, height + 9)
    axes = figure.subplots(4, 1, height_ratios=[height, 3, 3, 3])
    draw_owners(axes[0], summary.dispatch_q, "owner of each query token")
    draw_work(axes[1], {"visible pairs": summary.rank_areas})
    rows = {"received": summary.rank_recv_rows.astype(np.float64), "sent": summary.rank_send_rows.astype(np.float64)}
    draw_per_rank(axes[2], rows, "rows", "key rows per rank in one forward")
    times = {"forward": summary.forward.rank_times_us / 1e3, "backward": summary.backward.rank_times_us / 1e3}
    draw_per_rank(axes[3], times, "ms", f"predicted time of one layer on {summary.machine}")
    figure.savefig(path, dpi=DOTS_PER_INCH)
