"""Loads the C++ solver library and runs its operations on named integer arrays. Knows no operation by name."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt

from magi_attention._build_record import FROM_SOURCE, refusal_of_loading
from magi_attention._whole_file import reason_cut_off
from magi_attention.errors import InputError, InstallError

IntArray = npt.NDArray[np.integer]


@functools.cache
def _library() -> ctypes.CDLL:
    folder = Path(__file__).parent
    found = sorted(folder.glob("_solver*.so"))
    if not found:
        raise ImportError(
            f"magi_attention was imported from {folder}, which has no compiled solver (_solver*.so); "
            "install the package (pip install .) or build in place (python setup.py build_ext --inplace)"
        )
    fix = f"install the package again, or in a clone: {FROM_SOURCE}"
    try:
        if reason := reason_cut_off(found[0]):
            raise InstallError(f"{reason}; {fix}")
        lib = ctypes.CDLL(str(found[0]))
    except OSError as error:
        if (refusal := refusal_of_loading(error, found[0])) is not None:
            raise InstallError(str(refusal)) from None
        raise InstallError(f"{found[0]} does not load: {error}; {fix}") from None
    for name in ("magi_run", "magi_arrays_new", "magi_build_info"):
        if not hasattr(lib, name):
            raise InstallError(f"{found[0]} is of another version of this package, it has no {name}; {fix}")
    lib.magi_arrays_new.restype = ctypes.c_void_p
    lib.magi_arrays_free.argtypes = [ctypes.c_void_p]
    lib.magi_arrays_set.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    lib.magi_arrays_name.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    lib.magi_arrays_name.restype = ctypes.c_char_p
    lib.magi_arrays_get.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_int64),
        ctypes.POINTER(ctypes.c_int32),
    ]
    lib.magi_run.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
    lib.magi_last_error.restype = ctypes.c_char_p
    lib.magi_build_info.restype = ctypes.c_char_p
    return lib


def run(operation: str, **inputs: IntArray | int) -> dict[str, IntArray]:
    """Run one solver operation.

    Args:
        operation: its name in csrc/bindings/ops.cpp.
        inputs: numpy int32 / int64 arrays (made contiguous when they are not) or plain ints.

    Returns:
        Named arrays, one-dimensional, int32 or int64, owned by the caller.

    Raises:
        InputError: the solver refused the input.
        MemoryError: there is too little. RuntimeError: an invariant of the solver broke.
    """
    lib = _library()
    kept = []  # views handed to C++ must outlive the call
    in_ptr, out_ptr = lib.magi_arrays_new(), lib.magi_arrays_new()
    try:
        for name, value in inputs.items():
            array = np.ascontiguousarray(np.array([value], dtype=np.int64) if isinstance(value, int) else value)
            assert array.dtype in (np.int32, np.int64), f"{name}: {array.dtype} is not int32 or int64"
            kept.append(array)
            lib.magi_arrays_set(in_ptr, name.encode(), array.ctypes.data, array.size, array.itemsize)
        status = lib.magi_run(operation.encode(), in_ptr, out_ptr)
        if status:
            text = lib.magi_last_error().decode()
            if status == 3:
                raise MemoryError(f"solver operation {operation} ran out of memory; use larger chunks, fewer slices or a machine with more")
            raise InputError(text) if status == 1 else RuntimeError(f"solver operation {operation}: {text}")
        return _copy_out(lib, out_ptr)
    finally:
        lib.magi_arrays_free(in_ptr)
        lib.magi_arrays_free(out_ptr)


def _copy_out(lib: ctypes.CDLL, out_ptr: int) -> dict[str, IntArray]:
    outputs: dict[str, IntArray] = {}
    data, count, item_bytes = ctypes.c_void_p(), ctypes.c_int64(), ctypes.c_int32()
    idx = 0
    while (name := lib.magi_arrays_name(out_ptr, idx)) is not None:
        lib.magi_arrays_get(out_ptr, name, ctypes.byref(data), ctypes.byref(count), ctypes.byref(item_bytes))
        dtype = np.int32 if item_bytes.value == 4 else np.int64
        values = np.empty(count.value, dtype)
        if count.value:
            ctypes.memmove(values.ctypes.data, data.value or 0, count.value * item_bytes.value)
        outputs[name.decode()] = values
        idx += 1
    return outputs


def build_info() -> str:
    """One line about the compiled solver."""
    return str(_library().magi_build_info().decode())
