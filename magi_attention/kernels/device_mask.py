"""Masks whose ranges lie on a GPU: their work lists are made there, and the host never waits to see them. Knows no tensor of attention.

Nothing can be refused before such a list runs. What a list finds wrong with its ranges turns the results of every launch with it into
NaN on the device (see csrc/attention/device_work.h), and reaches the host with the next call that looks (`check_reports`).
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from magi_attention.errors import InputError
from magi_attention.kernels import ffa_device_work
from magi_attention.kernels.ffa_device import DeviceArray, is_capturing, launching

_INT_DTYPES = (torch.int32, torch.int64)
MAX_SLICES = 1 << 24


@dataclass(frozen=True, eq=False)
class DeviceMask:
    """Ranges of unknown content, as callers give them; stands where a WorkList does.

    Attributes:
        total_q, total_k: rows of q and k.
        tensors: what the mask is read from, contiguous int32 or int64: (q_ranges [n, 2], k_ranges [n, 2]), the types [n] as a third, or
            alone slices [n, 6] (int32).
        derived, calls: as of a WorkList.
    """

    total_q: int
    total_k: int
    tensors: tuple[Tensor, ...]
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    calls: dict[Hashable, Any] = field(default_factory=dict, repr=False)


def device_mask(tensors: tuple[Tensor, ...], total_q: int, total_k: int) -> DeviceMask | None:
    """The mask of (q_ranges, k_ranges[, types]) or of (slices,); None when they are not what the planner on a GPU reads."""
    first = tensors[0]
    widths = [(6,)] if len(tensors) == 1 else [(2,), (2,), ()]
    for x, width in zip(tensors, widths, strict=False):
        fits = x.device == first.device and x.dtype == first.dtype if width else x.device == first.device
        if not fits or x.device.type == "cpu" or x.dtype not in _INT_DTYPES or x.shape != (first.shape[0], *width):
            return None
    if first.shape[0] > MAX_SLICES or (len(tensors) == 1 and first.dtype != torch.int32):
        return None
    return DeviceMask(total_q, total_k, tuple(x.contiguous() for x in tensors))


@dataclass(frozen=True)
class PlannedList:
    """A list that the device makes of a mask; offsets of order, segment_offsets, segments, pieces in int32 elements of the array."""

    array: DeviceArray
    offsets: tuple[int, int, int, int]
    num_tiles: int
    num_rows: int
    status: int


def plan_on_device(mask: DeviceMask, tile: tuple[int, int], *, is_transposed: bool) -> PlannedList:
    """Start making the list for a tile shape, on the current stream."""
    first = mask.tensors[0]
    sizes = (
        *(mask.total_q, mask.total_k, *tile, int(is_transposed)),
        *(first.element_size(), mask.tensors[-1].element_size(), 0, first.shape[0]),
    )
    args, layout = ffa_device_work.DeviceWorkArgs(*sizes), _layout(sizes)
    if len(mask.tensors) == 1:
        args.slices = first.data_ptr()
    else:
        args.q_ranges, args.k_ranges = first.data_ptr(), mask.tensors[1].data_ptr()
        args.types = mask.tensors[2].data_ptr() if len(mask.tensors) == 3 else None
    workspace = torch.empty(layout.workspace_size, dtype=torch.int32, device=first.device)
    args.workspace = workspace.data_ptr()
    with launching(first.device, "magi_attention plan") as stream:
        ffa_device_work.build(args, stream)
        array = _watched(workspace)
    offsets = (layout.offset_order, layout.offset_segment_offsets, layout.offset_segments, layout.offset_pieces)
    return PlannedList(array, offsets, layout.num_tiles, layout.num_rows, args.workspace)


@functools.lru_cache(maxsize=256)
def _layout(sizes: tuple[int, ...]) -> ffa_device_work.DeviceWorkLayout:
    return ffa_device_work.layout_of(ffa_device_work.DeviceWorkArgs(*sizes))


def poison(status: int, outputs: tuple[Tensor | None, ...], stream: int) -> None:
    """Start turning the outputs of a launch into NaN, should its list not be the mask that was asked for."""
    buffers = [(x.data_ptr(), x.numel() * x.element_size()) for x in outputs if x is not None and x.numel()]
    ffa_device_work.poison(status, buffers, stream)


# ---- what lists have to say ----

_NUM_SLOTS = 256
_slots: list[Tensor] = []  # pinned words, one each
_reports: deque[tuple[DeviceArray, Tensor]] = deque()
_lock = threading.Lock()


def _watched(workspace: Tensor) -> DeviceArray:
    """The finished workspace, whose status word is on its way to the host."""
    if is_capturing(workspace.device):
        return DeviceArray(workspace)  # a replay cannot report; its results are poisoned all the same
    with _lock:
        if not _slots:
            ring = torch.zeros(_NUM_SLOTS, dtype=torch.int32, device="cpu", pin_memory=workspace.is_cuda)
            _slots.extend(ring.unbind(0))
        slot = _slots.pop(0)
        _slots.append(slot)
        while len(_reports) >= _NUM_SLOTS - 1:  # nobody looked for long: the oldest word is overwritten
            _reports.popleft()
        slot.copy_(workspace[0], non_blocking=True)
        array = DeviceArray(workspace)
        _reports.append((array, slot))
    return array


def check_reports(device: torch.device) -> None:
    """Look at the lists that are finished; never waits.

    Raises:
        InputError: one of them found its ranges or types wrong.
    """
    if not _reports or is_capturing(device):
        return
    status = 0
    with _lock:
        while _reports and _reports[0][0].is_written():
            status |= int(_reports.popleft()[1])
    if status:
        raise InputError(
            f"{'; '.join(ffa_device_work.reasons(status))}. Found on the GPU by a list of an earlier call, whose results are NaN; "
            "MAGI_CHECK=1 checks ranges before they are used"
        )
