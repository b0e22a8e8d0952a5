"""Results of cells: collected while a cell runs, one JSON file per cell in ci/results/. Knows no cell's checks."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matrix.cells import ROOT, Cell

RESULTS = ROOT / "ci" / "results"
MAX_DETAIL = 600


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `values` are what was measured or found, for the tables."""

    name: str
    passed: bool
    detail: str
    seconds: float
    values: dict[str, Any]


@dataclass
class Report:
    """What one cell has to say.

    Attributes:
        cell: which.
        say: told each check as it ends.
        hidden: folders of this machine and what is written in their place.
        environment, wheel: facts about what was used.
    """

    cell: Cell
    say: Callable[[str], None]
    hidden: dict[str, str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    wheel: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    _last: float = field(default_factory=time.perf_counter)

    def check(self, name: str, passed: bool, detail: str = "", **values: Any) -> bool:
        """Record one check; its time is the time since the one before."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        shown = self._without_folders(" ".join(detail.split()))[:MAX_DETAIL]
        self.checks.append(Check(name, bool(passed), shown, round(seconds, 2), self._clean(values)))
        self.say(f"{'ok    ' if passed else 'FAILED'} {name} ({seconds:.1f} s){': ' + shown if shown else ''}")
        return bool(passed)

    @property
    def outcome(self) -> str:
        return "passed" if self.checks and all(check.passed for check in self.checks) else "failed"

    def _without_folders(self, text: str) -> str:
        for folder, name in self.hidden.items():
            text = text.replace(folder, name)
        return text

    def _clean(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): self._clean(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._clean(one) for one in value]
        return self._without_folders(value) if isinstance(value, str) else value

    def as_record(self) -> dict[str, Any]:
        return {
            "cell": self.cell.name,
            "cases": list(self.cell.cases),
            "definition": self.cell.definition,
            "outcome": self.outcome,
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine(),
            "environment": self._clean(self.environment),
            "wheel": self._clean(self.wheel),
            "seconds": round(time.perf_counter() - self.started, 1),
            "checks": [asdict(check) for check in self.checks],
        }


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """What a time depends on; no names of hosts or people."""
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        "arch": platform.machine(),
        "glibc": platform.libc_ver()[1],
        "cpu": models[0] if models else "unknown",
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
    }


def write(record: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['cell']}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read(cell: Cell, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The cell's last result; None when there is none, or when it is of a cell that meant something else."""
    path = folder / f"{cell.name}.json"
    if not path.is_file():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    return record if record.get("definition") == cell.definition else None


def orphans(cells: tuple[Cell, ...], folder: Path = RESULTS) -> list[str]:
    """Result files that belong to no cell."""
    names = {f"{cell.name}.json" for cell in cells}
    return sorted(path.name for path in folder.glob("*.json") if path.name not in names)
