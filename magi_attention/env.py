"""The only reader of the environment: MAGI_LOG (log level) and MAGI_CHECK (extra checks). No behaviour beyond that."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("magi_attention")

# What os.environ keeps, bytes to bytes. Every call of attention asks, and os.environ takes 1 us to say that a name is not set.
_SET: dict[bytes, bytes] | None = getattr(os.environ, "_data", None) if os.name == "posix" else None
_CHECK = b"MAGI_CHECK"
_LEVELS = ("debug", "info", "warning", "error", "critical")


def check_enabled() -> bool:
    """True when MAGI_CHECK asks for cross-rank agreement, plan and NaN checks. Read at each call, so tests can switch it."""
    return _SET.get(_CHECK, b"0") not in (b"", b"0") if _SET is not None else os.environ.get("MAGI_CHECK", "0") not in ("", "0")


def configure_logging() -> None:
    """Set the level of the package logger from MAGI_LOG (debug, info, warning, error, critical)."""
    level = os.environ.get("MAGI_LOG", "warning").lower()
    if level not in _LEVELS:
        logger.warning("MAGI_LOG=%r is not one of %s; using warning", level, ", ".join(_LEVELS))
        level = "warning"
    logger.setLevel(level.upper())
