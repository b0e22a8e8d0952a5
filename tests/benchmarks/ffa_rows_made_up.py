"""Made-up rows and anchors for tests of the attention benchmark: numbers that nobody measured, kept in temporary folders only."""

from __future__ import annotations

from typing import Any

from benchmarks.ffa_rows import Key, Row

MACHINE = "made-up machine"


def made_up_row(mask: str = "causal", tokens: int = 8192, op: str = "fwd", tflops: float = 100.0, **changes: Any) -> Row:
    """A row of ours that is right, with the given changes."""
    fields: dict[str, Any] = {
        "mask": mask,
        "tokens": tokens,
        "heads": "48/8",
        "head_dim": 128,
        "dtype": "bfloat16",
        "op": op,
        "provider": "ours",
        "status": "ok",
        "ms": 1.5,
        "spread_pct": 2.0,
        "repeats": 10,
        "tflops": tflops,
        "area": 1000,
        "error_ratio": 0.5,
        "note": "",
        "provider_version": "made up, with a comma",
        "commit": "0000000",
        "machine": MACHINE,
        "torch": "0.0",
        "python": "3.0",
    }
    return Row(**(fields | changes))


def anchor(mask: str = "causal", tokens: int = 8192, op: str = "fwd", provider: str = "FA3", heads: str = "48/8") -> Key:
    return Key(mask, tokens, heads, 128, "bfloat16", op, provider)
