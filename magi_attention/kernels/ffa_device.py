"""What compiled kernels ask of a CUDA device: its stream, its multiprocessors, memory filled from the host. Knows no attention."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from magi_attention.errors import InputError


def raw_stream(device: torch.device) -> int:
    """The current stream of the device as the integer the C ABI takes; 0 for memory of the host."""
    if device.type != "cuda":
        return 0
    index = device.index
    # The same number as torch.cuda.current_stream(device).cuda_stream without building a Stream object: 0.1 us for 2.
    stream: int = _raw_stream_of(torch.cuda.current_device() if index is None else index)
    return stream


# The functions below torch.cuda, which first look whether CUDA was initialised: with a tensor on a GPU it was. Absent in builds without it.
_raw_stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
_nvtx: Any = getattr(torch._C, "_nvtx", None)
_range_push: Callable[[str], object] = torch.cuda.nvtx.range_push if _nvtx is None else _nvtx.rangePushA
_range_pop: Callable[[], object] = torch.cuda.nvtx.range_pop if _nvtx is None else _nvtx.rangePop


@functools.cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of the device; 1 for the host."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


@functools.lru_cache(maxsize=1024)
def usable_sms(device: torch.device, margin: int) -> int:
    """Multiprocessors left to attention.

    Raises:
        InputError: the margin leaves none.
    """
    total = num_sms(device)
    if not 0 <= margin < total:
        raise InputError(f"sm_margin={margin} must be in [0, {total - 1}]: {device} has {total} multiprocessors and attention needs one")
    return total - margin


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """(major, minor) of a CUDA device; None for others, and for a CUDA device that is not there."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def is_capturing(device: torch.device) -> bool:
    """A CUDA graph is being captured on the current stream of the device."""
    if device.type != "cuda":
        return False
    if device.index is None or device.index == _current_device():
        return _is_capturing()
    with torch.cuda.device(device):  # CUDA tells it of the current device alone
        return _is_capturing()


class DeviceArray:
    """Memory of a device that is written once and read by kernels on any stream.

    A stream that uses it for the first time waits for the writing, and tells the allocator. While a CUDA graph is captured neither is
    possible nor needed: a capture starts after a synchronisation, and what a graph reads must live as long as the process. What is
    written inside of a capture belongs to its graph, which orders and keeps it.
    """

    __slots__ = ("__weakref__", "_is_ordered", "_known_streams", "_written", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        device = tensor.device
        stream = raw_stream(device)
        self._known_streams = {stream}
        self._written: torch.cuda.Event | None = None
        self._is_ordered = device.type != "cuda"
        if stream != _DEFAULT_STREAM:
            self._is_ordered = is_capturing(device)
            if not self._is_ordered:
                self._written = torch.cuda.current_stream(device).record_event()

    def used_on(self, stream: int) -> None:
        """Make the memory good for kernels that follow on this stream (the current one)."""
        if self._is_ordered or (stream == _DEFAULT_STREAM and stream in self._known_streams):
            return
        device = self.tensor.device
        if is_capturing(device):
            with _captured_lock:
                _captured[id(self)] = self
            return
        if stream in self._known_streams:
            return
        current = torch.cuda.current_stream(device)
        # Nothing is recorded for the default stream until another asks, for lists that none does: an event takes 4 us. Its end by then is
        # later than the writing, it cannot be captured, and it is always there.
        current.wait_event(self._written or torch.cuda.default_stream(device).record_event())
        self.tensor.record_stream(current)
        self._known_streams.add(stream)


_DEFAULT_STREAM = 0  # on which nothing can be captured
_captured: dict[int, DeviceArray] = {}
_captured_lock = threading.Lock()


def uploaded(values: npt.NDArray[np.int32], device: torch.device, what: str) -> DeviceArray:
    """A copy on the device by way of pinned memory: the host does not wait.

    Args:
        what: the thing, for the message.

    Raises:
        InputError: a CUDA graph is being captured; the copy would be replayed from memory that is gone by then.
    """
    if is_capturing(device):
        raise InputError(
            f"{what} is not on {device} yet and a CUDA graph is being captured; run the same calls once before the capture (the backward "
            "too, when it is captured) with the same plan, and keep the plan"
        )
    with torch.inference_mode(False):  # outlives the mode of the call that happens to be first
        staged = torch.empty(values.size, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        staged.numpy()[:] = values
        return DeviceArray(staged.to(device, non_blocking=True))


class launching:
    """A block that launches kernels: the device is current, the lists are good for its stream, and an NVTX range shows it.

    Entered, it is the stream as `raw_stream` gives it.
    """

    __slots__ = ("_arrays", "_device", "_is_cuda", "_name", "_switch")

    def __init__(self, device: torch.device, name: str, *arrays: DeviceArray) -> None:
        self._device, self._name, self._arrays = device, name, arrays
        self._is_cuda = device.type == "cuda"
        self._switch: torch.cuda.device | None = None

    def __enter__(self) -> int:
        if not self._is_cuda:
            return _DEFAULT_STREAM
        device = self._device
        index = device.index
        if index != _current_device():
            self._switch = torch.cuda.device(device)
            self._switch.__enter__()  # type: ignore[no-untyped-call]
        stream = raw_stream(device) if index is None else _raw_stream_of(index)
        for array in self._arrays:
            array.used_on(stream)
        _range_push(self._name)
        return stream

    def __exit__(self, *error: object) -> None:
        if not self._is_cuda:
            return
        _range_pop()
        if self._switch is not None:
            self._switch.__exit__(*error)
