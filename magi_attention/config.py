"""What a caller may choose: frozen keyword-only records. Nothing here reads the environment or plans anything."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from magi_attention.arguments import count, flag, number, one_of, shown
from magi_attention.errors import InputError

KERNEL_BACKENDS = ("auto", "blocked", "ffa")
GRPCOLL_BACKENDS = ("auto", "a2av", "native", "hierarchical")
SINK_GRAD_REDUCTIONS = ("sum", "avg")
MAX_STEPS = 1_024  # each step is an exchange and some records on every rank; overlap gains nothing long before this
MAX_TIMEOUT_S = 1e7  # four months; process groups count milliseconds in 64 bits, and their time records end soon after
_MAX_CHUNK = (1 << 30) - 1  # tokens; ids fit 30 bits
_MAX_FACTOR = 1e6


def _require(is_valid: bool, name: str, value: object, rule: str) -> None:
    if not is_valid:
        raise InputError(f"{name}={shown(value)} {rule}")


def _keep(record: object, **plain: object) -> None:
    """Hold what was checked as plain Python values, so that equal records compare, hash and print alike on every rank."""
    for name, value in plain.items():
        object.__setattr__(record, name, value)


# ---- dispatch: which rank owns which chunk ----


@dataclass(frozen=True, kw_only=True)
class DispatchAlg:
    """Base of the dispatch algorithms; `name` selects the one in the C++ solver."""

    @property
    def name(self) -> str:
        raise InputError("DispatchAlg() is only the base class; pass one of its subclasses, e.g. MinHeapDispatchAlg()")

    @property
    def uses_cost(self) -> bool:
        """False for fixed layouts that ignore the mask."""
        return True


@dataclass(frozen=True, kw_only=True)
class ContiguousDispatchAlg(DispatchAlg):
    """Rank r owns the r-th contiguous run of chunks. Keeps token order; unbalanced under causal masks."""

    @property
    def name(self) -> str:
        return "contiguous"

    @property
    def uses_cost(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class SequentialDispatchAlg(ContiguousDispatchAlg):
    """The peer library's name for contiguous dispatch."""


@dataclass(frozen=True, kw_only=True)
class ZigzagDispatchAlg(DispatchAlg):
    """Tokens cut in 2 * cp_size runs; rank r owns runs r and 2 * cp_size - 1 - r. Balances one causal document."""

    @property
    def name(self) -> str:
        return "zigzag"

    @property
    def uses_cost(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class SortedSequentialSelectAlg(DispatchAlg):
    """Chunks by falling area, dealt to the ranks in turn."""

    @property
    def name(self) -> str:
        return "sorted_sequential"


@dataclass(frozen=True, kw_only=True)
class MinHeapDispatchAlg(DispatchAlg):
    """Chunks by falling area, each to the least loaded rank, then a bounded local search (default)."""

    @property
    def name(self) -> str:
        return "min_heap"


@dataclass(frozen=True, kw_only=True)
class ToppHeapDispatchAlg(DispatchAlg):
    """Like min heap, but among the least loaded `top_p` share of ranks takes the one that already needs the chunk's keys."""

    top_p: float = 0.2

    def __post_init__(self) -> None:
        _keep(self, top_p=number("top_p", self.top_p, "must be in (0, 1]; 0.2 is the default", above=0.0, high=1.0))

    @property
    def name(self) -> str:
        return "topp_heap"


@dataclass(frozen=True, kw_only=True)
class LBDispatchAlg(DispatchAlg):
    """Lower bound on balance first: heap and unbounded-size local search on the maximum area alone."""

    @property
    def name(self) -> str:
        return "lower_bound"


@dataclass(frozen=True, kw_only=True)
class DPDispatchAlg(DispatchAlg):
    """Contiguous runs of chunks, cut so that the largest area is as small as possible (dynamic programming over cuts)."""

    @property
    def name(self) -> str:
        return "dynamic_programming"


@dataclass(frozen=True, kw_only=True)
class BSDispatchAlg(DispatchAlg):
    """Contiguous runs of chunks, cut by binary search on the largest area. Same cuts as DP, faster."""

    @property
    def name(self) -> str:
        return "binary_search"


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """How tokens are given to ranks.

    Attributes:
        chunk_size: tokens per chunk; None lets the solver take the largest that keeps imbalance under 2 %.
        alg: the assignment algorithm.
        uneven_shard: ranks may own different numbers of tokens (also zero). False pads and gives every rank the same number.
    """

    chunk_size: int | None = None
    alg: DispatchAlg = field(default_factory=MinHeapDispatchAlg)
    uneven_shard: bool = True

    def __post_init__(self) -> None:
        if self.chunk_size is not None:
            _keep(self, chunk_size=count("chunk_size", self.chunk_size, 1, _MAX_CHUNK))
        _keep(self, uneven_shard=flag("uneven_shard", self.uneven_shard))
        is_one = isinstance(self.alg, DispatchAlg) and type(self.alg) is not DispatchAlg
        _require(is_one, "alg", self.alg, "must be one of the dispatch algorithms, e.g. MinHeapDispatchAlg()")


# ---- overlap: how the remote keys are split in steps ----


class AttnOverlapMode(enum.Enum):
    """STATIC: the degree is given. DYNAMIC: the degree comes from the cost model."""

    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, kw_only=True)
class OverlapAlg:
    """Base of the step split algorithms."""

    @property
    def name(self) -> str:
        raise InputError("OverlapAlg() is only the base class; pass UniformOverlapAlg() or GreedyOverlapAlg()")


@dataclass(frozen=True, kw_only=True)
class UniformOverlapAlg(OverlapAlg):
    """Every remote step receives about the same number of rows."""

    @property
    def name(self) -> str:
        return "uniform"


@dataclass(frozen=True, kw_only=True)
class GreedyOverlapAlg(OverlapAlg):
    """Each step receives as many rows as the compute of the step before it can hide."""

    @property
    def name(self) -> str:
        return "greedy"


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """How exchange and compute overlap.

    Attributes:
        enable: False exchanges everything first, then computes (one remote step, no overlap).
        mode: STATIC takes `degree`, DYNAMIC chooses 1..dynamic_max_degree by the cost model, forward and backward apart.
        degree: number of remote steps; given, it holds whatever `mode` says (min_chunk_size may still lower it); None is DYNAMIC.
        dynamic_max_degree: bound for DYNAMIC.
        min_chunk_size: a step never receives fewer rows than this, unless it is the only one.
        max_num_chunks: bound on the number of steps for the greedy algorithm.
        alg: the split.
        calc_cost_factor, comm_cost_factor: scale the cost model's compute and exchange times.
    """

    enable: bool = True
    mode: AttnOverlapMode = AttnOverlapMode.DYNAMIC
    degree: int | None = None
    dynamic_max_degree: int = 8
    min_chunk_size: int = 512
    max_num_chunks: int = 64
    alg: OverlapAlg = field(default_factory=UniformOverlapAlg)
    calc_cost_factor: float = 1.0
    comm_cost_factor: float = 1.0

    def __post_init__(self) -> None:
        _require(isinstance(self.mode, AttnOverlapMode), "mode", self.mode, "must be an AttnOverlapMode")
        is_one = isinstance(self.alg, OverlapAlg) and type(self.alg) is not OverlapAlg
        _require(is_one, "alg", self.alg, "must be UniformOverlapAlg() or GreedyOverlapAlg()")
        _keep(self, enable=flag("enable", self.enable))
        if self.degree is not None:
            _keep(self, degree=count("degree", self.degree, 1, MAX_STEPS))
        for name, limit in (("dynamic_max_degree", MAX_STEPS), ("max_num_chunks", MAX_STEPS), ("min_chunk_size", _MAX_CHUNK)):
            _keep(self, **{name: count(name, getattr(self, name), 1, limit)})
        for name in ("calc_cost_factor", "comm_cost_factor"):
            rule = f"must be a number above 0, at most {_MAX_FACTOR:g}; 1.0 takes the cost model as it is"
            _keep(self, **{name: number(name, getattr(self, name), rule, above=0.0, high=_MAX_FACTOR)})


# ---- exchange and the whole ----


@dataclass(frozen=True, kw_only=True)
class GrpCollConfig:
    """How rows travel between ranks.

    Attributes:
        backend: auto (the best that every rank can), a2av (all-to-all-v of torch.distributed), native, hierarchical (2-D mesh).
        timeout_s: an exchange waited for longer becomes a CommError. None leaves the limit to the process group: its own time-out
            (init_process_group, new_group) always holds, and says how long a healthy rank may compute before it joins the others.
    """

    backend: str = "auto"
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        _keep(self, backend=one_of("backend", self.backend, GRPCOLL_BACKENDS))
        if self.timeout_s is not None:
            rule = f"must be in [0.001, {MAX_TIMEOUT_S:g}] seconds, or None for the process group's own time-out"
            _keep(self, timeout_s=number("timeout_s", self.timeout_s, rule, low=0.001, high=MAX_TIMEOUT_S))


@dataclass(frozen=True, kw_only=True)
class DistAttnConfig:
    """Everything a key is planned with.

    Attributes:
        dispatch_config, overlap_config, grpcoll_config: see there.
        kernel_backend: auto, blocked (torch matmuls over blocks, any device) or ffa (compiled CUDA).
        deterministic: equal to the bit from run to run on the same devices and cp size.
        sink_grad_reduce: None leaves this rank's share of the sink gradient; "sum" or "avg" all-reduces it over the cp group.
    """

    dispatch_config: DispatchConfig = field(default_factory=DispatchConfig)
    overlap_config: OverlapConfig = field(default_factory=OverlapConfig)
    grpcoll_config: GrpCollConfig = field(default_factory=GrpCollConfig)
    kernel_backend: str = "auto"
    deterministic: bool = False
    sink_grad_reduce: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("dispatch_config", DispatchConfig), ("overlap_config", OverlapConfig), ("grpcoll_config", GrpCollConfig)):
            _require(isinstance(getattr(self, name), kind), name, getattr(self, name), f"must be a {kind.__name__}")
        one_of("kernel_backend", self.kernel_backend, KERNEL_BACKENDS)
        _keep(self, deterministic=flag("deterministic", self.deterministic))
        if self.sink_grad_reduce is not None:
            one_of("sink_grad_reduce", self.sink_grad_reduce, SINK_GRAD_REDUCTIONS)  # or None
