"""Summaries say what the plans say, for all ranks at once."""

from __future__ import annotations

import time

import numpy as np
import pytest

from magi_attention.config import DistAttnConfig
from magi_attention.mask import builders
from magi_attention.plan.build import PlanRequest, plan_attention
from magi_attention.plan.summary import queries_per_key, remote_rows_lower_bound, summarize
from magi_attention.testing.masks import mask_catalogue
from tests.plan.plans import HEADS, contiguous_dispatch, overlap


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_summary_equals_the_plans(num_nodes: int) -> None:
    mask = builders.from_cu_seqlens([0, 900, 1000, 4096], [0, 900, 1000, 4096], causal=True)
    config = overlap(3)
    summary = summarize(mask, 4, config, PlanRequest(**HEADS, num_nodes=num_nodes))
    for rank in range(4):
        plan = plan_attention(mask, 4, rank, config, **HEADS, num_nodes=num_nodes)
        for ours, theirs in (
            ("rank_areas", plan.rank_areas),
            ("rank_recv_rows", plan.rank_recv_rows),
            ("rank_send_rows", plan.rank_send_rows),
        ):
            assert np.array_equal(getattr(summary, ours), theirs)
        for direction, steps in ((summary.forward, plan.forward), (summary.backward, plan.backward)):
            loads = direction.loads
            assert direction.degree == len(steps) - 1 and loads.local_areas[rank] == steps[0].area
            assert loads.areas[:, rank].tolist() == [step.area for step in steps[1:]]
            exchanges = [step.exchange for step in steps[1:] if step.exchange]
            assert loads.recv_rows[:, rank].tolist() == [sum(exchange.recv_counts) for exchange in exchanges]
            assert loads.send_rows[:, rank].tolist() == [sum(exchange.send_counts) for exchange in exchanges]
            if num_nodes > 1:
                inters = [step.hierarchical.inter for step in steps[1:] if step.hierarchical]
                assert loads.node_recv_rows is not None and loads.node_send_rows is not None
                assert loads.node_recv_rows[:, rank].tolist() == [sum(inter.recv_counts) for inter in inters]
                assert loads.node_send_rows[:, rank].tolist() == [sum(inter.send_counts) for inter in inters]
    assert summary.reasons == plan.reasons
    assert summary.area == mask.area() and summary.rank_tokens.sum() == 4096


def test_bytes_of_both_directions() -> None:
    """Forward: rows of k and v. Backward: the same out, fp32 dk and dv back, so received and sent bytes trade places."""
    mask = builders.from_cu_seqlens([0, 256], [0, 256], causal=True)
    summary = summarize(mask, 2, overlap(1), PlanRequest(**HEADS, dispatch_q=contiguous_dispatch(256, 2)))
    row = 2 * HEADS["num_heads_kv"] * HEADS["head_dim"]
    assert summary.forward.recv_bytes.tolist() == [0, 128 * row * 2] and summary.forward.send_bytes.tolist() == [128 * row * 2, 0]
    assert summary.backward.recv_bytes.tolist() == [128 * row * 4, 128 * row * 2]
    assert summary.backward.send_bytes.tolist() == [128 * row * 2, 128 * row * 4]


@pytest.mark.parametrize("name", mask_catalogue())
def test_queries_per_key_counts_columns(name: str) -> None:
    mask = mask_catalogue()[name]
    assert np.array_equal(queries_per_key(mask), mask.to_dense().sum(axis=0))


@pytest.mark.parametrize("name", ["causal", "window", "documents_causal", "prefix_tree", "full", "video"])
def test_lower_bound_is_below_every_dispatch(name: str) -> None:
    mask = mask_catalogue()[name]
    for cp_size in (2, 4):
        summary = summarize(mask, cp_size, DistAttnConfig(), PlanRequest(**HEADS))
        assert 0 <= summary.remote_rows_lower_bound <= summary.remote_rows


def test_lower_bound_is_reached_by_full_attention() -> None:
    mask = builders.sliding_window(128, 128, None)
    assert remote_rows_lower_bound(mask, 32) == 3 * 128
    assert summarize(mask, 4, DistAttnConfig(), PlanRequest(**HEADS, dispatch_q=contiguous_dispatch(128, 4))).remote_rows == 3 * 128
    assert remote_rows_lower_bound(mask, 0) == 0


def test_many_ranks_in_one_process() -> None:
    borders = np.linspace(0, 1 << 20, 2_001).astype(int).tolist()
    mask = builders.from_cu_seqlens(borders, borders, causal=True)
    start = time.perf_counter()
    summary = summarize(mask, 4_096, DistAttnConfig(), PlanRequest(**HEADS, num_nodes=512))
    assert time.perf_counter() - start < 10.0
    assert summary.area == mask.area() and len(summary.rank_areas) == 4_096
    assert summary.rank_recv_rows.sum() == summary.rank_send_rows.sum()
    assert summary.forward.rank_times_us.min() >= 0 and summary.imbalance >= 1.0


def test_empty_mask() -> None:
    summary = summarize(builders.sliding_window(0, 0, None), 4, DistAttnConfig(), PlanRequest(**HEADS))
    assert summary.imbalance == 1.0 and summary.remote_rows == 0 and summary.forward.degree == 0
