"""Pictures of masks: how much of each cell is visible. Never builds a T x T array; matplotlib is imported when a picture is asked for.

matplotlib is an optional dependency (`pip install magi-attention[plot]`), which is why its import is inside the function.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from magi_attention import _native
from magi_attention.arguments import count
from magi_attention.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.backend_bases import FigureCanvasBase

MAX_GRID_LINES = 40  # up to this many tokens a side every cell is one token and gets its own frame


def grid_edges(total: int, max_cells: int) -> npt.NDArray[np.int32]:
    """int32 [cells + 1]: at most `max_cells` cells of equal size, the last one possibly short."""
    cell_size = max(-(-total // max_cells), 1)
    return np.append(np.arange(0, total, cell_size), total).astype(np.int32)


def visible_share(slices: npt.NDArray[np.int32], q_edges: npt.NDArray[np.int32], k_edges: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """float64 [q cells, k cells]: visible pairs over all pairs of each cell, exact before the division."""
    areas = _native.run("grid_area", slices=slices, q_edges=q_edges, k_edges=k_edges)["areas"]
    num_pairs = np.outer(np.diff(q_edges.astype(np.int64)), np.diff(k_edges.astype(np.int64)))
    share: npt.NDArray[np.float64] = areas.reshape(num_pairs.shape) / np.maximum(num_pairs, 1)
    return share


def require_picture_ending(path: str | os.PathLike[str], canvas: FigureCanvasBase) -> None:
    """The file name ends like a picture that the canvas writes.

    Raises:
        InputError: it does not, or has no ending.
    """
    ending = Path(path).suffix
    if ending.lower().lstrip(".") not in canvas.get_supported_filetypes():
        raise InputError(f"path={os.fspath(path)!r} ends with {ending or 'no'!r}; the ending chooses the format: .png, .svg or .pdf")


def plot_mask(
    path: str | os.PathLike[str], slices: npt.NDArray[np.int32], total_q: int, total_k: int, max_cells: int, title: str | None
) -> None:
    """Write the picture; the format follows the file name's ending.

    Raises:
        InputError: max_cells is out of range, or the file name does not end like a picture.
        UnsupportedError: matplotlib is not installed.
    """
    max_cells = count("max_cells", max_cells, 1, 4096)
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap, PowerNorm
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator
    except ImportError as fault:
        raise UnsupportedError(f"plotting a mask needs matplotlib ({fault}); pip install 'magi-attention[plot]'") from None
    q_edges, k_edges = grid_edges(total_q, max_cells), grid_edges(total_k, max_cells)
    share = visible_share(slices, q_edges, k_edges) if total_q and total_k else np.zeros((1, 1))
    figure = Figure(figsize=(6.4, 5.6), layout="compressed")
    require_picture_ending(path, FigureCanvasAgg(figure))  # a canvas of its own: no window system, no global pyplot state
    axes = figure.add_subplot()
    # Whole cells, also where the last one is short; the limits then cut the picture at the mask's edge.
    extent = (0, share.shape[1] * int(k_edges[:2][-1] or 1), share.shape[0] * int(q_edges[:2][-1] or 1), 0)
    # The root of the share and colours that start well off white keep a thin band visible: a window of 128 keys fills a few
    # percent of a cell of 2,048 tokens.
    colours = ListedColormap(colormaps["YlGnBu"](np.linspace(0.3, 1.0, 256)))
    shown = np.ma.masked_equal(share, 0.0)
    image = axes.imshow(shown, extent=extent, norm=PowerNorm(0.5, 0.0, 1.0), cmap=colours, interpolation="nearest", aspect="auto")
    axes.set_xlim(0, max(total_k, 1))
    axes.set_ylim(max(total_q, 1), 0)
    if total_q and total_k and max(total_q / total_k, total_k / total_q) <= 4:
        axes.set_aspect("equal")
    if max(total_q, total_k) <= min(MAX_GRID_LINES, max_cells):
        axes.set_xticks(range(total_k + 1), minor=True)
        axes.set_yticks(range(total_q + 1), minor=True)
        axes.grid(which="minor", color="0.85", linewidth=0.5)
        axes.tick_params(which="minor", length=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True))
        axis.remove_overlapping_locs = False  # frames also where a labelled tick is
        axis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    axes.set_xlabel("key token")
    axes.set_ylabel("query token")
    plural = "" if len(slices) == 1 else "s"
    axes.set_title(title or f"{total_q:,} queries x {total_k:,} keys, {len(slices):,} slice{plural}", fontsize="medium")
    if max(total_q, total_k) > max_cells:  # else a cell is one token, visible or not
        figure.colorbar(image, ax=axes, label="visible share of the cell", fraction=0.045, pad=0.03)
    figure.savefig(path, dpi=150, bbox_inches="tight")
