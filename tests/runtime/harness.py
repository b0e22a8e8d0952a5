"""One attention problem run on N ranks and put together again in global order, beside its float64 and eager twins. For tests only.

Rank functions (`*_on_rank`) run in the processes of a rank pool and return numpy arrays; the other functions run in the test itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from magi_attention.comm import SINGLE, comm_group
from magi_attention.config import DispatchAlg, DispatchConfig, DistAttnConfig, MinHeapDispatchAlg, OverlapConfig
from magi_attention.kernels.reference import attention_reference, dense_attention
from magi_attention.mask.slices import UNBOUNDED, AttnMask
from magi_attention.plan.build import plan_attention
from magi_attention.plan.routes import TokenRoutes
from magi_attention.plan.types import DispatchPlan, RankPlan
from magi_attention.runtime.attention import dist_attention
from magi_attention.runtime.rows import TokenOwners
from magi_attention.testing.numerics import assert_close_to_reference
from tests.poison import poisoned

Slices = Sequence[Sequence[int]]


def causal(lengths: Sequence[int], left: int | None = None) -> list[list[int]]:
    """Slices of documents one after another, each causal, with a window of `left` tokens when given."""
    borders = np.cumsum([0, *lengths]).tolist()
    lo = -UNBOUNDED if left is None else -left
    return [[start, end, start, end, lo, 0] for start, end in itertools.pairwise(borders) if end > start]


def full(total_q: int, total_k: int) -> list[list[int]]:
    return [[0, total_q, 0, total_k, -UNBOUNDED, UNBOUNDED]]


@dataclass(frozen=True)
class Problem:
    """Inputs are drawn from `seed`: equal on every rank. total_k None is self attention."""

    slices: Slices
    total_q: int
    total_k: int | None = None
    num_heads_q: int = 4
    num_heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    sink_layout: str | None = None
    num_sinks: int = 1
    softmax_scale: float | None = None
    softcap: float = 0.0
    uses_lse: bool = False
    seed: int = 0
    chunk_size: int | None = None
    alg: DispatchAlg = field(default_factory=MinHeapDispatchAlg)
    degree: int | None = None
    has_overlap: bool = True
    sink_grad_reduce: str | None = None
    num_nodes: int = 1
    deterministic: bool = False
    constants: tuple[tuple[str, float], ...] = ()  # inputs that hold one number everywhere

    @property
    def mask(self) -> AttnMask:
        return AttnMask.from_slices(np.array(self.slices, np.int32).reshape(-1, 6), self.total_q, self.num_keys)

    @property
    def num_keys(self) -> int:
        return self.total_q if self.total_k is None else self.total_k

    @property
    def config(self) -> DistAttnConfig:
        return DistAttnConfig(
            dispatch_config=DispatchConfig(chunk_size=self.chunk_size, alg=self.alg),
            overlap_config=OverlapConfig(degree=self.degree, enable=self.has_overlap, min_chunk_size=1),
            sink_grad_reduce=self.sink_grad_reduce,
            deterministic=self.deterministic,
        )

    def plan(self, cp_size: int, cp_rank: int, **options: Any) -> RankPlan:
        return plan_attention(
            self.mask,
            cp_size,
            cp_rank,
            self.config,
            num_heads_q=self.num_heads_q,
            num_heads_kv=self.num_heads_kv,
            head_dim=self.head_dim,
            num_nodes=self.num_nodes,
            is_same_source=self.total_k is None,
            **options,
        )

    def inputs(self) -> dict[str, torch.Tensor]:
        """q, k, v, dout, and dlse, sink when used, all in global order."""
        generator = torch.Generator().manual_seed(self.seed)
        width_v = self.head_dim_v or self.head_dim

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        drawn = {
            "q": draw(self.total_q, self.num_heads_q, self.head_dim).to(self.dtype),
            "k": draw(self.num_keys, self.num_heads_kv, self.head_dim).to(self.dtype),
            "v": draw(self.num_keys, self.num_heads_kv, width_v).to(self.dtype),
            "dout": draw(self.total_q, self.num_heads_q, width_v).to(self.dtype),
        }
        statistics = torch.float64 if self.dtype == torch.float64 else torch.float32
        if self.uses_lse:
            drawn["dlse"] = draw(self.total_q, self.num_heads_q).to(statistics)
        if self.sink_layout == "sh":
            drawn["sink"] = draw(self.num_sinks, self.num_heads_q).to(statistics)
        elif self.sink_layout == "ssh":
            drawn["sink"] = draw(self.total_q, self.num_sinks, self.num_heads_q).to(statistics)
        for name, number in self.constants:
            drawn[name].fill_(number)
        return drawn


def owners_of(dispatch: DispatchPlan, rank: int, num_tokens: int | None = None, group: Any = None) -> TokenOwners:
    """Owners over `group`, by default all ranks of the call."""
    found = SINGLE if dispatch.cp_size == 1 else comm_group(group)
    return TokenOwners(TokenRoutes(dispatch, rank, num_tokens), found, timeout_s=60.0)


@dataclass
class LocalCall:
    """This rank's leaves and results of one forward, kept for a later backward."""

    plan: RankPlan
    leaves: dict[str, torch.Tensor]
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    dout: torch.Tensor
    dlse: torch.Tensor | None

    def backward(self) -> None:
        out, lse, _ = self.results
        if self.dlse is None:
            out.backward(self.dout)
        else:
            torch.autograd.backward([out, lse], [self.dout, self.dlse])

    def arrays(self) -> dict[str, np.ndarray]:
        """Results as numpy (bf16 as float32), with the global rows they belong to."""
        out, lse, max_logits = self.results
        assert max_logits is not None
        found = {"out": out, "lse": lse, "max_logits": max_logits, **{f"d{name}": leaf.grad for name, leaf in self.leaves.items()}}
        arrays = {name: as_numpy(tensor) for name, tensor in found.items()}
        arrays["rows_q"] = self.plan.dispatch_q.position_ids(self.plan.cp_rank)
        arrays["rows_k"] = self.plan.dispatch_k.position_ids(self.plan.cp_rank)
        return arrays


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()


def forward_on_rank(problem: Problem, rank: int, num_ranks: int, group: Any = None, plan: RankPlan | None = None) -> LocalCall:
    """Plan, take local rows, run the forward."""
    plan = plan or problem.plan(num_ranks, rank)
    whole = problem.inputs()
    rows_q = torch.from_numpy(plan.dispatch_q.position_ids(rank).copy())
    rows_k = torch.from_numpy(plan.dispatch_k.position_ids(rank).copy())
    leaves = {"q": whole["q"][rows_q], "k": whole["k"][rows_k], "v": whole["v"][rows_k]}
    if problem.sink_layout is not None:
        leaves["sink"] = whole["sink"][rows_q] if problem.sink_layout == "ssh" else whole["sink"]
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in leaves.items()}
    results = dist_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        plan,
        group,
        problem.config,
        sink=leaves.get("sink"),
        sink_layout=problem.sink_layout or "sh",
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        return_max_logits=True,
    )
    dlse = whole["dlse"][rows_q] if problem.uses_lse else None
    return LocalCall(plan, leaves, results, whole["dout"][rows_q], dlse)


def run_on_rank(rank: int, num_ranks: int, problems: Sequence[Problem]) -> list[dict[str, np.ndarray]]:
    """Forward and backward of each problem, one after another."""
    found = []
    for problem in problems:
        call = forward_on_rank(problem, rank, num_ranks)
        call.backward()
        found.append(call.arrays())
    return found


def poisoned_on_rank(rank: int, num_ranks: int, problems: Sequence[Problem], number: str) -> list[dict[str, np.ndarray]]:
    """run_on_rank with uninitialised memory full of `number`, "nan" or "inf"."""
    with poisoned(number):
        return run_on_rank(rank, num_ranks, problems)


def assemble(problem: Problem, parts: Sequence[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Global out, lse, max_logits, dq, dk, dv, dsink from the parts of all ranks; every row exactly once."""
    whole = {}
    for name in parts[0]:
        if name.startswith("rows"):
            continue
        if name == "max_logits":
            assert all(np.array_equal(part[name], parts[0][name]) for part in parts), "max_logits differ between ranks"
            whole[name] = torch.from_numpy(parts[0][name])
        elif name == "dsink" and problem.sink_layout == "sh":
            shares = [part[name] for part in parts]
            whole[name] = torch.from_numpy(np.sum(shares, axis=0) if problem.sink_grad_reduce is None else shares[0])
        else:
            rows = np.concatenate([part["rows_k" if name in ("dk", "dv") else "rows_q"] for part in parts])
            assert np.array_equal(np.sort(rows), np.arange(len(rows))), f"rows of {name} are not all there once"
            joined = np.concatenate([part[name] for part in parts])
            whole[name] = torch.from_numpy(joined[np.argsort(rows)])
    return whole


def _with_grads(problem: Problem, attention: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [name for name in ("q", "k", "v", "sink") if name in inputs]
    leaves = {name: inputs[name].clone().requires_grad_() for name in names}
    dense = torch.from_numpy(problem.mask.to_dense().copy())
    scale = problem.softmax_scale if problem.softmax_scale is not None else problem.head_dim**-0.5
    options = {"sink": leaves.get("sink"), "sink_layout": problem.sink_layout or "sh", "softmax_scale": scale, "softcap": problem.softcap}
    out, lse, max_logits = attention(leaves["q"], leaves["k"], leaves["v"], dense, **options)
    loss = (out * inputs["dout"].to(out.dtype)).sum()
    if "dlse" in inputs:
        loss = loss + torch.where(lse.isfinite(), lse * inputs["dlse"].to(lse.dtype), 0).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {"out": out.detach(), "lse": lse.detach(), "max_logits": max_logits.detach()}
    for name, leaf, grad in zip(names, leaves.values(), grads, strict=True):
        found[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def reference(problem: Problem) -> dict[str, torch.Tensor]:
    """The float64 twin with gradients."""
    inputs = {name: tensor.double() for name, tensor in problem.inputs().items()}
    return _with_grads(problem, attention_reference, inputs)


def eager(problem: Problem) -> dict[str, torch.Tensor]:
    """Plain attention in the problem's dtype: scores and probabilities rounded to it, as eager PyTorch does."""
    return _with_grads(problem, dense_attention, problem.inputs())


def assert_parity(problem: Problem, parts: Sequence[dict[str, np.ndarray]], note: str = "", twins: Any = None) -> None:
    """Rule NUM on everything a call gives: ours against float64, bounded by the error of eager in the same dtype.

    `twins` is (reference(problem), eager(problem)) when a test has them already.
    """
    assert_near_twins(assemble(problem, parts), twins or (reference(problem), eager(problem)), f"{note}on {len(parts)} ranks: ")


def assert_near_twins(ours: dict[str, torch.Tensor], twins: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]], note: str) -> None:
    """Rule NUM on results in global order: out and gradients against float64 and eager, lse and max_logits within 1e-3."""
    exact, plain = twins
    for name, tensor in ours.items():
        label = note + name
        if name in ("lse", "max_logits"):
            wanted = exact[name]
            assert torch.equal(tensor.isneginf(), wanted.isneginf()), f"{label}: empty rows differ"
            finite = wanted.isfinite()
            assert torch.allclose(tensor[finite].double(), wanted[finite], atol=1e-3, rtol=0), f"{label}: off by more than 1e-3"
        else:
            kind = "forward" if name == "out" else "backward"
            assert_close_to_reference(label, tensor, exact[name], plain[name], kind)


def small(problem: Problem, **changes: Any) -> Problem:
    """The problem with other fields."""
    return replace(problem, **changes)
