"""Moving rows of one tensor along any dimension: the differentiable core of dispatch, undispatch and roll. Knows no attention.

A tensor is brought to [rows, everything else] here and back again; below this file only rows exist. Any dtype travels bit for bit.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from magi_attention.arguments import integer, shown
from magi_attention.comm import SINGLE, CommGroup, group_reduce
from magi_attention.errors import InputError
from magi_attention.kernels.tensors import require_tensor as require_tensor
from magi_attention.plan.types import DispatchPlan, Exchange, Int64Array


class Routes(Protocol):
    """What rows are moved by; plan/routes.py makes them (TokenRoutes)."""

    @property
    def dispatch(self) -> DispatchPlan: ...

    @property
    def cp_rank(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def roll(self, shift: int, borders: tuple[int, ...] | None = None) -> tuple[Exchange, Int64Array]: ...


@dataclass(frozen=True)
class TokenOwners:
    """Which rows are this rank's and how to reach the others.

    Attributes:
        routes: the owners of all tokens, and the exchanges between them.
        group: the cp group; rows travel on its flat form.
        timeout_s: bound on each exchange; None is the process group's own.
    """

    routes: Routes
    group: CommGroup = SINGLE
    timeout_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the global tensor, without padding."""
        return self.routes.num_tokens

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that exist only on the ranks; last in global order."""
        return self.routes.dispatch.total_tokens - self.routes.num_tokens

    @property
    def num_local_tokens(self) -> int:
        """This rank's rows, padding included."""
        return int(self.routes.dispatch.rank_tokens[self.routes.cp_rank])

    @property
    def num_real_local_tokens(self) -> int:
        """This rank's rows that are not padding; they come first."""
        runs = np.minimum(self.routes.dispatch.rank_runs[self.routes.cp_rank], self.num_tokens)
        return int((runs[:, 1] - runs[:, 0]).sum())

    def token_index(self, device: torch.device) -> torch.Tensor:
        """int64 [local tokens]: global token id of each local row, ascending. Shared: do not write to it."""
        dispatch, rank = self.routes.dispatch, self.routes.cp_rank
        return uploaded(dispatch, f"tokens of rank {rank}", lambda: dispatch.position_ids(rank), device)


def require_fill(name: str, value: Any, dtype: torch.dtype) -> int | float | complex:
    """A number that `dtype` can hold, as a plain Python number. Asked before anything is sent, on every rank alike.

    Raises:
        InputError: no number, a fraction or NaN for integers, or out of the dtype's range.
    """
    plain = _plain_number(value)
    if plain is None or (isinstance(plain, complex) and not dtype.is_complex):
        raise InputError(f"{name}={shown(value)} must be a number that {dtype} can hold")
    if isinstance(plain, complex) or dtype.is_complex:
        return plain
    if dtype.is_floating_point:
        is_fitting = abs(plain) <= torch.finfo(dtype).max or not math.isfinite(plain)
    else:
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        is_fitting = low <= plain <= high and int(plain) == plain  # NaN fails the comparison
    if not is_fitting:
        raise InputError(f"{name}={shown(value)} does not fit {dtype}; pass a value that does, e.g. {name}=0")
    return float(plain) if dtype.is_floating_point else int(plain)


def require_device(name: str, device: Any) -> torch.device:
    """A torch.device from what makes one.

    Raises:
        InputError: what makes none.
    """
    try:
        return torch.device(device)
    except (TypeError, ValueError, RuntimeError) as fault:
        why = str(fault).splitlines()[0]
        raise InputError(f"{name}={shown(device)} is no torch.device ({why}); pass e.g. 'cpu' or 'cuda:0'") from None


def _plain_number(value: Any) -> int | float | complex | None:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        try:
            value = value.item()
        except RuntimeError:  # a tensor without memory
            return None
    return value if isinstance(value, (int, float, complex)) else None


def require_tokens(tensor: torch.Tensor, dim: int, num_tokens: int, name: str) -> int:
    """`dim` counted from the front, after checking that `tensor` has `num_tokens` entries along it.

    Raises:
        InputError: no such dimension, or another number of entries.
    """
    require_tensor(name, tensor, f"with {num_tokens} tokens along a dimension")
    dim = integer("dim", dim)
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(f"dim={dim} is not a dimension of {name} with shape {tuple(tensor.shape)}; use 0 to {tensor.dim() - 1}")
    if tensor.shape[dim] != num_tokens:
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)}, so {tensor.shape[dim]} entries along dim={dim}; the key has {num_tokens} tokens "
            "there; pass the dimension that counts tokens, or a tensor made for this key"
        )
    return dim % tensor.dim()


def rows_first(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """[rows, ...] with `dim` in front, contiguous."""
    return tensor.movedim(dim, 0).contiguous()


def rows_back(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of rows_first."""
    return rows.movedim(0, dim).contiguous()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(rows: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as integers of its size: torch moves rows of every integer, not of every small float or unsigned dtype."""
    dtype = _BITS.get(rows.element_size())
    return rows if dtype is None else rows.view(dtype)


def sum_rows(exchange: Exchange, rows: torch.Tensor, owners: TokenOwners, what: str) -> torch.Tensor:
    """The transpose of a cast: [num_rows_in, ...], the sum of what all ranks hold for each row, in rank order and fp32 (fp64)."""
    if rows.is_complex():
        return torch.view_as_complex(sum_rows(exchange, torch.view_as_real(rows.resolve_conj()), owners, what))
    sum_dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros((exchange.num_rows_in, *rows.shape[1:]), dtype=sum_dtype, device=rows.device)
    group_reduce(exchange, [rows], owners.group, into=[total], timeout_s=owners.timeout_s, what=what).wait()
    return total.to(rows.dtype)


_uploads: weakref.WeakKeyDictionary[DispatchPlan | Exchange, dict[tuple[str, torch.device], torch.Tensor]] = weakref.WeakKeyDictionary()
_uploads_lock = threading.Lock()


def uploaded(record: DispatchPlan | Exchange, name: str, rows: Callable[[], Int64Array], device: torch.device) -> torch.Tensor:
    """Row indices of a record as an int64 tensor on `device`, copied there once and kept as long as the record."""
    with _uploads_lock:
        of_record = _uploads.setdefault(record, {})
        if (name, device) not in of_record:
            of_record[name, device] = torch.from_numpy(rows().copy()).to(device)
        return of_record[name, device]
