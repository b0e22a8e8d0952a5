"""AttnMask: a set of band slices, canonical and frozen. Knows nothing of ranks, chunks or kernels."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from magi_attention import _native
from magi_attention.errors import InputError

UNBOUNDED = 1 << 30  # a band bound of +-UNBOUNDED never binds; csrc/base/slice.h has the same number
MAX_TOKENS = UNBOUNDED - 1


@dataclass(frozen=True, eq=False)
class AttnMask:
    """Which query sees which key: slices (q_start, q_end, k_start, k_end, lo, hi), see docs/masks.md.

    Query i sees key j when a slice has q_start <= i < q_end, k_start <= j < k_end and lo <= j - i <= hi.

    Attributes:
        slices: int32 [N, 6], tightened, non-empty, sorted by (q_start, k_start, lo); read-only.
        total_q, total_k: rows and columns of the mask.
    """

    slices: npt.NDArray[np.int32]
    total_q: int
    total_k: int

    @classmethod
    def from_slices(cls, slices: npt.ArrayLike, total_q: int, total_k: int) -> AttnMask:
        """From int records [N, 6]; empty ones are dropped.

        Raises:
            InputError: wrong shape, ranges outside the totals, or a cell covered twice.
        """
        raw = np.asarray(slices, dtype=np.int32).reshape(-1, 6)
        if len(raw) and (raw[:, :4].min() < 0 or raw[:, 1].max() > total_q or raw[:, 3].max() > total_k):
            raise InputError(f"slices reach outside total_q={total_q}, total_k={total_k}; clip them first")
        kept = _native.run("tighten", slices=raw)["slices"].reshape(-1, 6)
        order = np.lexsort((kept[:, 4], kept[:, 2], kept[:, 0]))
        kept = np.ascontiguousarray(kept[order], dtype=np.int32)
        kept.setflags(write=False)
        return cls(kept, total_q, total_k)

    @functools.cached_property
    def digest(self) -> str:
        """Stable hex hash of sizes and slices; equal on every machine."""
        head = np.array([self.total_q, self.total_k, len(self.slices)], dtype="<i8").tobytes()
        return hashlib.sha256(head + self.slices.astype("<i4").tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttnMask) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)
