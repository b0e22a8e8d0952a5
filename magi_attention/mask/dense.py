"""The oracle: masks as T x T arrays, straight from the definition. Imports nothing clever; for tests and small pictures only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def cover_count(slices: npt.ArrayLike, total_q: int, total_k: int) -> npt.NDArray[np.int32]:
    """int32 [total_q, total_k]: how many slices (q_start, q_end, k_start, k_end, lo, hi) cover each cell; above 1 is an error."""
    cover = np.zeros((total_q, total_k), np.int32)
    for q_start, q_end, k_start, k_end, lo, hi in np.asarray(slices, np.int64).reshape(-1, 6):
        distance = np.arange(k_start, k_end)[None, :] - np.arange(q_start, q_end)[:, None]  # j - i
        cover[q_start:q_end, k_start:k_end] += (lo <= distance) & (distance <= hi)
    return cover


def dense_mask(slices: npt.ArrayLike, total_q: int, total_k: int) -> npt.NDArray[np.bool_]:
    """bool [total_q, total_k]: True where query i sees key j."""
    return cover_count(slices, total_q, total_k) > 0
