"""What every row of benchmarks/results carries: commit, machine and versions. Measures nothing."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch


def commit() -> str:
    """Short hash of the checked-out commit, with + when tracked files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return finished.stdout.strip() or "unknown"


def machine(device: str = "cpu") -> str:
    """The GPUs when `device` is cuda, else the processor and its cores."""
    if device == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {len([line for line in lines if line.startswith('processor')]) or '?'} cores"


def stamp(device: str = "cpu") -> dict[str, str]:
    """Columns commit, machine, torch and python."""
    return {"commit": commit(), "machine": machine(device), "torch": torch.__version__, "python": platform.python_version()}
