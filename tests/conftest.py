"""Fixtures every test may use."""

from magi_attention.testing.pytest_ranks import rank_pool

__all__ = ["rank_pool"]
