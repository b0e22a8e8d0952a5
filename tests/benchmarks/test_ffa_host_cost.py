"""Host time of a call: the cases run, and limits are judged. The times themselves need a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import ffa_host_cost
from benchmarks.ffa_host_cost import HostCost, cases, measure


def test_every_case_runs_and_the_promises_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffa_host_cost, "_TOKENS", 96)
    found = cases("cpu")
    assert {case.name: case.limit_us for case in found if case.limit_us} == {
        "plan, forward": 40.0,
        "range tensors unchanged, forward": 80.0,
        "range tensors rewritten, forward": 80.0,
        "range tensors new, forward": 80.0,
    }
    outs = []
    for case in found:
        case.before()
        result = case.call()
        assert isinstance(result, tuple)
        outs.append(result[0])
    assert [list(out.shape) for out in outs] == [[96, 8, 128]] * 6
    assert all(torch.equal(outs[0], outs[idx]) for idx in (3, 4, 5))  # the ranges are the plan's mask


def test_limits() -> None:
    assert HostCost(40.0, 90.0, None).is_within(40.0) and not HostCost(40.1, 41.0, None).is_within(40.0)
    assert not HostCost(1.0, 1.0, "called a synchronizing operation").is_within(40.0)
    assert HostCost(900.0, 900.0, "called a synchronizing operation").is_within(0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cases_are_measured_on_a_gpu() -> None:
    for case in cases():
        found = measure(case, num_calls=60)
        assert 0 < found.median_us <= found.p90_us
    assert torch.cuda.get_sync_debug_mode() == 0
