"""Labels and losses over tokens that are spread over ranks. Knows dispatch and roll, not attention or models."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist

from magi_attention.arguments import count as checked_count
from magi_attention.errors import InputError
from magi_attention.kernels.tensors import require_tensor
from magi_attention.runtime.collectives import all_reduce
from magi_attention.runtime.roll import roll
from magi_attention.runtime.rows import TokenOwners

IGNORED_LABEL = -100  # what torch.nn.functional.cross_entropy skips by default
GRAD_REDUCTIONS = ("avg", "sum")


def shift_labels(
    labels_local: torch.Tensor,
    owners: TokenOwners,
    cu_seqlens: npt.ArrayLike | torch.Tensor | None = None,
    *,
    dim: int = 0,
    fill_value: int = IGNORED_LABEL,
) -> torch.Tensor:
    """Next-token labels: each local row gets the token after it in its document, the last of a document `fill_value`. Collective.

    Args:
        labels_local: int, this rank's token ids (a dispatched tensor) along `dim`.
        owners: who owns which token.
        cu_seqlens: int [num_documents + 1], global document borders; None is one document.
        dim: the dimension that counts tokens.
        fill_value: the label that the loss ignores.

    Returns:
        The shape of labels_local. Padded rows of a padding key also hold `fill_value`.

    Raises:
        InputError, CommError: as `roll`.
    """
    shifted = roll(labels_local, -1, owners, dim=dim, within_documents=True, cu_seqlens=cu_seqlens, fill_value=fill_value)
    num_real = owners.num_real_local_tokens
    if num_real < owners.num_local_tokens:
        shifted.narrow(dim, num_real, owners.num_local_tokens - num_real).fill_(fill_value)
    return shifted


def reduce_loss(
    loss_sum: torch.Tensor, count: torch.Tensor | int, group: dist.ProcessGroup | None = None, *, grad_reduction: str = "avg"
) -> torch.Tensor:
    """The mean loss over all tokens of the group, equal on every rank, with gradients that fit the framework. Collective.

    value = sum over ranks of loss_sum / sum over ranks of count; 0 when no rank counts a token.

    Backward sends nothing. Rank r's gradient of the value is, up to a factor, the part that flows through its own loss_sum; attention
    has already carried the parts that belong to other ranks' keys and values to them. What is missing is the reduction of parameter
    gradients over the group, which the framework does, so it must be told how:

    * grad_reduction="avg": the framework averages parameter gradients over `group` (DDP, FSDP, most trainers). The gradient is
      scaled by the group's size, which the average divides away.
    * grad_reduction="sum": the framework, or the caller, sums them. No scaling.

    Either way the reduced gradients are those of the mean loss of the whole batch on one rank. When the framework averages over a
    larger group (data parallel x cp), pass that group, so that the mean is over its tokens; a rank's number of tokens does not matter.

    Args:
        loss_sum: floating point scalar, the sum of this rank's token losses; 0 when it has none (never a mean over nothing).
        count: tokens in that sum (labels that are not ignored), int or a tensor of one element.
        group: the ranks that share the batch; None is this rank alone.
        grad_reduction: what is done to parameter gradients over `group`, "avg" or "sum".

    Returns:
        A scalar of loss_sum's dtype, or fp32 when that is smaller.

    Raises:
        InputError: loss_sum is not a floating point scalar, or grad_reduction is unknown.
        CommError: a peer was lost.
    """
    require_tensor("loss_sum", loss_sum, "of one floating point number")
    if loss_sum.numel() != 1 or not loss_sum.is_floating_point():
        raise InputError(
            f"loss_sum has shape {tuple(loss_sum.shape)} and dtype {loss_sum.dtype}; sum the token losses to one floating number"
        )
    if not isinstance(grad_reduction, str) or grad_reduction not in GRAD_REDUCTIONS:
        raise InputError(f'grad_reduction={grad_reduction!r} must be "avg" or "sum": what the framework does to parameter gradients')
    if not isinstance(count, torch.Tensor):
        count = checked_count("count", count, 0, 1 << 53)
    elif require_tensor("count", count, "of one number").numel() != 1 or count.is_meta or count.is_complex():
        raise InputError(f"count has shape {tuple(count.shape)}, {count.dtype}; it must be one number, e.g. (labels != -100).sum()")
    mean: torch.Tensor = _ReduceLoss.apply(loss_sum.reshape(()), count, group, grad_reduction)[0]  # type: ignore[no-untyped-call]
    return mean


class _ReduceLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        loss_sum: torch.Tensor, count: torch.Tensor | int, group: dist.ProcessGroup | None, grad_reduction: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean loss, its derivative by this rank's loss_sum)."""
        # float64 counts tokens exactly up to 2^53 and adds losses of many ranks without a rounding of its own
        totals = torch.zeros(2, dtype=torch.float64, device=loss_sum.device)
        totals[0] = loss_sum
        totals[1] = count if isinstance(count, int) else count.reshape(())
        num_ranks = 1
        if group is not None:
            all_reduce(totals, group, "the loss")
            num_ranks = dist.get_world_size(group)
        weight = 1.0 / totals[1].clamp(min=1.0)
        dtype = loss_sum.dtype if loss_sum.dtype == torch.float64 else torch.float32
        return (totals[0] * weight).to(dtype), weight * (num_ranks if grad_reduction == "avg" else 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        derivative = output[1]
        ctx.mark_non_differentiable(derivative)
        ctx.save_for_backward(derivative)
        ctx.input_dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor | None) -> Any:
        (derivative,) = ctx.saved_tensors
        return (grad.to(torch.float64) * derivative).to(ctx.input_dtype), None, None, None
