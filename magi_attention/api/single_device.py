"""flex_flash_attn_func: attention with any mask on one device. Knows nothing of groups or keys.

The mask becomes a plan of one rank, and the plan runs through the same code as distributed attention, so one rank of a group and a
single device give the same bits.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from magi_attention import env
from magi_attention.api.device_ranges import ranges_on_device
from magi_attention.api.single_plans import AttnPlan, PlanOrSlices, plan_of_ranges, plan_of_table, prepare_attention
from magi_attention.arguments import count
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError
from magi_attention.mask import AttnMask
from magi_attention.mask.slices import MAX_TOKENS
from magi_attention.runtime.attention import dist_attention
from magi_attention.runtime.direct import Request, attend_again, attend_directly
from magi_attention.runtime.rows import require_tensor
from magi_attention.runtime.single import DeviceMask, WorkList, cast_for_autocast, check_tensors, single_device_attention

_IGNORED = (
    "auto_range_merge", "swap_ab", "pack_gqa", "cat_gqa", "sparse_load", "ref_block_size", "max_seqlen_q", "max_seqlen_k",
    "swap_bwd_qk_loop", "disable_fwd_atomic_reduction", "disable_bwd_dkv_atomic_reduction", "index_attn",
)  # fmt: skip


def flex_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_ranges: Any = None,
    k_ranges: Any = None,
    attn_type_map: Any = None,
    *,
    sink: torch.Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_max_logits: bool = False,
    index_attn_indices: torch.Tensor | None = None,
    q_block_size: int = 1,
    k_block_size: int = 1,
    mask: AttnMask | None = None,
    plan: AttnPlan | None = None,
    auto_range_merge: bool | None = None,
    swap_ab: bool | None = None,
    pack_gqa: bool | None = None,
    cat_gqa: bool | None = None,
    sparse_load: bool | None = None,
    ref_block_size: tuple[int, int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    swap_bwd_qk_loop: bool | None = None,
    disable_fwd_atomic_reduction: bool | None = None,
    disable_bwd_dkv_atomic_reduction: bool | None = None,
    index_attn: bool | None = None,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention of packed tokens with any mask, on one device.

    The mask is exactly one of: (q_ranges, k_ranges[, attn_type_map]), index_attn_indices, mask, plan. Ranges and tables are checked
    once per content, before anything runs; a repeated call checks nothing.

    Where a compiled kernel runs, ranges that are all int32 or int64 CUDA tensors never reach the host. Every call reads them anew, in
    the order of the current stream, and its backward uses what the forward has read, whatever is written to them in between. Results
    of a wrong range are NaN, and the error comes with the next call or the backward. Ranges that overlap are not looked for: a cell
    covered twice counts twice, silently. Run with MAGI_CHECK=1 to have such ranges checked in full, first.

    Other CUDA tensors (tables, and ranges where the blocked path runs) are read by the host, which waits, and not again while PyTorch
    counts no write to them: writes by .data, torch.distributed, other kernels or a graph replay need a new tensor or clear_cache().

    Under autocast, q, k and v are cast to the autocast dtype (float64 stays). Any strides are accepted; dout may be broadcast.
    torch.compile(fullgraph=True) sees registered operations; there, ranges are tensors or lists, and an AttnMask is passed as plan=.

    Args:
        q: [total_q, num_heads_q, head_dim], bf16, fp16, fp32 or fp64.
        k: [total_k, num_heads_kv, head_dim], dtype of q; num_heads_q is a multiple of num_heads_kv.
        v: [total_k, num_heads_kv, head_dim_v], dtype of q.
        q_ranges, k_ranges: int [n, 2] half-open token ranges: int32 or int64 tensors of any device, arrays, lists or AttnRanges. No
            (row, column) may be covered by two of them.
        attn_type_map: int [n], 0 full, 1 causal, 2 inv_causal, 3 bi_causal; None is all full.
        sink: fp32 logits that join the softmax denominator and bring no value: "sh" [num_sink, num_heads_q] or "ssh"
            [total_q, num_sink, num_heads_q]. Differentiable.
        sink_layout: "sh" or "ssh".
        softmax_scale: factor on q @ k.T; None is head_dim ** -0.5.
        softcap: cap * tanh(score / cap) on scaled scores; 0 is off.
        deterministic: gradients equal to the bit from run to run on one kind of device, at some cost on a GPU; out and lse always are.
        sm_margin: streaming multiprocessors of a GPU left to other work, fewer than it has; CPU paths have none.
        return_max_logits: fill `max_logits` of the second result.
        index_attn_indices: int [num_q_blocks, topk]: line b lists the key blocks that every row of query block b sees, in any
            order; -1 is unused, a block listed twice counts once. [n, heads, topk] is read as n * heads lines when that is the
            number of query blocks (heads folded into the tokens), else as one table per key head, heads = num_heads_kv.
        q_block_size, k_block_size: tokens per block of index_attn_indices; the last block may be short.
        mask: an AttnMask of total_q rows and total_k columns.
        plan: from `prepare_attention`.
        auto_range_merge, swap_ab, pack_gqa, cat_gqa and all after them: accepted for callers of the original and ignored with a
            DeprecationWarning each; the library chooses.

    Returns:
        out [total_q, num_heads_q, head_dim_v] in q's dtype, and AttnForwardMeta with lse [total_q, num_heads_q], fp32 (fp64 for
        fp64 inputs), natural log, differentiable, and max_logits [num_heads_q] or None. A row that sees no key has out 0, lse -inf
        (the sinks' lse with a sink) and zero gradients.

    Raises:
        InputError: before any compute, for tensors or a mask that break a rule above.
    """
    request = Request(softmax_scale, softcap, sink_layout, return_max_logits, "auto", deterministic, sm_margin)
    flags = (
        auto_range_merge, swap_ab, pack_gqa, cat_gqa, sparse_load, ref_block_size, max_seqlen_q, max_seqlen_k, swap_bwd_qk_loop,
        disable_fwd_atomic_reduction, disable_bwd_dkv_atomic_reduction, index_attn,
    )  # fmt: skip
    for value in flags:
        if value is not None:
            _warn_ignored([name for name, flag in zip(_IGNORED, flags, strict=True) if flag is not None])
            break
    device_mask: DeviceMask | None = None
    if index_attn_indices is None and mask is None and not torch.compiler.is_compiling() and not env.check_enabled():
        work: WorkList | DeviceMask | None = None
        if q_ranges is None:
            work = plan.work if isinstance(plan, AttnPlan) and k_ranges is None and attn_type_map is None else None
        elif plan is None and isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.dim() == 3 == k.dim():
            work = device_mask = ranges_on_device(q_ranges, k_ranges, attn_type_map, q.size(0), k.size(0))  # nested tensors have no shape
        known = None if work is None else attend_again(q, k, v, sink, work, request)
        if known is not None:
            return known[0], AttnForwardMeta(known[1], known[2])
    _check_sizes(q, k, v)
    request = request.normal()
    call = functools.partial(_attend, request)
    given = {"q_ranges": q_ranges, "index_attn_indices": index_attn_indices, "mask": mask, "plan": plan}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise InputError(
            f"the mask is given by {' and '.join(names) or 'nothing'}; pass exactly one of q_ranges (with k_ranges), index_attn_indices, "
            "mask, plan"
        )
    if (k_ranges is None) != (q_ranges is None) or (attn_type_map is not None and q_ranges is None):
        raise InputError("k_ranges and attn_type_map belong to q_ranges; pass q_ranges and k_ranges together, or neither")
    if index_attn_indices is not None:
        return _index_attention(q, k, v, index_attn_indices, (q_block_size, k_block_size), sink, call)
    if q_ranges is not None:
        found = None if device_mask is None else _attend_on_device(request, q, k, v, device_mask, sink)
        if found is not None:
            return found
        return call(q, k, v, plan_of_ranges(q_ranges, k_ranges, attn_type_map, q.shape[0], k.shape[0]), sink)
    if mask is not None:
        plan = prepare_attention(mask)
    assert plan is not None
    _check_plan(plan, q, k)
    return call(q, k, v, plan, sink)


def _warn_ignored(names: list[str]) -> None:
    for name in names:
        warnings.warn(f"{name} is ignored: the library chooses; leave it out", DeprecationWarning, stacklevel=3)


def _check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """What must hold before the mask can be read; the runtime checks the rest before it computes."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_tensor(name, tensor, "[tokens, heads, head_dim]")
        if tensor.dim() != 3:
            raise InputError(
                f"{name} has shape {tuple(tensor.shape)}; it must be [tokens, heads, head_dim] without a batch dimension; "
                "pack a batch into one row of tokens (squash_batch_dim) and give one range per sequence"
            )


def _check_plan(plan: AttnPlan, q: torch.Tensor, k: torch.Tensor) -> None:
    if not isinstance(plan, AttnPlan):
        raise InputError(f"plan is a {type(plan).__name__}; it must come from prepare_attention")
    for name, tensor, total in (("q", q, plan.mask.total_q), ("k", k, plan.mask.total_k)):
        if tensor.shape[0] != total:
            raise InputError(f"{name} has {tensor.shape[0]} rows but the mask has {total}; build the mask for this length")


@functools.cache
def _config(deterministic: bool) -> DistAttnConfig:
    return DistAttnConfig(deterministic=deterministic)


def _attend(
    request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PlanOrSlices, sink: torch.Tensor | None
) -> tuple[torch.Tensor, AttnForwardMeta]:
    if torch.compiler.is_compiling():  # one registered operation; the same kernels on the same slices, so the same bits
        slices = plan.slices if isinstance(plan, AttnPlan) else plan
        out, lse, max_logits = single_device_attention(q, k, v, slices, sink=sink, **request._asdict())
        return out, AttnForwardMeta(lse, max_logits)
    assert isinstance(plan, AttnPlan)
    if not env.check_enabled():
        q, k, v = cast_for_autocast(q, k, v)
        found = attend_directly(q, k, v, sink, plan.work, request)
        if found is not None:
            return found[0], AttnForwardMeta(found[1], found[2])
    options = request._asdict()
    config = _config(options.pop("deterministic"))
    del options["backend"]  # auto, as the config has it
    out, lse, max_logits = dist_attention(q, k, v, plan.rank_plan, None, config, sink=sink, **options)
    return out, AttnForwardMeta(lse, max_logits)


def _attend_on_device(
    request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: DeviceMask, sink: torch.Tensor | None
) -> tuple[torch.Tensor, AttnForwardMeta] | None:
    """With ranges that stay on the GPU; None where no compiled kernel takes the problem, which needs them on the host."""
    q, k, v = cast_for_autocast(q, k, v)
    found = attend_directly(q, k, v, sink, mask, request) if q.device == mask.tensors[0].device else None
    return None if found is None else (found[0], AttnForwardMeta(found[1], found[2]))


def _index_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    block_sizes: tuple[int, int],
    sink: torch.Tensor | None,
    call: functools.partial[tuple[torch.Tensor, AttnForwardMeta]],
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """One table for all heads, or one per key head, each with its own mask."""
    if isinstance(table, torch.Tensor):
        require_tensor("index_attn_indices", table, "[num_q_blocks, topk]")
    q_block_size, k_block_size = (count(f"{side}_block_size", size, 1, MAX_TOKENS) for side, size in zip("qk", block_sizes, strict=True))
    total_q, total_k, num_heads_kv = q.shape[0], k.shape[0], k.shape[1]

    sizes = (total_q, total_k, q_block_size, k_block_size)
    num_q_blocks = -(-total_q // q_block_size)
    is_per_head = getattr(table, "ndim", 0) == 3 and table.shape[1] == num_heads_kv > 1 and table.shape[0] == num_q_blocks > 0
    if not is_per_head:
        return call(q, k, v, plan_of_table(table, None, sizes), sink)
    if num_heads_kv == 0 or q.shape[1] % num_heads_kv:
        raise InputError(f"num_heads_q={q.shape[1]} is not a multiple of num_heads_kv={num_heads_kv}; repeat or drop heads")
    check_tensors(q, k, v, sink=sink, sink_layout=call.args[0].sink_layout)  # whole, before they are cut by heads
    plans = [plan_of_table(table, head, sizes) for head in range(num_heads_kv)]  # all masks before any compute
    group_size = q.shape[1] // num_heads_kv
    outs, metas = [], []
    for head, plan in enumerate(plans):
        heads = slice(head * group_size, (head + 1) * group_size)
        own_sink = sink[..., heads] if sink is not None else None
        out, meta = call(q[:, heads], k[:, head : head + 1], v[:, head : head + 1], plan, own_sink)
        outs.append(out)
        metas.append(meta)
    tops = [meta.max_logits for meta in metas if meta.max_logits is not None]
    max_logits = torch.cat(tops) if tops else None
    return torch.cat(outs, dim=1), AttnForwardMeta(torch.cat([meta.lse for meta in metas], dim=1), max_logits)
