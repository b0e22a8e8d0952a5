"""DistAttnKey: the frozen handle that carries a plan, and how it is made and cached. Moves no tensor and computes no attention."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from magi_attention import env
from magi_attention.api.key_arguments import check_config, check_heads, with_chunk_size
from magi_attention.api.key_cache import BoundedCache, cache_of
from magi_attention.api.padding import compute_pad_size
from magi_attention.arguments import flag
from magi_attention.comm import SINGLE, CommGroup, agree
from magi_attention.config import DistAttnConfig
from magi_attention.errors import InputError
from magi_attention.mask import AttnMask
from magi_attention.plan.build import plan_attention
from magi_attention.plan.check import check_own_plan
from magi_attention.plan.routes import TokenRoutes
from magi_attention.plan.types import DispatchPlan, RankPlan
from magi_attention.runtime.rows import TokenOwners

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class KeyIdentity:
    """What makes two keys of one group equal: everything that plans and calls depend on, by content.

    Attributes:
        mask_digest: digest of the mask, its sizes included.
        total_seqlen_q, total_seqlen_k: real tokens, padding not counted.
        num_heads_q, num_heads_kv, head_dim, head_dim_v: of q, k and v (head_dim_v None = any).
        config: as given, with chunk_size filled in.
        is_same_source, is_q_permutable, is_k_permutable: how tokens may be spread.
        dispatch_digest: which dispatch the key was laid on; "" when it made its own.
    """

    mask_digest: str
    total_seqlen_q: int
    total_seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int | None
    config: DistAttnConfig
    is_same_source: bool
    is_q_permutable: bool
    is_k_permutable: bool
    dispatch_digest: str = ""

    @functools.cached_property
    def digest(self) -> str:
        """Stable hash, equal on every rank that was given the same."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def describe(self) -> str:
        """One line that tells two identities apart."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return ", ".join(f"{name} {value:.12}" if isinstance(value, str) else f"{name} {value}" for name, value in facts.items())


AGREED = "arguments of the key"  # what ranks compare in check mode


@dataclass(frozen=True, repr=False)
class DistAttnKey:
    """Handle of one planned attention: hashable, equal by content and group, carries its plan. Made by the functions of this package.

    It stays usable for as long as it is held, whatever the caches forget. Copies of it are itself.

    Attributes:
        identity: what equality and hash compare, with the group.
        group: the ranks it was planned for; held weakly, so a key keeps no destroyed group alive.
        plan: what this rank executes.
        mask: the mask it was planned for (padding of uneven_shard=False not included).
        cu_seqlens_q, cu_seqlens_k: int64 document offsets when the key was made from cu_seqlens, else None. Not compared.
    """

    identity: KeyIdentity
    group: CommGroup
    plan: RankPlan = field(compare=False)
    mask: AttnMask = field(compare=False)
    cu_seqlens_q: Int64Array | None = field(default=None, compare=False)
    cu_seqlens_k: Int64Array | None = field(default=None, compare=False)

    # ---- facts ----

    @property
    def config(self) -> DistAttnConfig:
        return self.identity.config

    @property
    def total_seqlen_q(self) -> int:
        return self.identity.total_seqlen_q

    @property
    def total_seqlen_k(self) -> int:
        return self.identity.total_seqlen_k

    @property
    def num_heads_q(self) -> int:
        return self.identity.num_heads_q

    @property
    def num_heads_kv(self) -> int:
        return self.identity.num_heads_kv

    @property
    def head_dim(self) -> int:
        return self.identity.head_dim

    @property
    def cp_size(self) -> int:
        return self.group.size

    @property
    def cp_rank(self) -> int:
        return self.group.rank

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk of the query dispatch."""
        return self.plan.dispatch_q.chunk_size

    @property
    def pad_size(self) -> int:
        """Query tokens added by uneven_shard=False; 0 otherwise."""
        return self.plan.dispatch_q.total_tokens - self.total_seqlen_q

    @property
    def num_local_q(self) -> int:
        """Query rows of this rank."""
        return self.plan.num_local_q

    @property
    def num_local_k(self) -> int:
        """Key rows of this rank."""
        return self.plan.num_local_k

    @functools.cached_property
    def owners_q(self) -> TokenOwners:
        """Who owns which query token."""
        return self._owners(self.plan.dispatch_q, self.total_seqlen_q)

    @functools.cached_property
    def owners_k(self) -> TokenOwners:
        """Who owns which key token; the same object as owners_q for self attention."""
        return self.owners_q if self.identity.is_same_source else self._owners(self.plan.dispatch_k, self.total_seqlen_k)

    def _owners(self, dispatch: DispatchPlan, num_tokens: int) -> TokenOwners:
        return TokenOwners(TokenRoutes(dispatch, self.cp_rank, num_tokens), self.group, self.config.grpcoll_config.timeout_s)

    def __copy__(self) -> DistAttnKey:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DistAttnKey:
        return self

    def __reduce__(self) -> Any:
        raise InputError(
            "key cannot be pickled: it belongs to a process group of this process; build it in the other process from the same arguments, "
            "which gives an equal plan"
        )

    def __repr__(self) -> str:
        facts = self.identity
        return (
            f"DistAttnKey(mask {facts.mask_digest[:8]}, q {facts.total_seqlen_q} k {facts.total_seqlen_k} tokens, "
            f"heads {facts.num_heads_q}:{facts.num_heads_kv}, head_dim {facts.head_dim}, rank {self.cp_rank} of {self.cp_size})"
        )


# ---- what the caller said, checked ----


def checked_identity(
    mask: AttnMask,
    heads: tuple[int, int, int, int | None],
    config: DistAttnConfig,
    *,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
) -> KeyIdentity:
    """The identity of a key with its own dispatch; `heads` is (num_heads_q, num_heads_kv, head_dim, head_dim_v).

    Raises:
        InputError: heads, head_dim, config or sizes that no key can have.
    """
    num_heads_q, num_heads_kv, head_dim, head_dim_v = check_heads(*heads)
    check_config(config)
    is_same_source = flag("is_same_source", is_same_source)
    if is_same_source and mask.total_q != mask.total_k:
        raise InputError(
            f"total_seqlen_q={mask.total_q} and total_seqlen_k={mask.total_k} must be equal when is_same_source=True; "
            "pass is_same_source=False for cross attention"
        )
    return KeyIdentity(
        mask_digest=mask.digest,
        total_seqlen_q=mask.total_q,
        total_seqlen_k=mask.total_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        config=config,
        is_same_source=is_same_source,
        is_q_permutable=flag("is_q_permutable", is_q_permutable),
        is_k_permutable=flag("is_k_permutable", is_k_permutable),
    )


# ---- keys ----


def check_key(key: DistAttnKey, name: str) -> None:
    """A key.

    Raises:
        InputError: another type.
    """
    if not isinstance(key, DistAttnKey):
        raise InputError(f"{name} is a {type(key).__name__}; it must be a DistAttnKey, from magi_attn_flex_key or magi_attn_varlen_key")


def check_living_key(key: DistAttnKey) -> None:
    """A key whose ranks can be reached.

    Raises:
        InputError: another type, or its process group was destroyed.
    """
    check_key(key, "key")
    if key.group.is_single:
        return
    try:
        dist.get_process_group_ranks(key.group.flat)
    except (KeyError, ValueError, RuntimeError):
        raise InputError(
            f"key was made on a cp group of global ranks {list(key.group.members)} that torch.distributed no longer has; "
            "build the key again on a live group"
        ) from None


def make_key(
    mask: AttnMask, identity: KeyIdentity, group: CommGroup, *, key_for_dispatch: DistAttnKey | None = None, documents: Any = (None, None)
) -> DistAttnKey:
    """The key of an identity on a group; planned at most once while the group's cache remembers it.

    In check mode (MAGI_CHECK=1) collective: every rank raises the same InputError when ranks pass different things, and a new plan is
    checked against the mask (PlanError, our fault).
    """
    if env.check_enabled() and not group.is_single:
        agree(group, AGREED, identity.digest.encode(), identity.describe)
    cache = cache_of(group)
    plans: BoundedCache[RankPlan] = cache.plans
    plan = plans.get_or_make(identity, lambda: _plan(mask, identity, group, key_for_dispatch))
    key = DistAttnKey(identity, group, plan, mask, *documents)
    cache.most_recent = dataclasses.replace(key, group=SINGLE)
    return key


def most_recent_key(group: CommGroup) -> DistAttnKey:
    """The key made or found last on a group.

    Raises:
        InputError: there is none.
    """
    stripped: DistAttnKey | None = cache_of(group).most_recent
    if stripped is None:
        raise InputError("cp_group has no key yet, or its cache was cleared; build one with magi_attn_flex_key or magi_attn_varlen_key")
    return dataclasses.replace(stripped, group=group)


def _plan(mask: AttnMask, identity: KeyIdentity, group: CommGroup, key_for_dispatch: DistAttnKey | None) -> RankPlan:
    config = identity.config
    base = key_for_dispatch.plan if key_for_dispatch is not None else None
    padded_mask = mask
    if base is not None:
        padded_mask = _with_totals(mask, base.dispatch_q.total_tokens, base.dispatch_k.total_tokens)
    elif not config.dispatch_config.uneven_shard:
        config, padded_mask = _evenly_padded(mask, config, group.size)
    plan = plan_attention(
        padded_mask,
        group.size,
        group.rank,
        config,
        num_heads_q=identity.num_heads_q,
        num_heads_kv=identity.num_heads_kv,
        head_dim=identity.head_dim,
        num_nodes=group.num_nodes,
        is_same_source=identity.is_same_source,
        is_q_permutable=identity.is_q_permutable,
        is_k_permutable=identity.is_k_permutable,
        dispatch_q=base.dispatch_q if base is not None else None,
        dispatch_k=base.dispatch_k if base is not None else None,
    )
    if env.check_enabled():
        check_own_plan(padded_mask, plan)
    return plan


_CHUNKS_PER_RANK = 8  # when padding and the caller gives no chunk size: enough to balance a causal mask, at most 1/8 of a rank is padding


def _evenly_padded(mask: AttnMask, config: DistAttnConfig, cp_size: int) -> tuple[DistAttnConfig, AttnMask]:
    """Config with a chunk size, and the mask with rows and columns added that see and are seen by nothing."""
    chunk_size = config.dispatch_config.chunk_size
    if chunk_size is None:
        chunk_size = max(1, -(-max(mask.total_q, mask.total_k) // (cp_size * _CHUNKS_PER_RANK)))
    total_q, total_k = (total + compute_pad_size(total, cp_size, chunk_size) for total in (mask.total_q, mask.total_k))
    return with_chunk_size(config, chunk_size), _with_totals(mask, total_q, total_k)


def _with_totals(mask: AttnMask, total_q: int, total_k: int) -> AttnMask:
    """The same visible cells in a larger mask."""
    if (total_q, total_k) == (mask.total_q, mask.total_k):
        return mask
    return AttnMask(mask.slices, total_q, total_k)


def dispatch_digest(plan: RankPlan) -> str:
    """Stable hash of who owns which token."""
    digest = hashlib.sha256()
    for dispatch in (plan.dispatch_q, plan.dispatch_k):
        digest.update(np.array([dispatch.total_tokens, dispatch.chunk_size, dispatch.cp_size], "<i8").tobytes())
        digest.update(dispatch.chunk_owner.astype("<i4").tobytes())
    return digest.hexdigest()
