"""How many compilers this machine can run at once: CPUs and memory, also those of a container. Starts nothing."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kernel_build.variants import BuildError

GIB = 1 << 30
BYTES_PER_COMPILER = 2 * GIB
# Less than this and even one nvcc is likely to be killed: the largest of ours was seen to take 0.7 GiB.
LEAST_BYTES = GIB
UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a number near 2 ** 63


@dataclass(frozen=True)
class Jobs:
    """Compilers at once, and in words where the number comes from."""

    count: int
    why: str

    def __str__(self) -> str:
        return f"{self.count} at a time ({self.why})"


def choose_jobs(asked: str, cpus: int, free_bytes: int) -> Jobs:
    """MAX_JOBS as it stands, or one compiler per CPU and per 2 GiB of free memory.

    Raises:
        BuildError: MAX_JOBS is no positive number, or the memory does not suffice for one compiler and nobody insisted.
    """
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise BuildError(f"MAX_JOBS={asked!r}: must be a positive number")
        return Jobs(int(asked), "MAX_JOBS")
    if free_bytes < LEAST_BYTES:
        raise BuildError(
            f"compiling needs {BYTES_PER_COMPILER / GIB:.0f} GiB of free memory and {free_bytes / GIB:.1f} GiB are here: free some, give "
            "the container more, set MAX_JOBS=1 to try all the same, or install a published wheel"
        )
    count = max(1, min(cpus, free_bytes // BYTES_PER_COMPILER))
    return Jobs(count, f"{cpus} CPUs, {free_bytes / GIB:.1f} GiB free, {BYTES_PER_COMPILER / GIB:.0f} GiB each")


def jobs_here() -> Jobs:
    return choose_jobs(os.environ.get("MAX_JOBS", ""), num_cpus(), free_memory())


def num_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs this process may use, also under a container's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = _text(cgroup / "cpu.max").split() or [_text(cgroup / "cpu/cpu.cfs_quota_us"), _text(cgroup / "cpu/cpu.cfs_period_us")]
    if len(quota) == 2 and all(part.isdigit() for part in quota) and int(quota[1]):
        allowed = min(allowed, max(1, int(quota[0]) // int(quota[1])))
    return allowed


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be used, also under a container's limit (cgroup v2 and v1)."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _text(meminfo))
    free = int(found[1]) * 1024 if found else BYTES_PER_COMPILER
    for limit, used, statistics in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        most, now = _text(cgroup / limit), _text(cgroup / used)
        if most.isdigit() and now.isdigit() and int(most) < UNLIMITED:
            # Cached files count as used and are given back when they are in the way.
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", _text(cgroup / statistics), re.MULTILINE)
            free = min(free, max(0, int(most) - int(now) + (int(cached[1]) if cached else 0)))
    return free


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
