"""Trains a small Llama-style model on real text with context parallelism, checks it against one rank, draws what happened.

    python examples/05_train_long_context.py [--data PATH] [--ranks 4] [--steps 8] [--out demo_out]

Runs on GPUs when they are there, over NCCL when each rank has one; else over gloo, on the CPU without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from examples.demo import parity, pictures  # noqa: E402
from examples.demo.data import default_folder, packs  # noqa: E402
from examples.demo.model import ModelConfig  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_folder(), help="text file or folder of them (default: %(default)s)")
    num_gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, default=num_gpus if num_gpus > 1 else 4, help="default: one per GPU, else 4")
    parser.add_argument("--steps", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seq-len", type=int, default=16_384, help="tokens per packed sequence (default: %(default)s)")
    parser.add_argument("--window", type=int, default=1_024, help="keys a row sees in the sliding-window layers (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and of the order of the documents")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for records and pictures")
    args = parser.parse_args()
    for name in ("ranks", "steps", "seq_len", "window"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    return args


def train(args: argparse.Namespace, num_ranks: int, record: Path) -> None:
    """One torchrun of the training loop; ends the demo when it fails."""
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m", "examples.demo.train"]
    command += ["--data", str(args.data.resolve()), "--steps", str(args.steps), "--seq-len", str(args.seq_len)]
    command += ["--lr", str(args.lr), "--seed", str(args.seed)]
    command += ["--window", str(args.window), "--threads", str(threads), "--record", str(record.resolve())]
    # Threads that wait without spinning: on a busy machine spinning ones keep the core from the thread they wait for.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "OMP_NUM_THREADS": str(threads)}
    finished = subprocess.run(command, cwd=REPO, env=environment, check=False)
    if finished.returncode:
        raise SystemExit(f"training on {num_ranks} ranks ended with exit code {finished.returncode}; its messages are above")


def main() -> None:
    args = parse_args()
    start = time.perf_counter()
    sequences = packs(args.data, args.steps, args.seq_len, args.seed)
    lengths = [end - begin for pack in sequences for begin, end in itertools.pairwise(pack.cu_seqlens)]
    num_gpus = torch.cuda.device_count()
    if num_gpus >= args.ranks:
        device = f"{args.ranks} GPUs over NCCL"
    else:
        device = f"{args.ranks} ranks on {f'{num_gpus} GPUs' if num_gpus else 'the CPU'} over gloo"
    print(f"text: {args.data}; {args.steps} sequences of {args.seq_len:,} tokens; {device}")
    print(f"{len(lengths):,} documents of {min(lengths):,} to {max(lengths):,} tokens, packed one after another")
    many, one = args.out / "many_ranks", args.out / "one_rank"
    train(args, args.ranks, many)
    train(args, 1, one)
    bound = parity.BF16_BOUND if torch.cuda.is_available() else parity.FP32_BOUND
    is_ok = parity.report(many, one, bound)
    drawn = max(sequences, key=lambda pack: len(pack.cu_seqlens))  # many documents in one sequence show most
    for path in pictures.draw_all(drawn, ModelConfig(), args.ranks, args.window, (many, one), args.out):
        print(f"picture {path}")
    print(f"demo finished in {time.perf_counter() - start:.0f} s")
    raise SystemExit(0 if is_ok else 1)


if __name__ == "__main__":
    main()
