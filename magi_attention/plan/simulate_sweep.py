"""Mask families by size, speed against ranks for one of them, and predictions against measured times. Prints nothing."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError
from magi_attention.mask.builders import block_causal_video, from_cu_seqlens
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.build import PlanRequest
from magi_attention.plan.simulate_report import SimulatedLayer, nodes_of, simulate_layer

# As the authors of MagiAttention published them: varlen causal, forward, TFLOP/s per GPU. Not measured here; their documents are not ours.
PUBLISHED_VARLEN_CAUSAL_FORWARD = {8: 458.0, 16: 428.0, 32: 319.0, 64: 240.0}
FRAME_TOKENS = 1_560
CALIBRATION_COLUMNS = ("mask", "tokens", "ranks", "heads", "direction", "milliseconds")
CALIBRATION_LIMIT = 0.10


def _documents(total: int) -> list[int]:
    """Borders of log-normal documents (median 1,500 tokens, sigma 1.2, at most a quarter of all), the same for the same total."""
    rng = np.random.default_rng(0)
    borders = [0]
    while borders[-1] < total:
        length = int(np.clip(rng.lognormal(np.log(1_500.0), 1.2), 1, max(1, total // 4)))
        borders.append(min(total, borders[-1] + length))
    return borders


FAMILIES: dict[str, Callable[[int], AttnMask]] = {
    "full": lambda total: from_cu_seqlens([0, total], [0, total], causal=False),
    "causal": lambda total: from_cu_seqlens([0, total], [0, total], causal=True),
    "documents": lambda total: from_cu_seqlens(_documents(total), _documents(total), causal=True),
    "frame-causal": lambda total: block_causal_video(-(-total // FRAME_TOKENS), FRAME_TOKENS, total),
}


def family_mask(family: str, total: int) -> AttnMask:
    """The family's mask of so many tokens.

    Raises:
        InputError: no such family; no tokens, or more than token ids can name.
    """
    if family not in FAMILIES:
        raise InputError(f"mask family {family!r} must be one of {', '.join(FAMILIES)}")
    if not 1 <= total < 1 << 30:
        raise InputError(f"tokens={total} must be in 1..{(1 << 30) - 1}: token ids have 32 bits")
    return FAMILIES[family](total)


def sweep(
    family: str,
    ranks: Sequence[int],
    tokens_per_gpu: int,
    config: DistAttnConfig,
    request: PlanRequest,
    *,
    mover: str = "auto",
    on_layer: Callable[[SimulatedLayer], None] = lambda layer: None,
) -> list[SimulatedLayer]:
    """One layer for each number of ranks, on as many nodes as they fill. `on_layer` is called after each.

    Raises:
        InputError: as `simulate_layer` and `nodes_of`, before anything is simulated.
    """
    nodes = [nodes_of(request.machine, num_ranks) for num_ranks in ranks]
    layers = []
    for num_ranks, num_nodes in zip(ranks, nodes, strict=True):
        mask = family_mask(family, num_ranks * tokens_per_gpu)
        layers.append(simulate_layer(mask, num_ranks, config, replace(request, num_nodes=num_nodes), mover=mover))
        on_layer(layers[-1])
    return layers


@dataclass(frozen=True, kw_only=True)
class MeasuredTime:
    """One row of a calibration file. heads: query and key heads."""

    mask: str
    tokens: int
    ranks: int
    heads: tuple[int, int]
    direction: str
    milliseconds: float


def read_measured_times(text: str, max_ranks: int) -> list[MeasuredTime]:
    """Rows of a CSV file with the columns of CALIBRATION_COLUMNS, in any order; more columns are left alone.

    Raises:
        InputError: names line and column.
    """
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in CALIBRATION_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise InputError(f"--calibrate: columns {', '.join(missing)} are missing; the first line must name {','.join(CALIBRATION_COLUMNS)}")
    try:
        rows = [_measured_time(row, f"--calibrate: line {reader.line_num}", max_ranks) for row in reader]
    except csv.Error as error:
        raise InputError(f"--calibrate: line {reader.line_num}: {error}") from None
    if not rows:
        raise InputError("--calibrate: the file has no rows below its column names")
    return rows


def _measured_time(row: dict[str, str | None], place: str, max_ranks: int) -> MeasuredTime:
    words = {name: (row[name] or "").strip() for name in CALIBRATION_COLUMNS}
    if words["mask"] not in FAMILIES:
        raise InputError(f"{place}: mask={words['mask']!r} must be one of {', '.join(FAMILIES)}")
    if words["direction"] not in ("forward", "backward"):
        raise InputError(f"{place}: direction={words['direction']!r} must be forward or backward")
    try:
        tokens, ranks, milliseconds = int(words["tokens"]), int(words["ranks"]), float(words["milliseconds"])
        num_heads_q, num_heads_kv = (int(word) for word in words["heads"].split(":"))
    except ValueError as error:
        raise InputError(f"{place}: {error}; write whole numbers, heads as 64:8 and milliseconds as a number") from None
    if tokens < 1 or not 1 <= ranks <= max_ranks or not 0.0 < milliseconds < float("inf"):
        raise InputError(f"{place}: tokens and milliseconds must be above 0, ranks in 1..{max_ranks}")
    if min(num_heads_q, num_heads_kv) < 1 or num_heads_q % num_heads_kv:
        raise InputError(f"{place}: heads={words['heads']!r} must be query and key heads, the first a multiple of the second")
    return MeasuredTime(
        mask=words["mask"],
        tokens=tokens,
        ranks=ranks,
        heads=(num_heads_q, num_heads_kv),
        direction=words["direction"],
        milliseconds=milliseconds,
    )


def predicted_over_measured(
    rows: Sequence[MeasuredTime],
    config: DistAttnConfig,
    request: PlanRequest,
    *,
    mover: str = "auto",
    on_row: Callable[[MeasuredTime], None] = lambda row: None,
) -> list[float]:
    """One ratio per row, 1.0 is exact. Rows of one problem are simulated once."""
    nodes = {row.ranks: nodes_of(request.machine, row.ranks) for row in rows}
    layers: dict[tuple[str, int, int, tuple[int, int]], SimulatedLayer] = {}
    ratios = []
    for row in rows:
        problem = (row.mask, row.tokens, row.ranks, row.heads)
        if problem not in layers:
            row_request = replace(request, num_heads_q=row.heads[0], num_heads_kv=row.heads[1], num_nodes=nodes[row.ranks])
            layers[problem] = simulate_layer(family_mask(row.mask, row.tokens), row.ranks, config, row_request, mover=mover)
        direction = layers[problem].directions()[row.direction]
        ratios.append(direction.timeline.time_us / 1e3 / row.milliseconds)
        on_row(row)
    return ratios
