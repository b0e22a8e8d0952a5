"""Tile work lists on a device, made at first use and kept with the mask they belong to. Knows no tensor of attention and no heads."""

from __future__ import annotations

import threading

import torch

from magi_attention.kernels import ffa_library
from magi_attention.kernels.device_mask import DeviceMask, plan_on_device
from magi_attention.kernels.ffa_device import DeviceArray, uploaded
from magi_attention.kernels.tile_work import TileWork, tile_work
from magi_attention.kernels.work import WorkList
from magi_attention.plan.types import Int32Array

Mask = WorkList | DeviceMask


class DeviceWork:
    """One list as the C ABI takes it, and the memory it points into.

    Attributes:
        packed: pointers and sizes for the arguments of a launch, the bytes of a Work.
        array: the memory, one int32 tensor.
        status: address of a word that says whether the list is the mask; 0 for lists of the host, which are.
        num_tiles: tiles of rows.
        costs: int32 [num_tiles], relative time of each (TileWork.costs); None for lists made on the device.
    """

    __slots__ = ("array", "costs", "num_tiles", "packed", "status")

    def __init__(
        self,
        array: DeviceArray,
        offsets: tuple[int, int, int, int],
        sizes: tuple[int, int, int, int],
        status: int = 0,
        *,
        offset_near_order: int = -1,
        offset_cuts: int = -1,
        costs: Int32Array | None = None,
    ) -> None:
        """Offsets of order, segment_offsets, segments and pieces, and of near_order and cuts where there are any, in int32 elements.

        sizes are those of a Work.
        """
        start = array.tensor.data_ptr()
        self.array = array
        self.status = status
        self.num_tiles, self.costs = sizes[0], costs
        order, segment_offsets, segments, pieces = offsets
        near_order = start + 4 * offset_near_order if offset_near_order >= 0 else 0
        cuts = start + 4 * offset_cuts if offset_cuts >= 0 else 0
        rest = (start + 4 * segment_offsets, start + 4 * segments, start + 4 * pieces, cuts)
        self.packed = ffa_library.WORK.pack(start + 4 * order, near_order, *rest, *sizes)

    @property
    def record(self) -> ffa_library.Work:
        """`packed` as a struct."""
        return ffa_library.Work.from_buffer_copy(self.packed)


def device_work(mask: Mask, direction: str, head_dim: int, device: torch.device) -> DeviceWork:
    """The list of a mask for one direction of one compiled kernel.

    Args:
        direction: "forward", "forward_any" (of the forward's kernels the one that this mask suits; not with a softcap) or "dq" (tiles
            of queries), "backward" (tiles of keys); see ffa_library.TILE_FUNCTIONS.
        head_dim: a compiled one.

    Raises:
        InputError: it is not there yet and a CUDA graph is being captured.
    """
    name = (direction, head_dim, device)
    found: DeviceWork | None = mask.derived.get(name)
    return found if found is not None else _make(mask, direction, head_dim, device)


_lock = threading.Lock()  # a backward may run on another thread


def _make(mask: Mask, direction: str, head_dim: int, device: torch.device) -> DeviceWork:
    is_transposed = direction == "backward"
    tile, host = ffa_library.tile_of("forward" if direction == "forward_any" else direction, head_dim), None
    if direction == "forward_any" and not isinstance(mask, DeviceMask):
        tile, host = _cheaper(mask, tile, ffa_library.tile_of("forward_wide", head_dim))
    # Kernels of one tile shape share a list.
    shared = (is_transposed, tile, device)
    with _lock:
        if shared not in mask.derived:
            mask.derived[shared] = _planned(mask, tile, is_transposed, device, host)
        found: DeviceWork = mask.derived[shared]
        mask.derived[(direction, head_dim, device)] = found
    return found


_WIDE_COST = 0.965  # of a column in a wide block; measured on an H200 with masks that have no edges


def _cheaper(mask: WorkList, narrow: tuple[int, int], wide: tuple[int, int]) -> tuple[tuple[int, int], TileWork]:
    """Wide blocks read less again from shared memory, narrow ones waste less at edges. Lists made on a GPU are always narrow."""
    narrow_list = tile_work(mask.slices, mask.total_q, *narrow, transposed=False, fitted=True)
    if not wide[1]:
        return narrow, narrow_list
    wide_list = tile_work(mask.slices, mask.total_q, *wide, transposed=False, fitted=True)
    is_wide = wide_list.total_cost * wide[1] * _WIDE_COST < narrow_list.total_cost * narrow[1]
    return (wide, wide_list) if is_wide else (narrow, narrow_list)


def _planned(mask: Mask, tile: tuple[int, int], is_transposed: bool, device: torch.device, host: TileWork | None) -> DeviceWork:
    """The list on the device; `host` is the planner's where it is made already."""
    if isinstance(mask, DeviceMask):
        return DeviceWork(*plan_on_device(mask, tile, is_transposed=is_transposed))
    if host is None:
        num_rows = mask.total_k if is_transposed else mask.total_q
        host = tile_work(mask.slices, num_rows, *tile, transposed=is_transposed, fitted=True)
    array = uploaded(host.packed, device, f"the {'backward' if is_transposed else 'forward'} work list of this mask")
    offsets = (host.offset_order, host.offset_segment_offsets, host.offset_segments, host.offset_pieces)
    places = {"offset_near_order": host.offset_near_order, "offset_cuts": host.offset_cuts}
    return DeviceWork(array, offsets, (host.num_tiles, host.num_rows, *tile), **places, costs=host.costs)
