"""Check mode at the public doors: ranks that disagree, or of which one refuses, all raise the same error instead of waiting or crashing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from magi_attention import api
from magi_attention.api import DispatchConfig, DistAttnConfig, InputError, UnsupportedError
from magi_attention.testing.workers import RankPool

NUM_TOKENS = 20


def make_key(**config: Any) -> api.DistAttnKey:
    chosen = DistAttnConfig(dispatch_config=DispatchConfig(chunk_size=4), **config)
    return api.magi_attn_varlen_key([0, NUM_TOKENS], [0, NUM_TOKENS], 2, 2, 4, 0, dist.group.WORLD, causal=True, dist_attn_config=chosen)


def rows(key: api.DistAttnKey, *sizes: int, more: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(key.num_local_q + more, *sizes, dtype=dtype)


def attend(key: api.DistAttnKey, q: torch.Tensor, **options: Any) -> None:
    x = rows(key, 2, 4)
    api.calc_attn(q, x, x, key, **options)


# What each rank does; the second rank is the odd one out.
CASES: dict[str, Callable[[api.DistAttnKey, bool], Any]] = {
    "rows of attention": lambda key, odd: attend(key, rows(key, 2, 4, more=odd)),
    "heads of attention": lambda key, odd: attend(key, rows(key, 2 + odd, 4)),
    "softcap of attention": lambda key, odd: attend(key, rows(key, 2, 4), softcap=float("nan") if odd else 1.0),
    "sink of attention": lambda key, odd: attend(key, rows(key, 2, 4), sink=torch.zeros(1, 2 + odd)),
    "rows of undispatch": lambda key, odd: api.undispatch(rows(key, 3, more=odd), key),
    "columns of undispatch": lambda key, odd: api.undispatch(rows(key, 3 + odd), key),
    "dtype of undispatch": lambda key, odd: api.undispatch(rows(key, 3, dtype=torch.float64 if odd else torch.float32), key),
    "kind of undispatch": lambda key, odd: api.undispatch(rows(key, 3), key, is_partial_grad=odd),
    "backward of undispatch": lambda key, odd: api.undispatch(rows(key, 3).requires_grad_(odd), key, is_partial_grad=True),
    "columns of roll": lambda key, odd: api.roll(rows(key, 3 + odd), 1, 0, key),
    "shift of roll": lambda key, odd: api.roll(rows(key), 1 + odd, 0, key),
    "type of shift": lambda key, odd: api.roll(rows(key), 1.0 if odd else 1, 0, key),  # type: ignore[arg-type]
    "fill value of roll": lambda key, odd: api.roll(rows(key, dtype=torch.uint8), 1, 0, key, within_documents=True, fill_value=-odd),
    "backward of roll": lambda key, odd: api.roll(rows(key).requires_grad_(odd), 1, 0, key),
    "documents of labels": lambda key, odd: api.shift_labels(rows(key, dtype=torch.int64), key, cu_seqlens=[0, 10 + odd, NUM_TOKENS]),
}


def outcome_on_rank(rank: int, num_ranks: int, case: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAGI_CHECK", "1")
        key = make_key()
        try:
            CASES[case](key, rank == 1)
        except InputError as error:
            return str(error)
        api.undispatch(rows(key), key)  # the group is still in step
        return "none"


@pytest.mark.parametrize("case", CASES)
def test_every_rank_hears_of_it(rank_pool: RankPool, case: str) -> None:
    first, second = rank_pool.run(2, outcome_on_rank, case)
    assert "disagree" in first, first
    assert second == first or second.split("refused: ")[0] in first  # the odd one may say its own words
    assert "rank 0" in first and "rank 1" in first


def agreement_on_rank(rank: int, num_ranks: int) -> list[str]:
    """What may differ does: in undispatch without partial gradients only one rank has a backward."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAGI_CHECK", "1")
        key = make_key()
        api.undispatch(rows(key, 3).requires_grad_(rank == 0), key)
        for case, do in CASES.items():
            try:
                do(key, False)
            except InputError as error:
                found.append(f"{case}: {error}")
    return found


def test_ranks_that_agree_pass(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, agreement_on_rank) == [[], []]


def same_refusal_on_rank(rank: int, num_ranks: int) -> list[str]:
    """Refusals of all ranks alike keep their own words, also of a missing transport."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAGI_CHECK", "1")
        key = make_key()
        for do in (
            lambda: attend(key, rows(key, 3, 4)),
            lambda: api.undispatch(rows(key), key, dim="tokens"),  # type: ignore[arg-type]
            lambda: attend(make_key(kernel_backend="ffa"), rows(key, 2, 4)),
        ):
            try:
                do()
            except (InputError, UnsupportedError) as error:
                found.append(f"{type(error).__name__} {error}")
    return found


def test_a_refusal_of_all_ranks_is_their_own(rank_pool: RankPool) -> None:
    for attention, undispatch, kernel in rank_pool.run(2, same_refusal_on_rank):
        assert attention.startswith("InputError q has") and undispatch.startswith("InputError dim=")
        assert kernel.startswith("UnsupportedError") and "ffa" in kernel
