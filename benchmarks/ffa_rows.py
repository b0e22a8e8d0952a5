"""Rows of the attention benchmark: their file, the recorded anchors, and ratios between them. Measures nothing."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.ffa_cells import Cell

RESULTS = Path(__file__).parent / "results"
ROWS_CSV = RESULTS / "ffa.csv"
ANCHORS_CSV = RESULTS / "anchors_h200.csv"
OURS = "ours"
STATUSES = ("ok", "wrong", "failed")  # wrong: the check before the timing; failed: an error, in `note`


class Key(NamedTuple):
    """What a number belongs to; `op` as in ffa_cells.OPS, `provider` who computed it."""

    mask: str
    tokens: int
    heads: str
    head_dim: int
    dtype: str
    op: str
    provider: str


@dataclass(frozen=True)
class Row:
    """One line of the file; the fields are its columns.

    Attributes:
        ms: median of `repeats` calls, 0 when status is not ok; spread_pct: (90th - 10th percentile) / median.
        tflops: of the mask's area, see ffa_cells.flops.
        error_ratio: largest error over what the rule of magi_attention/testing/numerics.py allows; ours must stay at or below 1.
        note: why a row is not ok.
        provider_version: of the library behind the provider.
    """

    mask: str
    tokens: int
    heads: str
    head_dim: int
    dtype: str
    op: str
    provider: str
    status: str
    ms: float
    spread_pct: float
    repeats: int
    tflops: float
    area: int
    error_ratio: float
    note: str
    provider_version: str
    commit: str
    machine: str
    torch: str
    python: str

    @property
    def key(self) -> Key:
        return Key(self.mask, self.tokens, self.heads, self.head_dim, self.dtype, self.op, self.provider)


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))
_TYPES = {"int": int, "float": float, "str": str}
_CASTS = {field.name: _TYPES[str(field.type)] for field in dataclasses.fields(Row)}
ANCHOR_COLUMNS = (*Key._fields, "tflops", "source")


def read_rows(path: Path) -> list[Row]:
    """Rows of a file, none when it does not exist.

    Raises:
        ValueError: another header, or a status that is none of STATUSES.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: columns {reader.fieldnames}, expected {list(COLUMNS)}; it was written by another version")
        rows = [Row(**{name: _CASTS[name](value) for name, value in line.items()}) for line in reader]
    wrong = [row for row in rows if row.status not in STATUSES]
    if wrong:
        raise ValueError(f"{path}: status {wrong[0].status!r} of {wrong[0].key} is none of {', '.join(STATUSES)}")
    return rows


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows at the end, after the header when the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    read_rows(path)  # refuses to mix versions
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        writer.writerows(dataclasses.astuple(row) for row in rows)


def latest(rows: Iterable[Row]) -> dict[Key, Row]:
    """The last row of each key: a later measurement replaces an earlier one, also when it failed."""
    return {row.key: row for row in rows}


def read_anchors(path: Path = ANCHORS_CSV) -> dict[Key, float]:
    """TFLOP/s of kernels that were measured once and are not on the machine.

    Raises:
        ValueError: another header.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != ANCHOR_COLUMNS:
            raise ValueError(f"{path}: columns {reader.fieldnames}, expected {list(ANCHOR_COLUMNS)}")
        found = {}
        for line in reader:
            key = Key(**{name: _CASTS[name](line[name]) for name in Key._fields})
            if key in found:
                raise ValueError(f"{path}: {key} is there twice")
            found[key] = float(line["tflops"])
    return found


class Ratios(NamedTuple):
    """Speed of a row over others: the fastest other provider measured on the same machine, and two anchors. None where there is none."""

    best_name: str
    best: float | None
    fa3: float | None
    peer: float | None


def ratios(row: Row, rows: Sequence[Row], anchors: dict[Key, float]) -> Ratios:
    """Of one ok row; a deterministic backward is held against the others' default one."""
    key = row.key._replace(op="bwd" if row.op == "bwd_det" else row.op)
    others = [
        other
        for other in latest(rows).values()
        if other.status == "ok"
        and other.provider not in (OURS, "blocked")
        and other.machine == row.machine
        and other.key._replace(provider="") == key._replace(provider="")
    ]
    best = max(others, key=lambda other: other.tflops, default=None)

    def over(tflops: float | None) -> float | None:
        return row.tflops / tflops if tflops else None

    fa3, peer = (anchors.get(key._replace(provider=name)) for name in ("FA3", "peer FFA"))
    return Ratios(best.provider if best else "", over(best.tflops if best else None), over(fa3), over(peer))


def cell_of(key: Key) -> Cell:
    num_heads_q, num_heads_kv = (int(number) for number in key.heads.split("/"))
    return Cell(key.mask, key.tokens, num_heads_q, num_heads_kv, key.head_dim, key.dtype)


def summary(rows: Sequence[Row], anchors: dict[Key, float]) -> list[str]:
    """Lines of a table: our rows with their ratios, in the order they were first measured."""
    names = ("mask", "tokens", "heads", "dim", "dtype", "op", "ms", "TFLOP/s", "/best", "/FA3", "/peer")
    lines = ["{:<19}{:>7}{:>7}{:>5}  {:<9}{:<8}{:>9}{:>9}  {:<17}{:>6}{:>7}".format(*names)]
    for row in latest(rows).values():
        if row.provider != OURS:
            continue
        start = f"{row.mask:<19}{row.tokens:>7}{row.heads:>7}{row.head_dim:>5}  {row.dtype:<9}{row.op:<8}"
        if row.status != "ok":
            lines.append(f"{start}  {row.status}: {row.note}")
            continue
        found = ratios(row, rows, anchors)
        best = f"{_shown(found.best)} {found.best_name}"
        lines.append(f"{start}{row.ms:>9.3f}{row.tflops:>9.1f}  {best:<17}{_shown(found.fa3):>6}{_shown(found.peer):>7}")
    return lines


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
