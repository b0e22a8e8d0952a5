"""Masks from what callers pass at every call, remembered so that a repeated call does not check and sort again. Plans nothing.

Host data is known by its bytes. CUDA tensors are known by identity and version counter, because reading their bytes would stop the
host: the first call with a tensor copies it, later calls with the same unchanged tensor do not. Writes that PyTorch does not count
(by .data, torch.distributed, other kernels, the replay of a CUDA graph) need a new tensor or clear_cache().
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from magi_attention.api.key_cache import BoundedCache
from magi_attention.arguments import int_array
from magi_attention.errors import InputError
from magi_attention.mask import AttnMask, AttnMaskType
from magi_attention.mask.typed_ranges import type_array

_MAX_MASKS = 64


@dataclass(frozen=True)
class _DeviceEntry:
    """A mask made from device tensors, good while they are the same objects at the same version."""

    tensors: tuple[weakref.ref[torch.Tensor], ...]
    mask: AttnMask


_by_bytes: BoundedCache[AttnMask] = BoundedCache(_MAX_MASKS)
_by_tensor: BoundedCache[_DeviceEntry] = BoundedCache(_MAX_MASKS)


def clear_masks() -> None:
    """Forget every remembered mask."""
    _by_bytes.clear()
    _by_tensor.clear()


def mask_from_ranges(q_ranges: Any, k_ranges: Any, mask_types: Any, total_q: int, total_k: int, types_name: str) -> AttnMask:
    """The mask of the (q_ranges, k_ranges, types) form.

    Args:
        q_ranges, k_ranges: AttnRanges, int [n, 2] tensors of any device, arrays or lists.
        mask_types: None (FULL), one type, or one per range: AttnMaskType, its name, or 0..3.
        total_q, total_k: rows and columns.
        types_name: what the caller's parameter for the types is called.

    Raises:
        InputError: floats, other shapes, unknown types, ranges outside the totals, or a cell covered twice.
    """
    inputs = (q_ranges, k_ranges, mask_types)

    def make() -> AttnMask:
        q, k = int_array("q_ranges", q_ranges, columns=2), int_array("k_ranges", k_ranges, columns=2)
        if len(q) != len(k):
            raise InputError(f"q_ranges has {len(q)} ranges and k_ranges {len(k)}; they are pairs, pass as many of each")
        types = type_array(types_name, mask_types, len(q))
        name = ("ranges", q.tobytes(), k.tobytes(), types.tobytes(), total_q, total_k)
        return _by_bytes.get_or_make(name, lambda: AttnMask.from_ranges(q, k, types, total_q, total_k))

    return _remembered(("ranges", total_q, total_k), inputs, make)


def mask_from_table(table: torch.Tensor, head: int | None, sizes: tuple[int, ...], build: Callable[[Any], AttnMask]) -> AttnMask:
    """The mask that `build` makes of the lines of a table of integers [..., topk], or of table[:, head].

    `sizes` is whatever else `build` depends on.

    Raises:
        InputError: no integers or another number of dims, and what `build` raises.
    """

    def make() -> AttnMask:
        if not isinstance(table, (torch.Tensor, np.ndarray)):
            raise InputError(f"index_attn_indices is a {type(table).__name__}; pass an int32 tensor [num_q_blocks, topk]")
        if table.ndim not in (2, 3):
            raise InputError(f"index_attn_indices has shape {tuple(table.shape)}; it must be [num_q_blocks, topk] or [n, heads, topk]")
        lines = table if head is None else table[:, head]
        flat = int_array("index_attn_indices", lines.reshape(-1)).reshape(math.prod(lines.shape[:-1]), lines.shape[-1])
        return _by_bytes.get_or_make(("table", flat.shape, flat.tobytes(), *sizes), lambda: build(flat))

    return _remembered(("table", head, *sizes), (table,), make)


def _remembered(name: Hashable, inputs: tuple[Any, ...], make: Callable[[], AttnMask]) -> AttnMask:
    """`make()`, or what it returned before for the same unchanged device tensors."""
    tensors = tuple(value for value in inputs if isinstance(value, torch.Tensor))
    rest = [value for value in inputs if not isinstance(value, torch.Tensor)]
    is_known_by_version = tensors and all(x.device.type != "cpu" and not x.is_inference() for x in tensors)
    if not is_known_by_version or not all(isinstance(value, (int, str, AttnMaskType, type(None))) for value in rest):
        return make()
    key = (name, *rest, *((id(x), x._version, x.data_ptr(), x.shape, x.stride()) for x in tensors))
    entry = _by_tensor.get(key)
    if entry is not None and all(ref() is x for ref, x in zip(entry.tensors, tensors, strict=True)):
        return entry.mask
    mask = make()
    _by_tensor.put(key, _DeviceEntry(tuple(weakref.ref(x) for x in tensors), mask))
    return mask
