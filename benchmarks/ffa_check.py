"""The gate before a timing: outputs and gradients against float64, on the device, for some kv heads in full. Knows no provider.

All rows and all columns of a chosen kv head (with its query heads) are computed twice by plain torch, in float64 and in the dtype of
the inputs, a few hundred rows at a time. The rule is the one of magi_attention/testing/numerics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.ffa_cells import Cell, Layout
from magi_attention.kernels.reference import attention_reference, dense_attention
from magi_attention.mask import AttnMask
from magi_attention.testing.numerics import LSE_ERROR, allowed_error

_ELEMENTS_AT_ONCE = 2**27  # of the scores of one run of rows; a float64 copy is 1 GiB, and autograd keeps several
_SMALL = 8192  # up to here two kv heads are checked, above one

Twin = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Problem:
    """A cell with its tensors, random normal: q, dout [T, Hq, D]; k, v [T, Hkv, D]."""

    cell: Cell
    layout: Layout
    mask: AttnMask
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    references: dict[int, Reference] = field(default_factory=dict)  # by kv head, filled when first asked for

    def reference(self, kv_head: int) -> Reference:
        if kv_head not in self.references:
            self.references[kv_head] = reference_of(self, kv_head)
        return self.references[kv_head]


class Reference(NamedTuple):
    """Of one kv head: float64 values of out, lse, dq [T, group, ...] and dk, dv [T, D], and the error each may have."""

    values: dict[str, Tensor]
    allowed: dict[str, float]


class Verdict(NamedTuple):
    """error_ratio: largest error over the allowed one, inf for NaN; `worst` names the tensor it is in."""

    error_ratio: float
    worst: str

    @property
    def passed(self) -> bool:
        return self.error_ratio <= 1.0


def draw(cell: Cell, device: str) -> Problem:
    """The tensors of a cell, the same on every call on one kind of device."""
    layout = cell.layout()
    mask = layout.mask()
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, cell.dtype)
    heads = (cell.num_heads_q, cell.num_heads_kv, cell.num_heads_kv, cell.num_heads_q)
    shapes = [(mask.total_q, num_heads, cell.head_dim) for num_heads in heads]
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype) for shape in shapes)
    return Problem(cell, layout, mask, q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def poison_freed_memory(problem: Problem) -> None:
    """Leave NaN in memory that is free for the results of the next call, so that what it does not write shows."""
    shapes = [problem.q.shape, problem.k.shape, problem.v.shape]
    sizes = [(shape, dtype) for shape in shapes for dtype in (problem.q.dtype, torch.float32)] + [(problem.q.shape[:2], torch.float32)]
    blocks = [torch.full(shape, float("nan"), dtype=dtype, device=problem.q.device) for shape, dtype in sizes]
    del blocks


def visible(slices: npt.NDArray[np.int32], rows: tuple[int, int], columns: tuple[int, int], device: torch.device) -> Tensor:
    """bool [rows, columns]: the mask in a rectangle that holds every column its rows see."""
    i = torch.arange(*rows, dtype=torch.int32, device=device)[:, None]
    j = torch.arange(*columns, dtype=torch.int32, device=device)[None]
    seen = torch.zeros((rows[1] - rows[0], columns[1] - columns[0]), dtype=torch.bool, device=device)
    for q_start, q_end, k_start, k_end, lo, hi in slices.tolist():
        own_rows = slice(max(q_start, rows[0]) - rows[0], min(q_end, rows[1]) - rows[0])
        own_columns = slice(k_start - columns[0], k_end - columns[0])
        distance = j[:, own_columns] - i[own_rows]
        seen[own_rows, own_columns] |= (distance >= lo) & (distance <= hi)
    return seen


def _runs_of_rows(mask: AttnMask, group_size: int, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, columns they see, visible cells) until every row that sees something was there; few enough rows for the memory."""
    rows_at_once = max(1, min(1024, _ELEMENTS_AT_ONCE // max(1, group_size * mask.total_k)))
    for start in range(0, mask.total_q, rows_at_once):
        end = min(start + rows_at_once, mask.total_q)
        own = mask.slices[(mask.slices[:, 0] < end) & (mask.slices[:, 1] > start)]
        if len(own):
            columns = (int(own[:, 2].min()), int(own[:, 3].max()))
            yield slice(start, end), slice(*columns), visible(own, (start, end), columns, device)


def _run_twin(problem: Problem, kv_head: int, twin: Twin, dtype: torch.dtype) -> dict[str, Tensor]:
    """Values of one kv head by `twin` in `dtype`; rows are independent, gradients of keys are summed in float64."""
    group_size = problem.cell.num_heads_q // problem.cell.num_heads_kv
    heads = slice(kv_head * group_size, (kv_head + 1) * group_size)
    q, dout = (x.detach()[:, heads].to(dtype) for x in (problem.q, problem.dout))
    k, v = (x.detach()[:, kv_head : kv_head + 1].to(dtype) for x in (problem.k, problem.v))
    found = {name: torch.zeros(x.shape, dtype=torch.float64, device=q.device) for name, x in (("out", q), ("dq", q), ("dk", k), ("dv", v))}
    found["lse"] = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
    for rows, columns, seen in _runs_of_rows(problem.mask, group_size, q.device):
        leaves = [x.clone().requires_grad_() for x in (q[rows], k[columns], v[columns])]
        out, lse, _ = twin(*leaves, seen)
        dq, dk, dv = torch.autograd.grad(out, leaves, dout[rows])
        found["out"][rows], found["lse"][rows], found["dq"][rows] = out.detach().double(), lse.detach().double(), dq.double()
        found["dk"][columns] += dk.double()
        found["dv"][columns] += dv.double()
    return found


def reference_of(problem: Problem, kv_head: int) -> Reference:
    """Both twins of one kv head, reduced to float64 values and allowed errors."""
    exact = _run_twin(problem, kv_head, attention_reference, torch.float64)
    eager = _run_twin(problem, kv_head, dense_attention, problem.q.dtype)
    allowed = {name: allowed_error(exact[name], eager[name], "forward" if name == "out" else "backward") for name in exact}
    return Reference(exact, allowed | {"lse": LSE_ERROR})


def heads_to_check(cell: Cell) -> tuple[int, ...]:
    """The last kv head, whose offsets are the largest; the first one too where it is cheap."""
    last = cell.num_heads_kv - 1
    return tuple(sorted({0, last})) if cell.tokens <= _SMALL else (last,)


def check(problem: Problem, results: Mapping[str, Tensor | None]) -> Verdict:
    """Judge out, lse, dq, dk, dv, whole tensors as a provider returned them; None where it has none (lse)."""
    group_size = problem.cell.num_heads_q // problem.cell.num_heads_kv
    worst = Verdict(0.0, "")
    for name, whole in results.items():
        if whole is None:
            continue
        if not bool(torch.isfinite(whole).all()) and name != "lse":  # lse is -inf in a row without keys
            return Verdict(float("inf"), f"{name} is not finite")
        for kv_head in heads_to_check(problem.cell):
            reference = problem.reference(kv_head)
            size = 1 if name in ("dk", "dv") else group_size
            part, exact = whole.detach()[:, kv_head * size : (kv_head + 1) * size].double(), reference.values[name]
            error = torch.where(part == exact, 0.0, (part - exact).abs()).nan_to_num(nan=float("inf"))
            ratio = float(error.max()) / reference.allowed[name] if error.numel() else 0.0
            if ratio > worst.error_ratio:
                worst = Verdict(ratio, f"{name} of kv head {kv_head}")
    return worst
