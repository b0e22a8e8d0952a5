"""Doors of the kernels for the rest of the package: accumulate-mode forward and backward, and the merge of partials.

Plain tensors in and out; knows nothing of autograd, ranks, plans or exchanges.
"""

from __future__ import annotations

import numpy.typing as npt
import torch
from torch import Tensor

from magi_attention.kernels import blocked_backward, blocked_forward
from magi_attention.kernels.blocked import compute_dtype
from magi_attention.kernels.select import choose, describe
from magi_attention.kernels.work import WorkList, clear_prepared, prepare

__all__ = ["WorkList", "attention_backward", "attention_forward", "clear_prepared", "compute_dtype", "merge", "prepare", "softmax_delta"]


@torch.no_grad()
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: npt.ArrayLike | WorkList,
    *,
    softmax_scale: float,
    softcap: float,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Merge the attention of these keys into the running out and lse, in place.

    Args:
        q: [Tq, Hq, D]; k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv]; one dtype and device, any strides.
        slices: int32 [N, 6] in rows of q and k, or their work list from `prepare`.
        softmax_scale: factor on q.k; softcap: cap * tanh(score / cap) after it, 0 is off.
        out: [Tq, Hq, Dv] fp32 (fp64 for fp64 inputs), normalised; start with 0.
        lse: [Tq, Hq], natural log, dtype of out; start with -inf, or with `sink_lse`.
        max_logits: [Hq], dtype of out, running maximum of the capped scores; start with -inf.

    Rows that see no key here keep what they hold. Keys that no slice sees are not read.

    Raises:
        InputError: slices outside the tensors. UnsupportedError: no kernel takes the problem (see kernels/select.py).
    """
    choose(describe(q, k, v, softcap=softcap), backend)
    work = prepare(slices, q.shape[0], k.shape[0])
    with torch.autocast(q.device.type, enabled=False):  # accumulation stays in the dtype of out
        blocked_forward.forward(q, k, v, work, (softmax_scale, softcap), (out, lse), max_logits)


@torch.no_grad()
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    slices: npt.ArrayLike | WorkList,
    *,
    softmax_scale: float,
    softcap: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    backend: str = "auto",
) -> None:
    """Add the gradients that flow through these keys to dq, dk, dv, in place.

    Args:
        dout: like out, dtype of q, any strides (also broadcast).
        q, k, v, slices, softmax_scale, softcap: as in the forward.
        lse: [Tq, Hq], the final one over all keys of all steps and the sinks.
        delta: [Tq, Hq], from `softmax_delta`.
        dq: [Tq, Hq, D]; dk: [Tk, Hkv, D]; dv: [Tk, Hkv, Dv]; fp32 (fp64 for fp64 inputs).

    Rows that see nothing, and keys that nobody sees, get nothing added.
    """
    choose(describe(q, k, v, softcap=softcap), backend)
    work = prepare(slices, q.shape[0], k.shape[0])
    with torch.autocast(q.device.type, enabled=False):
        blocked_backward.backward((q, dout, lse, delta), k, v, work, (softmax_scale, softcap), (dq, dk, dv))


@torch.no_grad()
def softmax_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) - dlse, fp32 (fp64 for fp64 out): what softmax subtracts from the gradient of each score.

    Args:
        dout, out: [Tq, Hq, Dv]; dlse: [Tq, Hq], gradient of lse, None for 0.

    An out of exactly 0 contributes 0 even where dout is NaN: rows without keys carry no gradient.
    """
    dtype = compute_dtype(out.dtype)
    product = torch.where(out == 0, 0, dout.to(dtype) * out.to(dtype)).sum(-1)
    return product if dlse is None else product - dlse.to(dtype)


@torch.no_grad()
def merge(out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor) -> None:
    """Join a partial (attention over other keys of the same rows) into (out, lse), in place.

    Args:
        out, partial_out: [T, H, Dv], normalised; lse, partial_lse: [T, H], natural log. Where both lse are -inf: (0, -inf).
    """
    total = torch.logaddexp(lse, partial_lse)
    # Where there is no weight at all, any finite number in place of -inf keeps exp(-inf - total) = 0.
    finite = total.masked_fill(total == float("-inf"), 0)
    out.mul_(torch.exp(lse - finite)[..., None]).add_(partial_out * torch.exp(partial_lse - finite)[..., None])
    lse.copy_(total)
