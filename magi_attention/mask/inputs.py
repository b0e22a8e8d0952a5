"""Token ranges and offsets as callers pass them, checked. Knows nothing of masks or slices."""

from __future__ import annotations

from typing import Any

import numpy as np

from magi_attention.arguments import Int64Array, int_array
from magi_attention.errors import InputError


def check_ranges(name: str, ranges: Int64Array, total: int, total_name: str) -> None:
    """Every row of `ranges` [n, 2] is 0 <= start <= end <= total.

    Raises:
        InputError: names the first row that is not.
    """
    start, end = ranges[:, 0], ranges[:, 1]
    is_wrong = (start < 0) | (start > end) | (end > total)
    if not is_wrong.any():
        return
    idx = int(np.argmax(is_wrong))
    low, high = int(start[idx]), int(end[idx])
    if low < 0:
        fault = "starts below 0; token ids start at 0"
    elif low > high:
        fault = f"is reversed; did you mean [{high}, {low})?"
    else:
        fault = f"ends past {total_name}={total}; shorten it or raise {total_name}"
    raise InputError(f"{name}[{idx}]=[{low}, {high}) {fault} (rule: 0 <= start <= end <= {total_name})")


def offsets(name: str, cu_seqlens: Any, max_tokens: int) -> Int64Array:
    """int64 [num_documents + 1] cumulative lengths: starts with 0, never falls, ends at most at max_tokens.

    Raises:
        InputError: otherwise.
    """
    values = int_array(name, cu_seqlens)
    if not values.size or values[0] != 0:
        first = int(values[0]) if values.size else "nothing"
        raise InputError(f"{name} starts with {first}; it must start with 0 and hold num_documents + 1 offsets")
    steps = np.diff(values)
    if (steps < 0).any():
        idx = int(np.argmax(steps < 0)) + 1
        raise InputError(f"{name}[{idx}]={int(values[idx])} is below {name}[{idx - 1}]={int(values[idx - 1])}; offsets must not fall")
    if values[-1] > max_tokens:
        raise InputError(f"{name} ends with {int(values[-1])}; at most {max_tokens} tokens fit 32-bit token ids")
    return values
