"""Block-sparse masks from tables of key block numbers. Knows no tensor library, kernel or rank."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from magi_attention.errors import InputError
from magi_attention.mask import AttnMask
from magi_attention.mask.slices import UNBOUNDED


def mask_from_index_blocks(table: npt.NDArray[np.integer], total_q: int, total_k: int, q_block_size: int, k_block_size: int) -> AttnMask:
    """Every row of query block b sees every key of the key blocks listed in line b.

    Args:
        table: int [num_q_blocks, topk]; key block numbers in any order, -1 = unused, a block listed twice counts once.
        total_q, total_k: rows and columns of the mask; the last block of either side may be short.
        q_block_size, k_block_size: tokens per block.

    Raises:
        InputError: a number below -1 or past the last key block, or another number of lines than query blocks.
    """
    num_q_blocks = -(-total_q // q_block_size)
    num_k_blocks = -(-total_k // k_block_size)
    if len(table) != num_q_blocks:
        raise InputError(
            f"index_attn_indices has {len(table)} lines; total_q={total_q} with q_block_size={q_block_size} has {num_q_blocks} query "
            "blocks; pass one line per query block"
        )
    if table.size and (table.min() < -1 or table.max() >= num_k_blocks):
        line, column = (int(i[0]) for i in np.nonzero((table < -1) | (table >= num_k_blocks)))
        raise InputError(
            f"index_attn_indices[{line}, {column}]={int(table[line, column])} must be -1 (unused) or a key block number in "
            f"[0, {num_k_blocks}) (total_k={total_k}, k_block_size={k_block_size}); fix the table or the block size"
        )
    blocks = np.sort(table.astype(np.int64), axis=1)
    lines = np.broadcast_to(np.arange(num_q_blocks)[:, None], blocks.shape)
    is_used = blocks >= 0
    blocks, lines = blocks[is_used], lines[is_used]
    if not blocks.size:
        return AttnMask.from_slices(np.zeros((0, 6), np.int32), total_q, total_k)
    is_new_line = np.diff(lines, prepend=-1) != 0
    is_first = is_new_line | (np.diff(blocks, prepend=-2) > 1)  # a repeated block (difference 0) stays in its run
    starts = np.flatnonzero(is_first)
    ends = np.append(starts[1:], blocks.size) - 1
    slices = np.stack(
        [
            lines[starts] * q_block_size,
            np.minimum((lines[starts] + 1) * q_block_size, total_q),
            blocks[starts] * k_block_size,
            np.minimum((blocks[ends] + 1) * k_block_size, total_k),
            np.full(starts.size, -UNBOUNDED),
            np.full(starts.size, UNBOUNDED),
        ],
        axis=1,
    )
    return AttnMask.from_slices(slices.astype(np.int32), total_q, total_k)
