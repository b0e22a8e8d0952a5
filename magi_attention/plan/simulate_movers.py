"""What moves rows between GPUs: rates, start-up and what each costs the attention kernel beside it. Knows no plan and no time line.

GB is 1e9 bytes; rates are per rank and direction inside a node. "measured" is two H200 over NVLink, 128 MiB of 4 KiB rows each way;
everything else is an estimate until `--calibrate` has seen a machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from magi_attention.errors import InputError
from magi_attention.plan.cost import Machine

LONG_RUN_BYTES = 1 << 20  # from here on a copy engine beats an SM kernel
_MEMORY_SHARE = 0.3  # estimate: how much of the memory traffic of a transfer the attention kernel feels
_NUM_SMS = 132  # of H100 and H200
MOVER_NAMES = ("auto", "a2av", "sm", "copy-engine")


@dataclass(frozen=True, kw_only=True)
class Mover:
    """One way to move rows.

    Attributes:
        gb_s: inside a node, per rank and direction.
        start_us: before the first byte flows.
        range_us: a contiguous range takes at least so long (copy engine); 0 elsewhere.
        num_sms: multiprocessors that the attention kernel beside it leaves free, for its whole step.
        beside_slowdown: the attention kernel takes so many times longer while this rank's transfer runs.
        is_packed: gathers before and scatters after, each one read and one write of device memory.
        has_gate: the attention kernel waits until the mover has started, else it would take all multiprocessors.
        is_pipelined: a relay passes rows on while more arrive.
        total_sms: of the GPU.
    """

    name: str
    gb_s: float
    start_us: float
    range_us: float = 0.0
    num_sms: int = 0
    beside_slowdown: float = 1.0
    is_packed: bool = False
    has_gate: bool = True
    is_pipelined: bool = True
    total_sms: int = _NUM_SMS

    @property
    def margin(self) -> float:
        """Attention on the multiprocessors that are left, against all of them."""
        return self.total_sms / (self.total_sms - self.num_sms)


def choose_mover(name: str, machine: Machine, run_bytes: float, *, is_return: bool) -> Mover:
    """The mover of one exchange.

    Args:
        name: "a2av", "sm", "copy-engine", or "auto": a2av on machines whose rates are those of all-to-all-v, else the copy engine from
            ranges of 1 MiB of one tensor on and the SM kernel below.
        machine: for memory rate and slow-down.
        run_bytes: mean contiguous range of one tensor.
        is_return: partial sums coming back; copy engines cannot add, so SMs do.

    Raises:
        InputError: no such mover.
    """
    if name not in MOVER_NAMES:
        raise InputError(f"--mover={name!r} must be one of {', '.join(MOVER_NAMES)}")
    if name == "auto":
        is_ours = machine.name.endswith("-nvlink")
        name = "a2av" if not is_ours else "copy-engine" if run_bytes >= LONG_RUN_BYTES else "sm"
    if name == "a2av":
        return Mover(
            name=name,
            gb_s=min(265.0, machine.link_gb_s),  # 265 measured: NCCL all_to_all_single without its permutes
            start_us=machine.start_us,
            beside_slowdown=machine.overlap_slowdown,
            is_packed=True,
            is_pipelined=False,
        )
    if name == "copy-engine" and not is_return:
        # 370 measured on large copies; 64 KiB ranges at 61 GB/s measured are 1.07 us each. Starting costs 10 us: estimate.
        return Mover(name=name, gb_s=370.0, start_us=10.0, range_us=1.07, beside_slowdown=_beside(370.0, machine), has_gate=False)
    # Bulk kernel: cast 334 with 12 SMs, reduce 274 with 16, measured. Starting costs 8 us: estimate.
    rate, sms = (274.0, 16) if is_return else (334.0, 12)
    return Mover(name="sm", gb_s=rate, start_us=8.0, num_sms=sms, beside_slowdown=_beside(rate, machine))


def _beside(gb_s: float, machine: Machine) -> float:
    return 1.0 + _MEMORY_SHARE * 2.0 * gb_s / machine.memory_gb_s
