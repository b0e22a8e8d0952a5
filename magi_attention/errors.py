"""The three exceptions a caller can meet. Knows nothing of the rest of the package."""

from __future__ import annotations


class InputError(ValueError):
    """An argument breaks a rule. The text has its name, the value received, the rule and the next step."""


class UnsupportedError(NotImplementedError):
    """No compiled or built-in path takes this combination. The text lists every reason."""


class CommError(RuntimeError):
    """An exchange between ranks failed or timed out. The text names rank, peer, step, op and bytes."""
