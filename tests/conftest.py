"""Fixtures every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from magi_attention.testing.pytest_ranks import rank_pool
from tests.poison import NUMBERS, poisoned

__all__ = ["one_thread", "poisoned_memory", "rank_pool"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread: many small matmuls on a busy machine wait for each other's threads far longer than they compute."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=NUMBERS)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[str]:
    """Uninitialised memory holds NaN in one run and +inf in another: what is read before it is written shows."""
    with poisoned(request.param):
        yield request.param
