"""The two conveyor belts of distributed attention: keys arriving for the next step, key gradients returning from the last one.

Knows exchanges and their order, not attention. Every rank takes the same steps in the same order, also with zero rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi_attention.comm import CommGroup, Work, group_cast, group_reduce
from magi_attention.plan.types import Exchange, HierarchicalExchange, StepPlan


class Arrivals:
    """Keys and values of each step, received one step ahead of use when overlap is on.

    `take` must be called once per step, in order. The buffers of a step are freed when the caller drops them.
    """

    def __init__(
        self,
        steps: Sequence[StepPlan],
        tensors: Sequence[torch.Tensor],
        group: CommGroup,
        *,
        is_overlapped: bool,
        timeout_s: float,
        what: str,
    ) -> None:
        self._steps = steps
        self._tensors = list(tensors)
        self._group = group
        self._is_overlapped = is_overlapped
        self._timeout_s = timeout_s
        self._what = what
        self._pending: Work | None = None

    def take(self, index: int) -> list[torch.Tensor]:
        """Tensors of step `index` in the row order of its buffer; starts the exchange of the step after it."""
        arrived = self._tensors if index == 0 else self._wait(index)
        if self._is_overlapped:
            self._pending = self._start(index + 1)
        return arrived

    def _start(self, index: int) -> Work | None:
        if index >= len(self._steps):
            return None
        what = f"{self._what} step {index}"
        return group_cast(exchange_of(self._steps[index]), self._tensors, self._group, timeout_s=self._timeout_s, what=what)

    def _wait(self, index: int) -> list[torch.Tensor]:
        work = self._pending if self._is_overlapped else self._start(index)
        assert work is not None, f"step {index} was never started"
        self._pending = None
        return work.wait()


class GradReturns:
    """Partial dk, dv of each step on their way back to the owners, added into `into` step by step.

    The sum is in step order and, inside a step, in rank order, so it is equal to the bit from run to run.
    """

    def __init__(self, into: Sequence[torch.Tensor], group: CommGroup, *, is_overlapped: bool, timeout_s: float) -> None:
        self._into = list(into)
        self._group = group
        self._is_overlapped = is_overlapped
        self._timeout_s = timeout_s
        self._pending: Work | None = None

    def start(self, index: int, step: StepPlan, partials: Sequence[torch.Tensor]) -> None:
        """Send the partial gradients of one step; the one before it is completed after this one has left."""
        work = group_reduce(
            exchange_of(step), list(partials), self._group, into=self._into, timeout_s=self._timeout_s, what=f"dk, dv of step {index}"
        )
        self.finish()
        self._pending = work
        if not self._is_overlapped:
            self.finish()

    def finish(self) -> None:
        """Complete the reduce in flight, if any."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


def exchange_of(step: StepPlan) -> Exchange | HierarchicalExchange:
    """The form of the step's exchange that the plan was made for."""
    if step.hierarchical is not None:
        return step.hierarchical
    assert step.exchange is not None, "a remote step has an exchange"
    return step.exchange
