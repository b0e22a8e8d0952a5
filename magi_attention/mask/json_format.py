"""Masks as JSON text, to hand one to the plan command or to keep one in a report. Knows nothing of validation.

    {"total_q": 8, "total_k": 8, "slices": [[0, 4, 0, 4, "causal"], [4, 8, 0, 8, -3, null]]}

A slice is [q_start, q_end, k_start, k_end, type] with type full, causal, inv_causal or bi_causal, or
[q_start, q_end, k_start, k_end, lo, hi] with lo <= j - i <= hi and null for no bound. We write the second form.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from magi_attention.arguments import Int64Array, int_array, shown
from magi_attention.errors import InputError
from magi_attention.mask.typed_ranges import UNBOUNDED, bands_from_types, type_array

_FORM = '{"total_q": int, "total_k": int, "slices": [[q0, q1, k0, k1, type] or [q0, q1, k0, k1, lo or null, hi or null], ...]}'


def dump(slices: npt.NDArray[np.int32], total_q: int, total_k: int) -> str:
    """One line of JSON."""
    rows = [[*row[:4], *(None if abs(bound) >= UNBOUNDED else bound for bound in row[4:])] for row in slices.tolist()]
    return json.dumps({"total_q": total_q, "total_k": total_k, "slices": rows})


def load(text: str | bytes) -> tuple[Int64Array, Any, Any]:
    """(slices int64 [N, 6] as written, total_q, total_k).

    Raises:
        InputError: no JSON, a missing name, or a slice of another form.
    """
    if not isinstance(text, (str, bytes, bytearray)):
        raise InputError(f"the mask is a {type(text).__name__}, not JSON text; expected {_FORM}")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise InputError(f"the mask is not JSON ({fault}); expected {_FORM}") from None
    if not isinstance(record, dict) or not {"total_q", "total_k", "slices"} <= record.keys() or not isinstance(record["slices"], list):
        raise InputError(f"the mask needs the names total_q, total_k and slices; expected {_FORM}")
    rows = [_band(idx, row) for idx, row in enumerate(record["slices"])]
    return int_array("slices", rows, columns=6), record["total_q"], record["total_k"]


def _band(idx: int, row: Any) -> list[Any]:
    if isinstance(row, list) and len(row) == 6:
        lo, hi = row[4:]
        return [*row[:4], -UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi]
    if isinstance(row, list) and len(row) == 5:
        ids = int_array(f"slices[{idx}]", row[:4])
        if len(ids) != 4 or not 0 <= ids.min() <= ids.max() < UNBOUNDED:
            raise InputError(f"slices[{idx}]={shown(row)} has a token id outside [0, 2^30); expected {_FORM}")
        types = type_array(f"slices[{idx}] type", row[4:], 1)
        band: list[Any] = bands_from_types(ids[None, :2], ids[None, 2:], types)[0].tolist()
        return band
    raise InputError(f"slices[{idx}]={shown(row)} has neither 5 nor 6 entries; expected {_FORM}")
