"""Pictures and tables from the rows of the attention benchmark. Measures nothing; needs matplotlib.

    python -m benchmarks.plot_ffa                 docs/images/ffa_*.png, and the blocks of README.md and docs/benchmarks.md
    python -m benchmarks.plot_ffa --add ffa.csv   first append the rows of that file to benchmarks/results/ffa.csv

A block stands between two comment lines and is replaced whole; it is empty while there are no rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.ffa_cells import SIZED_MASKS, SIZES
from benchmarks.ffa_rows import OURS, ROWS_CSV, Key, Row, append_rows, latest, ratios, read_anchors, read_rows

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- attention speed: written by python -m benchmarks.plot_ffa -->", "<!-- end of attention speed -->"
OVERVIEW = "ffa_overview.png"
MAIN_HEADS, HEAD_DIM, DTYPE = "48/8", 128, "bfloat16"
COLOURS = {
    OURS: "#c1121f",
    "FA3": "#1d3557",
    "peer FFA": "#2a9d8f",
    "cudnn": "#76b900",
    "sdpa_flash": "#8d99ae",
    "fa3": "#1d3557",
    "fa4": "#6a4c93",
    "flex": "#f4a261",
}
RECORDED = ("FA3", "peer FFA")

Lines = dict[str, list[tuple[int, float]]]


def main_rows(rows: Sequence[Row], heads: str = MAIN_HEADS) -> list[Row]:
    """The latest rows of the pictures and tables: the masks that have sizes, head_dim 128, bf16."""
    return [
        row for row in latest(rows).values() if (row.heads, row.head_dim, row.dtype) == (heads, HEAD_DIM, DTYPE) and row.mask in SIZED_MASKS
    ]


# ---- pictures ----


def lines_of(rows: Sequence[Row], anchors: dict[Key, float], mask: str, heads: str, op: str) -> Lines:
    """(tokens, TFLOP/s) by provider, recorded ones under their own names."""
    found: Lines = {}
    for row in main_rows(rows, heads):
        if row.status == "ok" and (row.mask, row.op) == (mask, op) and row.provider in COLOURS:
            found.setdefault(row.provider, []).append((row.tokens, row.tflops))
    for key, tflops in anchors.items():
        if key[:6] == (mask, key.tokens, heads, HEAD_DIM, DTYPE, op) and key.provider in RECORDED:
            found.setdefault(key.provider, []).append((key.tokens, tflops))
    return {name: sorted(points) for name, points in found.items()}


def _draw(axes: Axes, lines: Lines, title: str) -> None:
    for name, points in lines.items():
        style = "--" if name in RECORDED else "-"
        label = f"{name} (recorded)" if name in RECORDED else name
        axes.plot(*zip(*points, strict=True), style, marker="o", ms=3, color=COLOURS[name], lw=2.2 if name == OURS else 1.3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [f"{size // 1024}k" for size in SIZES])
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)


def draw_mask(path: Path, rows: Sequence[Row], anchors: dict[Key, float], mask: str) -> None:
    """Forward and backward over size, one line of plots per head count that has rows of ours."""
    heads = [x for x in ("48/8", "16/16", "64/8") if any(row.provider == OURS and row.mask == mask for row in main_rows(rows, x))]
    figure, grid = plt.subplots(len(heads), 2, figsize=(9, 3.2 * len(heads)), squeeze=False)
    for line, own_heads in zip(grid, heads, strict=True):
        for axes, op, name in zip(line, ("fwd", "bwd"), ("forward", "backward"), strict=True):
            _draw(axes, lines_of(rows, anchors, mask, own_heads, op), f"{mask}, {name}, heads {own_heads}, head_dim {HEAD_DIM}, bf16")
            axes.set_xlabel("tokens")
            axes.set_ylabel("TFLOP/s")
        line[0].legend(fontsize=7)
    _save(figure, path)


def draw_overview(path: Path, rows: Sequence[Row], anchors: dict[Key, float], masks: Sequence[str]) -> None:
    """All masks side by side, forward above backward, heads 48/8."""
    figure, grid = plt.subplots(2, len(masks), figsize=(3.1 * len(masks), 5.4), squeeze=False, sharey=True, sharex=True)
    for line, op, name in zip(grid, ("fwd", "bwd"), ("forward", "backward"), strict=True):
        for axes, mask in zip(line, masks, strict=True):
            _draw(axes, lines_of(rows, anchors, mask, MAIN_HEADS, op), f"{mask}, {name}")
        line[0].set_ylabel("TFLOP/s")
    grid[0][0].legend(fontsize=7)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def drawn_masks(rows: Sequence[Row]) -> list[str]:
    """Masks with a right row of ours with the main head counts, in the order of the grid."""
    have = {row.mask for row in main_rows(rows) if row.provider == OURS and row.status == "ok"}
    return [mask for mask in SIZED_MASKS if mask in have]


# ---- tables ----


def table(rows: Sequence[Row], anchors: dict[Key, float]) -> list[str]:
    """Markdown: TFLOP/s forward / backward by mask and size, and the range of the ratios to the recorded kernels."""
    ours = {row.key: row for row in main_rows(rows) if row.provider == OURS}
    head = ["mask", *(f"{size // 1024}k" for size in SIZES), "/ FA3 fwd", "/ FA3 bwd", "/ peer fwd", "/ peer bwd"]
    lines = [f"| {' | '.join(head)} |", f"| --- {'| ---: ' * (len(head) - 1)}|"]
    for mask in drawn_masks(rows):
        cells = []
        for size in SIZES:
            pair = [_tflops(ours.get(Key(mask, size, MAIN_HEADS, HEAD_DIM, DTYPE, op, OURS))) for op in ("fwd", "bwd")]
            cells.append("-" if pair == ["-", "-"] else " / ".join(pair))
        own = [row for row in ours.values() if row.mask == mask and row.status == "ok"]
        found = {op: [ratios(row, rows, anchors) for row in own if row.op == op] for op in ("fwd", "bwd")}
        ranges = [_range([getattr(ratio, name) for ratio in found[op]]) for name in ("fa3", "peer") for op in ("fwd", "bwd")]
        lines.append(f"| {' | '.join([mask, *cells, *ranges])} |")
    return lines


def _tflops(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row.tflops:.0f}" if row.status == "ok" else row.status


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return low if low == high else f"{low} to {high}"


def readme_block(rows: Sequence[Row], anchors: dict[Key, float]) -> str:
    """What stands between the markers of README.md; empty without rows."""
    if not drawn_masks(rows):
        return ""
    own = [row for row in main_rows(rows) if row.provider == OURS]
    commits, machines = (", ".join(sorted({getattr(row, name) for row in own})) for name in ("commit", "machine"))
    text = [
        "## Speed",
        "",
        f"TFLOP/s forward / backward on {machines}, bf16, heads {MAIN_HEADS}, head_dim {HEAD_DIM}, by tokens; commit {commits}.",
        "The last columns are our speed over recorded numbers of FlashAttention-3 and of the peer library's kernels, smallest to largest",
        "over the sizes.",
        "Masks, method and all rows: [benchmarks](docs/benchmarks.md).",
        "",
        *table(rows, anchors),
        "",
        f"![Attention speed by mask and length, ours and baselines](docs/images/{OVERVIEW})",
    ]
    return "\n".join(text)


def page_block(rows: Sequence[Row]) -> str:
    """What stands between the markers of docs/benchmarks.md: one picture per mask; empty without rows."""
    return "\n\n".join(f"![Attention speed with the mask {mask}](images/ffa_{mask}.png)" for mask in drawn_masks(rows))


def replace_block(text: str, block: str) -> str:
    """The text with what is between the markers replaced.

    Raises:
        ValueError: the markers are not there, each once and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the lines {BEGIN!r} and {END!r} must be there once each, in this order")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{block}\n{END}{after}" if block else f"{before}{BEGIN}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, help="a file of rows, appended first")
    args = parser.parse_args(argv)
    if args.add is not None:
        added = read_rows(args.add)
        if not added:
            parser.error(f"--add {args.add}: no rows there")
        append_rows(ROWS_CSV, added)
    rows, anchors = read_rows(ROWS_CSV), read_anchors()
    for mask in drawn_masks(rows):
        draw_mask(IMAGES / f"ffa_{mask}.png", rows, anchors, mask)
    if drawn_masks(rows):
        draw_overview(IMAGES / OVERVIEW, rows, anchors, drawn_masks(rows))
    for page, block in ((README, readme_block(rows, anchors)), (PAGE, page_block(rows))):
        page.write_text(replace_block(page.read_text(), block))
    print(f"{len(drawn_masks(rows))} masks drawn from {len(rows)} rows of {ROWS_CSV}")


if __name__ == "__main__":
    main()
