"""Writes docs/support.md by running every cell: forward and backward against float64, or the refusal. `make support`.

A cell says yes only after its run passed the rule of numerics.md here, and no with the error that a caller gets. CPU only; the same
blocked path runs on GPUs, which the GPU tests check.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from magi_attention.errors import InputError, UnsupportedError
from magi_attention.kernels.ops import single_device_attention
from magi_attention.kernels.select import AttentionDesc, Build, choose
from magi_attention.mask import AttnMask, builders
from magi_attention.mask.dense import dense_mask
from magi_attention.testing.numerics import AttentionCase

PAGE = Path(__file__).parent / "support.md"
VARIANTS = PAGE.parents[1] / "csrc" / "attention" / "variants.txt"
TOTAL = 48
HEAD_DIMS = (32, 60, 64, 80, 96, 128, 192, 256, 512)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink `sh`": {"sink_shape": (2, 4)},
    "sink `ssh`": {"sink_shape": (TOTAL, 2, 4), "sink_layout": "ssh"},
    "softcap": {"softcap": 15.0},
    "gradient of lse": {"with_dlse": True},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def full_build() -> Build:
    """Every kernel of the list, whatever is compiled here: each line is the product of its columns."""
    lines = [line.split("#")[0].split() for line in VARIANTS.read_text().splitlines()]
    names = [":".join(cells) for line in lines if line for cells in itertools.product(*(cell.split(",") for cell in line))]
    return Build(tuple(names), ("sm_90a",))


FULL_BUILD = full_build()


def masks() -> dict[str, AttnMask]:
    """One small mask of each kind, with a row that sees nothing where the kind allows it."""

    def typed(kind: str) -> AttnMask:
        return AttnMask.from_ranges([[0, TOTAL]], [[0, TOTAL - 8]], [kind], TOTAL, TOTAL)

    documents = [0, 5, 5, 30, TOTAL]
    return {
        "full": typed("full"),
        "causal": typed("causal"),
        "inverse causal": typed("inv_causal"),
        "band": AttnMask.from_slices([[4, TOTAL, 0, TOTAL, -6, 3]], TOTAL, TOTAL),
        "documents": builders.from_cu_seqlens(documents, documents, causal=True),
        "window": builders.from_cu_seqlens(documents, documents, causal=True, window_size=(7, 0)),
        "blocks": builders.block_map([[True, False, True], [False, False, False], [True, True, False]], TOTAL, TOTAL, 16, 16),
    }


def passes(mask: AttnMask, head_dim: int, dtype: torch.dtype, options: dict[str, Any]) -> bool:
    """Forward and backward of one cell within the rule."""
    options = dict(options)
    generator = torch.Generator().manual_seed(0)
    sink_shape, with_dlse = options.pop("sink_shape", None), options.pop("with_dlse", False)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {"q": draw(TOTAL, 4, head_dim), "k": draw(TOTAL, 2, head_dim), "v": draw(TOTAL, 2, head_dim)}
    if sink_shape is not None:
        tensors["sink"] = torch.randn(sink_shape, generator=generator)
    dlse = torch.randn(TOTAL, 4, generator=generator) if with_dlse else None
    dense = torch.from_numpy(dense_mask(mask.slices, TOTAL, TOTAL).copy())
    case = AttentionCase(tensors, dense, draw(TOTAL, 4, head_dim), dlse, options)
    try:
        case.check("cell", case.run(lambda q, k, v, **rest: single_device_attention(q, k, v, mask.slices, **rest)))
    except AssertionError:
        return False
    return True


def refusal(call: Callable[[], object]) -> str:
    """The error of a cell that is not supported, by name."""
    try:
        call()
    except (InputError, UnsupportedError) as error:
        return f"no: `{type(error).__name__}`"
    return "yes"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def yes_or_no(is_supported: bool) -> str:
    return "yes" if is_supported else "**no**"


def render() -> str:
    """The whole page."""
    by_mask = masks()
    head_dims = [
        [str(head_dim), *(yes_or_no(passes(mask, head_dim, torch.bfloat16, {})) for mask in by_mask.values())] for head_dim in HEAD_DIMS
    ]
    options = [
        [name, *(yes_or_no(all(passes(mask, 32, dtype, option) for mask in by_mask.values())) for dtype in DTYPES.values())]
        for name, option in OPTIONS.items()
    ]
    paths = []
    for (device, dtype_name), backend in itertools.product(itertools.product(("cpu", "cuda"), DTYPES), ("auto", "blocked", "ffa")):
        cells = []
        for head_dim in (64, 256):
            desc = AttentionDesc(device, DTYPES[dtype_name], 4, 2, head_dim, head_dim, capability=(9, 0) if device == "cuda" else None)
            chosen = refusal(lambda desc=desc, backend=backend: choose(desc, backend, build=FULL_BUILD))  # type: ignore[misc]
            cells.append(choose(desc, backend, build=FULL_BUILD) if chosen == "yes" else chosen)
        paths.append([device, dtype_name, f"`{backend}`", *cells])
    return f"""# What is supported

This page is written by `make support`, which runs every cell below (forward and backward, judged as in [numerics](numerics.md));
a test fails when the page and the library differ. Any number of heads works whose ratio is whole, as does any length, also 0.

## Masks and head dimensions

Blocked path, bf16, values as wide as keys.

{table(["head_dim", *by_mask], head_dims)}

## Options and dtypes

Blocked path, every mask kind above. Results are equal to the bit from run to run with and without `deterministic=True`, on one device
and on any number of ranks.

{table(["option", *DTYPES], options)}

## Which path takes what

A GPU of compute capability 9.0 and a build with every variant of `csrc/attention/variants.txt`. Up to 128, a head_dim that is not
compiled runs on the next wider kernel with zero columns: exact, at the cost of the wider kernel and of copies in and out. On other GPUs,
and in builds without compiled kernels, bf16 and fp16 need a key with `DistAttnConfig(kernel_backend="blocked")`; the error lists what is
compiled.

{table(["device", "dtype", "`kernel_backend`", "head_dim up to 128", "above"], paths)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.parse_args().out.write_text(render())


if __name__ == "__main__":
    main()
