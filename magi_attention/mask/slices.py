"""AttnMask: a set of band slices, canonical and frozen. Knows nothing of ranks, chunks or kernels."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from magi_attention import _native
from magi_attention.arguments import count, int_array
from magi_attention.errors import InputError
from magi_attention.mask import dense, json_format, plot
from magi_attention.mask.inputs import check_ranges
from magi_attention.mask.mask_type import AttnMaskType
from magi_attention.mask.ranges import AttnRanges
from magi_attention.mask.typed_ranges import UNBOUNDED, bands_from_types, type_array, types_from_bands

MAX_TOKENS = UNBOUNDED - 1

__all__ = ["MAX_TOKENS", "UNBOUNDED", "AttnMask"]


@dataclass(frozen=True, eq=False, repr=False)
class AttnMask:
    """Which query sees which key: slices (q_start, q_end, k_start, k_end, lo, hi), see docs/masks.md.

    Query i sees key j when a slice has q_start <= i < q_end, k_start <= j < k_end and lo <= j - i <= hi. Make one with
    `from_slices`, `from_ranges`, `from_json` or the functions of magi_attention.mask.builders; the constructor checks nothing.

    Attributes:
        slices: int32 [N, 6], tightened, non-empty, sorted by (q_start, k_start), no cell covered twice; read-only.
        total_q, total_k: rows and columns of the mask.
    """

    slices: npt.NDArray[np.int32]
    total_q: int
    total_k: int

    def __post_init__(self) -> None:
        self.slices.setflags(write=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return AttnMask, (self.slices, self.total_q, self.total_k)  # through the constructor: copies are read-only too

    # ---- in ----

    @classmethod
    def from_slices(cls, slices: Any, total_q: int, total_k: int, *, check_overlap: bool = True) -> AttnMask:
        """From integer records [N, 6]; empty ones are dropped. A bound at or past +-2^30 is no bound.

        Args:
            slices: lists, an int array or an int tensor.
            total_q, total_k: tokens on each side, 0 to 2^30 - 1.
            check_overlap: False skips the search for doubly covered cells; for slices that are disjoint by construction.

        Raises:
            InputError: floats, wrong shape, ranges reversed or outside the totals, or a cell covered twice.
        """
        raw = int_array("slices", slices, columns=6)
        total_q, total_k = _totals(total_q, total_k)
        check_ranges("slices (q)", raw[:, 0:2], total_q, "total_q")
        check_ranges("slices (k)", raw[:, 2:4], total_k, "total_k")
        bands = np.clip(raw, -UNBOUNDED, UNBOUNDED).astype(np.int32)
        return cls._canonical(bands, total_q, total_k, check_overlap, lambda idx: f"slices[{idx}]={tuple(raw[idx].tolist())}")

    @classmethod
    def from_ranges(cls, q_ranges: Any, k_ranges: Any, attn_type_map: Any, total_q: int, total_k: int) -> AttnMask:
        """From the four user-level types, one (q_range, k_range, type) per entry.

        Args:
            q_ranges, k_ranges: [n, 2] half-open token ranges: AttnRanges, lists, an int array or an int tensor.
            attn_type_map: [n] types as AttnMaskType, name or number 0..3; one type for all; None for all FULL.
            total_q, total_k: tokens on each side, 0 to 2^30 - 1.

        Raises:
            InputError: floats, negative, reversed or too long ranges, unknown types, unequal numbers, or a cell covered twice.
        """
        q, k = int_array("q_ranges", q_ranges, columns=2), int_array("k_ranges", k_ranges, columns=2)
        if len(q) != len(k):
            raise InputError(f"q_ranges has {len(q)} ranges but k_ranges has {len(k)}; entry i of one belongs to entry i of the other")
        types = type_array("attn_type_map", attn_type_map, len(q))
        total_q, total_k = _totals(total_q, total_k)
        check_ranges("q_ranges", q, total_q, "total_q")
        check_ranges("k_ranges", k, total_k, "total_k")

        def describe(idx: int) -> str:
            kind = AttnMaskType.from_int_type(int(types[idx])).value
            return f"entry {idx} (q_range [{q[idx, 0]}, {q[idx, 1]}), k_range [{k[idx, 0]}, {k[idx, 1]}), {kind})"

        return cls._canonical(bands_from_types(q, k, types), total_q, total_k, True, describe)

    @classmethod
    def from_json(cls, text: str | bytes) -> AttnMask:
        """From the text that `to_json` writes; the format is described in magi_attention/mask/json_format.py.

        Raises:
            InputError: another format, or what `from_slices` refuses.
        """
        return cls.from_slices(*json_format.load(text))

    @classmethod
    def _canonical(
        cls, bands: npt.NDArray[np.int32], total_q: int, total_k: int, check_overlap: bool, describe: Callable[[int], str]
    ) -> AttnMask:
        found = _native.run("canonical", slices=bands, check=int(check_overlap))
        if found["overlap"].size:
            first, second, num_cells = (int(number) for number in found["overlap"])
            raise InputError(
                f"{describe(first)} and {describe(second)} cover {num_cells} cells twice; each (query, key) cell may be covered once, "
                "or it would be counted twice in the softmax; cut one of the two"
            )
        kept = found["slices"].reshape(-1, 6).astype(np.int32, copy=False)
        kept.setflags(write=False)
        return cls(kept, total_q, total_k)

    # ---- facts ----

    @property
    def is_empty(self) -> bool:
        """No query sees any key."""
        return not len(self.slices)

    def area(self) -> int:
        """Number of visible pairs, exact."""
        return int(_native.run("areas", slices=self.slices)["areas"].sum())

    @functools.cached_property
    def digest(self) -> str:
        """Stable hex hash of sizes and slices; equal on every machine."""
        head = np.array([self.total_q, self.total_k, len(self.slices)], dtype="<i8").tobytes()
        return hashlib.sha256(head + self.slices.astype("<i4").tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        """Same sizes and slices. Masks cut differently into slices differ even when they show the same cells."""
        return isinstance(other, AttnMask) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"AttnMask(total_q={self.total_q}, total_k={self.total_k}, {len(self.slices)} slices, area={self.area()})"

    # ---- other views ----

    def transpose(self) -> AttnMask:
        """Keys as rows: what the backward pass walks. `to_dense()` of the result is the transposed matrix."""
        q_start, q_end, k_start, k_end, lo, hi = self.slices.T
        return AttnMask.from_slices(
            np.stack([k_start, k_end, q_start, q_end, -hi, -lo], axis=1), self.total_k, self.total_q, check_overlap=False
        )

    def crop(self, q_start: int, q_end: int, k_start: int, k_end: int) -> AttnMask:
        """The mask of queries [q_start, q_end) and keys [k_start, k_end) alone, counted from 0.

        Raises:
            InputError: a range reversed or outside the mask.
        """
        q = int_array("crop (q)", [[q_start, q_end]], columns=2)
        k = int_array("crop (k)", [[k_start, k_end]], columns=2)
        check_ranges("crop (q)", q, self.total_q, "total_q")
        check_ranges("crop (k)", k, self.total_k, "total_k")
        kept = _native.run("crop", slices=self.slices, box=np.concatenate([q[0], k[0]]))["slices"]
        return AttnMask.from_slices(kept.reshape(-1, 6), int(np.diff(q)[0, 0]), int(np.diff(k)[0, 0]), check_overlap=False)

    def to_ranges(self) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
        """The same cells in the four user-level types: (q_ranges, k_ranges, types), at most three entries per slice."""
        q_ranges, k_ranges, types = types_from_bands(self.slices)
        kinds = [AttnMaskType.from_int_type(number) for number in range(4)]
        return AttnRanges.from_ranges(q_ranges), AttnRanges.from_ranges(k_ranges), [kinds[number] for number in types]

    def to_dense(self) -> npt.NDArray[np.bool_]:
        """bool [total_q, total_k], True where the query sees the key. The oracle of tests; memory is T x T."""
        return dense.dense_mask(self.slices, self.total_q, self.total_k)

    def to_json(self) -> str:
        """One line of JSON, see magi_attention/mask/json_format.py."""
        return json_format.dump(self.slices, self.total_q, self.total_k)

    def plot(self, path: str | os.PathLike[str], *, max_cells: int = 512, title: str | None = None) -> None:
        """Write a picture of at most max_cells x max_cells cells, coloured by the visible share of each; any length.

        Raises:
            UnsupportedError: matplotlib is not installed.
        """
        plot.plot_mask(path, self.slices, self.total_q, self.total_k, max_cells, title)


def _totals(total_q: Any, total_k: Any) -> tuple[int, int]:
    return count("total_q", total_q, 0, MAX_TOKENS), count("total_k", total_k, 0, MAX_TOKENS)
