"""What a caller passed, checked and made plain: a number, a flag, a name, or an array of integers. Knows no mask, tensor library or rank.

Tensors are taken by duck typing (`detach().cpu().numpy()`), so that nothing here imports torch; a CUDA tensor costs a copy to the host.
"""

from __future__ import annotations

import array
import itertools
import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from magi_attention.errors import InputError

Int64Array = npt.NDArray[np.int64]

_LARGEST = sys.float_info.max  # NaN and the infinities are outside of +- this
_ARRAY_FORM = "pass a list, an int array or an int tensor"
_SEQUENCES = {list, tuple}


def shown(value: Any) -> str:
    """A value in a message: its repr, cut to one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


# ---- one value ----


def count(name: str, value: Any, low: int, high: int) -> int:
    """An int in [low, high], from anything that stands for an integer (also numpy scalars and tensors of one element), not from a bool.

    Raises:
        InputError: no integer, or out of range.
    """
    found = integer(name, value, f"must be an int; it must be in [{low}, {high}]")
    if not low <= found <= high:
        raise InputError(f"{name}={found} must be in [{low}, {high}]")
    return found


def integer(name: str, value: Any, rule: str = "must be an int") -> int:
    """Any int, as `count` takes them.

    Raises:
        InputError: no integer.
    """
    found = _index(value)
    if found is None:
        raise InputError(f"{name}={shown(value)} {rule}")
    return found


def number(name: str, value: Any, rule: str, *, above: float = -math.inf, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite float with above < value and low <= value <= high.

    Args:
        rule: the rule in words, for the message.

    Raises:
        InputError: no real number, NaN, infinite, out of range, or a tensor that requires grad: no gradient would flow into it.
    """
    if isinstance(value, float):
        found: float | None = float(value)  # first and without a question more: inside torch.compile it may stand for any number
    elif getattr(value, "requires_grad", False):
        raise InputError(f"{name} is a tensor that requires grad, but no gradient flows into it; multiply it into an input, or detach it")
    else:
        found = _float(value)
    if found is None or not max(low, -_LARGEST) <= found <= min(high, _LARGEST) or found <= above:
        raise InputError(f"{name}={shown(value)} {rule}")
    return found


def flag(name: str, value: Any) -> bool:
    """True or False; 0 and 1 are taken too.

    Raises:
        InputError: anything else, which Python would silently read as true or false.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    found = _index(value)
    if found not in (0, 1):
        raise InputError(f"{name}={shown(value)} must be True or False")
    return found == 1


def one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of some names.

    Raises:
        InputError: another value.
    """
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"{name}={shown(value)} must be one of {', '.join(allowed)}")
    return value


def _index(value: Any) -> int | None:
    """The integer that `value` stands for, None when it stands for none."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor without memory, or one that requires grad
        return None


def _float(value: Any) -> float | None:
    if isinstance(value, (bool, np.bool_, str, bytes)) or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


# ---- integers in an array ----


def int_array(name: str, value: Any, columns: int | None = None) -> Int64Array:
    """int64 [n] (columns None) or [n, columns] from a list, an integer array or an integer tensor; anything empty is [0, ...].

    A list may hold ranges (AttnRange) as its rows.

    Raises:
        InputError: floats or other non-integers, another shape, numbers outside 64 bits.
    """
    values: npt.NDArray[Any] | None = None
    if isinstance(value, (list, tuple)):
        values = _from_lists(value, columns)
        if values is None and any(hasattr(row, "to_naive_range") for row in value):
            value = [row.to_naive_range() if hasattr(row, "to_naive_range") else row for row in value]
            values = _from_lists(value, columns)
    if values is None:
        values = _as_numpy(name, value)
    if values.size == 0:
        return np.zeros(0 if columns is None else (0, columns), np.int64)
    if values.dtype.kind not in "iu" or (values.dtype == np.uint64 and values.max() > np.iinfo(np.int64).max):
        raise InputError(
            f"{name}={shown(value)} has {values.dtype} values; it must hold integers (int32 or int64); convert it, token offsets have "
            "no fractions"
        )
    is_right_shape = values.ndim == 1 if columns is None else (values.ndim == 2 and values.shape[1] == columns)
    if not is_right_shape:
        wanted = "[n]" if columns is None else f"[n, {columns}]"
        raise InputError(f"{name} has shape {list(values.shape)}; it must be {wanted}; reshape it")
    return values.astype(np.int64, copy=False)


def _from_lists(value: Sequence[Any], columns: int | None) -> Int64Array | None:
    """Plain lists several times faster than numpy reads them; None for whatever is not plainly integers of the right shape.

    array("q") takes integers only (a float is a TypeError, never cut), and rows are lists or tuples (a set has no order, bytes hold
    letters), so nothing is accepted here that the slow way refuses.
    """
    try:
        if columns is None:
            return np.array(array.array("q", value), np.int64)
        if set(map(type, value)) - _SEQUENCES or set(map(len, value)) - {columns}:
            return None
        return np.array(array.array("q", list(itertools.chain.from_iterable(value))), np.int64).reshape(-1, columns)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _as_numpy(name: str, value: Any) -> npt.NDArray[Any]:
    if isinstance(value, (str, bytes, set, frozenset, dict)) or value is None:
        raise InputError(f"{name}={shown(value)} is a {type(value).__name__}; {_ARRAY_FORM}")
    if hasattr(value, "detach"):
        return _tensor_values(name, value)
    if hasattr(value, "to_array"):  # AttnRanges
        value = value.to_array()
    try:
        values = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as fault:
        raise InputError(f"{name}={shown(value)} is not a regular table of integers ({fault}); give every entry the same length") from None
    if values.dtype == object:
        what = f"is a {type(value).__name__}" if values.ndim == 0 else "does not hold integers of 64 bits"
        raise InputError(f"{name}={shown(value)} {what}; {_ARRAY_FORM} with numbers below 2^30")
    return values


def _tensor_values(name: str, tensor: Any) -> npt.NDArray[Any]:
    is_nested = getattr(tensor, "is_nested", False)  # has no shape to ask for
    if not is_nested and 0 in tensor.shape:
        return np.zeros(0, np.int64)
    dtype = str(tensor.dtype)
    if "int" not in dtype or "q" in dtype:  # bfloat16 and quantised numbers have no numpy twin; refused before the conversion fails
        raise InputError(f"{name} is a tensor of {dtype}; it must hold integers (int32 or int64); convert it with .to(torch.int32)")
    try:
        values: npt.NDArray[Any] = tensor.detach().cpu().numpy()
    except (TypeError, ValueError, RuntimeError) as fault:  # no memory behind it (meta), or no dense layout
        why = str(fault).splitlines()[0]
        raise InputError(f"{name} is a tensor whose numbers cannot be read ({why}); pass a dense tensor with memory, or a list") from None
    return values
