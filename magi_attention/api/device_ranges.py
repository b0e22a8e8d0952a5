"""Range tensors that stay on their GPU: taken as they are, remembered while they are unchanged. Reads no content, plans nothing.

Their content is checked by the list that a GPU makes of them, so a wrong range is an error of a later call (kernels/device_mask.py);
cells that two ranges cover are not looked for. In check mode ranges are read by the host, as everywhere else, and checked in full.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.api.key_cache import BoundedCache
from magi_attention.errors import InputError
from magi_attention.mask.slices import UNBOUNDED
from magi_attention.runtime.single import DeviceMask, device_mask, is_capturing

_MAX_MASKS = 4  # each keeps its lists, of some ten MiB; the layers of a step share one
_masks: BoundedCache[tuple[DeviceMask, tuple[torch.Tensor, ...]]] = BoundedCache(_MAX_MASKS)


def clear_device_masks() -> None:
    """Forget every remembered mask."""
    _masks.clear()


def ranges_on_device(q_ranges: Any, k_ranges: Any, types: Any, total_q: int, total_k: int) -> DeviceMask | None:
    """The mask of range tensors on a GPU, of int32 or int64, [n, 2], [n, 2] and [n]; None for all others, which the host reads."""
    if not (
        isinstance(q_ranges, torch.Tensor) and isinstance(k_ranges, torch.Tensor) and (types is None or isinstance(types, torch.Tensor))
    ):
        return None
    if not q_ranges.is_cuda:
        return None
    tensors = (q_ranges, k_ranges) if types is None else (q_ranges, k_ranges, types)
    parts: list[object] = [total_q, total_k]
    for x in tensors:
        if x.is_inference():  # without version counters nothing is known to be unchanged
            return device_mask(tensors, total_q, total_k)
        parts += (id(x), x._version, x.data_ptr(), x.shape, x.stride())
    if is_capturing(q_ranges.device):  # lists belong to the graph that makes them
        return device_mask(tensors, total_q, total_k)
    key = tuple(parts)
    found = _masks.get(key)
    if found is not None:
        return found[0]
    mask = device_mask(tensors, total_q, total_k)
    if mask is not None:
        _masks.put(key, (mask, tensors))  # with the tensors, so that their ids stay theirs
    return mask


def slices_on_device(q_ranges: torch.Tensor, k_ranges: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
    """int32 [n, 6] on the device of q_ranges: the table of docs/masks.md. An unknown type becomes a row that starts at -1, which every
    reader of slices refuses.

    Raises:
        InputError: no integers, or other shapes.
    """
    device, num_slices = q_ranges.device, q_ranges.shape[0]
    pairs = (num_slices, 2)
    for name, x, shape in (("q_ranges", q_ranges, pairs), ("k_ranges", k_ranges, pairs), ("attn_type_map", types, (num_slices,))):
        if x is not None and (x.dtype not in (torch.int32, torch.int64) or x.shape != shape):
            raise InputError(f"{name}: {x.dtype} {list(x.shape)} given, must be int32 or int64 {list(shape)}; cast it")
    q, k = q_ranges.long(), k_ranges.to(device).long()
    kind = q.new_zeros(num_slices) if types is None else types.to(device).long()
    is_known = (kind >= 0) & (kind <= 3)
    lo = torch.where(kind >= 2, k[:, 0] - q[:, 0], -UNBOUNDED)
    hi = torch.where(kind % 2 == 1, k[:, 1] - q[:, 1], UNBOUNDED)
    columns = (torch.where(is_known, q[:, 0], -1), q[:, 1], k[:, 0], k[:, 1], lo, hi)
    return torch.stack(columns, 1).clamp(-UNBOUNDED, UNBOUNDED).int()
