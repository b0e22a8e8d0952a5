"""Draws the pictures of the documentation from the library itself: `make figures`. They are committed; a test redraws one.

Uses planning only: no torch, no ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from magi_attention.config import (
    ContiguousDispatchAlg,
    DispatchAlg,
    DispatchConfig,
    DistAttnConfig,
    MinHeapDispatchAlg,
    ZigzagDispatchAlg,
)
from magi_attention.mask import AttnMask, builders
from magi_attention.plan.build import plan_attention
from magi_attention.plan.plot import plot_areas, plot_owners
from magi_attention.plan.types import RankPlan

FOLDER = Path(__file__).parent / "figures"
VISIBLE = ListedColormap(["#f4f4f4", "#3f51b5"])
HEADS = {"num_heads_q": 8, "num_heads_kv": 2, "head_dim": 64}
NUM_RANKS = 4
DOCUMENTS = [0, 190, 230, 900, 1010, 1024]


def _canvas(columns: int, rows: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr,call-arg]
    FigureCanvasAgg(figure)
    return figure, list(np.ravel(figure.subplots(rows, columns)))


def _draw(axes: Axes, cells: npt.NDArray[np.bool_], title: str, grid: bool = True) -> None:
    axes.imshow(cells, cmap=VISIBLE, vmin=0, vmax=1, interpolation="nearest", extent=(0, cells.shape[1], cells.shape[0], 0))
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=7)
    axes.set_xlabel("key", fontsize=8)
    axes.set_ylabel("query", fontsize=8)
    if grid:
        axes.xaxis.remove_overlapping_locs = axes.yaxis.remove_overlapping_locs = False  # a line also where a number stands
        axes.set_xticks(range(cells.shape[1] + 1), minor=True)
        axes.set_yticks(range(cells.shape[0] + 1), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
        axes.tick_params(which="minor", length=0)


def example_masks() -> dict[str, AttnMask]:
    documents = [0, 7, 10, 24]
    return {
        "causal documents": builders.from_cu_seqlens(documents, documents, causal=True),
        "window of 4 in documents": builders.from_cu_seqlens(documents, documents, causal=True, window_size=(3, 0)),
        "window and 2 global tokens": builders.sliding_window(24, 24, (3, 0), global_tokens=2),
        "prefix-LM": builders.prefix_lm([0, 10, 24], [4, 6]),
        "one question, three answers": builders.shared_question(8, [6, 4, 6]),
        "video, frames of 6": builders.block_causal_video(4, 6),
    }


def draw_masks(path: Path) -> None:
    figure, axes = _canvas(3, 2, 9.6, 7.0)
    for place, (name, mask) in zip(axes, example_masks().items(), strict=True):
        _draw(place, mask.to_dense(), f"{name}\n{len(mask.slices)} slices, {mask.area()} visible pairs")
    figure.savefig(path, dpi=90)


def draw_types(path: Path) -> None:
    """The four user-level types where the key range is longer, and where the query range is longer."""
    figure, axes = _canvas(4, 2, 9.6, 5.6)
    names = ("full", "causal", "inv_causal", "bi_causal")
    for row, (num_q, num_k) in enumerate(((5, 8), (8, 5))):
        for kind, name in enumerate(names):
            mask = AttnMask.from_ranges([[0, num_q]], [[0, num_k]], [kind], num_q, num_k)
            _draw(axes[4 * row + kind], mask.to_dense(), f"{name}, {num_q} x {num_k}\n{mask.area()} visible pairs")
    figure.savefig(path, dpi=90)


def example_plans(alg: DispatchAlg) -> list[RankPlan]:
    mask = builders.from_cu_seqlens(DOCUMENTS, DOCUMENTS, causal=True)
    config = DistAttnConfig(dispatch_config=DispatchConfig(alg=alg, chunk_size=32))
    return [plan_attention(mask, NUM_RANKS, rank, config, **HEADS) for rank in range(NUM_RANKS)]


def draw_areas(path: Path) -> None:
    algs = (ContiguousDispatchAlg(), ZigzagDispatchAlg(), MinHeapDispatchAlg())
    plot_areas({alg.name: example_plans(alg)[0].rank_areas for alg in algs}, path)


def draw_owners(path: Path) -> None:
    plot_owners(example_plans(MinHeapDispatchAlg())[0].dispatch_q, path)


def draw_steps(path: Path) -> None:
    """What rank 1 computes: its own keys, then the keys that arrive."""
    plan = example_plans(MinHeapDispatchAlg())[1]
    figure, axes = _canvas(len(plan.forward), 1, 3.4 * len(plan.forward), 3.8)
    for idx, (place, step) in enumerate(zip(axes, plan.forward, strict=True)):
        local = AttnMask.from_slices(step.slices, plan.num_local_q, step.num_keys)
        what = "its own keys" if step.exchange is None else "keys received"
        _draw(place, local.to_dense(), f"step {idx}: {what}\n{step.num_keys} rows, {len(step.slices)} slices", grid=False)
        place.set_xlabel("row of the key buffer", fontsize=8)
        place.set_ylabel("row of the query buffer", fontsize=8)
    figure.savefig(path, dpi=90)


PICTURES: dict[str, Callable[[Path], None]] = {
    "masks.png": draw_masks,
    "types.png": draw_types,
    "areas.png": draw_areas,
    "owners.png": draw_owners,
    "steps.png": draw_steps,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the pictures (default: %(default)s)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        draw(out / name)
        print(out / name)


if __name__ == "__main__":
    main()
