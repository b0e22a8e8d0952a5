"""In how many parts the backward walks the heads of a group."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention.kernels.head_splits import head_splits
from magi_attention.kernels.tile_work import tile_work

SMS = 132


def splits(mask: str, tokens: int, heads: tuple[int, int] = (48, 8), num_sms: int = SMS) -> int:
    kinds = {"full": 1 << 30, "causal": 0}
    work = tile_work([[0, tokens, 0, tokens, -(1 << 30), kinds[mask]]], tokens, 128, 64, transposed=True)
    return head_splits(work.costs, work.num_tiles, tokens, heads, num_sms)


@pytest.mark.parametrize(
    ("mask", "tokens", "expected"),
    [("full", 1024, 2), ("full", 2048, 1), ("full", 65536, 1), ("causal", 1024, 3), ("causal", 2048, 2), ("causal", 8192, 2)],
)
def test_what_was_fastest_on_an_h200(mask: str, tokens: int, expected: int) -> None:
    assert splits(mask, tokens) == expected


def test_without_a_group_there_is_nothing_to_split() -> None:
    assert splits("causal", 1024, (16, 16)) == 1


def test_many_items_are_left_whole() -> None:
    assert splits("full", 32768) == 1
    assert (splits("causal", 32768), splits("causal", 131072)) == (2, 1), "uneven ones are balanced for longer"
    assert splits("causal", 2048, num_sms=2) == 1


@pytest.mark.parametrize("heads", [(48, 8), (64, 8), (14, 2), (5, 1), (32, 4)])
@pytest.mark.parametrize("tokens", [1, 128, 129, 1000, 4096])
def test_parts_divide_the_group(heads: tuple[int, int], tokens: int) -> None:
    for mask in ("full", "causal"):
        assert heads[0] // heads[1] % splits(mask, tokens, heads) == 0


def test_short_documents_do_not_pay_for_sums() -> None:
    borders = range(0, 32768, 512)
    documents = [[at, at + 512, at, at + 512, -(1 << 30), 0] for at in borders]
    work = tile_work(documents, 32768, 128, 64, transposed=True)
    assert head_splits(work.costs, work.num_tiles, 32768, (64, 8), SMS) == 1


def test_unknown_costs_go_by_the_number_of_items() -> None:
    assert head_splits(None, 8, 1024, (48, 8), SMS) == 6
    assert head_splits(None, 32, 4096, (48, 8), SMS) == 2
    assert head_splits(None, 512, 65536, (48, 8), SMS) == 1


def test_nothing_to_do_is_one_part() -> None:
    assert head_splits(np.zeros(0, np.int32), 0, 0, (48, 8), SMS) == 1
    assert head_splits(np.zeros(4, np.int32), 4, 512, (48, 8), SMS) == 1, "tiles that see nothing"
    assert head_splits(None, 0, 0, (48, 8), SMS) == 1
