"""What a mask costs on many ranks, computed here without any of them.

python examples/03_plan_many_ranks.py [--ranks 64]
"""

from __future__ import annotations

import argparse

import numpy as np

from magi_attention.config import ContiguousDispatchAlg, DispatchConfig, DistAttnConfig, MinHeapDispatchAlg, ZigzagDispatchAlg
from magi_attention.mask.builders import from_cu_seqlens
from magi_attention.plan.build import plan_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    num_ranks = parser.parse_args().ranks

    # 262,144 tokens of documents whose lengths vary as in crawled text.
    total = 262_144
    lengths = np.random.default_rng(0).lognormal(np.log(1_500), 1.2, 2_000).astype(np.int64).clip(1, total // 4)
    borders = np.minimum(np.cumsum(lengths), total)
    cu_seqlens = [0, *np.unique(borders).tolist()]
    mask = from_cu_seqlens(cu_seqlens, cu_seqlens, causal=True)
    print(f"{mask.total_q:,} tokens, {len(cu_seqlens) - 1:,} documents, {mask.area():,} visible pairs, {num_ranks} ranks")
    for alg in (ContiguousDispatchAlg(), ZigzagDispatchAlg(), MinHeapDispatchAlg()):
        config = DistAttnConfig(dispatch_config=DispatchConfig(alg=alg))
        plan = plan_attention(mask, num_ranks, 0, config, num_heads_q=64, num_heads_kv=8, head_dim=128)
        imbalance = plan.rank_areas.max() / plan.rank_areas.mean()
        print(f"  {alg.name:11s} largest / mean work {imbalance:6.3f}   key rows moved {int(plan.rank_recv_rows.sum()):9,}")


if __name__ == "__main__":
    main()
