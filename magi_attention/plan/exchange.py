"""Exchanges for any wanted tokens, and records from the solver's arrays. Knows nothing of masks or steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from magi_attention import _native
from magi_attention.errors import InputError
from magi_attention.plan.types import DispatchPlan, Exchange, Int32Array, frozen_array


def exchange_for_wanted_tokens(wanted: Sequence[Int32Array], dispatch: DispatchPlan, cp_rank: int) -> Exchange:
    """How rows travel so that every rank receives the tokens it names, in the order it names them.

    Args:
        wanted: per rank int32 [n, 2], half-open global token ranges; any order, repeats allowed. A rank's own tokens travel to itself.
        dispatch: who owns which token.
        cp_rank: whose view to build.

    Returns:
        Exchange whose receive buffer has one row per wanted token of `cp_rank`, ranges one after the other.

    Raises:
        InputError: wrong number of ranks or shape, or a range outside the tokens.
    """
    if len(wanted) != dispatch.cp_size:
        raise InputError(f"wanted has ranges of {len(wanted)} ranks; the dispatch has cp_size={dispatch.cp_size}")
    for rank, ranges in enumerate(wanted):
        if np.asarray(ranges).ndim != 2 or np.asarray(ranges).shape[1] != 2:
            raise InputError(f"wanted[{rank}] has shape {np.asarray(ranges).shape}; pass int32 [n, 2] half-open ranges")
    ends = np.cumsum([len(ranges) for ranges in wanted], dtype=np.int64)
    found = _native.run(
        "wanted_exchange",
        wanted=np.concatenate([np.asarray(ranges, np.int32) for ranges in wanted]),
        wanted_ends=ends,
        cp_size=dispatch.cp_size,
        cp_rank=int(cp_rank),
        **ownership_arrays("k", dispatch),
    )
    return read_exchange(found, "", dispatch.cp_size)


def ownership_arrays(side: str, dispatch: DispatchPlan) -> dict[str, Int32Array | int]:
    """A dispatch as the solver reads it; side is "q" or "k"."""
    owner = np.asarray(dispatch.chunk_owner, np.int32)
    return {f"{side}_owner": owner, f"{side}_chunk_size": int(dispatch.chunk_size), f"{side}_total": int(dispatch.total_tokens)}


def read_exchange(arrays: Mapping[str, _native.IntArray], prefix: str, cp_size: int) -> Exchange:
    """The record from the solver's arrays `<prefix>send`, `<prefix>recv`, `<prefix>rows`."""
    num_rows_in, num_rows_out = (int(count) for count in arrays[prefix + "rows"])
    send, recv = (frozen_array(arrays[prefix + name].reshape(-1, 3)) for name in ("send", "recv"))
    return Exchange(cp_size, num_rows_in, num_rows_out, send, recv)
