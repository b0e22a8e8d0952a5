"""Turns what callers pass (lists, numpy, tensors of any library) into checked int64 arrays. Knows nothing of masks or slices.

Tensors are taken by duck typing (`detach().cpu().numpy()`), so that this package never imports torch; a CUDA tensor costs a
copy to the host.
"""

from __future__ import annotations

import array
import itertools
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from magi_attention.errors import InputError

Int64Array = npt.NDArray[np.int64]


def int_array(name: str, value: Any, columns: int | None = None) -> Int64Array:
    """int64 [n] (columns None) or [n, columns] from a list, an integer array or an integer tensor; anything empty is [0, ...].

    Raises:
        InputError: floats or other non-integers, another shape, numbers outside 64 bits.
    """
    values: npt.NDArray[Any] | None = _from_lists(value, columns) if isinstance(value, (list, tuple)) else None
    if values is None:
        values = _as_numpy(name, value)
    if values.size == 0:
        return np.zeros(0 if columns is None else (0, columns), np.int64)
    if values.dtype.kind not in "iu" or (values.dtype == np.uint64 and values.max() > np.iinfo(np.int64).max):
        raise InputError(
            f"{name}={_short(value)} has {values.dtype} values; it must hold integers (int32 or int64); convert it, token offsets have "
            "no fractions"
        )
    is_right_shape = values.ndim == 1 if columns is None else (values.ndim == 2 and values.shape[1] == columns)
    if not is_right_shape:
        wanted = "[n]" if columns is None else f"[n, {columns}]"
        raise InputError(f"{name} has shape {list(values.shape)}; it must be {wanted}; reshape it")
    return values.astype(np.int64, copy=False)


def _from_lists(value: list[Any] | tuple[Any, ...], columns: int | None) -> Int64Array | None:
    """Plain lists several times faster than numpy reads them; None for whatever is not plainly integers of the right shape.

    array("q") takes integers only (a float is a TypeError, never cut), so nothing is accepted here that the slow way refuses.
    """
    try:
        if columns is None:
            return np.array(array.array("q", value), np.int64)
        if set(map(len, value)) - {columns}:
            return None
        return np.array(array.array("q", list(itertools.chain.from_iterable(value))), np.int64).reshape(-1, columns)
    except (TypeError, OverflowError):
        return None


def _as_numpy(name: str, value: Any) -> npt.NDArray[Any]:
    if hasattr(value, "detach"):
        dtype = str(value.dtype)
        if 0 in value.shape:
            return np.zeros(0, np.int64)
        if "float" in dtype or "complex" in dtype:  # bfloat16 has no numpy twin; refuse it before the conversion fails
            raise InputError(f"{name} is a tensor of {dtype}; it must hold integers (int32 or int64); convert it with .to(int32)")
        value = value.detach().cpu().numpy()
    elif hasattr(value, "to_array"):  # AttnRanges
        value = value.to_array()
    try:
        values = np.asarray(value)
    except (TypeError, ValueError) as fault:
        raise InputError(f"{name}={_short(value)} is not a regular table of integers ({fault}); give every entry the same length") from None
    if values.dtype == object:
        raise InputError(f"{name}={_short(value)} does not hold integers of 64 bits; pass ints below 2^30")
    return values


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def count(name: str, value: Any, low: int, high: int) -> int:
    """An int in [low, high].

    Raises:
        InputError: no integer, or out of range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name}={_short(value)} must be an int") from None
    if not low <= number <= high:
        raise InputError(f"{name}={number} must be in [{low}, {high}]")
    return number


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
