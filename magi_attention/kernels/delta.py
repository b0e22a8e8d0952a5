"""What softmax subtracts from the gradient of each score. Knows no mask, no keys and no backend."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_attention.kernels.blocked import compute_dtype


@torch.no_grad()
def softmax_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) - dlse, fp32 (fp64 for fp64 out).

    Args:
        dout, out: [Tq, Hq, Dv]; dlse: [Tq, Hq], gradient of lse, None for 0.

    An out of exactly 0 contributes 0 even where dout is NaN: rows without keys carry no gradient.
    """
    dtype = compute_dtype(out.dtype)
    product = torch.where(out == 0, 0, dout.to(dtype) * out.to(dtype)).sum(-1)
    return product if dlse is None else product - dlse.to(dtype)
