"""Masks are data: build some, count their visible pairs, draw them.

python examples/01_masks.py [--out DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from magi_attention.api import AttnMask
from magi_attention.mask import builders


def masks() -> dict[str, AttnMask]:
    """A handful of masks that people train with."""
    documents = [0, 700, 760, 2048]
    return {
        "causal_documents": builders.from_cu_seqlens(documents, documents, causal=True),
        "sliding_window": builders.from_cu_seqlens(documents, documents, causal=True, window_size=(255, 0)),
        "video": builders.block_causal_video(num_frames=8, frame_length=256),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_out"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, mask in masks().items():
        path = out / f"{name}.png"
        mask.plot(path)
        share = mask.area() / (mask.total_q * mask.total_k)
        print(f"{name}: {len(mask.slices)} slices, {mask.area():,} visible pairs ({share:.1%} of the square), picture {path}")


if __name__ == "__main__":
    main()
