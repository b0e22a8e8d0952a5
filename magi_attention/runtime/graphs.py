"""Calls that talk to other ranks, or plan, stay out of compiled graphs: torch.compile breaks its graph there and runs them as they are.

Tracing them would follow numpy, locks and caches into every file of the package, and some of it cannot be traced. Knows no operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """The same function; torch.compile does not look into it. Costs nothing where nothing is compiled."""

    @functools.wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # torch.compiler.disable imports the compiler, which takes seconds
            found: R = torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-untyped-call]
            return found
        return function(*args, **kwargs)

    return door
