"""The check before a timing: it passes right results, names wrong ones, and its twins are the dense ones."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import ffa_check
from benchmarks.ffa_cells import Cell, Layout
from benchmarks.ffa_check import Problem, check, draw, heads_to_check, poison_freed_memory, visible
from benchmarks.ffa_providers import PROVIDERS, reason_not_installed
from magi_attention.kernels.ops import single_device_attention
from magi_attention.mask import AttnMask, builders
from magi_attention.testing.numerics import AttentionCase

TOTAL = 150
LAYOUTS = {
    "full": Layout((0, TOTAL)),
    "causal": Layout((0, TOTAL), is_causal=True),
    "documents": Layout((0, 7, 7, 90, TOTAL)),
    "documents_causal": Layout((0, 7, 7, 90, TOTAL), is_causal=True),
    "window": Layout((0, TOTAL), is_causal=True, window=20),
    "frames": Layout((0, TOTAL), frame=64),
}


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffa_check, "_ELEMENTS_AT_ONCE", 40 * 2 * TOTAL)  # several runs of rows


def problem_of(layout: Layout, heads: tuple[int, int] = (4, 2), dtype: str = "bfloat16") -> Problem:
    problem = draw(Cell("full", layout.total, *heads, 64, dtype), "cpu")
    return dataclasses.replace(problem, layout=layout, mask=layout.mask())


def results_of(problem: Problem, attend: Callable[..., Any]) -> dict[str, Tensor | None]:
    leaves = (problem.q, problem.k, problem.v)
    out, lse = attend(*leaves)
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, problem.dout), strict=True))}


def attend_with(mask: AttnMask) -> Callable[..., Any]:
    return lambda q, k, v: single_device_attention(q, k, v, mask.slices)[:2]


@pytest.mark.parametrize("name", LAYOUTS)
def test_right_results_pass(name: str) -> None:
    problem = problem_of(LAYOUTS[name])
    verdict = check(problem, results_of(problem, attend_with(problem.mask)))
    assert verdict.passed and 0 < verdict.error_ratio < 1 and verdict.worst


@pytest.mark.parametrize("tensor", ["out", "lse", "dq", "dk", "dv"])
def test_one_wrong_number_fails_and_is_named(tensor: str) -> None:
    problem = problem_of(LAYOUTS["causal"])
    results = results_of(problem, attend_with(problem.mask))
    found = results[tensor]
    assert found is not None
    wrong = found.detach().clone()
    wrong[-1, -1] += 0.5
    verdict = check(problem, results | {tensor: wrong})
    assert not verdict.passed and verdict.worst == f"{tensor} of kv head 1"
    wrong = found.detach().clone()
    wrong[0, 0] = float("nan")
    verdict = check(problem, results | {tensor: wrong})
    assert not verdict.passed and tensor in verdict.worst


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("full", LAYOUTS["causal"].mask()),
        ("window", builders.sliding_window(TOTAL, TOTAL, (20, 0))),
        ("frames", builders.block_causal_video(3, 63, TOTAL)),
        ("documents", LAYOUTS["full"].mask()),
    ],
)
def test_another_mask_fails(name: str, other: AttnMask) -> None:
    problem = problem_of(LAYOUTS[name])
    assert check(problem, results_of(problem, attend_with(other))).error_ratio > 5 * PROVIDERS["flex"].most_error


def test_twins_are_the_dense_ones() -> None:
    problem = problem_of(LAYOUTS["window"])
    tensors = {name: getattr(problem, name).detach() for name in "qkv"}
    case = AttentionCase(tensors, torch.from_numpy(np.array(problem.mask.to_dense())), problem.dout, None, {})
    whole, reference = case.reference().values, problem.reference(1)
    for name, value in reference.values.items():
        part = whole[name][:, 1:2] if name in ("dk", "dv") else whole[name][:, 2:4]
        torch.testing.assert_close(value, part.double(), rtol=1e-12, atol=1e-12)
    assert all(0 < allowed < 0.1 for allowed in reference.allowed.values())
    assert problem.reference(1) is reference  # computed once per problem


def test_rows_without_keys() -> None:
    mask = AttnMask.from_slices([[10, 20, 5, 60, -1000, 0]], TOTAL, TOTAL)
    problem = dataclasses.replace(problem_of(LAYOUTS["full"]), mask=mask)
    assert check(problem, results_of(problem, attend_with(mask))).passed


def test_heads_that_are_checked() -> None:
    assert heads_to_check(Cell("full", 1024, 48, 8, 128)) == (0, 7) and heads_to_check(Cell("full", 65_536, 48, 8, 128)) == (7,)
    assert heads_to_check(Cell("full", 1024, 8, 1, 128)) == (0,)


def test_visible_is_the_dense_mask() -> None:
    dense = torch.from_numpy(np.array(LAYOUTS["documents_causal"].mask().to_dense()))
    own = LAYOUTS["documents_causal"].mask().slices
    touching = own[(own[:, 0] < 100) & (own[:, 1] > 5)]
    assert torch.equal(visible(touching, (5, 100), (0, TOTAL), torch.device("cpu")), dense[5:100])


def test_drawing_repeats_and_poison_leaves_the_problem_alone() -> None:
    first, second = (problem_of(LAYOUTS["causal"]) for _ in range(2))
    poison_freed_memory(first)
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("q", "k", "v", "dout"))
    assert float(first.q.detach().float().std()) == pytest.approx(1.0, abs=0.05)


# ---- providers that run here ----


@pytest.mark.parametrize("name", ["full", "causal"])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=str)
def test_torch_flash_attention_gets_the_problem(name: str, heads: tuple[int, int]) -> None:
    problem, provider = problem_of(LAYOUTS[name], heads), PROVIDERS["sdpa_flash"]
    assert reason_not_installed(provider) is None and provider.takes(problem.layout)
    assert check(problem, results_of(problem, provider.prepare(problem, "bwd"))).error_ratio <= provider.most_error


def test_our_rows_must_keep_the_rule() -> None:
    assert {name for name, provider in PROVIDERS.items() if provider.most_error == 1.0} == {"ours", "blocked"}


def test_only_plain_masks_go_to_torch() -> None:
    taken = {name for name, layout in LAYOUTS.items() if PROVIDERS["cudnn"].takes(layout)}
    assert taken == {"full", "causal"}
    assert {name for name, layout in LAYOUTS.items() if not PROVIDERS["fa3"].takes(layout)} == {"frames"}
    assert all(PROVIDERS[name].takes(layout) for name in ("ours", "flex") for layout in LAYOUTS.values())


def stand_in() -> types.ModuleType:
    """A module with the two functions of FlashAttention, computed by our path, to see which arguments arrive."""

    def attend(q: Tensor, k: Tensor, v: Tensor, borders: list[int], causal: bool, window_size: tuple[int, int]) -> Tensor:
        mask = builders.from_cu_seqlens(borders, borders, causal=causal, window_size=window_size)
        return single_device_attention(q, k, v, mask.slices)[0]

    def one(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> tuple[Tensor, None]:
        assert q.shape[0] == 1
        return attend(q[0], k[0], v[0], [0, q.shape[1]], causal, window_size)[None], None

    def packed(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **cu: Any) -> Tensor:
        borders = cu["cu_seqlens_q"]
        assert borders.dtype == torch.int32 and torch.equal(borders, cu["cu_seqlens_k"])
        assert int(borders.diff().max()) == cu["max_seqlen_q"] == cu["max_seqlen_k"]
        return attend(q, k, v, borders.tolist(), causal, (-1, -1))

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_func, module.flash_attn_varlen_func = one, packed  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "frames"])
def test_what_flash_attention_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stand_in())
    problem, provider = problem_of(LAYOUTS[name]), PROVIDERS["fa3"]
    assert provider.takes(problem.layout) and provider.version() == "flash_attn_3"
    assert check(problem, results_of(problem, provider.prepare(problem, "bwd"))).passed


def test_a_provider_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert "flash_attn_interface" in (reason_not_installed(PROVIDERS["fa3"]) or "")
