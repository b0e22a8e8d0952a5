"""The training loop of one rank, started by torchrun (any number of ranks, also one). Writes what it saw to --record on rank 0."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from examples.demo.data import Pack, default_folder, packs
from examples.demo.model import Decoder, ModelConfig
from magi_attention.api import (
    DistAttnKey,
    dispatch,
    get_position_ids,
    magi_attn_varlen_key,
    make_varlen_key_for_new_mask_after_dispatch,
    reduce_loss,
    roll,
)


@dataclass(frozen=True)
class StepRecord:
    """What one training step showed.

    Attributes:
        loss: mean cross entropy over all tokens of the sequence that have a next token in their document, nats.
        tokens_per_s: global tokens per second, forward, backward and update.
        imbalance: largest over mean visible pairs per rank, all layers together.
        moved_bytes: payload sent between ranks in attention, all layers, forward and backward, all ranks together.
    """

    loss: float
    tokens_per_s: float
    imbalance: float
    moved_bytes: int


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=default_folder(), help="text file or folder; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=16_384)
    parser.add_argument("--window", type=int, default=1_024, help="keys a row of a window layer sees, itself included")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each rank")
    parser.add_argument("--record", type=Path, required=True, help="folder for record.json and gradients.pt (written by rank 0)")
    return parser.parse_args()


def keys_for(pack: Pack, config: ModelConfig, group: dist.ProcessGroup | None, window: int) -> tuple[DistAttnKey, DistAttnKey]:
    """The document-causal key and, on the same dispatch, the sliding-window key. Both stay alive through the step."""
    cu_seqlens = pack.cu_seqlens
    heads = (config.num_heads_q, config.num_heads_kv, config.head_dim)
    causal_key = magi_attn_varlen_key(cu_seqlens, cu_seqlens, *heads, 0, group, causal=True)
    window_key = make_varlen_key_for_new_mask_after_dispatch(cu_seqlens, cu_seqlens, causal_key, causal=True, window_size=(window - 1, 0))
    return causal_key, window_key


def moved_bytes(key: DistAttnKey, itemsize: int) -> int:
    """K and V rows cast in the forward, cast again in the backward, and their fp32 gradients reduced."""
    num_rows = int(key.plan.rank_recv_rows.sum())
    width = 2 * key.num_heads_kv * key.head_dim
    return num_rows * width * (2 * itemsize + 4)


def train_step(
    model: Decoder, pack: Pack, group: dist.ProcessGroup | None, window: int, device: torch.device
) -> tuple[torch.Tensor, list[DistAttnKey]]:
    """Loss of one sequence, gradients left in the parameters (summed over the cp group)."""
    causal_key, window_key = keys_for(pack, model.config, group, window)
    layer_keys = [window_key if idx in model.config.window_layers else causal_key for idx in range(model.config.num_layers)]
    tokens = dispatch(pack.tokens.to(device), causal_key)
    labels = roll(tokens, -1, 0, causal_key, within_documents=True, fill_value=-100)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(tokens, get_position_ids(causal_key).to(device), layer_keys)
    loss_sum = F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
    loss = reduce_loss(loss_sum, (labels != -100).sum(), group, grad_reduction="sum")
    loss.backward()
    if group is not None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=group)
    return loss.detach(), layer_keys


def main() -> None:
    args = parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    num_gpus = torch.cuda.device_count()
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    use_cuda = num_gpus > 0
    device = torch.device("cuda", local_rank % num_gpus) if use_cuda else torch.device("cpu")
    torch.set_num_threads(args.threads)
    if use_cuda:
        torch.cuda.set_device(device)
    group = None
    if world_size > 1:
        dist.init_process_group("nccl" if num_gpus >= local_size else "gloo")  # NCCL takes one rank per GPU
        group = dist.group.WORLD

    torch.manual_seed(args.seed)  # equal parameters on every rank
    config = ModelConfig()
    model = Decoder(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6)
    batches = packs(args.data, args.steps, args.seq_len, args.seed)
    records: list[StepRecord] = []
    gradients: list[dict[str, torch.Tensor]] = []
    progress = tqdm(batches, desc=f"{world_size} rank{'s' if world_size > 1 else ''}", disable=rank != 0, unit="step")
    for pack in progress:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss, layer_keys = train_step(model, pack, group, args.window, device)
        if rank == 0:
            gradients.append({name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        loss_value = loss.item()
        areas = sum(key.plan.rank_areas for key in layer_keys)
        record = StepRecord(
            loss=loss_value,
            tokens_per_s=args.seq_len / (time.perf_counter() - start),
            imbalance=float(areas.max() / max(areas.mean(), 1e-9)),
            moved_bytes=sum(moved_bytes(key, 2 if use_cuda else 4) for key in layer_keys),
        )
        records.append(record)
        progress.set_postfix_str(
            f"loss {record.loss:.3f}, {record.tokens_per_s:,.0f} tokens/s, imbalance {record.imbalance:.3f}, "
            f"{record.moved_bytes / 2**20:.1f} MiB moved"
        )
    if rank == 0:
        args.record.mkdir(parents=True, exist_ok=True)
        torch.save(gradients, args.record / "gradients.pt")
        (args.record / "record.json").write_text(json.dumps([asdict(record) for record in records], indent=1))
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
