"""Rows of tensors to bytes on the wire and back. Knows one rank's row order, nothing of groups or collectives.

Payload: one byte row per moved row, holding that row of every tensor side by side, in wire order (peer, order of arrival).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from magi_attention.plan.types import Exchange, Int64Array

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MIN_ROWS_PER_RUN = 32  # below this mean run length indexed adds beat one call per run


# ---- where payload rows live in a buffer ----


@dataclass(frozen=True)
class Round:
    """Payload rows that all come from one peer and go to different buffer rows.

    `payload` selects them; they go to `runs` (start, number of rows) in order, or to `rows` when there are too many runs.
    """

    payload: slice | torch.Tensor
    runs: tuple[tuple[int, int], ...]
    rows: torch.Tensor | None


class RowOrder:
    """Payload row i stands for buffer row rows[i]. One side of one Exchange on one device; built once, then reused."""

    def __init__(self, rows: Int64Array, counts: tuple[int, ...], num_buffer_rows: int, device: torch.device) -> None:
        self.counts = counts
        self.num_rows = len(rows)
        self.num_buffer_rows = num_buffer_rows
        self._rows = rows
        self._device = device
        is_run = bool(np.all(np.diff(rows) == 1))
        self.start: int | None = (int(rows[0]) if len(rows) else 0) if is_run else None

    @property
    def is_whole_buffer(self) -> bool:
        """Payload order is buffer order and nothing is left out."""
        return self.start == 0 and self.num_rows == self.num_buffer_rows

    @functools.cached_property
    def covers_buffer(self) -> bool:
        """Every buffer row is in the payload at least once."""
        return self.num_rows >= self.num_buffer_rows and len(np.unique(self._rows)) == self.num_buffer_rows

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """int64 [num_rows] on the device."""
        return torch.from_numpy(self._rows.copy()).to(self._device)

    @functools.cached_property
    def payload_rows(self) -> torch.Tensor | None:
        """int64 [num_buffer_rows]: payload row of each buffer row; None unless the payload is a permutation of the buffer."""
        if not self.covers_buffer or self.num_rows != self.num_buffer_rows:
            return None
        inverse = np.empty(self.num_rows, np.int64)
        inverse[self._rows] = np.arange(self.num_rows)
        return torch.from_numpy(inverse).to(self._device)

    @functools.cached_property
    def rounds(self) -> tuple[tuple[Round, ...], ...]:
        """Per peer: its rows, cut so that no round names a buffer row twice (adds then have one fixed order on any device)."""
        ends = np.cumsum(self.counts)
        return tuple(self._peer_rounds(int(end) - count, int(end)) for end, count in zip(ends, self.counts, strict=True))

    def _peer_rounds(self, first: int, end: int) -> tuple[Round, ...]:
        rows = self._rows[first:end]
        if not len(rows):
            return ()
        if len(np.unique(rows)) == len(rows):
            return (self._round(slice(first, end), rows),)
        by_row = np.argsort(rows, kind="stable")
        is_first = np.diff(rows[by_row], prepend=-1) != 0
        group_start = np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))
        repeat = np.empty(len(rows), np.int64)
        repeat[by_row] = np.arange(len(rows)) - group_start
        found = []
        for turn in range(int(repeat.max()) + 1):
            chosen = np.flatnonzero(repeat == turn)
            found.append(self._round(torch.from_numpy(chosen + first).to(self._device), rows[chosen]))
        return tuple(found)

    def _round(self, payload: slice | torch.Tensor, rows: Int64Array) -> Round:
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        num_runs = len(cuts) + 1
        max_runs = 1 if self._device.type == "cuda" else max(1, len(rows) // _MIN_ROWS_PER_RUN)
        if num_runs > max_runs:
            return Round(payload, (), torch.from_numpy(rows.copy()).to(self._device))
        firsts = np.concatenate([[0], cuts])
        lengths = np.diff(np.append(firsts, len(rows)))
        return Round(payload, tuple((int(rows[i]), int(n)) for i, n in zip(firsts, lengths, strict=True)), None)


_orders: weakref.WeakKeyDictionary[Exchange, dict[tuple[str, torch.device], RowOrder]] = weakref.WeakKeyDictionary()


def send_order(exchange: Exchange, device: torch.device) -> RowOrder:
    """Where the payload we send lies in the source buffer. Cached as long as the exchange lives."""
    found = _orders.setdefault(exchange, {})
    if ("send", device) not in found:
        found["send", device] = RowOrder(exchange.send_rows, exchange.send_counts, exchange.num_rows_in, device)
    return found["send", device]


def recv_order(exchange: Exchange, device: torch.device) -> RowOrder:
    """Where the payload we receive lies in the receive buffer. Cached as long as the exchange lives."""
    found = _orders.setdefault(exchange, {})
    if ("recv", device) not in found:
        found["recv", device] = RowOrder(exchange.recv_rows, exchange.recv_counts, exchange.num_rows_out, device)
    return found["recv", device]


# ---- bytes ----


def row_bytes(x: torch.Tensor) -> int:
    """Bytes of one row (everything behind the first dimension)."""
    return x.shape[1:].numel() * x.element_size()


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, elements of a row], a view when the elements of a row are contiguous."""
    plain = x.detach().resolve_conj().resolve_neg()  # lazy conjugates and negatives cannot be read as bytes
    flat = plain.reshape(x.shape[0], x.shape[1:].numel())
    return flat if flat.stride(1) == 1 or flat.shape[1] <= 1 else flat.contiguous()


def _unit_views(rows: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Views of [rows, elements] tensors in the widest integer that fits all of them, and its size in bytes."""
    unit = 8
    for x in rows:
        size = x.element_size()
        places = (x.shape[1] * size, x.stride(0) * size, x.storage_offset() * size, x.data_ptr())
        while any(place % unit for place in places):
            unit //= 2
    return [_integer_view(x, unit) for x in rows], unit


def _integer_view(x: torch.Tensor, unit: int) -> torch.Tensor:
    if x.stride(1) != 1:  # a single column of a wider tensor: its stride says nothing, but a dtype view insists on 1
        x = x.as_strided(x.shape, (x.stride(0), 1))
    return x.view(_UNITS[unit])


def _columns(rows: Sequence[torch.Tensor]) -> list[slice]:
    ends = np.cumsum([x.shape[1] for x in rows]).tolist()
    return [slice(int(end) - x.shape[1], int(end)) for end, x in zip(ends, rows, strict=True)]


def pack(order: RowOrder, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of `tensors` (all [num_buffer_rows, ...]) as a payload: uint8, one-dimensional. A view when nothing has to move."""
    rows, unit = _unit_views([_as_rows(x) for x in tensors])
    if len(rows) == 1 and order.start is not None:
        return rows[0][order.start : order.start + order.num_rows].contiguous().view(torch.uint8).view(-1)
    columns = _columns(rows)
    payload = torch.empty((order.num_rows, columns[-1].stop), dtype=_UNITS[unit], device=rows[0].device)
    for x, column in zip(rows, columns, strict=True):
        if order.start is not None:
            payload[:, column].copy_(x[order.start : order.start + order.num_rows])
        else:
            torch.index_select(x, 0, order.rows, out=payload[:, column])
    return payload.view(torch.uint8).view(-1)


def receive_buffer(order: RowOrder, outs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where the payload for `outs` should arrive: in the tensor itself when its order is the order of arrival, else apart."""
    if len(outs) == 1 and order.is_whole_buffer and outs[0].is_contiguous():
        return outs[0].detach().view(-1).view(torch.uint8)
    num_bytes = order.num_rows * sum(row_bytes(x) for x in outs)
    return torch.empty(num_bytes, dtype=torch.uint8, device=outs[0].device)


def unpack(order: RowOrder, payload: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    """Write a payload to its rows of `outs` (contiguous, all [num_buffer_rows, ...]). Rows not in the payload keep their values."""
    if payload.data_ptr() == outs[0].data_ptr():
        return  # it arrived in place
    rows, unit = _unit_views([_as_rows(x) for x in outs])
    columns = _columns(rows)
    table = payload.view(_UNITS[unit]).view(order.num_rows, columns[-1].stop)
    for out, column in zip(rows, columns, strict=True):
        if order.start is not None:
            out[order.start : order.start + order.num_rows].copy_(table[:, column])
        elif order.payload_rows is not None:
            torch.index_select(table[:, column], 0, order.payload_rows, out=out)
        else:
            out.index_copy_(0, order.rows, table[:, column])


def read(payload: torch.Tensor, num_rows: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A payload as tensors [num_rows, ...] with the dtypes and trailing shapes of `like`; views where alignment allows."""
    widths = [row_bytes(x) for x in like]
    table = payload.view(num_rows, sum(widths))
    found, first = [], 0
    for x, width in zip(like, widths, strict=True):
        if num_rows * width == 0:  # strides of nothing say nothing, but a dtype view insists on them
            found.append(torch.empty((num_rows, *x.shape[1:]), dtype=x.dtype, device=payload.device))
            continue
        part = table[:, first : first + width]
        if first % x.element_size() or sum(widths) % x.element_size():
            part = part.clone(memory_format=torch.contiguous_format)  # contiguous() keeps the odd stride of a single row
        found.append(part.view(x.dtype).view(num_rows, *x.shape[1:]))
        first += width
    return found
