"""Exact attention over the ranks of one group, forward and backward, as one autograd function. Plans nothing and keeps no state.

Forward: keys of step s + 1 travel while step s is computed; each step merges into one fp32 out and lse. Backward is the mirror:
keys travel again, dq gathers here, partial dk and dv return to their owners while the next step is computed. What a call needs in
its backward lives in its own graph node, so micro-batches may interleave, keys may alternate and checkpointing may recompute.

All collectives depend only on what every rank agrees on: the plan, the options, and that k or v needs a gradient on all ranks
or on none. Saved: this rank's q, k, v, out (in the dtype the caller gets, the same memory) and lse. With accumulation in fp32, delta
= rowsum(dout * out) - dlse from an out rounded to bf16 is as exact as the eager formula in that dtype, which is what the tests ask.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from magi_attention import env
from magi_attention.arguments import flag
from magi_attention.comm import SINGLE, CommGroup, announce_refusal, comm_group
from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError
from magi_attention.kernels.attention import (
    AttentionOptions,
    Rows,
    WorkList,
    attention_backward_fresh,
    attention_forward,
    attention_forward_fresh,
    compute_dtype,
    prepare,
    softmax_delta,
)
from magi_attention.kernels.ops import cast_for_autocast
from magi_attention.kernels.select import check_scale, choose, describe
from magi_attention.kernels.sink import sink_backward
from magi_attention.kernels.tensors import require_tensor
from magi_attention.plan.types import RankPlan, StepPlan
from magi_attention.runtime import checks
from magi_attention.runtime.collectives import all_reduce
from magi_attention.runtime.direct import Request, attend_directly
from magi_attention.runtime.second_order import first_order
from magi_attention.runtime.steps import Arrivals, ExchangeRule, GradReturns, select_exchange_rule


@dataclass(frozen=True)
class AttentionCall:
    """What one call of dist_attention is made with, besides its tensors."""

    plan: RankPlan
    rule: ExchangeRule
    config: DistAttnConfig
    sink_layout: str
    options: AttentionOptions
    wants_max_logits: bool

    @property
    def group(self) -> CommGroup:
        return self.rule.group

    @property
    def running_options(self) -> dict[str, Any]:
        """The options as the doors that merge into running results take them."""
        return dataclasses.asdict(self.options)


def dist_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: RankPlan,
    group: Any = None,
    config: DistAttnConfig | None = None,
    *,
    sink: torch.Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attention of this rank's queries to every key that the plan's mask lets them see. Collective, also in its backward.

    Under autocast, q, k and v are cast to the autocast dtype first (float64 stays).

    Args:
        q: [num_local_q, num_heads_q, head_dim], bf16, fp16, fp32 or fp64; any strides.
        k: [num_local_k, num_heads_kv, head_dim], dtype of q; num_heads_q is a multiple of num_heads_kv.
        v: [num_local_k, num_heads_kv, head_dim_v], dtype of q. k or v requires grad on every rank of the group, or on none; then q does on
            every rank or on none: the backward of either is collective.
        plan: this rank's plan. With one rank no group is needed and nothing is sent.
        group: the plan's ranks: a CommGroup, ProcessGroup or DeviceMesh (2-D for a hierarchical plan); None is the default group.
        config: kernel backend, overlap, time-out and sink reduction; None is DistAttnConfig().
        sink: fp32 logits that join the softmax denominator, equal on all ranks: "sh" [num_sink, num_heads_q]; or one set per local
            query: "ssh" [num_local_q, num_sink, num_heads_q]. The gradient of "sh" is this rank's share unless
            config.sink_grad_reduce asks for the sum or average over the group; that of "ssh" is whole as it is.
        softmax_scale: factor on q @ k.T; None is head_dim ** -0.5.
        softcap: cap * tanh(score / cap) on scaled scores; 0 is off.
        return_max_logits: also return the largest visible score of each head over all ranks.
        sm_margin: multiprocessors that compiled kernels leave to other work.

    Returns:
        out [num_local_q, num_heads_q, head_dim_v] in q's dtype; lse [num_local_q, num_heads_q], natural log, fp32 (fp64 for fp64
        inputs), differentiable; max_logits [num_heads_q] of lse's dtype, not differentiable, or None. A row that sees no key has
        out 0 and lse -inf (the sinks' lse with a sink).

    Raises:
        InputError: a tensor does not fit the plan or the others; in check mode also when ranks disagree.
        UnsupportedError: no kernel takes the problem.
        CommError: an exchange failed or timed out.
        FloatingPointError: in check mode, a NaN or infinity appeared in a result.
    """
    config = config or DistAttnConfig()
    cp_group = _group_of(plan, group)
    with announce_refusal(cp_group, checks.ATTENTION_CALL):
        q, k, v = cast_for_autocast(*(require_tensor(name, x, "[tokens, heads, head_dim]") for name, x in (("q", q), ("k", k), ("v", v))))
        choose(describe(q, k, v, sink=sink, sink_layout=sink_layout, softcap=softcap), config.kernel_backend)
        checks.check_local_rows(q, k, plan)
        checks.check_can_be_saved((q, k, v, sink))
        scale, wants_max_logits = check_scale(softmax_scale, q.shape[2]), flag("return_max_logits", return_max_logits)
        rule = select_exchange_rule(config, cp_group)
    if plan.cp_size == 1 and not env.check_enabled():
        request = Request(scale, float(softcap), sink_layout, wants_max_logits, config.kernel_backend, config.deterministic, sm_margin)
        found = attend_directly(q, k, v, sink, _work_list(plan.forward[0], plan.num_local_q), request)
        if found is not None:
            return found
    kernel_options = AttentionOptions(scale, float(softcap), config.kernel_backend, config.deterministic, sm_margin)
    call = AttentionCall(plan, rule, config, sink_layout, kernel_options, wants_max_logits)
    if env.check_enabled():
        checks.check_plan(plan)
        options = {
            "sink_layout": sink_layout,
            "softmax_scale": scale,
            "softcap": kernel_options.softcap,
            "max logits": wants_max_logits,
            "config": config,
        }
        checks.check_agreement(q, k, v, sink, plan, call.group, options)
    out, lse, max_logits = _DistAttention.apply(q, k, v, sink, call)  # type: ignore[no-untyped-call]
    return out, lse, max_logits


def _group_of(plan: RankPlan, group: Any) -> CommGroup:
    if plan.cp_size == 1:
        return SINGLE  # no communicator, whatever else this process runs
    found = comm_group(group)
    if (found.size, found.rank) != (plan.cp_size, plan.cp_rank):
        raise InputError(
            f"group has {found.size} ranks and we are rank {found.rank}; the plan is for rank {plan.cp_rank} of {plan.cp_size}; "
            "pass the group that the key was made with"
        )
    return found


class _DistAttention(torch.autograd.Function):
    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, call: AttentionCall) -> Any:
        with torch.autocast(q.device.type, enabled=False):
            return _forward(q, k, v, sink, call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, sink, ctx.call = inputs
        out, lse, max_logits = output
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.set_materialize_grads(False)
        if max_logits is not None:
            ctx.mark_non_differentiable(max_logits)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: object) -> Any:
        gradients = functools.partial(_gradients, ctx.call, tuple(ctx.needs_input_grad[:4]))
        return *first_order("attention", gradients, dout, dlse, *ctx.saved_tensors), None


def _gradients(
    call: AttentionCall, needs: tuple[bool, ...], dout: torch.Tensor | None, dlse: torch.Tensor | None, *saved: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """(dq, dk, dv, dsink), None where not needed; saved is what the forward kept."""
    q, k, v, sink, out, lse = saved
    needs_q, needs_k, needs_v, needs_sink = needs
    with torch.autocast(q.device.type, enabled=False):
        dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
        dq = dk = dv = dsink = None
        if needs_q or needs_k or needs_v:
            delta = torch.empty_like(lse)  # written in the first step
            dq, dk, dv = _backward(Rows(q, dout, lse, delta, out, dlse), k, v, call, returns_kv=needs_k or needs_v)
        else:
            delta = softmax_delta(dout, out, dlse)
        if needs_sink:
            dsink = _sink_grad(sink, lse, delta, call)
    return dq if needs_q else None, dk if needs_k else None, dv if needs_v else None, dsink


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    plan = call.plan
    is_only_step = len(plan.forward) == 1  # then the kernel writes what the caller gets
    guard = _BadValueGuard()
    arrivals = Arrivals(plan.forward, (k, v), call.rule, "forward k, v of")
    step_k, step_v = arrivals.take(0)
    out, lse, max_logits = attention_forward_fresh(
        q,
        step_k,
        step_v,
        _work_list(plan.forward[0], plan.num_local_q),
        call.options,
        sink=sink,
        out_dtype=q.dtype if is_only_step else compute_dtype(q.dtype),
        wants_max_logits=call.wants_max_logits,
    )
    guard.look(0, out=out, lse=lse)
    for index, step in enumerate(plan.forward[1:], 1):
        step_k, step_v = arrivals.take(index)
        work_list = _work_list(step, plan.num_local_q)
        attention_forward(q, step_k, step_v, work_list, out=out, lse=lse, max_logits=max_logits, **call.running_options)
        guard.look(index, out=out, lse=lse)
    guard.report(call, q.device)
    if max_logits is not None and not call.group.is_single:
        all_reduce(max_logits, call.group.flat, "max_logits", takes_max=True)
    return out.to(q.dtype), lse, max_logits


def _backward(
    rows: Rows,
    k: torch.Tensor,
    v: torch.Tensor,
    call: AttentionCall,
    *,
    returns_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, lse = rows.q, rows.lse
    plan = call.plan
    dq = torch.zeros_like(q, dtype=lse.dtype, memory_format=torch.contiguous_format)
    sum_dtype = q.dtype if len(plan.backward) == 1 else lse.dtype
    guard = _BadValueGuard()
    guard.look(0, dout=rows.dout)
    arrivals = Arrivals(plan.backward, (k, v), call.rule, "backward k, v of")
    step_k, step_v = arrivals.take(0)
    options = call.options
    work_list = _work_list(plan.backward[0], plan.num_local_q)
    dk, dv = attention_backward_fresh(rows, step_k, step_v, work_list, options, dq=dq, dkv_dtype=sum_dtype)
    rows = dataclasses.replace(rows, out=None, dlse=None)  # delta is known from here on
    guard.look(0, dq=dq, dk=dk, dv=dv)
    returns = GradReturns((dk, dv), call.rule)
    for index, step in enumerate(plan.backward[1:], 1):
        step_k, step_v = arrivals.take(index)
        work_list = _work_list(step, plan.num_local_q)
        step_dk, step_dv = attention_backward_fresh(rows, step_k, step_v, work_list, options, dq=dq)
        guard.look(index, dq=dq, dk=step_dk, dv=step_dv)
        if returns_kv:
            returns.start(index, step, (step_dk, step_dv))
    returns.finish()
    guard.report(call, q.device)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _sink_grad(sink: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    dsink = sink_backward(sink, call.sink_layout, lse, delta)
    reduction = call.config.sink_grad_reduce
    if reduction is not None and call.sink_layout == "sh" and not call.group.is_single:
        all_reduce(dsink, call.group.flat, "the sink gradient")
        if reduction == "avg":
            dsink = dsink / call.plan.cp_size
    return dsink.to(sink.dtype)


# ---- work lists: one per step of a plan, made at first use ----

_work_lists: weakref.WeakKeyDictionary[StepPlan, WorkList] = weakref.WeakKeyDictionary()
_work_lists_lock = threading.Lock()  # backward may run on another thread


def _work_list(step: StepPlan, num_queries: int) -> WorkList:
    with _work_lists_lock:
        found = _work_lists.get(step)
        if found is None:
            found = _work_lists[step] = prepare(step.slices, num_queries, step.num_keys)
        return found


class _BadValueGuard:
    """In check mode, remembers the first NaN or infinity of one pass; otherwise does nothing."""

    def __init__(self) -> None:
        self._is_on = env.check_enabled()
        self._found: tuple[int, ...] | None = None

    def look(self, step: int, **tensors: torch.Tensor) -> None:
        if not self._is_on:
            return
        for name, tensor in tensors.items():
            if self._found is None:
                self._found = checks.first_bad_value(name, tensor, step, is_minus_inf_legal=name == "lse")

    def report(self, call: AttentionCall, device: torch.device) -> None:
        if self._is_on:
            checks.check_no_bad_value(self._found, call.group, device)
