"""What an attention call asks for besides its tensors and its mask. Knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionOptions:
    """Checked values; see kernels/select.py for the checks.

    Attributes:
        softmax_scale: factor on q.k.
        softcap: cap * tanh(score / cap) after it; 0 is off.
        backend: auto, blocked or ffa.
        deterministic: gradients equal to the bit from run to run; out and lse always are.
        sm_margin: streaming multiprocessors left to other work by compiled kernels.
    """

    softmax_scale: float
    softcap: float = 0.0
    backend: str = "auto"
    deterministic: bool = False
    sm_margin: int = 0
