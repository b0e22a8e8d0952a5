"""Whether measured rows meet a promise. A promise is data: which cells, against whom, by what factor. Measures nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from benchmarks.ffa_cells import SIZES, Cell
from benchmarks.ffa_rows import OURS, Key, Row, cell_of, latest

_LONG = tuple(size for size in SIZES if size >= 8192)
_SHORT = tuple(size for size in SIZES if size <= 4096)
_FA3_MASKS = ("full", "causal", "varlen_full", "varlen_causal", "swa_causal")
_ALL_MASKS = (*_FA3_MASKS, "frame_causal")


@dataclass(frozen=True)
class Promise:
    """ours >= factor * anchor in TFLOP/s, or > when `is_strict`, in every cell where the anchor has a number."""

    against: str
    factor: float
    masks: tuple[str, ...]
    sizes: tuple[int, ...] = SIZES
    ops: tuple[str, ...] = ("fwd", "bwd")
    is_strict: bool = False

    def covers(self, key: Key) -> bool:
        return key.provider == self.against and key.mask in self.masks and key.tokens in self.sizes and key.op in self.ops


@dataclass(frozen=True)
class PairPromise:
    """time of `slow` <= factor * time of `fast`, both ours; each is (mask, op), None for the same in both."""

    slow: tuple[str | None, str]
    fast: tuple[str | None, str]
    factor: float


PROMISES: dict[str, tuple[Promise, ...]] = {
    "milestone": (
        Promise("FA3", 0.90, _FA3_MASKS, _LONG, ("fwd",)),
        Promise("FA3", 0.85, _FA3_MASKS, _LONG, ("bwd",)),
        Promise("peer FFA", 1.0, ("frame_causal",), _LONG, is_strict=True),
    ),
    "short": (
        Promise("FA3", 0.90, ("causal",), _SHORT),
        Promise("peer FFA", 1.0, ("causal",), _SHORT, is_strict=True),
    ),
    "goal": (Promise("FA3", 1.0, _ALL_MASKS), Promise("peer FFA", 1.15, _ALL_MASKS)),
}
PAIR_PROMISES: dict[str, tuple[PairPromise, ...]] = {
    "deterministic": (PairPromise((None, "bwd_det"), (None, "bwd"), 1.25),),
    "small": tuple(PairPromise((mask, op), (f"{mask}_as_tiles", op), 2.0) for mask in ("docs_1_4", "docs_8_64") for op in ("fwd", "bwd")),
}
GATES = (*PROMISES, *PAIR_PROMISES)


@dataclass(frozen=True)
class Verdict:
    """One cell of a gate."""

    passed: bool
    text: str


def judge(gate: str, rows: Sequence[Row], anchors: dict[Key, float], selected: Collection[Cell] | None = None) -> list[Verdict]:
    """One verdict per promised cell; cells outside `selected` (None: all) are not asked for, cells without a row are missed."""
    ours = {key: row for key, row in latest(rows).items() if key.provider == OURS}
    if gate in PROMISES:
        return _against_anchors(PROMISES[gate], ours, anchors, selected)
    return [verdict for promise in PAIR_PROMISES[gate] for verdict in _between_pairs(promise, ours, selected)]


def _against_anchors(
    promises: tuple[Promise, ...], ours: dict[Key, Row], anchors: dict[Key, float], selected: Collection[Cell] | None
) -> list[Verdict]:
    found = []
    for promise in promises:
        for key, tflops in anchors.items():
            if promise.covers(key) and (selected is None or cell_of(key) in selected):
                found.append(_anchor_verdict(promise, key, tflops, ours.get(key._replace(provider=OURS))))
    return found


def _anchor_verdict(promise: Promise, key: Key, tflops: float, row: Row | None) -> Verdict:
    sign = ">" if promise.is_strict else ">="
    wanted = f"{key.op} {cell_of(key)}: wants {sign} {promise.factor:.2f} x {promise.against} ({tflops:.0f} TFLOP/s)"
    if row is None:
        return Verdict(False, f"{wanted}, not measured")
    if row.status != "ok":
        return Verdict(False, f"{wanted}, {row.status}: {row.note}")
    ratio = row.tflops / tflops
    passed = ratio > promise.factor if promise.is_strict else ratio >= promise.factor
    return Verdict(passed, f"{wanted}, has {ratio:.3f} ({row.tflops:.1f} TFLOP/s)")


def _between_pairs(promise: PairPromise, ours: dict[Key, Row], selected: Collection[Cell] | None) -> list[Verdict]:
    found = []
    for key, row in ours.items():
        mask, op = promise.slow
        if key.op != op or mask not in (None, key.mask) or (selected is not None and cell_of(key) not in selected):
            continue
        twin_key = key._replace(mask=promise.fast[0] or key.mask, op=promise.fast[1])
        wanted = f"{key.op} {cell_of(key)}: wants <= {promise.factor:.2f} x the time of {twin_key.op} {twin_key.mask}"
        twin = ours.get(twin_key)
        wrong = next((f"{x.op} {x.mask} is {x.status}: {x.note}" for x in (row, twin) if x is not None and x.status != "ok"), None)
        if twin is None or wrong is not None:
            found.append(Verdict(False, f"{wanted}, {wrong or f'{twin_key.op} {twin_key.mask} is not measured'}"))
            continue
        ratio = row.ms / twin.ms
        found.append(Verdict(ratio <= promise.factor, f"{wanted}, takes {ratio:.3f} ({row.ms:.3f} against {twin.ms:.3f} ms)"))
    return found


def report(gate: str, verdicts: Sequence[Verdict]) -> tuple[bool, list[str]]:
    """(met, lines to print). A gate without any cell is not met: nothing was shown."""
    missed = [verdict.text for verdict in verdicts if not verdict.passed]
    if not verdicts:
        return False, [f"gate {gate}: MISSED, no selected cell belongs to it"]
    if missed:
        return False, [f"gate {gate}: MISSED in {len(missed)} of {len(verdicts)} cells", *(f"  {text}" for text in missed)]
    return True, [f"gate {gate}: met in all {len(verdicts)} cells"]
