"""Ports of every rank as transfers occupy them, in order; bytes are counted as they pass. Knows no step, no mask and no mover."""

from __future__ import annotations

import numpy as np

from magi_attention.plan.cost import Float64Array
from magi_attention.plan.types import Int64Array

Index = int | Int64Array


class Port:
    """One direction of one kind of link, of all ranks. A port serves one transfer after the other, at the whole rate.

    Attributes:
        free_us: float64 [R], when everything so far has passed.
        num_bytes, busy_us: float64 [R], what has passed and for how long the port was occupied.
    """

    def __init__(self, num_ranks: int) -> None:
        self.free_us = np.zeros(num_ranks)
        self.num_bytes = np.zeros(num_ranks)
        self.busy_us = np.zeros(num_ranks)

    def serve(
        self, ranks: Index, begin_us: float | Float64Array, num_bytes: float | Float64Array, gb_s: float, least_us: float = 0.0
    ) -> tuple[Float64Array, Float64Array]:
        """(begin, end) of transfers that are ready at `begin_us`, one per rank; ranks are different ones."""
        begin = np.maximum(self.free_us[ranks], begin_us)
        duration = np.maximum(np.divide(num_bytes, gb_s * 1e3), least_us)
        end = begin + duration
        self.free_us[ranks] = end
        self.num_bytes[ranks] += num_bytes
        self.busy_us[ranks] += duration
        return begin, end


class Links:
    """NVLink out and in of every GPU, and out and in of the network card of every rank."""

    def __init__(self, num_ranks: int) -> None:
        self.nvlink_out, self.nvlink_in, self.nic_out, self.nic_in = (Port(num_ranks) for _ in range(4))


def slowed_end(start_us: float, work_us: float, spans: list[tuple[float, float, float]]) -> float:
    """When work is done that goes slower by the product of the factors of all spans (start, end, factor) it meets."""
    time, left = start_us, work_us
    for edge in sorted({edge for span in spans for edge in span[:2] if edge > start_us}):
        factor = 1.0
        for begin, end, slowdown in spans:
            factor *= slowdown if begin <= time < end else 1.0
        if left * factor <= edge - time:
            return time + left * factor
        left -= (edge - time) / factor
        time = edge
    return time + left
