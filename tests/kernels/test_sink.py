"""Sinks: what attention starts from, their gradient against autograd, refusals."""

from __future__ import annotations

import pytest
import torch

from magi_attention.errors import InputError
from magi_attention.kernels.sink import check_sink, sink_backward, sink_lse
from magi_attention.testing.masks import mask_catalogue
from tests.kernels.problems import check, make_case, run_ours

pytestmark = pytest.mark.usefixtures("one_thread")

CATALOGUE = mask_catalogue()


def test_without_sink_attention_starts_from_nothing() -> None:
    assert torch.equal(sink_lse(None, "sh", 3, 2, torch.float32), torch.full((3, 2), -torch.inf))
    assert torch.equal(sink_lse(torch.zeros(0, 2), "sh", 3, 2, torch.float32), torch.full((3, 2), -torch.inf))


def test_sink_lse_joins_the_sinks() -> None:
    sink = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    want = torch.logsumexp(sink, 0)
    assert torch.allclose(sink_lse(sink, "sh", 3, 2, torch.float32), want.expand(3, 2))
    per_row = torch.randn(3, 2, 2)
    assert torch.allclose(sink_lse(per_row, "ssh", 3, 2, torch.float64), torch.logsumexp(per_row.double(), 1))


@pytest.mark.parametrize("name", ["rows_without_keys", "documents_causal", "no_keys", "window", "empty"])
@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_sink_in_attention_with_both_gradients(name: str, layout: str) -> None:
    mask = CATALOGUE[name]
    shape = (2, 4) if layout == "sh" else (mask.total_q, 2, 4)
    ours = check(f"{name} {layout}", mask, (4, 2), (16, 16), torch.float32, sink_shape=shape, sink_layout=layout, with_dlse=True)
    assert ours.values["dsink"].shape == shape


def test_a_row_without_keys_has_the_lse_of_its_sinks() -> None:
    mask = CATALOGUE["rows_without_keys"]
    case = make_case(mask, (4, 2), (8, 8), torch.float32, sink_shape=(3, 4))
    ours = run_ours(case, mask)
    dead = ~case.dense.any(1)
    assert (ours.values["out"][dead] == 0).all()
    torch.testing.assert_close(ours.values["lse"][dead], torch.logsumexp(case.tensors["sink"], 0).expand(int(dead.sum()), 4))


def test_garbage_in_the_gradient_of_dead_rows_does_not_reach_the_sink() -> None:
    mask = CATALOGUE["rows_without_keys"]
    case = make_case(mask, (4, 2), (8, 8), torch.float32, sink_shape=(1, 4))
    clean = run_ours(case, mask).values["dsink"]
    case.dout[~case.dense.any(1)] = float("nan")
    assert torch.equal(run_ours(case, mask).values["dsink"], clean)


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    sink = torch.full((1, 2), -torch.inf)
    lse = sink_lse(sink, "sh", 4, 2, torch.float32)
    assert (lse == -torch.inf).all()
    assert (sink_backward(sink, "sh", lse, torch.ones(4, 2)) == 0).all()


@pytest.mark.parametrize(
    ("sink", "layout", "told"),
    [
        (torch.zeros(1, 4), "hs", "sink_layout='hs'"),
        (torch.zeros(1, 3), "sh", r"\[num_sink, 4\]"),
        (torch.zeros(4), "sh", r"\[4\]"),
        (torch.zeros(5, 1, 4), "ssh", r"\[6, num_sink, 4\]"),
        (torch.zeros(1, 4, dtype=torch.int32), "sh", "int32"),
    ],
)
def test_wrong_sinks_are_refused(sink: torch.Tensor, layout: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        check_sink(sink, layout, 6, 4)
