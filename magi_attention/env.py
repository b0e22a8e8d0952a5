"""The only reader of the environment: MAGI_LOG (log level) and MAGI_CHECK (extra checks). No behaviour beyond that."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("magi_attention")

_LEVELS = ("debug", "info", "warning", "error", "critical")


def check_enabled() -> bool:
    """True when MAGI_CHECK asks for cross-rank agreement, plan and NaN checks. Read at each call, so tests can switch it."""
    return os.environ.get("MAGI_CHECK", "0") not in ("", "0")


def configure_logging() -> None:
    """Set the level of the package logger from MAGI_LOG (debug, info, warning, error, critical)."""
    level = os.environ.get("MAGI_LOG", "warning").lower()
    if level not in _LEVELS:
        logger.warning("MAGI_LOG=%r is not one of %s; using warning", level, ", ".join(_LEVELS))
        level = "warning"
    logger.setLevel(level.upper())
