"""Compares two recorded runs step by step: losses and every parameter gradient."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class ParityBound:
    """Allowed differences between a many-rank and a one-rank run of the same steps.

    A gradient's difference is max|a - b| / max|b| over one parameter. The first step starts from equal parameters, so it shows
    the attention alone. Later steps also carry what the optimiser made of earlier rounding, hence the wider bound.
    """

    loss: float
    first_gradient: float
    later_gradient: float


# A few times what eight steps of 16,384 tokens showed: fp32 on 4 CPU ranks (5e-7, 3e-6, 4e-6), bf16 on an H200 (1e-4, 4e-3, 2e-2).
FP32_BOUND = ParityBound(loss=1e-5, first_gradient=2e-5, later_gradient=1e-4)
BF16_BOUND = ParityBound(loss=1e-3, first_gradient=1.5e-2, later_gradient=8e-2)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in json.loads((folder / "record.json").read_text())]


def gradient_difference(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest relative difference over all parameters, and the parameter's name."""
    assert ours.keys() == reference.keys()
    worst = (0.0, "none")
    for name, expected in reference.items():
        difference = (ours[name] - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
        worst = max(worst, (difference, name))
    return worst


def report(ours: Path, reference: Path, bound: ParityBound) -> bool:
    """Prints one line per step and says whether all of them are within the bound."""
    grads, reference_grads = torch.load(ours / "gradients.pt"), torch.load(reference / "gradients.pt")
    is_ok = True
    print(f"parity, many ranks against one (bounds: loss {bound.loss:g}, gradients {bound.first_gradient:g} / {bound.later_gradient:g})")
    for step, (loss, expected) in enumerate(zip(losses(ours), losses(reference), strict=True)):
        difference, name = gradient_difference(grads[step], reference_grads[step])
        gradient_bound = bound.first_gradient if step == 0 else bound.later_gradient
        step_ok = abs(loss - expected) <= bound.loss and difference <= gradient_bound
        is_ok &= step_ok
        print(
            f"  step {step:2d}  loss {loss:.6f} vs {expected:.6f}  |diff| {abs(loss - expected):.1e}"
            f"  worst of {len(grads[step])} gradients {difference:.1e} ({name})  {'ok' if step_ok else 'FAIL'}"
        )
    print(f"parity {'PASS' if is_ok else 'FAIL'}")
    return is_ok
