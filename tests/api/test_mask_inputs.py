"""What is remembered of masks: host data by content, device tensors by identity and version, without reading them again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from magi_attention.api import AttnMask, clear_cache
from magi_attention.api.index_blocks import mask_from_index_blocks
from magi_attention.api.mask_inputs import _remembered, mask_from_ranges, mask_from_table


class Maker:
    """Makes a mask and counts how often: a device tensor is read only in here."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> AttnMask:
        self.count += 1
        return AttnMask.from_slices([], self.count, 0)


def remember(maker: Maker, *inputs: Any) -> AttnMask:
    return _remembered(("test", 8, 8), inputs, maker)


def test_device_tensors_are_read_once_while_unchanged() -> None:
    """Meta tensors stand for device memory: reading one would raise."""
    clear_cache()
    maker = Maker()
    q_ranges, types = torch.empty(3, 2, dtype=torch.int32, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    first = remember(maker, q_ranges, q_ranges, types)
    assert all(remember(maker, q_ranges, q_ranges, types) is first for _ in range(5)) and maker.count == 1
    q_ranges.add_(1)
    assert remember(maker, q_ranges, q_ranges, types) is not first and maker.count == 2, "written in place: read again"
    remember(maker, q_ranges, q_ranges, None)
    remember(maker, q_ranges, q_ranges, "causal")
    assert maker.count == 4, "other types, other mask"
    remember(maker, q_ranges, types, q_ranges)
    assert maker.count == 5, "order counts"


def test_a_new_tensor_in_the_place_of_an_old_one_is_read() -> None:
    clear_cache()
    maker = Maker()
    for expected in range(1, 20):
        tensor = torch.empty(3, 2, dtype=torch.int32, device="meta")  # often at the address of the one before
        remember(maker, tensor)
        assert maker.count == expected
        del tensor


def test_what_has_no_version_is_read_every_time() -> None:
    maker = Maker()
    with torch.inference_mode():
        inference = torch.empty(3, 2, dtype=torch.int32, device="meta")
    host = torch.zeros(3, 2, dtype=torch.int32)
    mixed = torch.empty(3, dtype=torch.int32, device="meta")
    for inputs in ((inference,), (host, host), (host, mixed), (mixed, [[0, 1]])):
        before = maker.count
        remember(maker, *inputs)
        remember(maker, *inputs)
        assert maker.count == before + 2


def test_host_data_of_equal_content_is_one_mask() -> None:
    clear_cache()
    first = mask_from_ranges([[0, 4]], [[0, 4]], "causal", 5, 5, "t")
    assert mask_from_ranges(torch.tensor([[0, 4]]), np.array([[0, 4]]), [1], 5, 5, "t") is first
    assert mask_from_ranges([[0, 4]], [[0, 4]], 1, 5, 5, "t") is first
    assert mask_from_ranges([[0, 4]], [[0, 4]], "causal", 6, 5, "t") is not first


@pytest.mark.parametrize("head", [None, 0, 1])
def test_tables_are_remembered_per_head_and_sizes(head: int | None) -> None:
    clear_cache()
    table = torch.tensor([[[0, 1], [1, -1]], [[-1, -1], [2, 0]]])

    def mask_of(k_block_size: int) -> AttnMask:
        lines = 4 if head is None else 2
        sizes = (lines, 3 * k_block_size, 1, k_block_size)
        return mask_from_table(table, head, sizes, lambda flat: mask_from_index_blocks(flat, *sizes))

    area = {None: 5, 0: 2, 1: 3}[head]
    assert mask_of(1) is mask_of(1) and mask_of(1).area() == area and mask_of(2).area() == 2 * area
