"""Pictures of a plan: who owns which tokens, how even the work is, who sends how much to whom. Needs matplotlib; knows no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from magi_attention.plan.types import DispatchPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LABELLED_RANKS = 16


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    # Built without pyplot: no global state, no display, safe in any thread.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise ImportError("pictures need matplotlib; install it with: pip install 'magi-attention[plot]'") from error
    figure = NewFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _rank_ticks(num_ranks: int) -> npt.NDArray[np.int64]:
    return np.arange(0, num_ranks, max(1, -(-num_ranks // MAX_LABELLED_RANKS)))


def plot_owners(dispatch: DispatchPlan, path: str | Path, title: str = "owner of each token") -> None:
    """Saves a picture with one row per rank and a bar for every token range it owns."""
    from matplotlib import colormaps

    num_ranks = dispatch.cp_size
    figure, axes = _figure(9, min(12.0, 1.4 + 0.28 * num_ranks))
    colours = colormaps["tab20"]
    for rank, runs in enumerate(dispatch.rank_runs):
        bars = [(int(start), int(end - start)) for start, end in runs]
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colours(rank % 20), edgecolor="white", linewidth=0.3)
    axes.set_xlim(0, max(1, dispatch.total_tokens))
    axes.set_ylim(num_ranks - 0.4, -0.6)
    axes.set_yticks(_rank_ticks(num_ranks))
    axes.set_xlabel("global token")
    axes.set_ylabel("rank")
    axes.set_title(f"{title} (chunks of {dispatch.chunk_size} tokens)")
    figure.savefig(path, dpi=130)


def plot_areas(areas: dict[str, npt.NDArray[np.int64]], path: str | Path) -> None:
    """Saves bars of visible pairs per rank, one colour per named assignment, with the mean as the line to aim at.

    Args:
        areas: name -> int64 [R].
        path: PNG, SVG or PDF file.
    """
    num_ranks = len(next(iter(areas.values())))
    figure, axes = _figure(9, 4)
    width = 0.8 / len(areas)
    for idx, (name, values) in enumerate(areas.items()):
        imbalance = values.max() / max(values.mean(), 1e-9)
        offset = (idx - (len(areas) - 1) / 2) * width
        axes.bar(np.arange(num_ranks) + offset, values / 1e6, width, label=f"{name}: largest / mean {imbalance:.3f}")
    mean = next(iter(areas.values())).mean() / 1e6
    axes.axhline(mean, color="black", linewidth=0.8, linestyle="--", label="mean")
    axes.set_xticks(_rank_ticks(num_ranks))
    axes.set_xlabel("rank")
    axes.set_ylabel("visible pairs (millions)")
    axes.set_title("attention work per rank")
    axes.legend()
    figure.savefig(path, dpi=130)


def plot_traffic(rows: npt.NDArray[np.int64], path: str | Path) -> None:
    """Saves the traffic matrix as an image.

    Args:
        rows: int64 [R, R], rows[sender, receiver] key rows sent in one forward.
        path: PNG, SVG or PDF file.
    """
    num_ranks = rows.shape[0]
    figure, axes = _figure(6.2, 5.2)
    image = axes.imshow(rows, cmap="viridis")
    if num_ranks <= MAX_LABELLED_RANKS:
        dark_below = rows.max() * 0.6
        for sender in range(num_ranks):
            for receiver in range(num_ranks):
                colour = "white" if rows[sender, receiver] < dark_below else "black"
                axes.text(receiver, sender, f"{rows[sender, receiver]}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(_rank_ticks(num_ranks))
    axes.set_yticks(_rank_ticks(num_ranks))
    axes.set_xlabel("receiving rank")
    axes.set_ylabel("sending rank")
    axes.set_title(f"key rows sent in one forward: {int(rows.sum()):,}")
    figure.colorbar(image, label="rows")
    figure.savefig(path, dpi=130)
