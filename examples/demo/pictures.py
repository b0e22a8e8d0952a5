"""Pictures of the demo: masks, owners, work per rank, traffic, loss curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from examples.demo.data import Pack
from examples.demo.model import ModelConfig
from examples.demo.parity import losses
from magi_attention.config import ContiguousDispatchAlg, DispatchConfig, DistAttnConfig
from magi_attention.mask.builders import from_cu_seqlens
from magi_attention.mask.slices import AttnMask
from magi_attention.plan.build import plan_attention
from magi_attention.plan.plot import plot_areas, plot_owners, plot_traffic
from magi_attention.plan.types import RankPlan


def rank_plans(mask: AttnMask, num_ranks: int, config: ModelConfig, dist_config: DistAttnConfig) -> list[RankPlan]:
    """The plan of every rank, made here in one process: planning needs no communication."""
    heads = {"num_heads_q": config.num_heads_q, "num_heads_kv": config.num_heads_kv, "head_dim": config.head_dim}
    return [plan_attention(mask, num_ranks, rank, dist_config, **heads) for rank in range(num_ranks)]


def traffic(plans: list[RankPlan]) -> np.ndarray:
    """int64 [R, R], rows each rank sends to each other rank in one forward."""
    rows = np.zeros((len(plans), len(plans)), np.int64)
    for plan in plans:
        for step in plan.forward:
            if step.exchange is not None:
                rows[plan.cp_rank] += np.array(step.exchange.send_counts, np.int64)
    return rows


def plot_losses(folders: tuple[Path, Path], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    many, one = (losses(folder) for folder in folders)
    axes.plot(one, "o-", label="one rank", markersize=8, color="tab:orange")
    axes.plot(many, "x--", label="many ranks", color="tab:blue")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("training loss")
    axes.legend()
    figure.savefig(path, dpi=130)


def draw_all(pack: Pack, config: ModelConfig, num_ranks: int, window: int, record_folders: tuple[Path, Path], out: Path) -> list[Path]:
    """Writes every picture of the demo for one of its sequences and returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    names = ("mask_documents", "mask_window", "owners", "work_per_rank", "traffic", "loss")
    paths = {name: out / f"{name}.png" for name in names}
    causal = from_cu_seqlens(pack.cu_seqlens, pack.cu_seqlens, causal=True)
    windowed = from_cu_seqlens(pack.cu_seqlens, pack.cu_seqlens, causal=True, window_size=(window - 1, 0))
    num_documents = len(pack.cu_seqlens) - 1
    what = f"{num_documents} document{'' if num_documents == 1 else 's'} of one sequence, causal"
    causal.plot(paths["mask_documents"], title=what)
    windowed.plot(paths["mask_window"], title=f"{what}, window of {window:,} keys")
    plans = rank_plans(causal, num_ranks, config, DistAttnConfig())
    plain_config = DistAttnConfig(dispatch_config=DispatchConfig(alg=ContiguousDispatchAlg()))
    plain = rank_plans(causal, num_ranks, config, plain_config)
    plot_owners(plans[0].dispatch_q, paths["owners"])
    plot_areas({"contiguous": plain[0].rank_areas, "balanced": plans[0].rank_areas}, paths["work_per_rank"])
    plot_traffic(traffic(plans), paths["traffic"])
    plot_losses(record_folders, paths["loss"])
    return list(paths.values())
