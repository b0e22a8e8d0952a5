"""Which tokens a rank needs to roll the global order: exchanges made once per dispatch. Pure integers; sends nothing, knows no tensor."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable

import numpy as np

from magi_attention.plan.exchange import exchange_for_wanted_tokens
from magi_attention.plan.types import DispatchPlan, Exchange, Int32Array, Int64Array

_MAX_ROUTES = 64

Route = tuple[Exchange, Int64Array]


class TokenRoutes:
    """Exchanges over one dispatch as one rank sees them, each built at first use and kept, boundedly, for as long as the dispatch lives.

    Attributes:
        dispatch: the owners of all tokens.
        cp_rank: whose view.
        num_tokens: real tokens; the rest of dispatch.total_tokens is padding and last in global order.
    """

    def __init__(self, dispatch: DispatchPlan, cp_rank: int, num_tokens: int | None = None) -> None:
        self.dispatch = dispatch
        self.cp_rank = cp_rank
        self.num_tokens = dispatch.total_tokens if num_tokens is None else num_tokens
        assert 0 <= self.num_tokens <= dispatch.total_tokens, f"num_tokens={num_tokens} of {dispatch.total_tokens}"
        with _lock:
            self._kept = _kept.setdefault(dispatch, _KeptRoutes())

    def roll(self, shift: int, borders: tuple[int, ...] | None = None) -> Route:
        """The rows of y[i] = x[i - shift] that have a source, in row order, and the local rows they fill, ascending.

        Args:
            shift: any int. Without borders it wraps around num_tokens.
            borders: strictly rising document borders from 0; source and target must be in one document.
        """
        period = max(1, self.num_tokens)
        steps = shift % period if borders is None else max(-period, min(period, shift))
        return self._kept.get_or_build((self.cp_rank, self.num_tokens, steps, borders), lambda: self._roll(steps, borders))

    def _roll(self, shift: int, borders: tuple[int, ...] | None) -> Route:
        if borders is None:
            cuts = np.array([0, shift, self.num_tokens], np.int64)  # targets [0, shift) wrap around, [shift, num_tokens) do not
            targets = np.stack([cuts[:-1], cuts[1:]], axis=1)
            sources = cuts[:-1] + np.array([self.num_tokens - shift, -shift], np.int64)
        else:
            edges = np.array(borders, np.int64)
            starts = np.minimum(edges[:-1] + max(shift, 0), edges[1:])
            ends = np.maximum(edges[1:] + min(shift, 0), starts)
            targets = np.stack([starts, ends], axis=1)
            sources = starts - shift
        clipped = [_clip_targets(self.dispatch.rank_runs[peer], targets, sources) for peer in range(self.dispatch.cp_size)]
        exchange = exchange_for_wanted_tokens([wanted for wanted, _, _ in clipped], self.dispatch, self.cp_rank)
        _, first_rows, num_rows = clipped[self.cp_rank]
        ends = np.cumsum(num_rows)
        filled = np.arange(int(num_rows.sum()), dtype=np.int64) + np.repeat(first_rows - (ends - num_rows), num_rows)
        return exchange, filled


class _KeptRoutes:
    """Routes of one dispatch. Holds no dispatch: a cycle with it would keep plans, and what devices hold of them, until a collection."""

    def __init__(self) -> None:
        self._routes: OrderedDict[Hashable, Route] = OrderedDict()
        self._lock = threading.Lock()  # backward may run on another thread

    def get_or_build(self, name: Hashable, build: Callable[[], Route]) -> Route:
        with self._lock:
            if name not in self._routes:
                self._routes[name] = build()
                if len(self._routes) > _MAX_ROUTES:
                    self._routes.popitem(last=False)
            self._routes.move_to_end(name)
            return self._routes[name]


_kept: weakref.WeakKeyDictionary[DispatchPlan, _KeptRoutes] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _clip_targets(runs: Int32Array, targets: Int64Array, sources: Int64Array) -> tuple[Int32Array, Int64Array, Int64Array]:
    """The parts of `targets` inside a rank's runs: (int32 [n, 2] source ranges, first local row of each, rows of each), in row order.

    Targets are disjoint and ascending; `sources` has the first source token of each.
    """
    runs = runs.astype(np.int64)
    lengths = runs[:, 1] - runs[:, 0]
    run_rows = np.cumsum(lengths) - lengths
    first = np.searchsorted(targets[:, 1], runs[:, 0], side="right")
    last = np.searchsorted(targets[:, 0], runs[:, 1], side="left")
    num_pairs = np.maximum(last - first, 0)
    run_idx = np.repeat(np.arange(len(runs)), num_pairs)
    before = np.cumsum(num_pairs) - num_pairs
    target_idx = np.arange(int(num_pairs.sum())) + np.repeat(first - before, num_pairs)
    starts = np.maximum(runs[run_idx, 0], targets[target_idx, 0])
    ends = np.minimum(runs[run_idx, 1], targets[target_idx, 1])
    kept = ends > starts
    run_idx, target_idx, starts, ends = run_idx[kept], target_idx[kept], starts[kept], ends[kept]
    shift = sources[target_idx] - targets[target_idx, 0]
    wanted = np.stack([starts + shift, ends + shift], axis=1).astype(np.int32)
    return wanted, run_rows[run_idx] + starts - runs[run_idx, 0], ends - starts
