"""The exceptions a caller can meet. Knows nothing of the rest of the package."""

from __future__ import annotations


class InputError(ValueError):
    """An argument breaks a rule. The text has its name, the value received, the rule and the next step."""


class UnsupportedError(NotImplementedError):
    """No compiled or built-in path takes this combination. The text lists every reason."""


class CommError(RuntimeError):
    """An exchange between ranks failed or timed out. The text names rank, peer, step, op and bytes."""


class InstallError(ImportError):
    """The installed build does not fit this torch or this machine. The text says what was built, what is here and the command to fix it."""
