"""The `rank_pool` fixture: one pool of rank processes for a whole test session. Imported by tests/conftest.py only.

A test takes it as an argument and calls rank_pool.run(2, worker, 5) with a module-level worker(rank, num_ranks, number).
"""

from __future__ import annotations

import atexit
import functools

import pytest

from magi_attention.testing.workers import RankPool


@functools.cache
def session_pool() -> RankPool:
    """The pool shared by every test of this process; closed when the process ends."""
    pool = RankPool()
    atexit.register(pool.close)
    return pool


@pytest.fixture(scope="session")
def rank_pool() -> RankPool:
    """See session_pool. Processes start at the first call that needs them."""
    return session_pool()
