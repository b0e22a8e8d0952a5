"""The checks of the self-test: small problems, each against dense float64. Prints nothing and starts no process (selftest.py does).

A check returns one line about what it measured; it raises Failed when a result is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from magi_attention.api import (
    AttnMask,
    DistAttnKey,
    calc_attn,
    dispatch,
    flex_flash_attn_func,
    get_position_ids,
    magi_attn_flex_key,
    roll,
    undispatch,
)
from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError
from magi_attention.kernels.reference import attention_reference, dense_attention
from magi_attention.plan.build import plan_attention
from magi_attention.plan.check import check_plans
from magi_attention.testing.masks import mask_catalogue
from magi_attention.testing.numerics import ERROR_FLOOR, FACTOR, LSE_ERROR

NUM_HEADS_Q, NUM_HEADS_KV, HEAD_DIM, HEAD_DIM_V = 4, 2, 32, 48
# On a GPU fp32 has no automatic path (select.py says why), so the half precisions are tested there.
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}
DISTRIBUTED_MASKS = (
    "documents_causal",
    "documents_window_global",
    "shared_question",
    "video",
    "rows_without_keys",
    "documents_cross",
    "empty",
)


class Failed(Exception):
    """A result is wrong; the text has what, how far off and how far it may be."""


@dataclass(frozen=True)
class Result:
    """Tensors of one forward and backward, by name."""

    values: dict[str, torch.Tensor]

    @classmethod
    def of(
        cls, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, leaves: dict[str, torch.Tensor], *, is_twin: bool = False
    ) -> Result:
        """Runs the backward. A twin may leave inputs out of its graph where nothing is visible; ours must give them zeros."""
        grads = torch.autograd.grad(out, list(leaves.values()), dout, allow_unused=is_twin, materialize_grads=is_twin)
        return cls({"out": out.detach(), "lse": lse.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}})


def make_inputs(mask: AttnMask, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """q, k, v that require grad, and dout; the same on every rank and device."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    inputs = {
        "q": normal(mask.total_q, NUM_HEADS_Q, HEAD_DIM),
        "k": normal(mask.total_k, NUM_HEADS_KV, HEAD_DIM),
        "v": normal(mask.total_k, NUM_HEADS_KV, HEAD_DIM_V),
    }
    return {**{name: x.requires_grad_() for name, x in inputs.items()}, "dout": normal(mask.total_q, NUM_HEADS_Q, HEAD_DIM_V)}


def judge(ours: Result, mask: AttnMask, inputs: dict[str, torch.Tensor], sink: torch.Tensor | None = None, softcap: float = 0.0) -> float:
    """Compare with dense attention in float64; eager attention in the same dtype is the measure.

    Returns:
        The largest error as a share of the allowed one.
    """
    given = {name: x.detach().cpu() for name, x in inputs.items() if name != "dout"} | (
        {} if sink is None else {"sink": sink.detach().cpu()}
    )
    dense, dout = torch.from_numpy(mask.to_dense()), inputs["dout"].cpu()

    def twin(attention: Callable[..., tuple[torch.Tensor, ...]], dtype: torch.dtype) -> Result:
        leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
        out, lse, _ = attention(leaves["q"], leaves["k"], leaves["v"], dense, softcap=softcap, sink=leaves.get("sink"))
        return Result.of(out, lse, dout.to(dtype), leaves, is_twin=True)

    return compare(ours, twin(attention_reference, torch.float64), twin(dense_attention, inputs["q"].dtype))


def compare(ours: Result, exact: Result, eager: Result) -> float:
    """The largest error as a share of what is allowed, over all tensors. Raises Failed past 1."""
    worst = 0.0
    for name, reference in exact.values.items():
        mine = ours.values[name].detach().cpu().double()
        if mine.shape != reference.shape:
            raise Failed(f"{name} has shape {tuple(mine.shape)}, expected {tuple(reference.shape)}")
        error = _distance(mine, reference)
        kind = "forward" if name == "out" else "backward"
        budget = LSE_ERROR if name == "lse" else FACTOR[kind] * _distance(eager.values[name].double(), reference) + ERROR_FLOOR
        if not error <= budget:
            index = tuple(int(i) for i in np.unravel_index(int(_gap(mine, reference).argmax()), reference.shape))
            raise Failed(
                f"{name}{list(index)} is {mine[index]:.6g}, float64 has {reference[index]:.6g}; off by {error:.1e}, allowed {budget:.1e}"
            )
        worst = max(worst, error / budget)
    return worst


def _gap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b|, 0 where both are the same infinity, infinite where one is NaN."""
    return torch.where(a == b, torch.zeros_like(b), (a - b).abs()).nan_to_num(nan=torch.inf)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(_gap(a, b).max()) if b.numel() else 0.0


# ---- planning ----


def check_areas() -> str:
    """The closed form against counting cells, every mask."""
    for name, mask in mask_catalogue().items():
        counted = int(mask.to_dense().sum())
        if mask.area() != counted:
            raise Failed(f"{name}: area() is {mask.area()}, the dense mask has {counted} cells")
    return f"{len(mask_catalogue())} masks"


def check_plans_over(num_ranks: int) -> str:
    """Plans of all ranks cover every cell exactly once and send what is needed, every mask."""
    for name, mask in mask_catalogue().items():
        is_square = mask.total_q == mask.total_k
        plans = [
            plan_attention(
                mask,
                num_ranks,
                rank,
                DistAttnConfig(),
                num_heads_q=NUM_HEADS_Q,
                num_heads_kv=NUM_HEADS_KV,
                head_dim=HEAD_DIM,
                is_same_source=is_square,
            )
            for rank in range(num_ranks)
        ]
        try:
            check_plans(mask, plans)
        except AssertionError as error:
            raise Failed(f"{name}: {error}") from None
    return f"{len(mask_catalogue())} masks"


def check_wrong_input() -> str:
    """A cell covered twice is refused in words."""
    try:
        AttnMask.from_ranges([[0, 128], [64, 192]], [[0, 128], [0, 128]], None, 192, 128)
    except InputError as error:
        return f"refused: {str(error)[:50]}..."
    raise Failed("a mask that covers 8,192 cells twice was accepted")


# ---- one device ----


def check_attention(mask_name: str, device: torch.device) -> str:
    """Forward and backward in each dtype of the device."""
    mask = mask_catalogue()[mask_name]
    shares = []
    for dtype in DTYPES[device.type]:
        inputs = make_inputs(mask, dtype, device)
        out, meta = flex_flash_attn_func(inputs["q"], inputs["k"], inputs["v"], mask=mask)
        assert meta.lse is not None
        ours = Result.of(out, meta.lse, inputs["dout"], {name: inputs[name] for name in "qkv"})
        if bool((ours.values["out"].cpu()[torch.from_numpy(~mask.to_dense().any(1))] != 0).any()):
            raise Failed(f"{dtype}: a row that sees no key has out != 0")
        shares.append(f"{judge(ours, mask, inputs):.0%} in {str(dtype).removeprefix('torch.')}")
    return f"error, of the allowed: {', '.join(shares)}"


def check_sink_and_softcap(device: torch.device) -> str:
    """Two sinks and a soft cap, gradient of the sinks included."""
    mask = mask_catalogue()["rows_without_keys"]
    inputs = make_inputs(mask, DTYPES[device.type][0], device)
    sink = torch.linspace(-1.0, 2.0, 2 * NUM_HEADS_Q, device=device).reshape(2, NUM_HEADS_Q).requires_grad_()
    out, meta = flex_flash_attn_func(inputs["q"], inputs["k"], inputs["v"], mask=mask, sink=sink, softcap=2.0)
    assert meta.lse is not None
    ours = Result.of(out, meta.lse, inputs["dout"], {**{name: inputs[name] for name in "qkv"}, "sink": sink})
    return f"error, of the allowed: {judge(ours, mask, inputs, sink, 2.0):.0%}"


# ---- several ranks: each runs on every rank of the default process group ----


def _key_of(mask: AttnMask) -> DistAttnKey:
    totals = (mask.total_q, mask.total_k)
    heads = (NUM_HEADS_Q, NUM_HEADS_KV, HEAD_DIM)
    return magi_attn_flex_key(*mask.to_ranges(), *totals, *heads, 0, dist.group.WORLD, is_same_source=totals[0] == totals[1])


def _rank_device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")


def attention_on_ranks(rank: int, mask_name: str) -> str:
    """Dispatch, attend, gather; gradients of the whole inputs on every rank."""
    mask, device = mask_catalogue()[mask_name], _rank_device(rank)
    key = _key_of(mask)
    inputs = make_inputs(mask, DTYPES[device.type][0], device)
    k_role = "q" if mask.total_q == mask.total_k else "k"
    k, v = (dispatch(inputs[name], key, role=k_role) for name in "kv")
    out_local, meta = calc_attn(dispatch(inputs["q"], key), k, v, key)
    assert meta.lse is not None
    out, lse = undispatch(out_local, key), undispatch(meta.lse, key)
    ours = Result.of(out, lse, inputs["dout"], {name: inputs[name] for name in "qkv"})
    return f"error, of the allowed: {judge(ours, mask, inputs):.0%}"


def tokens_on_ranks(rank: int, mask_name: str) -> str:
    """Rows travel unchanged: round trip, positions and roll are equal to the bit."""
    mask, device = mask_catalogue()[mask_name], _rank_device(rank)
    key = _key_of(mask)
    x = torch.arange(mask.total_q * 3, device=device).reshape(mask.total_q, 3)
    local = dispatch(x, key)
    if not torch.equal(undispatch(local, key), x):
        raise Failed("undispatch(dispatch(x)) differs from x")
    if not torch.equal(get_position_ids(key).to(device), local[:, 0] // 3):
        raise Failed("get_position_ids does not name the rows that dispatch gave this rank")
    if not torch.equal(roll(local, -1, 0, key), dispatch(torch.roll(x, -1, 0), key)):
        raise Failed("roll differs from torch.roll of the whole tensor")
    return f"{mask.total_q} rows, equal to the bit"


RANK_CHECKS: dict[str, Callable[[int, str], str]] = {"attention": attention_on_ranks, "tokens": tokens_on_ranks}


def run_rank_check(rank: int, num_ranks: int, check: str, mask_name: str) -> tuple[bool, str]:
    """Entry of a rank process: (is right, line). Other exceptions travel by the pool."""
    try:
        return True, RANK_CHECKS[check](rank, mask_name)
    except Failed as failure:
        return False, f"rank {rank} of {num_ranks}: {failure}"
