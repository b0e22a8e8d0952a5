"""The C ABI of csrc/attention/launch.h in ctypes: its structs, its calls, its errors. Knows no tensor, no mask and no device.

A binding by plain pointers has no torch symbol, so one binary serves every torch and every Python. tests/kernels/test_ffa_library.py
compares every size and offset below with what a C++ compiler makes of the header.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

from magi_attention import _ffa_library

DTYPE_CODES = {"bfloat16": 0, "float16": 1, "float32": 2}


class TokenTensor(ctypes.Structure):
    """[tokens, heads, head_dim]; strides in elements, 64 bits."""

    _fields_ = (("data", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))


class AttentionShape(ctypes.Structure):
    """Sizes and factors of one call."""

    _fields_ = (
        ("total_q", ctypes.c_int32),
        ("total_k", ctypes.c_int32),
        ("num_heads_q", ctypes.c_int32),
        ("num_heads_kv", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("num_sms", ctypes.c_int32),
    )


class Work(ctypes.Structure):
    """Device pointers to the parts of a tile work list."""

    _fields_ = (
        ("order", ctypes.c_void_p),
        ("near_order", ctypes.c_void_p),
        ("segment_offsets", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("cuts", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("tile_rows", ctypes.c_int32),
        ("block_cols", ctypes.c_int32),
    )


class ForwardArgs(ctypes.Structure):
    """One forward launch."""

    _fields_ = (
        ("shape", AttentionShape),
        ("work", Work),
        ("q", TokenTensor),
        ("k", TokenTensor),
        ("v", TokenTensor),
        ("out", ctypes.c_void_p),
        ("out_dtype", ctypes.c_int32),
        ("lse", ctypes.c_void_p),
        ("sink_lse", ctypes.c_void_p),
        ("sink_token_stride", ctypes.c_int64),
        ("max_logits", ctypes.c_void_p),
        ("accumulate", ctypes.c_int32),
        ("counter", ctypes.c_void_p),
    )


class BackwardArgs(ctypes.Structure):
    """One backward launch."""

    _fields_ = (
        ("shape", AttentionShape),
        ("work", Work),
        ("work_dq", Work),
        ("q", TokenTensor),
        ("k", TokenTensor),
        ("v", TokenTensor),
        ("dout", TokenTensor),
        ("lse", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_dtype", ctypes.c_int32),
        ("dlse", ctypes.c_void_p),
        ("stats", ctypes.c_void_p),
        ("dq", ctypes.c_void_p),
        ("dk", ctypes.c_void_p),
        ("dv", ctypes.c_void_p),
        ("dkv_dtype", ctypes.c_int32),
        ("accumulate_dkv", ctypes.c_int32),
        ("head_splits", ctypes.c_int32),
        ("counter", ctypes.c_void_p),
    )


# The arguments of a forward in parts, because filling a struct field by field takes 5 us: the shape as `forward_head` makes it, kept
# between calls, its Work, and a tail packed from q to counter, in the order of the fields and with the C compiler's own padding.
WORK = struct.Struct("@6P4i")
FORWARD_TAIL = struct.Struct("@" + 3 * "Pqq" + "PiPPqPiP")


def forward_head(shape: AttentionShape) -> bytes:
    """The bytes of ForwardArgs up to work."""
    return bytes(ForwardArgs(shape))[: ForwardArgs.work.offset]


@functools.cache
def _symbols() -> Any:
    """The loaded library with typed symbols."""
    lib = _ffa_library.library()
    assert lib is not None, "kernels/select.py lets nothing through without a library"
    for name in ("magi_ffa_forward", "magi_ffa_backward"):
        function = getattr(lib, name)
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    for name in TILE_FUNCTIONS.values():
        function = getattr(lib, name)
        function.argtypes, function.restype = [ctypes.c_int32, ctypes.POINTER(ctypes.c_int32)], ctypes.c_int
    lib.magi_ffa_stats_floats.argtypes, lib.magi_ffa_stats_floats.restype = [ctypes.c_int32, ctypes.c_int32], ctypes.c_int64
    lib.magi_ffa_error.argtypes, lib.magi_ffa_error.restype = [], ctypes.c_char_p
    return lib


def run_forward(args: bytes, stream: int) -> None:
    """Start a forward on a CUDA stream, `args` being the bytes of ForwardArgs. Raises RuntimeError when the launch is refused."""
    lib = _symbols()
    if lib.magi_ffa_forward(args, stream):
        raise _failure("forward", lib)


def run_backward(args: BackwardArgs, stream: int) -> None:
    """Start a backward on a CUDA stream. Raises RuntimeError when the launch is refused."""
    lib = _symbols()
    if lib.magi_ffa_backward(ctypes.byref(args), stream):
        raise _failure("backward", lib)


# Which work list a launch walks, and the function that knows its tile: rows are queries (forward, dq) or keys (backward).
TILE_FUNCTIONS = {
    "forward": "magi_ffa_forward_tile",
    "forward_wide": "magi_ffa_forward_wide_tile",
    "backward": "magi_ffa_backward_tile",
    "dq": "magi_ffa_dq_tile",
}


@functools.cache
def tile_of(direction: str, head_dim: int) -> tuple[int, int]:
    """(tile_rows, block_cols) that the work list of a direction must be made for; block_cols is 0 where there is no such kernel.

    Args:
        direction: a key of TILE_FUNCTIONS.
    """
    lib = _symbols()
    pair = (ctypes.c_int32 * 2)()
    if getattr(lib, TILE_FUNCTIONS[direction])(head_dim, pair):
        raise _failure(f"{direction} tile", lib)
    return int(pair[0]), int(pair[1])


def stats_floats(total_q: int, num_heads_q: int) -> int:
    """fp32 numbers of scratch that a backward needs."""
    return int(_symbols().magi_ffa_stats_floats(total_q, num_heads_q))


def _failure(what: str, lib: Any) -> RuntimeError:
    text = (lib.magi_ffa_error() or b"").decode(errors="replace") or "no reason given"
    return RuntimeError(
        f"compiled attention {what}: {text}; DistAttnConfig(kernel_backend='blocked') of a key runs without compiled kernels"
    )
