"""What a simulated layer says to people and programs: times, what communication was not hidden, bytes, who is slowest and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.build import PlanRequest, build_problem
from magi_attention.plan.cost import Float64Array, find_machine
from magi_attention.plan.simulate import Timeline, simulate
from magi_attention.plan.simulate_movers import Mover, choose_mover
from magi_attention.plan.simulate_traffic import Traffic, read_traffic
from magi_attention.plan.step_choice import PlanProblem, StepChoice, choose_both


@dataclass(frozen=True, kw_only=True)
class SimulatedDirection:
    """One direction of one layer. `operations` are those of all visible pairs, on all ranks together."""

    traffic: Traffic
    timeline: Timeline
    casts: tuple[Mover, ...]
    reduces: tuple[Mover, ...]
    operations: float

    @property
    def tflops_per_gpu(self) -> float:
        """Of the time of the slowest rank."""
        return self.operations / self.traffic.cp_size / self.timeline.time_us / 1e6


@dataclass(frozen=True, kw_only=True)
class SimulatedLayer:
    """Forward and backward of one layer on one machine."""

    machine: str
    num_nodes: int
    forward: SimulatedDirection
    backward: SimulatedDirection

    def directions(self) -> dict[str, SimulatedDirection]:
        return {"forward": self.forward, "backward": self.backward}


def nodes_of(machine_name: str, num_ranks: int) -> int:
    """Nodes that so many ranks fill.

    Raises:
        InputError: more ranks than a node has, and not whole nodes; an unknown machine.
    """
    size = find_machine(machine_name).gpus_per_node
    if num_ranks > size and num_ranks % size:
        raise InputError(f"ranks={num_ranks} do not fill nodes of {size} GPUs ({machine_name}); take at most {size} or a multiple of it")
    return max(1, num_ranks // size)


def simulate_layer(
    mask: AttnMask,
    cp_size: int,
    config: DistAttnConfig,
    request: PlanRequest,
    *,
    mover: str = "auto",
    on_rank: Callable[[int], None] = lambda rank: None,
) -> SimulatedLayer:
    """Plans for all ranks, then both directions.

    Args:
        mask, cp_size, config, request: as `plan.summary.summarize`.
        mover: as `choose_mover`.
        on_rank: called after each rank's plan was read.

    Raises:
        InputError: as `plan_attention`; more ranks on a node than the machine has GPUs; an unknown mover.
    """
    machine = find_machine(request.machine)
    if request.num_nodes * machine.gpus_per_node < cp_size:
        raise InputError(
            f"num_nodes={request.num_nodes} is too few for {cp_size} ranks: a node of {machine.name} has {machine.gpus_per_node} GPUs; "
            f"take at least {-(-cp_size // machine.gpus_per_node)} nodes"
        )
    problem, _ = build_problem(mask, cp_size, config, request)
    forward, backward = choose_both(problem)
    forward_rows = read_traffic(problem, forward, is_backward=False, on_rank=on_rank)
    is_same_split = forward.wanted_degree == backward.wanted_degree and not problem.is_greedy
    backward_rows = forward_rows if is_same_split else read_traffic(problem, backward, is_backward=True, on_rank=on_rank)
    return SimulatedLayer(
        machine=machine.name,
        num_nodes=request.num_nodes,
        forward=_run(problem, forward, forward_rows, mover, is_backward=False),
        backward=_run(problem, backward, backward_rows, mover, is_backward=True),
    )


def _run(problem: PlanProblem, choice: StepChoice, traffic: Traffic, mover: str, *, is_backward: bool) -> SimulatedDirection:
    cost = problem.cost
    casts = [choose_mover(mover, cost.machine, run_bytes, is_return=False) for run_bytes in _run_bytes(problem, traffic)]
    reduces = [choose_mover(mover, cost.machine, 0.0, is_return=True) for _ in range(traffic.num_steps)]
    return SimulatedDirection(
        traffic=traffic,
        timeline=simulate(traffic, cost, casts, reduces if is_backward else None),
        casts=tuple(casts),
        reduces=tuple(reduces) if is_backward else (),
        operations=4.0 * cost.num_heads_q * cost.head_dim * float(choice.rank_areas.sum()) * (2.5 if is_backward else 1.0),
    )


def _run_bytes(problem: PlanProblem, traffic: Traffic) -> list[float]:
    """Mean contiguous range of one tensor in each step's cast, all ranks together: all choose the same mover."""
    one_tensor = problem.cost.row_bytes(False) / 2
    rows, runs = traffic.rows.sum(axis=(1, 2)), traffic.runs.sum(axis=1)
    return [float(count) / max(1, int(num_runs)) * one_tensor for count, num_runs in zip(rows, runs, strict=True)]


def exposed_us(direction: SimulatedDirection) -> dict[str, Float64Array]:
    """float64 [R] each: where a rank's time goes beyond its own work; with `work` they add up to end_us.

    peers: waiting while an owner of the rows has not started to send, because it is behind. links: the rest of waiting, for rows on
    their way or the start of a mover. slowed: attention beside a transfer. tail: after the last attention.
    """
    timeline = direction.timeline
    waiting = timeline.attention_start_us - timeline.ready_us
    peers = np.zeros(direction.traffic.cp_size)
    for step, rows in enumerate(direction.traffic.rows):
        last_start = np.where(rows > 0, timeline.cast_us[step, :, :1], 0.0).max(axis=0)
        peers += np.clip(last_start - timeline.ready_us[step + 1], 0.0, waiting[step + 1])
    return {
        "work": timeline.work_us.sum(axis=0),
        "peers": peers,
        "links": waiting.sum(axis=0) - peers,
        "slowed": (timeline.attention_end_us - timeline.attention_start_us - timeline.work_us).sum(axis=0),
        "tail": timeline.end_us - timeline.attention_end_us[-1],
    }


def slowest_rank(direction: SimulatedDirection) -> tuple[int, str]:
    """The rank that the group waits for (the lowest at equal times), and where it loses most against the mean rank's work."""
    rank = int(np.argmax(direction.timeline.end_us))
    parts = exposed_us(direction)
    losses = {
        "more work than the mean rank": float(parts["work"][rank] - parts["work"].mean()),
        "waits for owners of its rows that are behind it": float(parts["peers"][rank]),
        "waits for rows on their way": float(parts["links"][rank]),
        "attention is slowed by transfers beside it": float(parts["slowed"][rank]),
        "returns gradients after the last attention": float(parts["tail"][rank]),
    }
    reason = max(losses, key=lambda name: losses[name])
    return rank, f"{reason}: {losses[reason]:,.0f} us" if losses[reason] > 1e-6 else "work alone"


def as_json(layer: SimulatedLayer) -> dict[str, Any]:
    """Plain numbers. Times in microseconds, bytes of all ranks together, out of each link class."""
    values: dict[str, Any] = {"machine": layer.machine, "ranks": layer.forward.traffic.cp_size, "nodes": layer.num_nodes}
    values["is_calibrated"] = False
    for name, direction in layer.directions().items():
        timeline, links = direction.timeline, direction.timeline.links
        rank, reason = slowest_rank(direction)
        parts = {part: float(times[rank]) for part, times in exposed_us(direction).items()}
        values[name] = {
            "remote_steps": direction.traffic.num_steps,
            "time_us": timeline.time_us,
            "tflops_per_gpu": direction.tflops_per_gpu,
            "slowest_rank": rank,
            "reason": reason,
            "slowest_rank_us": parts,
            "exposed_us": timeline.time_us - parts["work"],
            "nvlink_bytes": int(links.nvlink_out.num_bytes.sum()),
            "nic_bytes": int(links.nic_out.num_bytes.sum()),
            "nvlink_busiest_us": float(max(links.nvlink_out.busy_us.max(), links.nvlink_in.busy_us.max())),
            "nic_busiest_us": float(max(links.nic_out.busy_us.max(), links.nic_in.busy_us.max())),
            "cast_movers": sorted({mover.name for mover in direction.casts}),
            "reduce_movers": sorted({mover.name for mover in direction.reduces}),
        }
    return values


def print_text(values: dict[str, Any]) -> None:
    """`as_json` for people."""
    print(f"simulated {values['ranks']} ranks on {values['nodes']} node(s) of {values['machine']}; rates are not yet calibrated on GPUs")
    for name in ("forward", "backward"):
        part = values[name]
        parts = part["slowest_rank_us"]
        movers = ", ".join(sorted({*part["cast_movers"], *part["reduce_movers"]})) or "nothing to move"
        print(f"{name:9s} {part['time_us'] / 1e3:,.3f} ms, {part['tflops_per_gpu']:,.0f} TFLOP/s per GPU, ", end="")
        print(f"1 local + {part['remote_steps']} remote steps ({movers})")
        print(f"          exposed {part['exposed_us'] / 1e3:,.3f} ms: waiting for peers {parts['peers'] / 1e3:,.3f}, ", end="")
        print(f"for links {parts['links'] / 1e3:,.3f}, slowed {parts['slowed'] / 1e3:,.3f}, tail {parts['tail'] / 1e3:,.3f}")
        print(f"          NVLink {part['nvlink_bytes'] / 2**20:,.1f} MiB, busiest port {part['nvlink_busiest_us'] / 1e3:,.3f} ms; ", end="")
        print(f"network {part['nic_bytes'] / 2**20:,.1f} MiB, busiest port {part['nic_busiest_us'] / 1e3:,.3f} ms")
        print(f"          slowest is rank {part['slowest_rank']}: {part['reason']}")
