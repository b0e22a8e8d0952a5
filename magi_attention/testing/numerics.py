"""The tolerances of the library, in one place, and the checkers that apply them. Knows no kernel: results come in as tensors.

Forward and backward: the error against float64 may be at most FACTOR times the error of plain torch in the same dtype on the same
input, plus a rounding floor. The constants may only become tighter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from magi_attention.kernels.reference import attention_reference, dense_attention
from magi_attention.mask.dense import dense_mask
from magi_attention.mask.slices import AttnMask

FACTOR = {"forward": 2.0, "backward": 2.0}
ERROR_FLOOR = 1e-5
LSE_ERROR = 1e-3
MERGE_EPS = 4.0  # merged out: error at most MERGE_EPS * eps(fp32) * the largest input

_ROWS_AT_ONCE = 1024
_KEYS_AT_ONCE = 1024


def allowed_error(reference64: Tensor, eager_same_dtype: Tensor, kind: str = "forward") -> float:
    """FACTOR[kind] * max|eager - reference| + ERROR_FLOOR, over the finite elements of the reference."""
    error = _error(eager_same_dtype, reference64)
    return FACTOR[kind] * (float(error.max()) if error.numel() else 0.0) + ERROR_FLOOR


def assert_close_to_reference(name: str, ours: Tensor, reference64: Tensor, eager_same_dtype: Tensor, kind: str = "forward") -> None:
    """Raises AssertionError, naming the first bad index, unless `ours` is as close to float64 as the rule asks.

    Args:
        ours, reference64, eager_same_dtype: one shape. Infinities (an lse of -inf) must be at the same places.
        kind: "forward" or "backward".
    """
    _assert_within(name, ours, reference64, allowed_error(reference64, eager_same_dtype, kind))


def assert_lse_close(name: str, ours: Tensor, reference64: Tensor) -> None:
    """lse within LSE_ERROR of float64, -inf exactly where the reference has it."""
    _assert_within(name, ours, reference64, LSE_ERROR)


def _error(x: Tensor, reference64: Tensor) -> Tensor:
    """|x - reference|, 0 where both are the same infinity, inf where x is NaN or only one is infinite."""
    x = x.detach().double()
    reference = reference64.detach().double()
    return torch.where(x == reference, 0.0, (x - reference).abs()).nan_to_num(nan=float("inf"))


def _assert_within(name: str, ours: Tensor, reference64: Tensor, allowed: float) -> None:
    assert ours.shape == reference64.shape, f"{name}: shape {list(ours.shape)}, reference {list(reference64.shape)}"
    error = _error(ours, reference64)
    bad = (error > allowed).nonzero()
    if len(bad):
        index = tuple(int(x) for x in bad[0])
        raise AssertionError(
            f"{name}{list(index)} = {ours[index].item():.8g}, float64 has {reference64[index].item():.8g}: "
            f"error {error[index].item():.3g} > {allowed:.3g}; {len(bad)} of {error.numel()} elements are off, "
            f"the worst by {float(error.max()):.3g}"
        )


# ---- a whole forward and backward against both twins ----


@dataclass(frozen=True)
class AttentionResult:
    """out, lse and the gradients of one problem, by name: out, lse, dq, dk, dv and dsink when there is one."""

    values: dict[str, Tensor]


@dataclass(frozen=True)
class AttentionCase:
    """One problem: leaves q, k, v (and sink), gradients of out (and lse), and the dense mask.

    Attributes:
        tensors: q, k, v and, when used, sink.
        dense: bool [Tq, Tk].
        dout: [Tq, Hq, Dv]; dlse: [Tq, Hq] or None.
        options: softmax_scale, softcap, sink_layout.
    """

    tensors: dict[str, Tensor]
    dense: Tensor
    dout: Tensor
    dlse: Tensor | None
    options: dict[str, float | str]

    def run(self, attention: Callable[..., tuple[Tensor, ...]]) -> AttentionResult:
        """Forward and backward of attention(q, k, v, sink=..., **options) -> (out, lse, ...)."""
        leaves = {name: x.detach().requires_grad_() for name, x in self.tensors.items()}
        out, lse = attention(leaves["q"], leaves["k"], leaves["v"], sink=leaves.get("sink"), **self.options)[:2]
        outputs, grads = [out], [self.dout]
        if self.dlse is not None:
            outputs.append(lse)
            grads.append(self.dlse)
        found = torch.autograd.grad(outputs, list(leaves.values()), grads)
        named = {f"d{name}": grad for name, grad in zip(leaves, found, strict=True)}
        return AttentionResult({"out": out.detach(), "lse": lse.detach(), **named})

    def reference(self) -> AttentionResult:
        """In float64."""
        return self._dense(attention_reference, torch.float64)

    def eager(self) -> AttentionResult:
        """By plain torch in the dtype of the inputs, every operation rounded to it."""
        return self._dense(dense_attention, None)

    def _dense(self, twin: Callable[..., tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype | None) -> AttentionResult:
        """Rows are independent, so they go in runs of _ROWS_AT_ONCE: long sequences fit, gradients of keys are summed in float64."""
        leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in self.tensors.items()}
        sums = {name: torch.zeros(x.shape, dtype=torch.float64, device=x.device) for name, x in leaves.items()}
        parts: dict[str, list[Tensor]] = {"out": [], "lse": []}
        is_per_row = self.options.get("sink_layout", "sh") == "ssh"
        for start in range(0, max(1, self.dense.shape[0]), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            sink = leaves.get("sink")
            out, lse, _ = twin(
                leaves["q"][rows],
                leaves["k"],
                leaves["v"],
                self.dense[rows],
                sink=sink[rows] if sink is not None and is_per_row else sink,
                **self.options,
            )
            outputs, grads = [out], [self.dout[rows].to(out.dtype)]
            if self.dlse is not None:
                has_weight = torch.isfinite(lse)  # the derivative of -inf is 0, and dense arithmetic would make it NaN
                outputs.append(torch.where(has_weight, lse, 0))
                grads.append(self.dlse[rows].to(lse.dtype))
            for name, grad in zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), grads), strict=True):
                sums[name] += grad.double()
            parts["out"].append(out.detach())
            parts["lse"].append(lse.detach())
        named = {f"d{name}": x for name, x in sums.items()}
        return AttentionResult({**{name: torch.cat(x) for name, x in parts.items()}, **named})

    def check(
        self, name: str, ours: AttentionResult, reference: AttentionResult | None = None, eager: AttentionResult | None = None
    ) -> None:
        """Every value of `ours` against the rule; the twins are computed unless given."""
        reference = reference or self.reference()
        eager = eager or self.eager()
        for key, value in ours.values.items():
            if key == "lse":
                assert_lse_close(f"{name} lse", value, reference.values[key])
            else:
                kind = "forward" if key == "out" else "backward"
                assert_close_to_reference(f"{name} {key}", value, reference.values[key], eager.values[key], kind)


# ---- which cells does an attention really see ----


@dataclass(frozen=True)
class MaskVerdict:
    """Whether an attention sees exactly the cells of a mask.

    Attributes:
        first_cell: (query, key) of the first difference in row order, None when there is none.
        num_cells: how many cells differ.
        text: one line, starting with PASS or FAIL.
    """

    first_cell: tuple[int, int] | None
    num_cells: int
    text: str

    @property
    def passed(self) -> bool:
        return self.first_cell is None

    def __str__(self) -> str:
        return self.text


def check_against_mask(attend: Callable[[Tensor, Tensor, Tensor], Tensor], mask: AttnMask) -> MaskVerdict:
    """Probe an attention cell by cell, and print and return the verdict.

    With q = k = 0 every visible key of a row has the same weight, and with unit vectors as values the weights are the output: a
    cell is seen when its output is not 0. Needs total_q * total_k cells in chunks of keys; for masks of a few thousand tokens.

    Args:
        attend: (q [Tq, 1, 8], k [Tk, 1, 8], v [Tk, 1, n], fp32) -> out [Tq, 1, n].
        mask: what it should see.
    """
    expected = torch.from_numpy(np.array(dense_mask(mask.slices, mask.total_q, mask.total_k)))
    q, k = torch.zeros(mask.total_q, 1, 8), torch.zeros(mask.total_k, 1, 8)
    parts = []
    for start in range(0, mask.total_k, _KEYS_AT_ONCE):
        width = min(_KEYS_AT_ONCE, mask.total_k - start)
        v = torch.zeros(mask.total_k, 1, width)
        v[torch.arange(start, start + width), 0, torch.arange(width)] = 1.0
        parts.append(attend(q, k, v)[:, 0] != 0)
    seen = torch.cat(parts, dim=1) if parts else torch.zeros_like(expected)
    wrong = (seen != expected).nonzero()
    if not len(wrong):
        verdict = MaskVerdict(None, 0, f"PASS: {int(expected.sum())} visible cells, all as the mask says")
    else:
        query, key = (int(x) for x in wrong[0])
        found, wanted = ("visible", "hidden") if seen[query, key] else ("hidden", "visible")
        text = f"FAIL: first at query {query}, key {key}: {found}, the mask says {wanted}; {len(wrong)} cells differ"
        verdict = MaskVerdict((query, key), len(wrong), text)
    print(verdict)
    return verdict
