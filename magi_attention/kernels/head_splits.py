"""In how many parts the query heads of a key head are walked by the backward, so that few tiles of keys still fill a GPU.

One work item is a tile of keys and the query heads of one key head. Below a few items per multiprocessor the last ones decide the time;
parts are smaller items, which then add to dk and dv. Knows costs and counts, no tensors.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

# In interior blocks (1,024 of a cost), from times on an H200: filling and emptying an item, the same where parts are added, and the sums
# in fp32 that parts need: per key and head, spread over the GPU.
_BLOCK_COST = 1024
_ITEM_BLOCKS, _PART_BLOCKS = 2.0, 2.5
_SUM_BLOCKS_PER_KEY_AND_HEAD = 4.3e-4

# Items per multiprocessor: from when on whole items balance, and what is not worth a look.
_FEW_ITEMS, _FEW_UNEVEN_ITEMS, _MANY_ITEMS = 8, 48, 24
_WORTH = 0.96
_UNEVEN = 1.3  # largest cost over the mean
_MOST_UNEVEN_PARTS = 3
_MOST_SUMS = 0.1  # of all blocks: short documents would pay more for the sums than balance gives
_FEW_UNKNOWN_ITEMS = 2  # per multiprocessor, where costs are on the device


def head_splits(costs: npt.NDArray[np.int32] | None, num_tiles: int, num_keys: int, heads: tuple[int, int], num_sms: int) -> int:
    """A divisor of the query heads of a key head, 1 for the most part.

    Args:
        costs: int32 [num_tiles], relative time of each tile for one query head (TileWork.costs); None when not known on the host.
        num_tiles: tiles of keys.
        num_keys: keys in all of them.
        heads: (query heads, key heads).
        num_sms: multiprocessors that a launch may use.
    """
    num_heads_kv, group = heads[1], heads[0] // heads[1]
    num_items = num_tiles * num_heads_kv
    divisors = [parts for parts in range(1, group + 1) if group % parts == 0]
    if len(divisors) == 1 or num_items == 0 or num_items > _FEW_UNEVEN_ITEMS * num_sms:
        return 1
    if costs is None:
        return next((parts for parts in divisors if parts * num_items >= _FEW_UNKNOWN_ITEMS * num_sms), group)
    blocks = (np.sort(costs)[::-1] * (group / _BLOCK_COST)).tolist()
    if not blocks[0]:
        return 1
    sums = _SUM_BLOCKS_PER_KEY_AND_HEAD * num_keys * num_heads_kv
    whole = sum(blocks) * num_heads_kv / num_sms
    # Uneven items do not take the time they are said to: smaller ones were faster by 2 to 8 % up to 64k tokens.
    is_uneven = blocks[0] * num_tiles > _UNEVEN * sum(blocks) and sums < _MOST_SUMS * whole
    least = divisors[1] if is_uneven and divisors[1] <= _MOST_UNEVEN_PARTS else 1
    if num_items > _FEW_ITEMS * num_sms:
        return least
    best, best_time = 1, _makespan(blocks, num_heads_kv, 1, num_sms)
    for parts in divisors[1:]:
        if parts * num_items > _MANY_ITEMS * num_sms:
            break
        time = _makespan(blocks, num_heads_kv, parts, num_sms) + sums
        if time < _WORTH * best_time:
            best, best_time = parts, time
    return max(best, least)


def _makespan(blocks: list[float], num_heads_kv: int, parts: int, num_sms: int) -> float:
    """When the last item ends if each multiprocessor takes the heaviest one left."""
    start = _ITEM_BLOCKS if parts == 1 else _PART_BLOCKS
    ends = [0.0] * num_sms
    for cost in blocks:
        if not cost:
            break
        for _ in range(num_heads_kv * parts):
            heapq.heapreplace(ends, ends[0] + cost / parts + start)
    return max(ends)
