"""Masks whose ranges lie on a GPU: their work lists are made there, and the host never waits to see them. Knows no tensor of attention.

Nothing can be refused before such a list runs. What a list finds wrong with its ranges turns the results of every launch with it into
NaN on the device (see csrc/attention/device_work.h), and reaches the host with the next call that looks (`check_reports`).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from magi_attention.errors import InputError
from magi_attention.kernels import ffa_device_work
from magi_attention.kernels.ffa_device import DeviceArray, is_capturing, launching

_INT_DTYPES = (torch.int32, torch.int64)
MAX_SLICES = 1 << 24

Four = tuple[int, int, int, int]


class DeviceMask:
    """Ranges of unknown content, as callers give them; stands where a WorkList does.

    Attributes:
        total_q, total_k: rows of q and k.
        tensors: what the mask is read from, contiguous int32 or int64: (q_ranges [n, 2], k_ranges [n, 2]), the types [n] as a third, or
            alone slices [n, 6] (int32).
        derived, calls: as of a WorkList.
    """

    __slots__ = ("calls", "derived", "tensors", "total_k", "total_q")

    def __init__(self, total_q: int, total_k: int, tensors: tuple[Tensor, ...]) -> None:
        self.total_q, self.total_k, self.tensors = total_q, total_k, tensors
        self.derived: dict[Hashable, Any] = {}
        self.calls: dict[Hashable, Any] = {}

    def copied(self) -> DeviceMask:
        """The same mask from a copy of its tensors, made on the current stream: for what runs later, when they may hold something else.

        The copy is some bytes for each range, where a list made ahead would be held at ten MiB for each layer.
        """
        # One torch.cat and views of it take the host as long as these.
        return DeviceMask(self.total_q, self.total_k, tuple([x.clone() for x in self.tensors]))


def device_mask(tensors: tuple[Tensor, ...], total_q: int, total_k: int) -> DeviceMask | None:
    """The mask of (q_ranges, k_ranges[, types]) or of (slices,); None when they are not what the planner on a GPU reads.

    Tensors that are not contiguous are copied on the current stream: the mask is for launches on this stream.
    """
    first = tensors[0]
    device, dtype, num_slices = first.device, first.dtype, first.shape[0] if first.dim() else 0
    shapes = ((num_slices, 6),) if len(tensors) == 1 else ((num_slices, 2), (num_slices, 2), (num_slices,))
    if device.type == "cpu" or dtype not in _INT_DTYPES or num_slices > MAX_SLICES:
        return None
    if len(tensors) == 1 and dtype != torch.int32:
        return None
    for x, shape in zip(tensors, shapes, strict=False):
        if x.shape != shape or x.device != device or (x.dtype != dtype and (len(shape) == 2 or x.dtype not in _INT_DTYPES)):
            return None
    return DeviceMask(total_q, total_k, tuple([x.contiguous() for x in tensors]))


def plan_on_device(mask: DeviceMask, tile: tuple[int, int], *, is_transposed: bool) -> tuple[DeviceArray, Four, Four, int]:
    """Start making the list for a tile shape, on the current stream: what a DeviceWork is made of."""
    tensors = mask.tensors
    first, last = tensors[0], tensors[-1]
    device = first.device
    item_sizes = (first.element_size(), last.element_size())
    sizes, size, list_of = _layout(mask.total_q, mask.total_k, tile, is_transposed, item_sizes, first.shape[0])
    workspace = torch.empty(size, dtype=torch.int32, device=device)
    start = workspace.data_ptr()
    if len(tensors) == 1:
        addresses = (0, 0, 0, first.data_ptr())
    else:
        addresses = (first.data_ptr(), tensors[1].data_ptr(), last.data_ptr() if len(tensors) == 3 else 0, 0)
    with launching(device, "magi_attention plan") as stream:
        ffa_device_work.build(sizes + ffa_device_work.ADDRESSES.pack(*addresses, start), stream)
        array = DeviceArray(workspace)
    return array, *list_of, start


@functools.lru_cache(maxsize=256)
def _layout(
    total_q: int, total_k: int, tile: tuple[int, int], is_transposed: bool, item_sizes: tuple[int, int], num_slices: int
) -> tuple[bytes, int, tuple[Four, Four]]:
    """The bytes of DeviceWorkArgs up to the addresses, the size of the workspace, and (offsets, sizes) of a DeviceWork."""
    args = ffa_device_work.DeviceWorkArgs(total_q, total_k, *tile, int(is_transposed), *item_sizes, 0, num_slices)
    layout = ffa_device_work.layout_of(args)
    offsets = (layout.offset_order, layout.offset_segment_offsets, layout.offset_segments, layout.offset_pieces)
    head = bytes(args)[: ffa_device_work.DeviceWorkArgs.q_ranges.offset]
    return head, layout.workspace_size, (offsets, (layout.num_tiles, layout.num_rows, *tile))


def poison_at(status: int, addresses: tuple[int, int, int], sizes: tuple[int, int, int], device: torch.device, stream: int) -> None:
    """`poison` of three outputs by address and number of bytes; of one that is not there both are 0."""
    reports = _reports.get(device.type) or _reports_of(device)
    ffa_device_work.poison_packed(status, addresses, sizes, reports.address, stream)


def poison(status: int, outputs: tuple[Tensor | None, ...], stream: int) -> None:
    """Start turning the outputs of a launch into NaN, and telling the host, should its list not be the mask that was asked for."""
    buffers = [(x.data_ptr(), x.nbytes) for x in outputs if x is not None and x.numel()]
    device = next(x.device for x in outputs if x is not None)
    ffa_device_work.poison(status, buffers, stream, reports=_reports_of(device).address)


# ---- what lists have to say ----


class _Reports:
    """A word for each reason, which the device sets and the host reads and clears. They live as long as the process: graphs write them."""

    def __init__(self, words: Tensor | None) -> None:
        self._memory = words
        self.address = 0 if words is None else words.data_ptr()
        self.words = (ctypes.c_int32 * _NUM_REASONS)() if words is None else (ctypes.c_int32 * _NUM_REASONS).from_address(self.address)


_NUM_REASONS = len(ffa_device_work.REASONS)
_NONE = _Reports(None)
_reports: dict[str, _Reports] = {}  # of a kind of device: every GPU can write to pinned memory
_lock = threading.Lock()


def _reports_of(device: torch.device) -> _Reports:
    found = _reports.get(device.type)
    if found is not None:
        return found
    if is_capturing(device):
        return _NONE  # nothing is allocated on the host in a capture; results are poisoned all the same
    with _lock:
        if device.type not in _reports:
            with torch.inference_mode(False):  # outlives the mode of the call that happens to be first
                words = torch.zeros(_NUM_REASONS, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
            _reports[device.type] = _Reports(words)
        return _reports[device.type]


def check_reports() -> None:
    """Look at what lists that ran have found; never waits.

    Raises:
        InputError: one of them found its ranges or types wrong. It is told once for all launches that have reported by now.
    """
    for reports in _reports.values():
        words = reports.words
        if words[0] or words[1] or words[2]:
            _raise(words)


def _raise(words: Any) -> None:
    with _lock:
        status = sum(bit for bit, word in zip(ffa_device_work.REASONS, words, strict=True) if word)
        for idx in range(_NUM_REASONS):
            words[idx] = 0
    if status:
        raise InputError(
            f"{'; '.join(ffa_device_work.reasons(status))}. Found on the GPU by a list of an earlier call, whose results are NaN; "
            "MAGI_CHECK=1 checks ranges before they are used"
        )
