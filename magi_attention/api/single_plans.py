"""Masks made ready for one device: plans, remembered by content, and the registered operations that stand for them in compiled graphs.

Computes no attention. Inside torch.compile nothing can be looked up while tracing, so there a mask is the result of an operation that
runs with the graph: its slices, a CPU tensor [num_slices, 6] whose length is not known while tracing, or one line for each range where
the ranges lie on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from magi_attention.api.device_ranges import slices_on_device
from magi_attention.api.index_blocks import mask_from_index_blocks
from magi_attention.api.key_cache import BoundedCache
from magi_attention.api.mask_inputs import mask_from_ranges, mask_from_table
from magi_attention.errors import InputError, UnsupportedError
from magi_attention.mask import AttnMask
from magi_attention.plan.types import RankPlan
from magi_attention.runtime.single import WorkList, prepare, single_rank_plan

_MAX_PLANS = 64
_TYPES_NAME = "attn_type_map"


@dataclass(frozen=True, eq=False)
class AttnPlan:
    """A mask made ready for one device; depends on the mask alone, so one serves every layer, head count and dtype.

    Attributes:
        mask: what it computes.
        rank_plan: what runs.
        slices: int32 [num_slices, 6] on the CPU, what runs inside a compiled graph.
        work: what kernels derive from the mask, made at their first use and kept with the plan.
    """

    mask: AttnMask
    rank_plan: RankPlan
    slices: torch.Tensor
    work: WorkList = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "work", prepare(self.mask.slices, self.mask.total_q, self.mask.total_k))


# What attention takes: a plan, or inside a compiled graph the slices that an operation will return.
PlanOrSlices = AttnPlan | torch.Tensor

_plans: BoundedCache[AttnPlan] = BoundedCache(_MAX_PLANS)


def clear_plans() -> None:
    """Forget every remembered single-device plan."""
    _plans.clear()


def prepare_attention(mask: AttnMask) -> AttnPlan:
    """The plan of a mask for `flex_flash_attn_func(q, k, v, plan=...)`: with it a call looks at no range and hashes nothing.

    Raises:
        InputError: mask is not an AttnMask.
    """
    if not isinstance(mask, AttnMask):
        raise InputError(f"mask is a {type(mask).__name__}; it must be an AttnMask, e.g. AttnMask.from_ranges(...)")
    if torch.compiler.is_compiling():
        raise UnsupportedError("an AttnMask cannot be planned inside torch.compile; call prepare_attention(mask) outside and pass plan=")
    return _plans.get_or_make(mask.digest, lambda: _plan(mask))


def _plan(mask: AttnMask) -> AttnPlan:
    rank_plan = single_rank_plan(mask.slices, mask.total_q, mask.total_k, mask.area())
    with torch.inference_mode(False):  # the plan outlives the mode of this call, and a graph saves its slices for a backward
        return AttnPlan(mask, rank_plan, torch.from_numpy(mask.slices.copy()))


def plan_of_ranges(q_ranges: Any, k_ranges: Any, attn_type_map: Any, total_q: int, total_k: int) -> PlanOrSlices:
    """Of the (q_ranges, k_ranges, types) form.

    Raises:
        InputError: ranges or types that break a rule; inside a compiled graph when it runs.
    """
    if torch.compiler.is_compiling():
        types = None if attn_type_map is None else _graph_tensor(_TYPES_NAME, attn_type_map)
        ranges = (_graph_tensor("q_ranges", q_ranges), _graph_tensor("k_ranges", k_ranges))
        slices: torch.Tensor = _ranges_op(*ranges, types, total_q, total_k)
        return slices
    return prepare_attention(mask_from_ranges(q_ranges, k_ranges, attn_type_map, total_q, total_k, _TYPES_NAME))


def plan_of_table(table: torch.Tensor, head: int | None, sizes: tuple[int, int, int, int]) -> PlanOrSlices:
    """Of an index table, or of table[:, head]; `sizes` is (total_q, total_k, q_block_size, k_block_size).

    Raises:
        InputError: a table that breaks a rule; inside a compiled graph when it runs.
    """
    if torch.compiler.is_compiling():
        slices: torch.Tensor = _table_op(_graph_tensor("index_attn_indices", table), -1 if head is None else head, *sizes)
        return slices
    return prepare_attention(_mask_of_table(table, head, sizes))


def _mask_of_table(table: torch.Tensor, head: int | None, sizes: tuple[int, int, int, int]) -> AttnMask:
    return mask_from_table(table, head, sizes, lambda lines: mask_from_index_blocks(lines, *sizes))


def _graph_tensor(name: str, values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, (list, tuple)):
        return torch.tensor(values)
    raise UnsupportedError(f"{name} is a {type(values).__name__} inside torch.compile; pass a tensor or a list of ints, or plan=")


# ---- in compiled graphs ----


@torch.library.custom_op("magi_attention::slices_of_ranges", mutates_args=())
def _ranges_op(
    q_ranges: torch.Tensor, k_ranges: torch.Tensor, attn_type_map: torch.Tensor | None, total_q: int, total_k: int
) -> torch.Tensor:
    if q_ranges.is_cuda:  # stay there, unread
        return slices_on_device(q_ranges, k_ranges, attn_type_map)
    return _copied(mask_from_ranges(q_ranges, k_ranges, attn_type_map, total_q, total_k, _TYPES_NAME))


@torch.library.custom_op("magi_attention::slices_of_table", mutates_args=())
def _table_op(table: torch.Tensor, head: int, total_q: int, total_k: int, q_block_size: int, k_block_size: int) -> torch.Tensor:
    return _copied(_mask_of_table(table, None if head < 0 else head, (total_q, total_k, q_block_size, k_block_size)))


def _copied(mask: AttnMask) -> torch.Tensor:
    return torch.from_numpy(mask.slices.astype(np.int32))  # an operation returns memory of its own


@_ranges_op.register_fake
def _(q_ranges: torch.Tensor, k_ranges: torch.Tensor, attn_type_map: torch.Tensor | None, total_q: int, total_k: int) -> torch.Tensor:
    return q_ranges.new_empty((q_ranges.shape[0], 6), dtype=torch.int32) if q_ranges.is_cuda else _unknown_slices()


@_table_op.register_fake
def _(table: torch.Tensor, head: int, total_q: int, total_k: int, q_block_size: int, k_block_size: int) -> torch.Tensor:
    return _unknown_slices()


def _unknown_slices() -> torch.Tensor:
    num_slices = torch.library.get_ctx().new_dynamic_size()
    return torch.empty((num_slices, 6), dtype=torch.int32, device="cpu")
