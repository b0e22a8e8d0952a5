"""What compiled kernels ask of a CUDA device: its stream, its multiprocessors, memory filled from the host. Knows no attention."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

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
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if index is None else index))


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
    """A CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


class DeviceArray:
    """Memory of a device that is written once and read by kernels on any stream.

    A stream that uses it for the first time waits for the writing, and tells the allocator. While a CUDA graph is captured neither is
    possible nor needed: a capture starts after a synchronisation, and what a graph reads must live as long as the process. What is
    written inside of a capture belongs to its graph, which orders and keeps it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._known_streams = {raw_stream(tensor.device)}
        self._written: torch.cuda.Event | None = None
        if tensor.is_cuda and not is_capturing(tensor.device):
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(tensor.device))

    def is_written(self) -> bool:
        """The writing is over. Does not wait; not to be asked while a CUDA graph is captured."""
        return self._written is None or bool(self._written.query())  # type: ignore[no-untyped-call]

    def used_on(self, stream: int) -> None:
        """Make the memory good for kernels that follow on this stream (the current one)."""
        if self._written is None or (stream == _DEFAULT_STREAM and stream in self._known_streams):
            return
        device = self.tensor.device
        if is_capturing(device):
            with _captured_lock:
                _captured[id(self)] = self
            return
        if stream in self._known_streams:
            return
        current = torch.cuda.current_stream(device)
        current.wait_event(self._written)
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
    staged = torch.empty(values.size, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    staged.numpy()[:] = values
    return DeviceArray(staged.to(device, non_blocking=True))


class launching:
    """A block that launches kernels: the device is current, the lists are good for its stream, and an NVTX range shows it.

    Entered, it is the stream as `raw_stream` gives it.
    """

    __slots__ = ("_arrays", "_device", "_name", "_switch")

    def __init__(self, device: torch.device, name: str, *arrays: DeviceArray) -> None:
        self._device, self._name, self._arrays = device, name, arrays
        self._switch: torch.cuda.device | None = None

    def __enter__(self) -> int:
        device = self._device
        if device.type != "cuda":
            return 0
        if device.index != torch.cuda.current_device():
            self._switch = torch.cuda.device(device)
            self._switch.__enter__()  # type: ignore[no-untyped-call]
        stream = raw_stream(device)
        for array in self._arrays:
            array.used_on(stream)
        _range_push(self._name)
        return stream

    def __exit__(self, *error: object) -> None:
        if self._device.type != "cuda":
            return
        _range_pop()
        if self._switch is not None:
            self._switch.__exit__(*error)


_range_push: Callable[[str], object] = torch.cuda.nvtx.range_push
_range_pop: Callable[[], object] = torch.cuda.nvtx.range_pop
