"""Attention of one device by a compiled kernel: one autograd node, checks made once per form of the inputs. Sends nothing, plans nothing.

The way of every step without others: the kernel writes out, dk and dv in the dtype of the inputs, and nothing is merged. A call costs
some 20 us of the host besides the launch, so everything that can be known from shapes and options is looked up, not worked out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from magi_attention.arguments import count, flag
from magi_attention.kernels import ffa_backward
from magi_attention.kernels.attention import AttentionOptions, softmax_delta
from magi_attention.kernels.device_mask import DeviceMask, check_reports
from magi_attention.kernels.ffa_forward import ForwardCall, ForwardForm
from magi_attention.kernels.ffa_work import Mask
from magi_attention.kernels.select import check_scale, check_softcap, choose, describe, reasons_against_ffa
from magi_attention.kernels.sink import joined_sink, sink_backward
from magi_attention.runtime.checks import check_can_be_saved
from magi_attention.runtime.second_order import first_order

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class Request(NamedTuple):
    """What the caller asks for. Values of exactly these types are looked up; `normal` makes them so."""

    softmax_scale: float | None = None
    softcap: float = 0.0
    sink_layout: str = "sh"
    return_max_logits: bool = False
    backend: str = "auto"
    deterministic: bool = False
    sm_margin: int = 0

    def normal(self) -> Request:
        """The same request in these types. Raises InputError for values that stand for none."""
        return self._replace(
            softmax_scale=None if self.softmax_scale is None else check_scale(self.softmax_scale, 1),
            softcap=check_softcap(self.softcap),
            return_max_logits=flag("return_max_logits", self.return_max_logits),
            deterministic=flag("deterministic", self.deterministic),
            sm_margin=count("sm_margin", self.sm_margin, 0, _MAX_MARGIN),
        )


class _Form(NamedTuple):
    """A request that was checked against tensors of one form, whatever the mask."""

    options: AttentionOptions
    sink_layout: str
    wants_max_logits: bool
    can_differentiate: bool
    device: torch.device
    device_type: str
    total_q: int
    total_k: int
    forward: ForwardForm


class _Call(NamedTuple):
    """A form with a mask: what a call runs."""

    form: _Form
    forward: ForwardCall


_MAX_MARGIN = 1 << 30
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MAX_FORMS, _MAX_CALLS = 4096, 256  # a scale that changes at every step is a form of its own each time
_forms: dict[Hashable, _Form | None] = {}
_transforms_are_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def attend_again(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, mask: Mask, request: Request
) -> Results | None:
    """What `attend_directly` returns, when it was called with tensors of this form before, with any mask; None when it was not.

    Checks nothing that the form does not decide. Under autocast nothing is known: tensors are cast first.

    Raises:
        InputError: what earlier masks on a GPU had to report.
    """
    if isinstance(mask, DeviceMask):
        check_reports()
    key = _key(q, k, v, sink, request)
    if key is None:
        return None
    call: _Call | None = mask.calls.get(key)
    if call is None:
        form = _forms.get(key)
        if form is None or form.total_q != mask.total_q or form.total_k != mask.total_k:
            return None
        if isinstance(mask, DeviceMask) and mask.tensors[0].device != form.device:
            return None
        call = _call_of(key, form, mask)
    if torch.is_autocast_enabled(call.form.device_type):
        return None
    return _run(q, k, v, sink, mask, call)


def attend_directly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, mask: Mask, request: Request
) -> Results | None:
    """(out, lse, max_logits) of plain tensors that a compiled kernel takes; None for all others, which take the general way.

    The caller has cast for autocast, and has compared the rows of q and k with the mask.

    Raises:
        InputError, UnsupportedError: as kernels/select.py says; InputError also for what earlier masks on a GPU had to report.
    """
    if isinstance(mask, DeviceMask):
        check_reports()
    key = _key(q, k, v, sink, request)
    if key is None:
        return None
    call: _Call | None = mask.calls.get(key)
    if call is None:
        form = _forms[key] if key in _forms else _remember(key, q, k, v, sink, request)
        if form is None:
            return None
        call = _call_of(key, form, mask)
    return _run(q, k, v, sink, mask, call)


def _call_of(key: Hashable, form: _Form, mask: Mask) -> _Call:
    call = _Call(form, ForwardCall(form.forward, mask))
    if len(mask.calls) >= _MAX_CALLS:
        mask.calls.clear()
    mask.calls[key] = call
    return call


def _key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, request: Request) -> Hashable | None:
    """What decides whether a call is legal and how it runs, except for the mask and addresses; None for what takes the general way."""
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN) or _transforms_are_active():
        return None
    scale, softcap, sink_layout, wants_max_logits, backend, deterministic, sm_margin = request
    # True, 1 and 1.0 are one key, and not one request.
    if not (
        (scale is None or type(scale) is float)
        and type(softcap) is float
        and type(wants_max_logits) is bool
        and type(deterministic) is bool
        and type(sm_margin) is int
        and type(sink_layout) is str
        and type(backend) is str
    ):
        return None
    try:
        form_of_sink = None if sink is None else (sink.shape, sink.dtype, sink.device, sink.layout, type(sink))
        shapes = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
        return request, shapes, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, form_of_sink
    except (RuntimeError, AttributeError):  # no strides (sparse and nested tensors), or a sink that is no tensor
        return None


def _remember(
    key: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, request: Request
) -> _Form | None:
    desc = describe(q, k, v, sink=sink, sink_layout=request.sink_layout, softcap=request.softcap)
    form = None
    if choose(desc, request.backend) == "ffa":
        scale = check_scale(request.softmax_scale, q.shape[2])
        options = AttentionOptions(scale, request.softcap, request.backend, request.deterministic, request.sm_margin)
        can_differentiate = not reasons_against_ffa(desc, "backward")
        known = (options, request.sink_layout, request.return_max_logits, can_differentiate, q.device, q.device.type)
        form = _Form(*known, q.shape[0], k.shape[0], ForwardForm(q, k, v, options, q.dtype))
    if len(_forms) >= _MAX_FORMS:
        _forms.clear()
    _forms[key] = form
    return form


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, mask: Mask, call: _Call) -> Results | None:
    if not torch.is_grad_enabled() or not (
        q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    ):
        return _forward(q, k, v, sink, call)
    if not call.form.can_differentiate:
        return None  # the general way says why
    held = (mask, call)
    try:
        results = _apply(q, k, v, held) if sink is None else _apply(q, k, v, held, sink)
    except RuntimeError:
        check_can_be_saved((q, k, v, sink))  # tensors of inference mode are refused when they are saved
        raise
    return results if call.form.wants_max_logits else (*results, None)


class _DirectAttention(torch.autograd.Function):
    """With ctx in the forward: a node with setup_context binds its arguments by inspect, which alone takes 30 us.

    Each argument, result and attribute of ctx takes some tenths of a us, so there are few, and none that is None.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, held: tuple[Mask, _Call], sink: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        mask, call = held
        out, lse, max_logits = _forward(q, k, v, sink, call)
        # Ranges on a GPU may be written to before the backward, also where no version counter tells: it reads what the forward read.
        ctx.held = (mask.copied() if isinstance(mask, DeviceMask) else mask, call.form)
        ctx.save_for_backward(q, k, v, out, lse) if sink is None else ctx.save_for_backward(q, k, v, out, lse, sink)
        ctx.set_materialize_grads(False)
        if max_logits is None:
            return out, lse
        ctx.mark_non_differentiable(max_logits)
        return out, lse, max_logits

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: object) -> Any:
        mask, form = ctx.held
        if isinstance(mask, DeviceMask):  # its lists go with this backward, not with a graph that somebody still holds
            mask = DeviceMask(mask.total_q, mask.total_k, mask.tensors)
        has_sink = len(ctx.needs_input_grad) == 5
        needs = (*ctx.needs_input_grad[:3], has_sink and ctx.needs_input_grad[4])
        q, k, v, out, lse, *others = ctx.saved_tensors
        gradients = functools.partial(_gradients, mask, form, needs)
        dq, dk, dv, dsink = first_order("attention", gradients, dout, dlse, q, k, v, others[0] if has_sink else None, out, lse)
        return (dq, dk, dv, None, dsink) if has_sink else (dq, dk, dv, None)


# Function.apply looks for functorch transforms, of which there are none here, in every argument; what it calls then is this.
_apply: Callable[..., Any] = super(torch.autograd.Function, _DirectAttention).apply


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, call: _Call) -> Results:
    return call.forward.fresh(q, k, v, None if sink is None else joined_sink(sink, torch.float32), call.form.wants_max_logits)


def _gradients(
    mask: Mask, form: _Form, needs: tuple[bool, ...], dout: torch.Tensor | None, dlse: torch.Tensor | None, *saved: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """(dq, dk, dv, dsink), None where not needed; saved is what the forward kept."""
    q, k, v, sink, out, lse = saved
    needs_q, needs_k, needs_v, needs_sink = needs
    if isinstance(mask, DeviceMask):
        check_reports()
    with torch.autocast(q.device.type, enabled=False):
        dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
        delta = torch.empty_like(lse)
        dq = dk = dv = dsink = None
        if needs_q or needs_k or needs_v:
            wide_dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
            rows = ffa_backward.Rows(q, dout, lse, delta, out, dlse)
            dk, dv = ffa_backward.backward_fresh(rows, k, v, mask, form.options, dq=wide_dq, dkv_dtype=k.dtype)
            dq = wide_dq.to(q.dtype) if needs_q else None
        else:
            delta = softmax_delta(dout, out, dlse)
        if needs_sink:
            dsink = sink_backward(sink, form.sink_layout, lse, delta)
    return dq, dk if needs_k else None, dv if needs_v else None, dsink
