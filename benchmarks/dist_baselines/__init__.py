"""Other ways to spread one attention over ranks, on the kernels of this package, beside calc_attn. For benchmarks; knows no timing.

method = METHODS["ring"](mask, comm_group(None), Heads(64, 8, 128), options_for(Heads(64, 8, 128)))
result = method.forward(q, k, v)                    # rows method.query_rows of q and method.key_rows of k, v
dq, dk, dv = method.backward(result, dout)
"""

from benchmarks.dist_baselines.all_gather import AllGather, OverlappedAllGather
from benchmarks.dist_baselines.magi import Magi
from benchmarks.dist_baselines.protocol import Heads, LocalAttention, MethodMaker, Result, options_for
from benchmarks.dist_baselines.ring import Ring
from benchmarks.dist_baselines.ulysses import Ulysses

METHODS: dict[str, MethodMaker] = {
    "magi": Magi,
    "ring": Ring,
    "all_gather": AllGather,
    "all_gather_overlap": OverlappedAllGather,
    "ulysses": Ulysses,
}

__all__ = [
    "METHODS",
    "AllGather",
    "Heads",
    "LocalAttention",
    "Magi",
    "MethodMaker",
    "OverlappedAllGather",
    "Result",
    "Ring",
    "Ulysses",
    "options_for",
]
