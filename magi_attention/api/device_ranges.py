"""Range tensors that stay on their GPU: taken as they are at each call. Reads no content, plans nothing, remembers nothing.

A list made earlier may be that of other ranges: version counters tell nothing of writes by `.data`, by communication, by kernels of
others or by the replay of a CUDA graph. So each call has its list made anew, which the host does not wait for.

Their content is checked by the list that a GPU makes of them, so a wrong range is an error of a later call (kernels/device_mask.py);
cells that two ranges cover are not looked for. In check mode ranges are read by the host, as everywhere else, and checked in full.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.errors import InputError
from magi_attention.mask.slices import UNBOUNDED
from magi_attention.runtime.single import DeviceMask, device_mask


def ranges_on_device(q_ranges: Any, k_ranges: Any, types: Any, total_q: int, total_k: int) -> DeviceMask | None:
    """The mask of range tensors on a GPU, of int32 or int64, [n, 2], [n, 2] and [n]; None for all others, which the host reads."""
    if not (
        isinstance(q_ranges, torch.Tensor) and isinstance(k_ranges, torch.Tensor) and (types is None or isinstance(types, torch.Tensor))
    ):
        return None
    if not q_ranges.is_cuda:
        return None
    return device_mask((q_ranges, k_ranges) if types is None else (q_ranges, k_ranges, types), total_q, total_k)


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
