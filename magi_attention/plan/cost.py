"""Predicted times of a plan: machines in one table, formulas in one place. Pure arithmetic; knows no mask and no transfer.

Everything is plain IEEE double arithmetic in a fixed order, so every rank predicts the same numbers and chooses the same steps.

Formulas, per rank and step (rows and pairs from the plan, H heads, D head_dim, b bytes an element):

    pairs        forward 4 * H_q * D operations a pair, backward 2.5 times that
    k, v rows    2 * H_kv * D * b bytes a row; returned dk, dv rows 2 * H_kv * D * 4
    exchange     start + (2 * hop when it spans nodes) + max(in, out) / link [or through-the-network rows / nic, the larger]
                 + 2 * (in + out) / memory for packing and unpacking
    beside       exchange of the next step [+ return of the step before, backward]
    step         max(beside, compute + beside * (1 - 1 / slowdown)), compute = pairs + host + merge
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from magi_attention.errors import InputError
from magi_attention.plan.types import Int64Array

Float64Array = npt.NDArray[np.float64]

_BACKWARD_OPERATIONS = 2.5  # five matrix products for two
_ACCUMULATOR_BYTES = 4  # partial results travel and merge in fp32


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one kind of machine. GB is 1e9 bytes, rates are per rank and direction.

    Attributes:
        forward_tflops, backward_tflops: attention kernels on long runs.
        link_gb_s: rows exchanged inside a node, as the fallback transport (all-to-all-v) reaches it.
        nic_gb_s: rows exchanged between nodes.
        memory_gb_s: device memory, reads plus writes.
        start_us: fixed cost of one exchange; hop_us: added per pass over the network.
        host_us: fixed cost of one compute step (launch, merge bookkeeping).
        overlap_slowdown: compute takes this many times longer while an exchange runs.
        element_bytes: of q, k, v.
        gpus_per_node: with NVLink between all of them and one network card (400 Gb/s) each.
    """

    name: str
    forward_tflops: float
    backward_tflops: float
    link_gb_s: float
    nic_gb_s: float
    memory_gb_s: float
    start_us: float
    hop_us: float
    host_us: float
    overlap_slowdown: float
    element_bytes: int
    gpus_per_node: int = 8  # HGX boards of both kinds


_GPU = {"nic_gb_s": 45.0, "start_us": 20.0, "hop_us": 8.4, "host_us": 10.0, "overlap_slowdown": 1.1, "element_bytes": 2}

# Measured on two H200 where the design says so, else estimates there; H100 has the same links and less memory bandwidth.
# nvlink: our own pushes; nccl: all-to-all-v. cpu: two processes over gloo on one host, order of magnitude only.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(name="h200", forward_tflops=640.0, backward_tflops=540.0, link_gb_s=330.0, memory_gb_s=4300.0, **_GPU),  # type: ignore[arg-type]
        Machine(name="h100", forward_tflops=640.0, backward_tflops=540.0, link_gb_s=330.0, memory_gb_s=3000.0, **_GPU),  # type: ignore[arg-type]
        Machine(
            name="h200-nvlink",
            forward_tflops=640.0,
            backward_tflops=540.0,
            link_gb_s=380.0,
            memory_gb_s=4300.0,
            **{**_GPU, "start_us": 8.0},  # type: ignore[arg-type]
        ),
        Machine(
            name="h100-nvlink",
            forward_tflops=640.0,
            backward_tflops=540.0,
            link_gb_s=380.0,
            memory_gb_s=3000.0,
            **{**_GPU, "start_us": 8.0},  # type: ignore[arg-type]
        ),
        Machine(
            name="cpu",
            forward_tflops=0.05,
            backward_tflops=0.05,
            link_gb_s=1.0,
            nic_gb_s=1.0,
            memory_gb_s=10.0,
            start_us=300.0,
            hop_us=100.0,
            host_us=200.0,
            overlap_slowdown=1.5,
            element_bytes=4,
        ),
    )
}
DEFAULT_MACHINE = "h200"


def find_machine(name: str) -> Machine:
    """The table's entry.

    Raises:
        InputError: no such machine.
    """
    if name not in MACHINES:
        raise InputError(f"machine={name!r} must be one of {', '.join(MACHINES)}")
    return MACHINES[name]


@dataclass(frozen=True, kw_only=True)
class StepLoads:
    """What every rank does in every step. R ranks, S remote steps.

    Attributes:
        local_areas: int64 [R], pairs of the local step.
        local_tokens: int64 [R], query rows.
        areas, recv_rows, send_rows: int64 [S, R], of the remote steps.
        node_recv_rows, node_send_rows: int64 [S, R], rows through the network (two-level form); None on one node.
    """

    local_areas: Int64Array
    local_tokens: Int64Array
    areas: Int64Array
    recv_rows: Int64Array
    send_rows: Int64Array
    node_recv_rows: Int64Array | None = None
    node_send_rows: Int64Array | None = None


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Times of one layer's attention on one machine.

    Attributes:
        calc_factor, comm_factor: scale compute and exchange (OverlapConfig).
        is_overlapped: False waits for each exchange before computing.
    """

    machine: Machine
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    calc_factor: float = 1.0
    comm_factor: float = 1.0
    is_overlapped: bool = True

    def pair_us(self, is_backward: bool) -> float:
        """Compute time of one visible pair, all heads."""
        operations = 4.0 * self.num_heads_q * self.head_dim * (_BACKWARD_OPERATIONS if is_backward else 1.0)
        tflops = self.machine.backward_tflops if is_backward else self.machine.forward_tflops
        return operations / (tflops * 1e6) * self.calc_factor

    def row_bytes(self, is_return: bool) -> float:
        """One row of k and v on its way out, or of dk and dv on its way back."""
        return 2.0 * self.num_heads_kv * self.head_dim * (_ACCUMULATOR_BYTES if is_return else self.machine.element_bytes)

    def row_us(self, is_backward: bool, *, crosses_nodes: bool) -> float:
        """Exchange time of one row through the slowest link; backward counts its return too."""
        num_bytes = self.row_bytes(False) + (self.row_bytes(True) if is_backward else 0.0)
        rate = self.machine.nic_gb_s if crosses_nodes else self.machine.link_gb_s
        return num_bytes / (rate * 1e3) * self.comm_factor

    def start_us(self, *, crosses_nodes: bool) -> float:
        """Fixed cost of an exchange."""
        return (self.machine.start_us + (2.0 * self.machine.hop_us if crosses_nodes else 0.0)) * self.comm_factor

    def exchange_us(self, loads: StepLoads, step: int, *, is_return: bool) -> Float64Array:
        """float64 [R]: one exchange of remote step `step` (0-based) as each rank sees it."""
        row_bytes = self.row_bytes(is_return)
        incoming, outgoing = loads.recv_rows[step] * row_bytes, loads.send_rows[step] * row_bytes
        slowest = np.maximum(incoming, outgoing) / (self.machine.link_gb_s * 1e3)
        if loads.node_recv_rows is not None and loads.node_send_rows is not None:
            network = np.maximum(loads.node_recv_rows[step], loads.node_send_rows[step]) * row_bytes
            slowest = np.maximum(slowest, network / (self.machine.nic_gb_s * 1e3))
        packing = (incoming + outgoing) * 2.0 / (self.machine.memory_gb_s * 1e3)
        fixed = self.start_us(crosses_nodes=loads.node_recv_rows is not None)
        return np.asarray(fixed + (slowest + packing) * self.comm_factor)

    def merge_us(self, loads: StepLoads) -> Float64Array:
        """float64 [R]: read and write of the fp32 accumulator of every local query, once per remote step."""
        return self.query_merge_us(loads.local_tokens)

    def query_merge_us(self, num_queries: Int64Array) -> Float64Array:
        """float64, shape of num_queries: the same for any number of queries."""
        num_bytes = num_queries * (2.0 * self.num_heads_q * self.head_dim * _ACCUMULATOR_BYTES)
        return np.asarray(num_bytes / (self.machine.memory_gb_s * 1e3) * self.calc_factor)

    def step_times_us(self, loads: StepLoads, *, is_backward: bool) -> Float64Array:
        """float64 [S + 1, R]: time of each step on each rank, local step first, exchanges hidden where they can be."""
        num_remote = len(loads.areas)
        pair_us, merge = self.pair_us(is_backward), self.merge_us(loads)
        casts = [self.exchange_us(loads, step, is_return=False) for step in range(num_remote)]
        returns = [self.exchange_us(loads, step, is_return=True) for step in range(num_remote)] if is_backward else []
        nothing = np.zeros(len(loads.local_areas))
        times = []
        for step in range(num_remote + 1):
            areas = loads.areas[step - 1] if step else loads.local_areas
            compute = areas * pair_us + self.machine.host_us * self.calc_factor + (merge if step else nothing)
            beside = casts[step] if step < num_remote else nothing
            if is_backward and step >= 2:
                beside = beside + returns[step - 2]
            if self.is_overlapped:
                time = np.maximum(beside, compute + beside * (1.0 - 1.0 / self.machine.overlap_slowdown))
            else:
                time = compute + beside
            times.append(time)
        if is_backward and num_remote:
            times[-1] = times[-1] + returns[-1]
        return np.stack(times)

    def rank_times_us(self, loads: StepLoads, *, is_backward: bool) -> Float64Array:
        """float64 [R]: the steps' times added in order."""
        return _sum_in_order(self.step_times_us(loads, is_backward=is_backward))


def _sum_in_order(rows: Sequence[Float64Array] | Float64Array) -> Float64Array:
    """One addition after the other: library sums may pair terms differently on different machines."""
    total = np.zeros(len(rows[0]))
    for row in rows:
        total = total + row
    return total
