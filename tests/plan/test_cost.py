"""The cost model: formulas by hand, units, and what the design says about break-even."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention.errors import InputError
from magi_attention.plan.cost import MACHINES, CostModel, Machine, StepLoads, find_machine

# Round numbers: a pair takes 1 us forward, a row 1 us on the link, memory and fixed costs are free.
ROUND = Machine(
    name="round",
    forward_tflops=4 * 2 * 16 / 1e6,
    backward_tflops=10 * 2 * 16 / 1e6,
    link_gb_s=2 * 1 * 16 * 2 / 1e3,
    nic_gb_s=2 * 1 * 16 * 2 / 1e4,
    memory_gb_s=1e12,
    start_us=0.0,
    hop_us=0.0,
    host_us=0.0,
    overlap_slowdown=1.0,
    element_bytes=2,
)


def model(**changes: object) -> CostModel:
    return CostModel(**{"machine": ROUND, "num_heads_q": 2, "num_heads_kv": 1, "head_dim": 16, **changes})  # type: ignore[arg-type]


def loads(local: list[int], areas: list[list[int]], recv: list[list[int]], send: list[list[int]] | None = None) -> StepLoads:
    shape = (-1, len(local))
    return StepLoads(
        local_areas=np.array(local),
        local_tokens=np.zeros(len(local), np.int64),
        areas=np.array(areas, np.int64).reshape(shape),
        recv_rows=np.array(recv, np.int64).reshape(shape),
        send_rows=np.array(recv if send is None else send, np.int64).reshape(shape),
    )


def test_units() -> None:
    cost = model()
    assert cost.pair_us(False) == pytest.approx(1.0) and cost.pair_us(True) == pytest.approx(1.0)
    assert cost.row_bytes(False) == 64 and cost.row_bytes(True) == 128
    assert cost.row_us(False, crosses_nodes=False) == pytest.approx(1.0)
    assert cost.row_us(False, crosses_nodes=True) == pytest.approx(10.0)
    assert cost.row_us(True, crosses_nodes=False) == pytest.approx(3.0), "out in bf16, back in fp32"


def test_exchanges_hide_under_the_step_before() -> None:
    work = loads([10], [[20], [30]], [[5], [25]])
    assert model().step_times_us(work, is_backward=False).ravel() == pytest.approx([10, 25, 30])
    assert model().rank_times_us(work, is_backward=False) == pytest.approx([65])


def test_without_overlap_everything_adds_up() -> None:
    work = loads([10], [[20], [30]], [[5], [25]])
    assert model(is_overlapped=False).rank_times_us(work, is_backward=False) == pytest.approx([10 + 5 + 20 + 25 + 30])


def test_backward_returns_beside_the_next_step_and_at_the_end() -> None:
    work = loads([10], [[20], [30]], [[5], [7]])
    # Steps: max(10, 5), max(20, 7), max(30, return of step 1 = 10), then the return of step 2 = 14.
    assert model().step_times_us(work, is_backward=True).ravel() == pytest.approx([10, 20, 30 + 14])


def test_slower_direction_of_a_link_counts() -> None:
    work = loads([0, 0], [[1, 1]], [[3, 9]], [[9, 3]])
    assert model().exchange_us(work, 0, is_return=False) == pytest.approx([9, 9])


def test_network_rows_count_once_per_node() -> None:
    work = loads([0], [[1]], [[3]])
    two_level = StepLoads(**{**vars(work), "node_recv_rows": np.array([[2]]), "node_send_rows": np.array([[1]])})
    assert model().exchange_us(two_level, 0, is_return=False) == pytest.approx([20])


def test_slowdown_applies_while_the_exchange_runs() -> None:
    slow = Machine(**{**vars(ROUND), "overlap_slowdown": 1.25})
    work = loads([100], [[0]], [[50]])
    # 50 us beside the exchange do 40 us of work, the other 60 run freely.
    assert model(machine=slow).step_times_us(work, is_backward=False)[0] == pytest.approx([110])


def test_factors_scale_their_side() -> None:
    work = loads([10], [[20]], [[30]])
    assert model(calc_factor=5.0).rank_times_us(work, is_backward=False) == pytest.approx([50 + 100])
    assert model(comm_factor=2.0).rank_times_us(work, is_backward=False) == pytest.approx([60 + 20])


def test_fixed_costs() -> None:
    fixed = Machine(**{**vars(ROUND), "start_us": 7.0, "hop_us": 2.0, "host_us": 3.0})
    cost = model(machine=fixed)
    assert cost.start_us(crosses_nodes=False) == 7.0 and cost.start_us(crosses_nodes=True) == 11.0
    assert cost.rank_times_us(loads([0], [[0]], [[0]]), is_backward=False) == pytest.approx([7 + 3])
    assert cost.rank_times_us(loads([5], [], []), is_backward=False) == pytest.approx([8]), "no remote step, no exchange"


def test_break_even_of_the_design() -> None:
    """A fetched row hides when about 210 local queries see it over NVLink, 1,780 over the network."""
    cost = CostModel(machine=MACHINES["h200-nvlink"], num_heads_q=64, num_heads_kv=8, head_dim=128)
    assert cost.row_us(False, crosses_nodes=False) / cost.pair_us(False) == pytest.approx(210, rel=0.02)
    assert cost.row_us(False, crosses_nodes=True) / cost.pair_us(False) == pytest.approx(1_780, rel=0.02)


@pytest.mark.parametrize("name", MACHINES)
def test_table_is_positive(name: str) -> None:
    machine = find_machine(name)
    assert machine.name == name
    assert all(value > 0 for field, value in vars(machine).items() if field != "name") and machine.overlap_slowdown >= 1.0


def test_unknown_machine_is_named() -> None:
    with pytest.raises(InputError, match=r"machine='tpu'.*h200"):
        find_machine("tpu")
