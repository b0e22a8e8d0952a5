"""The device planner of csrc/attention/device_work.h in ctypes: work lists from range tensors that the host never reads.

Takes addresses and sizes; knows no tensor library, no mask and no stream but as numbers. Nothing here waits for a device.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

from magi_attention import _ffa_library

# Bits of the status word, the first int32 of the workspace, with what a later look at it has to tell the user.
LIST_TOO_LONG, RANGE_OUTSIDE, UNKNOWN_TYPE = 1, 2, 4
ANY_STATUS = LIST_TOO_LONG | RANGE_OUTSIDE | UNKNOWN_TYPE
REASONS = {
    LIST_TOO_LONG: "q_ranges, k_ranges: the mask has too many pieces to be planned on the GPU; pass the ranges as CPU tensors or lists, "
    "or a mask or plan made from them",
    RANGE_OUTSIDE: "q_ranges, k_ranges: a range is reversed or reaches outside of q or k; ranges are half-open rows of q and k, "
    "0 <= start <= end <= rows",
    UNKNOWN_TYPE: "attn_type_map: a type is unknown; types are 0 (full), 1 (causal), 2 (inv_causal) and 3 (bi_causal)",
}


class DeviceWorkArgs(ctypes.Structure):
    """What a list is made from; the header says what each field is."""

    _fields_ = (
        ("total_q", ctypes.c_int32),
        ("total_k", ctypes.c_int32),
        ("tile_rows", ctypes.c_int32),
        ("block_cols", ctypes.c_int32),
        ("is_transposed", ctypes.c_int32),
        ("range_bytes", ctypes.c_int32),
        ("type_bytes", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("num_slices", ctypes.c_int64),
        ("q_ranges", ctypes.c_void_p),
        ("k_ranges", ctypes.c_void_p),
        ("types", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
    )


class DeviceWorkLayout(ctypes.Structure):
    """Sizes and offsets in int32 elements; they follow from sizes alone."""

    _fields_ = (
        ("workspace_size", ctypes.c_int64),
        ("offset_order", ctypes.c_int64),
        ("offset_segment_offsets", ctypes.c_int64),
        ("offset_segments", ctypes.c_int64),
        ("offset_pieces", ctypes.c_int64),
        ("num_tiles", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
    )


class PoisonArgs(ctypes.Structure):
    """Buffers that become NaN when a bit of the status is set."""

    _fields_ = (
        ("status", ctypes.c_void_p),
        ("bits", ctypes.c_int32),
        ("num_buffers", ctypes.c_int32),
        ("data", ctypes.c_void_p * 4),
        ("num_bytes", ctypes.c_int64 * 4),
        ("reports", ctypes.c_void_p),
    )


# What calls fill, field by field; ctypes would take several us for it. ADDRESSES are the fields of DeviceWorkArgs from q_ranges on.
ADDRESSES = struct.Struct("@5P")
_POISON_ARGS = struct.Struct("@Pii4P4qP")
_NO_BUFFERS = (0, 0, 0, 0)


def layout_of(args: DeviceWorkArgs) -> DeviceWorkLayout:
    """Where everything lies in the workspace; pointers of the arguments need not be set.

    Raises:
        RuntimeError: a size is out of range.
    """
    layout = DeviceWorkLayout()
    _call("magi_ffa_device_work_layout", ctypes.byref(args), ctypes.byref(layout))
    return layout


def build(args: DeviceWorkArgs | bytes, stream: int) -> None:
    """Start making the list on a CUDA stream; `args` may be packed. Raises RuntimeError when the arguments or the launch are refused."""
    _call("magi_ffa_device_work", bytes(args), stream)


def poison(status: int, buffers: Sequence[tuple[int, int]], stream: int, bits: int = ANY_STATUS, reports: int = 0) -> None:
    """Start the check that follows every launch with a list of unknown status: wrong outputs become NaN.

    Args:
        status: address of the status word, that is of the workspace.
        buffers: up to 4 of (address aligned to 16 bytes, number of bytes).
        bits: statuses that make the outputs wrong.
        reports: address of an int32 word for each of REASONS that the host may read, 1 from then on when its bit is set; 0 is none.

    Raises:
        RuntimeError: the arguments or the launch are refused.
    """
    num_buffers = len(buffers)
    addresses, sizes = zip(*buffers, strict=True) if buffers else ((), ())
    unused = _NO_BUFFERS[num_buffers:]
    _call("magi_ffa_poison", _POISON_ARGS.pack(status, bits, num_buffers, *addresses, *unused, *sizes, *unused, reports), stream)


def poison_packed(status: int, addresses: tuple[int, int, int], sizes: tuple[int, int, int], reports: int, stream: int) -> None:
    """`poison` of three buffers for any status, by fewer steps."""
    lib = _symbols()
    if lib.magi_ffa_poison(_POISON_ARGS.pack(status, ANY_STATUS, 3, *addresses, 0, *sizes, 0, reports), stream):
        raise _failure("magi_ffa_poison", lib)


def reasons(status: int) -> list[str]:
    """What a status word says, in the words of a user's arguments; empty when the list is the mask."""
    return [text for bit, text in REASONS.items() if status & bit]


@functools.cache
def _symbols() -> Any:
    lib = _ffa_library.library()
    assert lib is not None, "kernels/select.py lets nothing through without a library"
    for name in ("magi_ffa_device_work_layout", "magi_ffa_device_work", "magi_ffa_poison"):
        function = getattr(lib, name)
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return lib


def _call(name: str, *arguments: Any) -> None:
    lib = _symbols()
    if getattr(lib, name)(*arguments):
        raise _failure(name, lib)


def _failure(name: str, lib: Any) -> RuntimeError:
    return RuntimeError(f"{name}: {(lib.magi_ffa_error() or b'').decode(errors='replace') or 'no reason given'}")
