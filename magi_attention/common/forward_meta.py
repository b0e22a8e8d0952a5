"""What attention returns beside its output. Knows no operation; torch is needed for type checkers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class AttnForwardMeta:
    """Second result of `flex_flash_attn_func` and `calc_attn`.

    Attributes:
        lse: fp32 (fp64 for fp64 inputs) [total_q, num_heads_q] natural log-sum-exp of the scaled, soft-capped scores and the
            sinks of each row; -inf for a row that sees nothing. Differentiable: gradients that reach it flow to q, k and the sink.
        max_logits: fp32 [num_heads_q], the largest score of each head over all visible pairs (-inf when it has none), detached;
            None unless asked for.
    """

    lse: torch.Tensor
    max_logits: torch.Tensor | None = None
