"""What distributed attention verifies about its inputs and, in check mode, about ranks, plans and numbers. Computes no attention.

check_local_rows runs always and costs no message. The others run only when MAGI_CHECK is set: they send small messages, so every
rank of the group calls them in the same order, and they raise the same error on every rank instead of leaving some waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from magi_attention import env
from magi_attention.comm import CommGroup, agree
from magi_attention.errors import InputError
from magi_attention.plan.types import RankPlan, StepPlan
from magi_attention.runtime.collectives import all_gather
from magi_attention.runtime.rows import TokenOwners

ATTENTION_CALL = "attention call"  # what ranks compare


def check_can_be_saved(tensors: Sequence[torch.Tensor | None]) -> None:
    """Tensors made in inference mode cannot be kept for a backward, which torch would only notice after the exchange.

    Raises:
        InputError: one is there, another requires grad, and autograd records.
    """
    given = [x for x in tensors if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given) and any(x.is_inference() for x in given):
        raise InputError(
            "one of q, k, v and sink was made in torch.inference_mode and another requires grad; clone() it outside of inference mode, "
            "or call under torch.no_grad()"
        )


def check_local_rows(q: torch.Tensor, k: torch.Tensor, plan: RankPlan) -> None:
    """The number of local rows against the plan; what q, k and v must share is kernels/select.py's part.

    Raises:
        InputError: q or k (and with it v) has another number of rows than this rank owns.
    """
    for name, tensor, num_rows in (("q", q, plan.num_local_q), ("k", k, plan.num_local_k)):
        if tensor.shape[0] != num_rows:
            raise InputError(
                f"{name} has {tensor.shape[0]} rows; the key gives rank {plan.cp_rank} of {plan.cp_size} {num_rows} tokens; "
                "dispatch the tensor with the same key, or build a key for this length"
            )


# ---- check mode ----


def check_plan(plan: RankPlan) -> None:
    """Assert what the executor relies on; what only the whole mask can show is plan/check.py's part."""
    assert len(plan.forward) >= 1 and len(plan.backward) >= 1, "a plan has at least the local step"
    for name, steps in (("forward", plan.forward), ("backward", plan.backward)):
        for index, step in enumerate(steps):
            _check_step(f"{name} step {index} of rank {plan.cp_rank}", step, plan, is_local=index == 0)


def _check_step(place: str, step: StepPlan, plan: RankPlan, *, is_local: bool) -> None:
    runs = step.k_token_runs
    assert int((runs[:, 1] - runs[:, 0]).sum()) == step.num_keys, f"{place}: key runs do not add up to num_keys={step.num_keys}"
    assert (runs[1:, 0] >= runs[:-1, 1]).all(), f"{place}: key runs are not ascending"
    if len(step.slices):
        assert step.slices[:, :4].min() >= 0, f"{place}: a slice starts before row 0"
        assert step.slices[:, 1].max() <= plan.num_local_q, f"{place}: a slice ends past the {plan.num_local_q} local query rows"
        assert step.slices[:, 3].max() <= step.num_keys, f"{place}: a slice ends past the {step.num_keys} keys of the step"
    if is_local:
        assert step.exchange is None and step.num_keys == plan.num_local_k, f"{place}: the local step uses the rank's own keys"
        return
    exchange = step.exchange
    assert exchange is not None, f"{place}: a remote step has an exchange"
    assert exchange.num_rows_in == plan.num_local_k and exchange.num_rows_out == step.num_keys, f"{place}: exchange sizes"
    assert np.array_equal(np.sort(exchange.recv_rows), np.arange(step.num_keys)), f"{place}: received rows do not tile the buffer"


def check_agreement(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    plan: RankPlan,
    group: CommGroup,
    options: dict[str, object],
) -> None:
    """Raise the same InputError on every rank when they differ in anything a call must share. Collective."""
    is_recorded = torch.is_grad_enabled()
    facts = {
        **{name: f"{tuple(x.shape[1:])} {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v))},
        # A backward that exchanges keys runs, returns their gradients, reduces that of the sink.
        "q, k or v requires grad": is_recorded and (q.requires_grad or k.requires_grad or v.requires_grad),
        "k or v requires grad": is_recorded and (k.requires_grad or v.requires_grad),
        "sink requires grad": is_recorded and sink is not None and sink.requires_grad,
        "sink": None if sink is None else tuple(sink.shape[-2:]),
        **options,
        "steps": (len(plan.forward), len(plan.backward)),
        "area": int(plan.rank_areas.sum()),
    }
    text = ", ".join(f"{name} {value}" for name, value in facts.items())
    digest = hashlib.sha256(text.encode())
    for dispatch in (plan.dispatch_q, plan.dispatch_k):
        digest.update(np.array([dispatch.total_tokens, dispatch.chunk_size], "<i8").tobytes())
        digest.update(dispatch.chunk_owner.astype("<i4").tobytes())
    for counts in (plan.rank_areas, plan.rank_recv_rows, plan.rank_send_rows):
        digest.update(counts.astype("<i8").tobytes())
    agree(group, ATTENTION_CALL, digest.digest(), text)


def check_move_agreement(what: str, x: torch.Tensor, dim: int, owners: TokenOwners, options: Mapping[str, object]) -> None:
    """In check mode, raise the same InputError on every rank when they differ in how tokens move; collective then."""
    if owners.group.is_single or not env.check_enabled():
        return
    dispatch = owners.routes.dispatch
    facts = {
        "dim": dim,
        "other sizes": (*x.shape[:dim], *x.shape[dim + 1 :]),
        "dtype": x.dtype,
        **options,
        "tokens": dispatch.total_tokens,
        "chunk size": dispatch.chunk_size,
    }
    text = ", ".join(f"{name} {value}" for name, value in facts.items())
    agree(owners.group, what, text.encode() + dispatch.chunk_owner.astype("<i4").tobytes(), text)


def has_backward(x: torch.Tensor) -> bool:
    """Autograd records what is done with x."""
    return torch.is_grad_enabled() and x.requires_grad


def first_bad_value(name: str, tensor: torch.Tensor, step: int, *, is_minus_inf_legal: bool = False) -> tuple[int, ...] | None:
    """(step, name index, flat index) of the first NaN or infinity of `tensor`, or None."""
    bad = torch.isnan(tensor) | torch.isposinf(tensor)
    if not is_minus_inf_legal:
        bad |= torch.isneginf(tensor)
    if not bool(bad.any()):
        return None
    return step, _GUARDED.index(name), int(bad.reshape(-1).to(torch.uint8).argmax())


_GUARDED = ("out", "lse", "dout", "dq", "dk", "dv")


def check_no_bad_value(found: Sequence[int] | None, group: CommGroup, device: torch.device) -> None:
    """Raise the same FloatingPointError on every rank when any rank found a bad value. Collective."""
    seen = _gather_ints(list(found) if found is not None else [-1, -1, -1], group, device)
    for rank, (step, name_idx, flat_idx) in enumerate(seen):
        if step >= 0:
            raise FloatingPointError(
                f"MAGI_CHECK: {_GUARDED[name_idx]} has a NaN or infinity at flat index {flat_idx}, first seen after step {step} "
                f"on rank {rank}; look for NaN or infinity in the q, k, v (forward) or dout (backward) rows that meet there"
            )


def _gather_ints(values: list[int], group: CommGroup, device: torch.device) -> list[list[int]]:
    if group.is_single:
        return [values]
    ours = torch.tensor(values, dtype=torch.int64, device=device)
    return [part.tolist() for part in all_gather(ours, group.flat, "bad values found in check mode")]
