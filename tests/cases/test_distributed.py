"""Cases M, N, D and A about attention itself over 1 to 8 ranks. What is smaller than the catalogue asks: README of this folder."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from magi_attention.api import (
    BSDispatchAlg,
    ContiguousDispatchAlg,
    DPDispatchAlg,
    LBDispatchAlg,
    MinHeapDispatchAlg,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
    ZigzagDispatchAlg,
)
from magi_attention.config import DispatchAlg
from magi_attention.kernels.reference import attention_reference
from magi_attention.mask.slices import UNBOUNDED
from magi_attention.runtime import steps
from magi_attention.testing.workers import RankPool
from tests.cases.by_keys import check_documents
from tests.poison import NUMBERS, poisoned
from tests.runtime.harness import (
    Problem,
    assemble,
    assert_parity,
    causal,
    eager,
    full,
    poisoned_on_rank,
    reference,
    run_on_rank,
)

LIGHT = {"num_heads_q": 2, "num_heads_kv": 1, "head_dim": 128, "dtype": torch.bfloat16}
DEFAULT = {"num_heads_q": 8, "num_heads_kv": 2, "head_dim": 128, "dtype": torch.bfloat16}  # the catalogue's
ALL_ALGS: tuple[DispatchAlg, ...] = (
    MinHeapDispatchAlg(),
    ToppHeapDispatchAlg(),
    LBDispatchAlg(),
    DPDispatchAlg(),
    BSDispatchAlg(),
    SortedSequentialSelectAlg(),
    SequentialDispatchAlg(),
    ContiguousDispatchAlg(),
    ZigzagDispatchAlg(),
)


def parts_of(rank_pool: RankPool, num_ranks: int, problem: Problem) -> list[dict[str, np.ndarray]]:
    return [found[0] for found in rank_pool.run(num_ranks, run_on_rank, [problem], timeout_s=120)]


def check_on(rank_pool: RankPool, rank_counts: tuple[int, ...], problem: Problem) -> None:
    twins = reference(problem), eager(problem)
    for num_ranks in rank_counts:
        assert_parity(problem, parts_of(rank_pool, num_ranks, problem), twins=twins)


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 4, 8))
def test_n01_natural_logarithm(rank_pool: RankPool, num_ranks: int) -> None:
    problem = Problem(full(8, 8), 8, **DEFAULT, chunk_size=1, constants=(("q", 0.0), ("k", 0.0)))
    lse = assemble(problem, parts_of(rank_pool, num_ranks, problem))["lse"]
    assert torch.allclose(lse, torch.full_like(lse, math.log(8)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sink_layout", (None, "sh"))
def test_n02_loss_on_lse(rank_pool: RankPool, sink_layout: str | None) -> None:
    """loss = 0.5 * out.sum() + lse.sum()"""
    constants = (("dout", 0.5), ("dlse", 1.0))
    problem = Problem(causal([256]), 256, **DEFAULT, sink_layout=sink_layout, uses_lse=True, constants=constants)
    check_on(rank_pool, (1, 2), problem)


def run_and_watch_partials(rank: int, num_ranks: int, problem: Problem) -> tuple[dict[str, np.ndarray], set[str]]:
    """The run, and the dtypes of the partial gradients that travel and of what they are added to."""
    seen: set[str] = set()
    send = steps.group_reduce

    def watched(exchange: Any, partials: list[torch.Tensor], group: Any, *, into: list[torch.Tensor], **options: Any) -> Any:
        seen.update(str(x.dtype) for x in (*partials, *into))
        return send(exchange, partials, group, into=into, **options)

    with mock.patch.object(steps, "group_reduce", watched):
        (found,) = run_on_rank(rank, num_ranks, [problem])
    return found, seen


def causal_reference(problem: Problem, rows_at_once: int = 1024) -> dict[str, torch.Tensor]:
    """The float64 twin of one causal sequence, in runs of rows that read only the keys before their end."""
    inputs = {name: x.double().requires_grad_(name != "dout") for name, x in problem.inputs().items()}
    leaves = [inputs[name] for name in "qkv"]
    outs, grads = [], [torch.zeros_like(x) for x in leaves]
    for start in range(0, problem.total_q, rows_at_once):
        rows, keys = slice(start, start + rows_at_once), slice(0, start + rows_at_once)
        dense = torch.ones(rows_at_once, keys.stop, dtype=torch.bool).tril(start)
        out, _, _ = attention_reference(inputs["q"][rows], inputs["k"][keys], inputs["v"][keys], dense)
        for total, grad in zip(grads, torch.autograd.grad(out, leaves, inputs["dout"][rows]), strict=True):
            total += grad
        outs.append(out.detach())
    return {"out": torch.cat(outs), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def test_n16_error_does_not_grow_with_ranks(rank_pool: RankPool) -> None:
    problem = Problem(causal([8192]), 8192, num_heads_q=2, num_heads_kv=1, head_dim=64, dtype=torch.bfloat16)
    exact = causal_reference(problem)
    errors = {}
    for num_ranks in (1, 2, 4, 8):
        per_rank = rank_pool.run(num_ranks, run_and_watch_partials, problem, timeout_s=120)
        assert all(seen == ({"torch.float32"} if num_ranks > 1 else set()) for _, seen in per_rank), "partials are fp32"
        ours = assemble(problem, [found for found, _ in per_rank])
        errors[num_ranks] = {name: (ours[name].double() - exact[name]).abs().max().item() for name in exact}
    for name, alone in errors[1].items():
        assert errors[8][name] <= 1.5 * alone, f"{name}: {errors}"


@pytest.mark.parametrize("scale", (1.0, 0.0625))
def test_n24_scale_reaches_every_path(rank_pool: RankPool, scale: float) -> None:
    check_on(rank_pool, (1, 2), Problem(causal([100, 28]), 128, **DEFAULT, softmax_scale=scale))


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_n26_sink(rank_pool: RankPool, num_ranks: int) -> None:
    constants = (("q", 0.0), ("k", 0.0), ("v", 1.0), ("dout", 1.0), ("sink", 1.0))
    problem = Problem(full(8, 8), 8, num_heads_q=1, num_heads_kv=1, head_dim=64, chunk_size=2, sink_layout="sh", constants=constants)
    ours = assemble(problem, parts_of(rank_pool, num_ranks, problem))
    assert torch.allclose(ours["lse"], torch.tensor(2.371951), rtol=0, atol=2e-6)
    assert torch.allclose(ours["out"], torch.tensor(0.746388), rtol=0, atol=2e-6)
    assert torch.allclose(ours["dsink"], torch.tensor(8 * -12.114740), rtol=1e-6, atol=0)  # no factor of the number of ranks


def test_n28_sink_window_documents(rank_pool: RankPool) -> None:
    slices = causal([137, 2041, 89], left=127)
    problem = Problem(slices, 2267, **LIGHT, sink_layout="sh", sink_grad_reduce="sum")
    twins = reference(problem), eager(problem)
    for num_ranks in (1, 2, 4, 8):
        parts = parts_of(rank_pool, num_ranks, problem)
        assert all(np.array_equal(part["dsink"], parts[0]["dsink"]) for part in parts)
        assert_parity(problem, parts, twins=twins)


def test_d03_any_length_without_padding(rank_pool: RankPool) -> None:
    problem = Problem(causal([137, 2041, 89]), 2267, **LIGHT)
    assert problem.mask.area() == 2_097_319
    check_documents(rank_pool, (2, 3, 4, 8), problem, [0, 137, 2178, 2267], [{"causal": True}])


def test_m08_windows_that_mean_causal(rank_pool: RankPool) -> None:
    windows = [{"causal": True}, {"window_size": (None, 0)}, {"window_size": (-1, 0)}, {"causal": True, "window_size": (-1, -1)}]
    check_documents(rank_pool, (1, 2), Problem(causal([1024, 1024]), 2048, **DEFAULT), [0, 1024, 2048], windows)


def test_a03_uneven_shares(rank_pool: RankPool) -> None:
    problem = Problem(causal([2999]), 2999, num_heads_q=2, num_heads_kv=1, head_dim=64, dtype=torch.bfloat16)
    check_documents(rank_pool, (4,), problem, [0, 2999], [{"causal": True}])


@pytest.mark.parametrize("total", (100, 1, 0))
def test_d05_ranks_without_tokens(rank_pool: RankPool, total: int) -> None:
    problem = Problem(causal([total]), total, **DEFAULT, chunk_size=128)
    parts = [found[0] for found in rank_pool.run(8, run_on_rank, [problem], timeout_s=30)]
    assert sum(len(part["out"]) for part in parts) == total
    assert sum(len(part["out"]) > 0 for part in parts) == min(1, total)
    assert_parity(problem, parts)


@pytest.mark.parametrize("num_ranks", (2, 4))
def test_d08_layers_with_other_head_counts(rank_pool: RankPool, num_ranks: int) -> None:
    heads = [(12, 12), (6, 3), (28, 7), (40, 8)]
    layers = [Problem(causal([50, 14]), 64, num_heads_q=q, num_heads_kv=kv, head_dim=8, chunk_size=4) for q, kv in heads]
    for order in (layers, layers[::-1]):
        per_rank = rank_pool.run(num_ranks, run_on_rank, order)
        for layer, parts in zip(order, zip(*per_rank, strict=True), strict=True):
            assert_parity(layer, parts)


@pytest.mark.parametrize("alg", ALL_ALGS, ids=lambda alg: type(alg).__name__)
def test_d18_every_dispatch_policy(rank_pool: RankPool, alg: DispatchAlg) -> None:
    check_on(rank_pool, (2,), Problem(full(128, 128), 128, num_heads_q=1, num_heads_kv=1, head_dim=64, alg=alg))


# ---- POISON over ranks ----

POISONED = {
    "m01": Problem(
        [[0, 76, 0, 1, -UNBOUNDED, 1 - 76], [76, 110, 1, 2, -UNBOUNDED, 2 - 110], [110, 256, 2, 3, -UNBOUNDED, 3 - 256]],
        256,
        total_k=3,
        num_heads_q=1,
        num_heads_kv=1,
        head_dim=32,
        dtype=torch.float16,
        chunk_size=16,
    ),
    "m10": Problem([[0, 128, 0, 128, -UNBOUNDED, UNBOUNDED], [256, 512, 0, 512, -UNBOUNDED, UNBOUNDED]], 512, **LIGHT, chunk_size=32),
    "n11": Problem(causal([144, 288, 512]), 946, **LIGHT, chunk_size=32),
}
EMPTY_ROWS = {"m01": [row for row in range(256) if row not in (75, 109, 255)], "m10": range(128, 256), "n11": (944, 945)}


@pytest.mark.parametrize("number", NUMBERS)
def test_m01_m10_n11_poisoned_memory_over_ranks(rank_pool: RankPool, number: str) -> None:
    """Rows outside every slice, whichever rank owns them: exact zeros, with new memory of every rank full of NaN or +inf."""
    for num_ranks in (2, 3):
        per_rank = rank_pool.run(num_ranks, poisoned_on_rank, list(POISONED.values()), number)
        for (name, problem), parts in zip(POISONED.items(), zip(*per_rank, strict=True), strict=True):
            assert_parity(problem, parts, f"{name} ")
            whole, empty = assemble(problem, parts), list(EMPTY_ROWS[name])
            assert all(bool((whole[value][empty] == 0).all()) for value in ("out", "dq")), name
            assert bool((whole["lse"][empty] == -torch.inf).all()), name
            if name == "n11":
                assert bool((whole["dk"][empty] == 0).all() and (whole["dv"][empty] == 0).all())
                assert (whole["dk"].flatten(1).T @ torch.randn(946, 16)).isfinite().all()


def test_poisoned_memory_is_what_it_says() -> None:
    for number in NUMBERS:
        with poisoned(number):
            fresh = torch.empty(7), torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)), torch.zeros(2).new_empty(5)
            assert all(str(float(x)) == number for tensor in fresh for x in tensor)
            octets = torch.empty(64, dtype=torch.uint8).view(torch.float32)  # what exchanges pack floats in
            assert octets.isnan().all() if number == "nan" else octets.isposinf().all()
