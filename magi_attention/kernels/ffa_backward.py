"""The compiled backward: dq is added to, dk and dv are written fresh or added to. One launch on the current stream.

Knows nothing of autograd, sinks or ranks. Problems are those that kernels/select.py lets through.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magi_attention.kernels import ffa_device, ffa_library
from magi_attention.kernels.delta import softmax_delta
from magi_attention.kernels.device_mask import poison
from magi_attention.kernels.ffa_device import raw_stream, usable_sms
from magi_attention.kernels.ffa_launch import DTYPE_CODE, compiled_head_dim, counter, query, shape_record
from magi_attention.kernels.ffa_library import BackwardArgs, run_backward, stats_floats
from magi_attention.kernels.ffa_tensors import dense, is_aligned, narrowed, readable, token_tensor
from magi_attention.kernels.ffa_work import Mask, device_work
from magi_attention.kernels.head_splits import head_splits
from magi_attention.kernels.options import AttentionOptions

_NO_WORK = ffa_library.Work()


@dataclass(frozen=True, slots=True)
class Rows:
    """What a backward reads of the queries.

    Attributes:
        q: [Tq, Hq, D]; dout: [Tq, Hq, Dv], both of one dtype, any strides.
        lse: fp32 [Tq, Hq], final.
        delta: fp32 [Tq, Hq], contiguous: read, or written when `out` is there.
        out: [Tq, Hq, Dv] of the forward, in q's dtype or fp32; None when delta is known.
        dlse: [Tq, Hq] or None, read with `out`.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    out: Tensor | None = None
    dlse: Tensor | None = None


def backward_fresh(
    rows: Rows, k: Tensor, v: Tensor, mask: Mask, options: AttentionOptions, *, dq: Tensor, dkv_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dk [Tk, Hkv, D] and dv [Tk, Hkv, Dv] of these keys alone, every element written once; dq is added to.

    Args:
        dq: fp32 [Tq, Hq, D].
        dkv_dtype: dtype of q, or fp32.
    """
    width = compiled_head_dim(rows.q, v)
    shape = (k.shape[0], k.shape[1], width)
    has_work = bool(rows.q.shape[0] and k.shape[0])
    parts = _head_splits(rows, k, width, mask, options) if has_work else 0
    if parts == 1:
        dk, dv = (torch.empty(shape, dtype=dkv_dtype, device=k.device) for _ in range(2))
        _add_dq(rows, k, v, mask, options, (dq, dk, dv), parts_added=0)
    else:
        dk, dv = (torch.zeros(shape, dtype=torch.float32, device=k.device) for _ in range(2))
        if parts:
            _add_dq(rows, k, v, mask, options, (dq, dk, dv), parts_added=parts)
        elif rows.out is not None:
            rows.delta.copy_(softmax_delta(rows.dout, rows.out, rows.dlse))
        dk, dv = dk.to(dkv_dtype), dv.to(dkv_dtype)
    return narrowed(dk, k.shape[2]), narrowed(dv, v.shape[2])


def backward_into(rows: Rows, k: Tensor, v: Tensor, mask: Mask, options: AttentionOptions, grads: tuple[Tensor, Tensor, Tensor]) -> None:
    """Add to grads = (dq, dk, dv), all fp32, shapes of q, k, v."""
    if not (rows.q.shape[0] and k.shape[0]):
        return
    width = compiled_head_dim(rows.q, v)
    dq, dk, dv = grads
    own_dk, own_dv = dense(dk, width), dense(dv, width)
    _add_dq(rows, k, v, mask, options, (dq, own_dk, own_dv), parts_added=_head_splits(rows, k, width, mask, options))
    for own, x in ((own_dk, dk), (own_dv, dv)):
        if own is not x:
            x.copy_(own[..., : x.shape[2]])


def _head_splits(rows: Rows, k: Tensor, width: int, mask: Mask, options: AttentionOptions) -> int:
    """See head_splits.py. Parts add to dk and dv as they come, so there is one where the caller wants the same bits every time."""
    heads = (rows.q.shape[1], k.shape[1])
    if options.deterministic or heads[0] == heads[1]:
        return 1
    device = rows.q.device
    name = ("head_splits", heads, width, device, options.sm_margin)
    found: int | None = mask.derived.get(name)
    if found is None:
        work = device_work(mask, "backward", width, device)
        found = head_splits(work.costs, work.num_tiles, k.shape[0], heads, usable_sms(device, options.sm_margin))
        mask.derived[name] = found
    return found


def _add_dq(
    rows: Rows,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    options: AttentionOptions,
    grads: tuple[Tensor, Tensor, Tensor],
    *,
    parts_added: int,
) -> None:
    """The launch, with a dq of its own where the caller's is narrower, strided, not aligned, or of the opposite sign.

    parts_added: 0 writes dk and dv; else so many parts of the heads add to what they hold.
    """
    dq, dk, dv = grads
    width, is_negative = dk.shape[2], options.softmax_scale < 0
    if dq.shape[2] == width and not is_negative and is_aligned(dq):
        _launch(rows, k, v, mask, options, (dq, dk, dv), parts_added)
        return
    own_dq = torch.zeros((dq.shape[0], dq.shape[1], width), dtype=torch.float32, device=dq.device)
    _launch(rows, k, v, mask, options, (own_dq, dk, dv), parts_added)
    dq.add_(own_dq[..., : dq.shape[2]], alpha=-1.0 if is_negative else 1.0)


def _launch(
    rows: Rows,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    options: AttentionOptions,
    grads: tuple[Tensor, Tensor, Tensor],
    parts_added: int,
) -> None:
    dq, dk, dv = grads
    device, width = rows.q.device, dk.shape[2]
    work = device_work(mask, "backward", width, device)
    work_dq = device_work(mask, "dq", width, device) if options.deterministic else None
    shape = shape_record(rows.q.shape, k.shape, width, rows.q.dtype, device, options)
    q, k, v, dout = query(rows.q, width, options), readable(k, width), readable(v, width), readable(rows.dout, width)
    lse = rows.lse.contiguous()
    out = None if rows.out is None else dense(rows.out, width)
    dlse = None if rows.dlse is None or out is None else rows.dlse.to(torch.float32).contiguous()
    stats = torch.empty(stats_floats(q.shape[0], q.shape[1]), dtype=torch.float32, device=device)
    counted = counter(device, raw_stream(device))
    args = BackwardArgs(
        shape,
        work.record,
        _NO_WORK if work_dq is None else work_dq.record,
        token_tensor(q),
        token_tensor(k),
        token_tensor(v),
        token_tensor(dout),
        lse.data_ptr(),
        rows.delta.data_ptr(),
        None if out is None else out.data_ptr(),
        0 if out is None else DTYPE_CODE[out.dtype],
        None if dlse is None else dlse.data_ptr(),
        stats.data_ptr(),
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
        DTYPE_CODE[dk.dtype],
        parts_added > 0,
        max(parts_added, 1),
        counted.data_ptr(),
    )
    lists = (work,) if work_dq is None else (work, work_dq)
    with ffa_device.launching(device, "magi_attention backward", *(x.array for x in lists)) as stream:
        run_backward(args, stream)
        for planned in lists:
            if planned.status:
                poison(planned.status, grads, stream)
