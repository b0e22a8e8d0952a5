"""Exact attention for training on very long and irregular sequences, over many GPUs.

The package root: version and build facts only. Importing it needs no GPU, no compiled part and no torch; everything else is one
import away: `from magi_attention.api import ...`. A published wheel refuses here a torch that it was not made for.
"""

from __future__ import annotations

import sys
from typing import Any

from magi_attention import _build_record, _ffa_library, _native, env
from magi_attention.errors import InstallError

try:
    from magi_attention._version import __version__
except ImportError:  # a source tree that was never built has no version file
    __version__ = "0.0.0+unknown"

env.configure_logging()


def build_info() -> dict[str, Any]:
    """What was built and what is here, as plain values that json can write.

    Keys: version; revision (of git); origin ("release" for a published wheel, "source" for a build on this machine); torch (what the
    wheel is pinned to, or None); libraries (compiler or CUDA version, architectures, variants, oldest glibc, by file); solver (the
    compiled planner's own line, or why there is none); kernels (file, variants and archs in use, or the error that says why none);
    here (this Python, machine, glibc and torch).
    """
    record = _build_record.read_record()
    try:
        solver = _native.build_info()
    except (ImportError, OSError) as fault:
        solver = f"no compiled solver: {fault}"
    return {
        "version": __version__,
        "revision": record.get("revision"),
        "origin": record.get("origin", "source"),
        "torch": record.get("torch"),
        "libraries": record.get("libraries", {}),
        "solver": solver,
        "kernels": {
            "file": _ffa_library.file_in_use(),
            "variants": list(_ffa_library.compiled_variants()),
            "archs": list(_ffa_library.compiled_archs()),
            "error": _ffa_library.load_error() or None,
        },
        "here": _build_record.here(),
    }


def _is_the_doctor() -> bool:
    """`python -m magi_attention.doctor` must report a wheel that does not fit, so it may not die of it."""
    arguments = sys.orig_argv
    return "-m" in arguments and "magi_attention.doctor" in arguments[arguments.index("-m") + 1 :][:1]


def _refuse_a_torch_that_does_not_fit() -> None:
    refusal = _build_record.refusal_of_torch(_build_record.read_record(), _build_record.torch_here())
    if refusal is not None and not _is_the_doctor():
        raise InstallError(str(refusal))


_refuse_a_torch_that_does_not_fit()

__all__ = ["__version__", "build_info"]
