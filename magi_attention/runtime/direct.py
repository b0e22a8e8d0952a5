"""Attention of one device by a compiled kernel: one autograd node, checks made once per form of the inputs. Sends nothing, plans nothing.

The way of every step without others: the kernel writes out, dk and dv in the dtype of the inputs, and nothing is merged. A call costs
some 20 us of the host besides the launch, so everything that can be known from shapes and options is looked up, not worked out.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from magi_attention.arguments import flag
from magi_attention.kernels import ffa_backward, ffa_forward
from magi_attention.kernels.attention import AttentionOptions, WorkList, softmax_delta
from magi_attention.kernels.select import check_scale, choose, describe, reasons_against_ffa
from magi_attention.kernels.sink import joined_sink, sink_backward
from magi_attention.runtime.checks import check_can_be_saved
from magi_attention.runtime.second_order import first_order

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class Request(NamedTuple):
    """What the caller asks for, as it was given. Values of exactly these types are looked up; others take the way with all checks."""

    softmax_scale: float | None = None
    softcap: float = 0.0
    sink_layout: str = "sh"
    return_max_logits: bool = False
    backend: str = "auto"
    deterministic: bool = False
    sm_margin: int = 0


class _Call(NamedTuple):
    """A request that was checked against tensors of one form."""

    options: AttentionOptions
    sink_layout: str
    wants_max_logits: bool
    can_differentiate: bool


_LOOKED_UP = {(scale, float, str, bool, str, bool, int) for scale in (float, type(None))}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MAX_CALLS = 4096
_calls: dict[Hashable, _Call | None] = {}
_transforms_are_active = getattr(torch._C, "_are_functorch_transforms_active", None)


def attend_directly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, mask: WorkList, request: Request
) -> Results | None:
    """(out, lse, max_logits) of plain tensors that a compiled kernel takes; None for all others, which take the general way.

    The caller has cast for autocast, and has compared the rows of q and k with the mask.

    Raises:
        InputError, UnsupportedError: as kernels/select.py says, at the first call with tensors of this form.
    """
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN and q.layout is k.layout is v.layout is torch.strided):
        return None
    if tuple(map(type, request)) in _LOOKED_UP:
        form = None if sink is None else (sink.shape, sink.dtype, sink.device, type(sink), sink.layout)
        key = (request, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, form)
        call = _calls.get(key, _UNKNOWN)
        if call is _UNKNOWN:
            call = _remember(key, q, k, v, sink, request)
    else:  # True, 1 and 1.0 are one key, and not one request
        call = _checked(q, k, v, sink, request)
    if call is None:
        return None
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    )
    if not needs_grad:
        return _forward(q, k, v, sink, mask, call)
    if _transforms_are_active is None or _transforms_are_active() or not call.can_differentiate:
        return None
    check_can_be_saved((q, k, v, sink))
    results: Results = _DirectAttention.apply(q, k, v, sink, mask, call)  # type: ignore[no-untyped-call]
    return results


_UNKNOWN = _Call(AttentionOptions(0.0), "", False, False)


def _remember(
    key: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, request: Request
) -> _Call | None:
    call = _checked(q, k, v, sink, request)
    if len(_calls) >= _MAX_CALLS:
        _calls.clear()
    _calls[key] = call
    return call


def _checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, request: Request) -> _Call | None:
    desc = describe(q, k, v, sink=sink, sink_layout=request.sink_layout, softcap=request.softcap)
    if choose(desc, request.backend) != "ffa":
        return None
    options = AttentionOptions(
        check_scale(request.softmax_scale, q.shape[2]), float(request.softcap), request.backend, request.deterministic, request.sm_margin
    )
    wants_max_logits = flag("return_max_logits", request.return_max_logits)
    return _Call(options, request.sink_layout, wants_max_logits, not reasons_against_ffa(desc, "backward"))


class _DirectAttention(torch.autograd.Function):
    """With ctx in the forward: a node with setup_context binds its arguments by inspect, which alone takes 30 us."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, mask: WorkList, call: _Call
    ) -> Results:
        out, lse, max_logits = _forward(q, k, v, sink, mask, call)
        ctx.mask, ctx.call = mask, call
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.set_materialize_grads(False)
        if max_logits is not None:
            ctx.mark_non_differentiable(max_logits)
        return out, lse, max_logits

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: object) -> Any:
        gradients = functools.partial(_gradients, ctx.mask, ctx.call, tuple(ctx.needs_input_grad[:4]))
        return *first_order("attention", gradients, dout, dlse, *ctx.saved_tensors), None, None


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, mask: WorkList, call: _Call) -> Results:
    sinks = None if sink is None else joined_sink(sink, torch.float32)
    return ffa_forward.forward_fresh(q, k, v, mask, call.options, sink_lse=sinks, out_dtype=q.dtype, wants_max_logits=call.wants_max_logits)


def _gradients(
    mask: WorkList, call: _Call, needs: tuple[bool, ...], dout: torch.Tensor | None, dlse: torch.Tensor | None, *saved: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """(dq, dk, dv, dsink), None where not needed; saved is what the forward kept."""
    q, k, v, sink, out, lse = saved
    needs_q, needs_k, needs_v, needs_sink = needs
    with torch.autocast(q.device.type, enabled=False):
        dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
        delta = torch.empty_like(lse)
        dq = dk = dv = dsink = None
        if needs_q or needs_k or needs_v:
            wide_dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
            rows = ffa_backward.Rows(q, dout, lse, delta, out, dlse)
            dk, dv = ffa_backward.backward_fresh(rows, k, v, mask, call.options, dq=wide_dq, dkv_dtype=k.dtype)
            dq = wide_dq.to(q.dtype) if needs_q else None
        else:
            delta = softmax_delta(dout, out, dlse)
        if needs_sink:
            dsink = sink_backward(sink, call.sink_layout, lse, delta)
    return dq, dk if needs_k else None, dv if needs_v else None, dsink
