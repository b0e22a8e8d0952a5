"""What a command said when it was done. Knows nothing of what was run, or where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    @property
    def last_line(self) -> str:
        lines = self.text.strip().splitlines()
        return lines[-1].strip() if lines else f"exit code {self.code}, no output"
