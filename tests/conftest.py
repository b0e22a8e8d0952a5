"""Fixtures every test may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from magi_attention.testing.pytest_ranks import rank_pool

__all__ = ["one_thread", "poisoned_memory", "rank_pool"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread: many small matmuls on a busy machine wait for each other's threads far longer than they compute."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=["nan", "inf"])
def poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Uninitialised floating memory holds NaN in one run and +inf in another: what is read before it is written shows."""
    if request.param == "inf":
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
            monkeypatch.setattr(owner, name, _filled_with_inf(getattr(owner, name)))
        yield "inf"
        return
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield "nan"
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = was_filling
        torch.use_deterministic_algorithms(was_deterministic)


def _filled_with_inf(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make_filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        return made.fill_(float("inf")) if made.is_floating_point() else made

    return make_filled
