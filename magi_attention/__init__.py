"""Exact attention for training on very long and irregular sequences, over many GPUs.

The package root: version and build facts only. Importing it needs no GPU, no compiled part and no torch; everything else is one
import away: `from magi_attention.api import ...`.
"""

from __future__ import annotations

from magi_attention import _native, env

try:
    from magi_attention._version import __version__
except ImportError:  # a source tree that was never built has no version file
    __version__ = "0.0.0+unknown"

env.configure_logging()


def build_info() -> str:
    """One line: the package version and the compiled solver's own description, or why there is none."""
    try:
        solver = _native.build_info()
    except (ImportError, OSError) as fault:
        solver = f"no compiled solver: {fault}"
    return f"magi_attention {__version__}; {solver}"


__all__ = ["__version__", "build_info"]
