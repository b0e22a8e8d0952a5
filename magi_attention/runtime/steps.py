"""The two conveyor belts of distributed attention: keys arriving for the next step, key gradients returning from the last one.

Knows exchanges and their order, not attention. Every rank takes the same steps in the same order, also with zero rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from magi_attention.comm import CommGroup, Work, group_cast, group_reduce
from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError, UnsupportedError
from magi_attention.plan.types import Exchange, HierarchicalExchange, StepPlan


@dataclass(frozen=True)
class ExchangeRule:
    """How the exchanges of one call run.

    Attributes:
        group: whose collectives they are.
        is_overlapped: the next exchange is in flight while a step is computed; False finishes each exchange before anything else.
        is_two_level: rows cross nodes once and fan out there.
        timeout_s: bound on each exchange; None is the process group's own.
    """

    group: CommGroup
    is_overlapped: bool
    is_two_level: bool
    timeout_s: float | None

    def exchange_of(self, step: StepPlan) -> Exchange | HierarchicalExchange:
        """The form of the step's exchange that this rule runs."""
        exchange = step.hierarchical if self.is_two_level else step.exchange
        assert exchange is not None, "a remote step has the exchange of its mesh"
        return exchange


def select_exchange_rule(config: DistAttnConfig, group: CommGroup) -> ExchangeRule:
    """The rule that config asks for on this group.

    Raises:
        UnsupportedError: the native transport, which this build does not have.
        InputError: two levels on a flat group.
    """
    backend = config.grpcoll_config.backend
    if backend == "native":
        raise UnsupportedError(
            "GrpCollConfig.backend='native': this build has no native transport (it moves rows by all-to-all-v of torch.distributed); "
            "use backend='auto', which takes the best that every rank has"
        )
    if backend == "hierarchical" and not group.is_two_level:
        raise InputError(
            f"GrpCollConfig.backend='hierarchical' on a flat group of {group.size} ranks; pass a 2-D DeviceMesh (inter, intra) with more "
            "than one node and more than one rank in each, or use backend='auto'"
        )
    is_two_level = group.is_two_level and backend != "a2av"
    return ExchangeRule(group, config.overlap_config.enable, is_two_level, config.grpcoll_config.timeout_s)


class Arrivals:
    """Keys and values of each step, received one step ahead of use when overlap is on.

    `take` must be called once per step, in order. The buffers of a step are freed when the caller drops them.
    """

    def __init__(self, steps: Sequence[StepPlan], tensors: Sequence[torch.Tensor], rule: ExchangeRule, what: str) -> None:
        self._steps = steps
        self._tensors = list(tensors)
        self._rule = rule
        self._what = what
        self._pending: Work | None = None

    def take(self, index: int) -> list[torch.Tensor]:
        """Tensors of step `index` in the row order of its buffer; starts the exchange of the step after it."""
        arrived = self._tensors if index == 0 else self._wait(index)
        if self._rule.is_overlapped:
            self._pending = self._start(index + 1)
        return arrived

    def _start(self, index: int) -> Work | None:
        if index >= len(self._steps):
            return None
        exchange = self._rule.exchange_of(self._steps[index])
        what = f"{self._what} step {index}"
        return group_cast(exchange, self._tensors, self._rule.group, timeout_s=self._rule.timeout_s, what=what)

    def _wait(self, index: int) -> list[torch.Tensor]:
        work = self._pending if self._rule.is_overlapped else self._start(index)
        assert work is not None, f"step {index} was never started"
        self._pending = None
        return work.wait()


class GradReturns:
    """Partial dk, dv of each step on their way back to the owners, added into `into` step by step.

    The sum is in step order and, inside a step, in rank order, so it is equal to the bit from run to run.
    """

    def __init__(self, into: Sequence[torch.Tensor], rule: ExchangeRule) -> None:
        self._into = list(into)
        self._rule = rule
        self._pending: Work | None = None

    def start(self, index: int, step: StepPlan, partials: Sequence[torch.Tensor]) -> None:
        """Send the partial gradients of one step; the one before it is completed after this one has left."""
        rule = self._rule
        what = f"backward dk, dv of step {index}"
        work = group_reduce(rule.exchange_of(step), list(partials), rule.group, into=self._into, timeout_s=rule.timeout_s, what=what)
        self.finish()
        self._pending = work
        if not rule.is_overlapped:
            self.finish()

    def finish(self) -> None:
        """Complete the reduce in flight, if any."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
