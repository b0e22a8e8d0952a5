"""What every method of distributed attention offers here: the rows of a rank, a forward, a backward. Knows no method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from magi_attention.comm import CommGroup
from magi_attention.kernels.attention import AttentionOptions
from magi_attention.mask import AttnMask
from magi_attention.plan.types import Int64Array


@dataclass(frozen=True)
class Heads:
    """Heads of q, of k and v, and the width of all of them."""

    num_heads_q: int
    num_heads_kv: int
    head_dim: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of one row of each tensor."""
        q, kv = (self.num_heads_q, self.head_dim), (self.num_heads_kv, self.head_dim)
        return {"q": q, "k": kv, "v": kv, "dout": q}


def options_for(heads: Heads, backend: str = "auto", sm_margin: int = 0) -> AttentionOptions:
    """The usual scale; `sm_margin` multiprocessors are left to the collectives."""
    return AttentionOptions(heads.head_dim**-0.5, backend=backend, sm_margin=sm_margin)


@dataclass(frozen=True)
class Result:
    """Of one forward.

    Attributes:
        out: [local queries, Hq, D], dtype of q.
        lse: [local queries, Hq], natural log; None where the method leaves it with the rank that computed the head.
        saved: what the backward of the same method needs.
    """

    out: Tensor
    lse: Tensor | None
    saved: Any


class LocalAttention(Protocol):
    """One rank's part of a method. Both passes are collective: every rank calls them in the same order, also without rows.

    Attributes:
        query_rows, key_rows: int64, the global token of each local row, ascending.
        area: visible pairs this rank computes, each counted as the share of the query heads it is computed for.
    """

    query_rows: Int64Array
    key_rows: Int64Array
    area: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Result:
        """Of local rows: q [local queries, Hq, D]; k, v [local keys, Hkv, D], contiguous."""
        ...

    def backward(self, result: Result, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of the local rows in the dtype of q. May be called several times for one result."""
        ...


class MethodMaker(Protocol):
    """Sets a method up for one mask: plans, sends nothing.

    Raises:
        InputError: on every rank alike, when the method cannot do it; the text says what would do.
    """

    def __call__(self, mask: AttnMask, group: CommGroup, heads: Heads, options: AttentionOptions, /) -> LocalAttention: ...
