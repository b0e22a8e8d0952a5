"""Which rank owns which tokens: the door to the C++ dispatch solver. Knows nothing of exchanges, steps, torch or groups."""

from __future__ import annotations

import numpy as np

from magi_attention import _native
from magi_attention.config import ContiguousDispatchAlg, DispatchAlg, DispatchConfig, ToppHeapDispatchAlg
from magi_attention.errors import InputError
from magi_attention.mask.slices import MAX_TOKENS, AttnMask
from magi_attention.plan.types import DispatchPlan, Int32Array

# Order of DispatchAlgorithm in csrc/solver/dispatch.h.
_ALGORITHMS = (
    "contiguous",
    "zigzag",
    "sorted_sequential",
    "min_heap",
    "topp_heap",
    "lower_bound",
    "dynamic_programming",
    "binary_search",
)
MAX_CHUNKS = 1 << 23  # what 2^30 tokens are in chunks of a kernel tile; each costs the solver some hundred bytes
_KEEP_ORDER = ("contiguous", "dynamic_programming", "binary_search")
# Order of DispatchWay in csrc/solver/dispatch.h.
_WAYS = ("as named", "one contiguous run per rank", "few runs per rank (ring cut)", "heap and local search")
_KEY_CHUNKS_PER_RANK = 16
_KEY_CHUNK_UNIT = 128


def solve_dispatch(
    mask: AttnMask,
    cp_size: int,
    config: DispatchConfig,
    *,
    is_permutable: bool = True,
    is_same_source: bool = True,
) -> tuple[DispatchPlan, tuple[str, ...]]:
    """Owners of the query tokens (of all tokens in self attention).

    The largest area comes first (up to 2 % above the mean is balanced), then equal tokens (up to 5 %), then few remote key rows.
    Equal inputs give equal plans on every machine; any number of tokens, also 0 or fewer than ranks, is normal.

    Args:
        mask: whole mask; `mask.total_q` tokens are dispatched. With uneven_shard=False already padded.
        cp_size: number of ranks, R.
        config: chunk size, algorithm, even or uneven shares.
        is_permutable: False keeps the token order over the ranks: contiguous equal shares, unless the algorithm cuts contiguous
            runs itself (dynamic_programming, binary_search).
        is_same_source: keys are the same tokens, so a rank's own rows are local keys.

    Returns:
        The plan, and one sentence for each thing that was chosen.

    Raises:
        InputError: cp_size < 1; more than MAX_CHUNKS chunks; an unknown algorithm; uneven_shard=False and tokens that do not divide into
            equal shares of whole chunks.
    """
    _check(mask.total_q, cp_size, config)
    if config.alg.name not in _ALGORITHMS:
        raise InputError(f"alg={config.alg!r} has the unknown name {config.alg.name!r}; the solver has {', '.join(_ALGORITHMS)}")
    alg = config.alg if is_permutable or config.alg.name in _KEEP_ORDER else ContiguousDispatchAlg()
    solved = _native.run(
        "solve_dispatch",
        slices=mask.slices,
        total_tokens=mask.total_q,
        chunk_size=config.chunk_size or 0,
        cp_size=cp_size,
        is_even=int(not config.uneven_shard),
        owns_keys=int(is_same_source and mask.total_q == mask.total_k),
        algorithm=_ALGORITHMS.index(alg.name),
        top_p_ppm=max(1, round(alg.top_p * 1e6)) if isinstance(alg, ToppHeapDispatchAlg) else 1_000_000,
    )
    plan = DispatchPlan(mask.total_q, int(solved["chunk_size"][0]), cp_size, _owners(solved["owner"]))
    return plan, _reasons(solved, plan, config, alg)


def dispatch_keys(
    mask: AttnMask,
    dispatch_q: DispatchPlan,
    config: DispatchConfig,
    *,
    is_permutable: bool = True,
) -> DispatchPlan:
    """Owners of the key tokens of cross attention: with the ranks that read them most, token counts within 5 % (one chunk).

    Falls back to contiguous equal shares when these receive no more rows, and always with is_permutable=False.

    Args:
        mask: whole mask; `mask.total_k` key tokens are dispatched.
        dispatch_q: owners of its query tokens.
        config: `chunk_size` (None: chosen here) and `uneven_shard` also rule the keys.

    Raises:
        InputError: uneven_shard=False and keys that do not divide into equal shares of whole chunks.
    """
    total_k, cp_size = mask.total_k, dispatch_q.cp_size
    _check(total_k, cp_size, config, what="total_k")
    chunk_size = config.chunk_size or _key_chunk_size(total_k, cp_size, is_even=not config.uneven_shard)
    num_chunks = -(-total_k // chunk_size)
    if not is_permutable:
        owner: _native.IntArray = (np.arange(1, num_chunks + 1, dtype=np.int64) * cp_size - 1) // max(num_chunks, 1)
    else:
        owner = _native.run(
            "dispatch_keys",
            slices=mask.slices,
            q_total=dispatch_q.total_tokens,
            q_chunk_size=dispatch_q.chunk_size,
            q_owner=dispatch_q.chunk_owner,
            k_total=total_k,
            k_chunk_size=chunk_size,
            cp_size=cp_size,
            is_even=int(not config.uneven_shard),
        )["owner"]
    return DispatchPlan(total_k, chunk_size, cp_size, _owners(owner))


def _owners(values: _native.IntArray) -> Int32Array:
    owner = np.array(values, dtype=np.int32)
    owner.setflags(write=False)
    return owner


def _check(total_tokens: int, cp_size: int, config: DispatchConfig, what: str = "total_q") -> None:
    if cp_size < 1:
        raise InputError(f"cp_size={cp_size!r} must be at least 1; pass the number of ranks of the group")
    if total_tokens > MAX_TOKENS:
        raise InputError(f"{what}={total_tokens} must be at most {MAX_TOKENS}; split the sequence")
    num_chunks = -(-total_tokens // (config.chunk_size or total_tokens or 1))
    if num_chunks > MAX_CHUNKS:
        raise InputError(
            f"chunk_size={config.chunk_size} cuts {what}={total_tokens} in {num_chunks} chunks; at most {MAX_CHUNKS} are planned: "
            f"use chunk_size={-(-total_tokens // MAX_CHUNKS)} or more, or None to let the solver choose"
        )
    share = cp_size * (config.chunk_size or 1)
    if not config.uneven_shard and total_tokens % share:
        name = "cp_size * chunk_size" if config.chunk_size else "cp_size"
        raise InputError(
            f"{what}={total_tokens} must be a multiple of {name} = {share} with uneven_shard=False; "
            f"pad by {-total_tokens % share} tokens or use uneven_shard=True"
        )


def _key_chunk_size(total_k: int, cp_size: int, *, is_even: bool) -> int:
    """About 16 chunks per rank, in multiples of 128 when there are enough keys for that."""
    if is_even:
        per_rank = total_k // cp_size
        parts = max((parts for parts in (16, 8, 4, 2, 1) if per_rank % parts == 0), default=1)
        return max(1, per_rank // parts)
    size = max(1, -(-total_k // (cp_size * _KEY_CHUNKS_PER_RANK)))
    return -(-size // _KEY_CHUNK_UNIT) * _KEY_CHUNK_UNIT if size >= _KEY_CHUNK_UNIT else size


def _reasons(solved: dict[str, _native.IntArray], plan: DispatchPlan, config: DispatchConfig, alg: DispatchAlg) -> tuple[str, ...]:
    max_area, total_area, max_tokens = (int(solved[name][0]) for name in ("max_area", "total_area", "max_tokens"))
    chosen = "as given" if config.chunk_size else "the largest that balances, or finer where that saves many key rows"
    imbalance = max_area * plan.cp_size / total_area if total_area else 1.0
    if not config.chunk_size and alg.uses_cost and imbalance > 1.02:
        chosen = "the best balance found; this mask does not reach 1.02 on this many ranks"
    token_imbalance = max_tokens * plan.cp_size / plan.total_tokens if plan.total_tokens else 1.0
    way = _WAYS[int(solved["way"][0])]
    how = alg.name if way == _WAYS[0] else f"{alg.name}: {way}"
    return (
        f"dispatch {how}: max/mean area {imbalance:.4f}, max/mean tokens {token_imbalance:.4f}, "
        f"{int(solved['remote_rows'][0])} remote key rows in all",
        f"chunk_size {plan.chunk_size}: {chosen} ({len(plan.chunk_owner)} chunks)",
    )
