"""The event simulation: by hand to the microsecond, conservation, bounds, monotony, empty cases. Knows no GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError
from magi_attention.mask.builders import from_cu_seqlens
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.build import PlanRequest, build_problem, plan_attention
from magi_attention.plan.cost import CostModel, Machine
from magi_attention.plan.simulate import Timeline, simulate
from magi_attention.plan.simulate_links import slowed_end
from magi_attention.plan.simulate_movers import Mover, choose_mover
from magi_attention.plan.simulate_report import exposed_us, nodes_of, simulate_layer, slowest_rank
from magi_attention.plan.simulate_sweep import FAMILIES, family_mask
from magi_attention.plan.simulate_traffic import Traffic, read_traffic
from magi_attention.plan.step_choice import choose_both
from tests.plan.plans import contiguous_dispatch, overlap

# Round numbers: a pair takes 1 us, a row 1 us out (64 bytes at 0.064 GB/s) and 2 us back, memory and fixed costs are free.
ROUND = Machine(
    name="round",
    forward_tflops=4 * 2 * 16 / 1e6,
    backward_tflops=10 * 2 * 16 / 1e6,
    link_gb_s=0.064,
    nic_gb_s=0.0064,
    memory_gb_s=1e12,
    start_us=0.0,
    hop_us=0.0,
    host_us=0.0,
    overlap_slowdown=1.0,
    element_bytes=2,
)
COST = CostModel(machine=ROUND, num_heads_q=2, num_heads_kv=1, head_dim=16)
PLAIN = Mover(name="plain", gb_s=0.064, start_us=0.0, has_gate=False)
REQUEST = PlanRequest(num_heads_q=64, num_heads_kv=8, head_dim=128, machine="h200-nvlink")


def traffic_of(areas: list[list[int]], rows: list[list[list[int]]], node_rows: list[list[list[int]]] | None = None) -> Traffic:
    """Areas [S + 1][R], rows [S][owner][receiver]; one range per owner and receiver."""
    num_ranks = len(areas[0])
    sent = np.array(rows, np.int64).reshape(-1, num_ranks, num_ranks)
    return Traffic(
        areas=np.array(areas, np.int64),
        tokens=np.zeros(num_ranks, np.int64),
        rows=sent,
        node_rows=np.zeros((len(sent), num_ranks, 1), np.int64) if node_rows is None else np.array(node_rows, np.int64),
        runs=np.count_nonzero(sent, axis=2),
    )


# Two ranks, two remote steps. Step 1: 0 sends 5 rows to 1 and gets 8; step 2: 0 sends 30 and gets 2.
HAND = traffic_of([[10, 20], [20, 10], [30, 30]], [[[0, 5], [8, 0]], [[0, 30], [2, 0]]])


def run(traffic: Traffic, mover: Mover = PLAIN, cost: CostModel = COST, *, is_backward: bool = False) -> Timeline:
    movers = [mover] * traffic.num_steps
    return simulate(traffic, cost, movers, movers if is_backward else None)


def test_two_ranks_two_steps_forward_by_hand() -> None:
    """Rank 0: 0-10 local; rows of step 1 came at 8: 10-30; its cast of 30 rows leaves at 10-40; rank 1 issues its second cast at 20, so
    rows of step 2 are at rank 0 at 22: 30-60. Rank 1: 0-20, 20-30, rows of step 2 are there at 40: waits 10 us, 40-70."""
    found = run(HAND)
    np.testing.assert_allclose(found.attention_start_us, [[0, 0], [10, 20], [30, 40]])
    np.testing.assert_allclose(found.attention_end_us, [[10, 20], [30, 30], [60, 70]])
    np.testing.assert_allclose(found.cast_us, [[[0, 5], [0, 8]], [[10, 40], [20, 22]]])
    np.testing.assert_allclose(found.arrival_us, [[8, 5], [22, 40]])
    np.testing.assert_allclose(found.end_us, [60, 70])
    assert found.time_us == pytest.approx(70)


def test_two_ranks_two_steps_backward_by_hand() -> None:
    """As forward until the gradients: rank 0 returns 8 rows (16 us) after step 1 at 30, behind its cast of 30 rows on its outgoing port
    (10-40): 40-56; 2 rows (4 us) at 60-64. Rank 1 returns 5 rows (10 us) at 30-40 into rank 0, and 30 rows (60 us) at 70-130."""
    found = run(HAND, is_backward=True)
    np.testing.assert_allclose(found.attention_end_us, [[10, 20], [30, 30], [60, 70]])
    np.testing.assert_allclose(found.reduce_us, [[[30, 56], [30, 40]], [[60, 64], [70, 130]]])
    np.testing.assert_allclose(found.end_us, [130, 130])


def test_a_cast_goes_before_a_reduce_of_the_same_moment() -> None:
    """Step 2 begins at 20 on both ranks: 4 rows of step 3 leave at 20-24, the gradients of step 1 (8 us) at 24-32."""
    rows = [[0, 4], [4, 0]]
    found = run(traffic_of([[10, 10]] * 4, [rows] * 3), is_backward=True)
    np.testing.assert_allclose(found.cast_us[2], [[20, 24], [20, 24]])
    np.testing.assert_allclose(found.reduce_us[0], [[20, 32], [20, 32]])


def test_start_gate_margin_and_slowdown_by_hand() -> None:
    """A mover on half of the SMs doubles step 0 (the only one with a cast beside it); its start-up delays the rows by 3 us."""
    sm = Mover(name="sm", gb_s=0.064, start_us=3.0, num_sms=66)
    found = run(traffic_of([[10, 10], [5, 5]], [[[0, 4], [4, 0]]]), sm)
    np.testing.assert_allclose(found.cast_us, [[[0, 7], [0, 7]]])
    np.testing.assert_allclose(found.attention_end_us, [[20, 20], [25, 25]])
    beside = replace(PLAIN, beside_slowdown=2.0)
    found = run(traffic_of([[10, 10], [5, 5]], [[[0, 4], [4, 0]]]), beside)
    np.testing.assert_allclose(found.attention_end_us, [[12, 12], [17, 17]], err_msg="4 us beside the cast do 2 us of work")


def test_gate_holds_attention_until_the_mover_starts() -> None:
    """The first cast leaves for 50 us, so the second starts at 50; attention of step 1 has its rows at once but waits for that start."""
    work = traffic_of([[1, 1], [1, 1], [1, 1]], [[[0, 50], [0, 0]], [[0, 1], [0, 0]]])
    assert run(work).attention_start_us[1, 0] == pytest.approx(1)
    assert run(work, replace(PLAIN, has_gate=True)).attention_start_us[1, 0] == pytest.approx(50)


def test_copy_engine_ranges_and_packing_cost_time() -> None:
    work = traffic_of([[1, 1], [1, 1]], [[[0, 4], [4, 0]]])
    assert run(work, replace(PLAIN, range_us=9.0)).arrival_us.max() == pytest.approx(9)
    memory = replace(COST, machine=replace(ROUND, memory_gb_s=0.064))
    assert run(work, replace(PLAIN, is_packed=True), memory).arrival_us.max() == pytest.approx(4 + 8 + 8), "gather, link, scatter"


def test_a_busy_receiver_serves_one_sender_after_the_other() -> None:
    found = run(traffic_of([[1, 1, 1], [1, 1, 1]], [[[0, 0, 10], [0, 0, 10], [0, 0, 0]]]))
    assert found.arrival_us[0, 2] == pytest.approx(20) and found.end_us.max() == pytest.approx(21)


def test_two_nodes_by_hand() -> None:
    """Rank 0 of node 0 sends the same 3 rows to both ranks of node 1: once through the network (10 us a row), on at 1 us a row."""
    rows = [[[0, 0, 3, 3], [0] * 4, [0] * 4, [0] * 4]]
    work = traffic_of([[1] * 4, [1] * 4], rows, [[[0, 3], [0, 0], [0, 0], [0, 0]]])
    found = run(work, replace(PLAIN, is_pipelined=False))
    np.testing.assert_allclose(found.arrival_us, [[0, 0, 30, 33]])
    assert found.links.nic_out.num_bytes.sum() == 3 * 64 and found.links.nvlink_out.num_bytes.tolist() == [0, 0, 192, 0]
    # Back: rank 3 adds into rank 2 (6 us after its step at 34), then 3 rows in fp32 cross: 60 us.
    assert run(work, replace(PLAIN, is_pipelined=False), is_backward=True).end_us[0] == pytest.approx(34 + 6 + 60)


def test_network_adds_a_hop_per_leg_and_relays_may_start_early() -> None:
    """3 rows cross from 0 to 30 and a hop of 5; the relay passes them on from 5 (pipelined) or from 35, 1 us a row, and another hop."""
    work = traffic_of([[1] * 4, [1] * 4], [[[0, 0, 3, 3], [0] * 4, [0] * 4, [0] * 4]], [[[0, 3], [0, 0], [0, 0], [0, 0]]])
    cost = replace(COST, machine=replace(ROUND, hop_us=5.0))
    np.testing.assert_allclose(run(work, replace(PLAIN, is_pipelined=False), cost).arrival_us, [[0, 0, 35, 43]])
    np.testing.assert_allclose(run(work, PLAIN, cost).arrival_us, [[0, 0, 35, 40]])


def test_launch_and_merge_are_part_of_each_step() -> None:
    """7 us per launch; out of 100 queries is read and written in fp32: 100 * 2 * 2 * 16 * 4 bytes at 25.6 GB/s are 1 us."""
    cost = replace(COST, machine=replace(ROUND, host_us=7.0, memory_gb_s=25.6))
    work = replace(traffic_of([[10], [20]], [[[0]]]), tokens=np.array([100]))
    np.testing.assert_allclose(run(work, PLAIN, cost).attention_end_us, [[17], [17 + 28]])


def test_slowed_work() -> None:
    assert slowed_end(5.0, 10.0, []) == 15.0
    assert slowed_end(0.0, 10.0, [(2.0, 6.0, 2.0)]) == pytest.approx(12.0)
    assert slowed_end(0.0, 10.0, [(0.0, 4.0, 2.0), (2.0, 6.0, 2.0)]) == pytest.approx(6 + 10 - 1 - 0.5 - 1)
    assert slowed_end(0.0, 1.0, [(0.0, 100.0, 3.0)]) == pytest.approx(3.0)


def problem_traffic(mask: AttnMask, cp_size: int, config: DistAttnConfig, num_nodes: int = 1) -> tuple[Traffic, CostModel]:
    problem, _ = build_problem(mask, cp_size, config, replace(REQUEST, num_nodes=num_nodes))
    return read_traffic(problem, choose_both(problem)[0], is_backward=False), problem.cost


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_simulated_bytes_are_those_of_the_plans(family: str, num_nodes: int) -> None:
    mask, config = family_mask(family, 20_001), overlap(3)
    layer = simulate_layer(mask, 4, config, replace(REQUEST, num_nodes=num_nodes))
    plans = [plan_attention(mask, 4, rank, config, num_heads_q=64, num_heads_kv=8, head_dim=128, num_nodes=num_nodes) for rank in range(4)]
    plans_rows = np.zeros((len(plans[0].forward) - 1, 4, 4), np.int64)
    crossing = 0
    for rank, plan in enumerate(plans):
        for step, part in enumerate(plan.forward[1:]):
            assert part.exchange is not None
            plans_rows[step, :, rank] = part.exchange.recv_counts
            if part.hierarchical is not None:
                counts = part.hierarchical.inter.recv_counts
                crossing += sum(counts) - counts[rank // 2]
    traffic = layer.forward.traffic
    np.testing.assert_array_equal(traffic.rows, plans_rows)
    np.testing.assert_array_equal(traffic.areas, np.array([[step.area for step in plan.forward] for plan in plans]).T)
    assert traffic.areas.sum() == mask.area() and traffic.rows.any()
    row_bytes = 2 * 8 * 128 * 2
    for direction, factor in ((layer.forward, 1), (layer.backward, 3)):  # k, v out in bf16; dk, dv back in fp32
        links = direction.timeline.links
        assert links.nic_out.num_bytes.sum() == links.nic_in.num_bytes.sum() == crossing * row_bytes * factor
        assert links.nvlink_out.num_bytes.sum() == links.nvlink_in.num_bytes.sum()
        if num_nodes == 1:
            np.testing.assert_array_equal(links.nvlink_in.num_bytes, _nvlink_in(direction.traffic, row_bytes, factor))


def _nvlink_in(traffic: Traffic, row_bytes: int, factor: int) -> np.ndarray:
    received, sent = traffic.rows.sum(axis=(0, 1)), traffic.rows.sum(axis=(0, 2))
    return np.asarray(received * row_bytes + (sent * 2 * row_bytes if factor == 3 else 0))


def random_traffic(seed: int, num_ranks: int = 5, num_steps: int = 3) -> Traffic:
    """Any areas and rows; about half of the pairs send nothing, one rank has nothing at all."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 60, size=(num_steps, num_ranks, num_ranks)) * rng.integers(0, 2, size=(num_steps, num_ranks, num_ranks))
    areas = rng.integers(0, 100, size=(num_steps + 1, num_ranks))
    idle = int(rng.integers(num_ranks))
    rows[:, idle, :] = rows[:, :, idle] = areas[:, idle] = 0
    for rank in range(num_ranks):
        rows[:, rank, rank] = 0
    return traffic_of(areas.tolist(), rows.tolist())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_backward", [False, True])
def test_never_faster_than_compute_or_any_link(seed: int, is_backward: bool) -> None:
    traffic = random_traffic(seed)
    found = run(traffic, is_backward=is_backward)
    assert np.isfinite(found.attention_end_us).all()
    assert (found.end_us >= found.work_us.sum(axis=0) - 1e-9).all()
    out_us, in_us = traffic.rows.sum(axis=(0, 2)), traffic.rows.sum(axis=(0, 1))
    if is_backward:
        out_us, in_us = out_us + 2 * in_us, in_us + 2 * out_us
    np.testing.assert_allclose(found.links.nvlink_out.busy_us, out_us)
    np.testing.assert_allclose(found.links.nvlink_in.busy_us, in_us)
    assert (found.end_us >= out_us - 1e-9).all() and found.time_us >= max(out_us.max(), in_us.max())
    arrived_first = found.attention_start_us[1:] >= found.arrival_us - 1e-9
    assert arrived_first.all(), "no attention before its rows"
    assert (found.attention_start_us[1:] >= found.attention_end_us[:-1] - 1e-9).all(), "one step after the other"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("link", ["nvlink", "network"])
def test_slower_links_only_slow(family: str, link: str) -> None:
    traffic, cost = problem_traffic(family_mask(family, 8_192 * 4), 4, overlap(2), num_nodes=2)
    mover = choose_mover("sm", cost.machine, 0.0, is_return=False)
    times = []
    for share in (8.0, 1.0, 0.3, 0.1, 0.01):
        nic = replace(cost.machine, nic_gb_s=cost.machine.nic_gb_s * share) if link == "network" else cost.machine
        slower = replace(mover, gb_s=mover.gb_s * share) if link == "nvlink" else mover
        times.append(run(traffic, slower, replace(cost, machine=nic), is_backward=True).time_us)
    assert times == sorted(times) and times[-1] > times[0]


def test_one_rank_is_compute_alone() -> None:
    mask = family_mask("causal", 8_192)
    layer = simulate_layer(mask, 1, DistAttnConfig(), REQUEST)
    cost = CostModel(machine=replace(ROUND, forward_tflops=640.0), num_heads_q=64, num_heads_kv=8, head_dim=128)
    assert layer.forward.timeline.time_us == pytest.approx(mask.area() * cost.pair_us(False) + 10.0), "pairs and one launch"
    assert layer.backward.timeline.time_us == pytest.approx(mask.area() * 2.5 * cost.pair_us(False) * 640 / 540 + 10.0)
    assert slowest_rank(layer.forward) == (0, "work alone")
    long = simulate_layer(family_mask("full", 262_144), 1, DistAttnConfig(), REQUEST)
    assert (long.forward.tflops_per_gpu, long.backward.tflops_per_gpu) == pytest.approx((640, 540), rel=1e-3), "the table's rates"


def test_one_document_per_rank_moves_nothing() -> None:
    borders = [0, 1000, 2000, 3000, 4000]
    mask = from_cu_seqlens(borders, borders, causal=True)
    request = replace(REQUEST, dispatch_q=contiguous_dispatch(4_000, 4))
    layer = simulate_layer(mask, 4, DistAttnConfig(), request)
    for direction in layer.directions().values():
        assert direction.traffic.num_steps == 0 and direction.timeline.links.nvlink_out.num_bytes.sum() == 0
        np.testing.assert_allclose(direction.timeline.end_us, direction.timeline.work_us[0])


def test_empty_mask_and_ranks_without_tokens() -> None:
    empty = simulate_layer(from_cu_seqlens([0], [0], causal=True), 4, DistAttnConfig(), REQUEST)
    assert empty.forward.timeline.time_us == pytest.approx(10.0) and empty.backward.tflops_per_gpu == 0
    few = simulate_layer(from_cu_seqlens([0, 3], [0, 3], causal=True), 8, overlap(2), REQUEST)
    assert np.isfinite(few.backward.timeline.end_us).all() and few.forward.traffic.areas.sum() == 6


def test_equal_inputs_give_equal_bits() -> None:
    layers = [simulate_layer(family_mask("documents", 40_000), 16, DistAttnConfig(), replace(REQUEST, num_nodes=2)) for _ in range(2)]
    for name, direction in layers[0].directions().items():
        other = layers[1].directions()[name]
        for field in ("attention_end_us", "cast_us", "reduce_us", "end_us"):
            assert getattr(direction.timeline, field).tobytes() == getattr(other.timeline, field).tobytes()


def test_parts_of_the_time_add_up() -> None:
    for direction in simulate_layer(family_mask("causal", 65_536), 8, overlap(4), REQUEST).directions().values():
        parts = exposed_us(direction)
        np.testing.assert_allclose(sum(parts.values()), direction.timeline.end_us)
        assert all((times >= -1e-6).all() for times in parts.values())


def test_mover_choice() -> None:
    machine = replace(ROUND, name="round-nvlink")
    assert choose_mover("auto", machine, 2e6, is_return=False).name == "copy-engine"
    assert choose_mover("auto", machine, 2e3, is_return=False).name == "sm"
    assert choose_mover("copy-engine", machine, 2e6, is_return=True).name == "sm", "copy engines do not add"
    assert choose_mover("auto", ROUND, 2e6, is_return=False).name == "a2av"
    with pytest.raises(InputError, match="--mover='pigeon'"):
        choose_mover("pigeon", machine, 1.0, is_return=False)


def test_what_cannot_be_simulated_is_named() -> None:
    with pytest.raises(InputError, match="ranks=12 do not fill nodes of 8"):
        nodes_of("h200", 12)
    with pytest.raises(InputError, match="machine='tpu'"):
        nodes_of("tpu", 8)
    with pytest.raises(InputError, match="take at least 2 nodes"):
        simulate_layer(family_mask("full", 100), 16, DistAttnConfig(), REQUEST)
    with pytest.raises(InputError, match="casts has 0 movers; the plan has 2"):
        simulate(HAND, COST, [])
    with pytest.raises(InputError, match="enable=False"):
        run(HAND, cost=replace(COST, is_overlapped=False))
