"""The border between the four user-level types and bands: (q_ranges, k_ranges, types) <-> slices [N, 6].

Knows nothing of documents, windows or ranks. The table of docs/masks.md is `bands_from_types`; its inverse cuts a band into at
most three typed pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from magi_attention.arguments import Int64Array, int_array, integer
from magi_attention.errors import InputError
from magi_attention.mask.mask_type import AttnMaskType

UNBOUNDED = 1 << 30  # a band bound of +-UNBOUNDED never binds; csrc/base/slice.h has the same number
_UNKNOWN = "is unknown; pass 0 (full), 1 (causal), 2 (inv_causal) or 3 (bi_causal)"


def type_array(name: str, types: Any, num_ranges: int) -> Int64Array:
    """int64 [num_ranges] of 0..3.

    Args:
        types: None (all FULL), one type for all, or one per range; a type is an AttnMaskType, its name or its number.

    Raises:
        InputError: an unknown type or another number of types.
    """
    if types is None:
        return np.zeros(num_ranges, np.int64)
    if isinstance(types, (AttnMaskType, str)):
        return np.full(num_ranges, _type_number(name, types), np.int64)
    if isinstance(types, (int, float, np.number)) or getattr(types, "ndim", None) == 0:
        number = integer(name, types, _UNKNOWN)
        if not 0 <= number <= 3:
            raise InputError(f"{name}={number} {_UNKNOWN}")
        return np.full(num_ranges, number, np.int64)
    if isinstance(types, (list, tuple)) and set(map(type, types)) - {int}:  # plain numbers need no look at each
        types = [kind.int_type if type(kind) is AttnMaskType else _type_number(name, kind) for kind in types]
    numbers = int_array(name, types)
    if len(numbers) != num_ranges:
        raise InputError(f"{name} has {len(numbers)} types for {num_ranges} q_ranges; pass one per range, or None for all full")
    is_wrong = (numbers < 0) | (numbers > 3)
    if is_wrong.any():
        idx = int(np.argmax(is_wrong))
        raise InputError(f"{name}[{idx}]={int(numbers[idx])} {_UNKNOWN}")
    return numbers


def _type_number(name: str, kind: Any) -> Any:
    """The number of a type or its name; anything else passes on to the check of numbers."""
    if not isinstance(kind, (AttnMaskType, str)):
        return kind
    try:
        return (kind if isinstance(kind, AttnMaskType) else AttnMaskType(kind)).int_type
    except InputError as fault:
        raise InputError(f"{name}: {fault}") from None


def bands_from_types(q_ranges: Int64Array, k_ranges: Int64Array, types: Int64Array) -> npt.NDArray[np.int32]:
    """int32 [n, 6] band of each (q_range, k_range, type); same order, not tightened, ids below 2^30."""
    has_lo, has_hi = types >= 2, types % 2 == 1  # inv_causal and bi_causal; causal and bi_causal
    lo = np.where(has_lo, k_ranges[:, 0] - q_ranges[:, 0], -UNBOUNDED)
    hi = np.where(has_hi, k_ranges[:, 1] - q_ranges[:, 1], UNBOUNDED)
    return np.column_stack([q_ranges, k_ranges, lo, hi]).astype(np.int32)


def types_from_bands(slices: npt.NDArray[np.int32]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The same cells as (q_ranges [n, 2], k_ranges [n, 2], types [n]); slices must be tight.

    Rows where the lower bound cuts (row >= k_start - lo) and rows where the upper bound cuts (row < k_end - hi) are each one run,
    so their borders split a slice in at most three runs of one type each. A bound that cuts every row of a run is the
    alignment that the type means once the key range is cut to what the run's first or last row sees.
    """
    q_start, q_end, k_start, k_end, lo, hi = slices.astype(np.int64).T
    first_lo_row = k_start - lo
    end_hi_row = k_end - hi
    edges = np.stack([q_start, np.clip(first_lo_row, q_start, q_end), np.clip(end_hi_row, q_start, q_end), q_end], axis=1)
    edges.sort(axis=1)
    row_start, row_end = edges[:, :-1], edges[:, 1:]  # [N, 3], some empty
    cuts_lo = row_start >= first_lo_row[:, None]
    cuts_hi = row_end <= end_hi_row[:, None]
    key_start = np.where(cuts_lo, row_start + lo[:, None], k_start[:, None])
    key_end = np.where(cuts_hi, row_end + hi[:, None], k_end[:, None])
    kind = 2 * cuts_lo + cuts_hi
    is_kept = row_start < row_end
    q_ranges = np.stack([row_start[is_kept], row_end[is_kept]], axis=1)
    k_ranges = np.stack([key_start[is_kept], key_end[is_kept]], axis=1)
    return q_ranges, k_ranges, kind[is_kept].astype(np.int64)
