"""What ptxas -v said about each kernel: registers, spills, stack, shared memory; and what of that fails a build."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from dataclasses import dataclass, fields, replace
from pathlib import Path

# Objects whose kernels may spill. Empty on purpose: a spill in a shipped kernel is a fault.
MAY_SPILL: frozenset[str] = frozenset()

ENTRY = re.compile(r"Compiling entry function '([^']+)'")
PROPERTIES = re.compile(r"Function properties for (\S+)")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
STATIC_SHARED = re.compile(r"(\d+) bytes smem")
# C7508 setmaxnreg ignored, C7510 to C7514 wgmma serialised: numbers grow with each ptxas, the words stay.
LOSS = re.compile(r"\((C\d+)\).*(Potential Performance Loss|setmaxnreg' ignored|serialized).*")
DYNAMIC_SHARED = re.compile(r"magi_dynamic_shared\(std::integral_constant<int, (\d+)>\)")
NAMESPACE = re.compile(r"(\w+|\(anonymous namespace\))::")
MAX_LABEL = 60


@dataclass(frozen=True)
class KernelResources:
    """One __global__ function. Sizes in bytes; `seconds` is the compile time of its whole object.

    `dynamic_shared` is the most that launchers of the object ask for; None when the source does not say (csrc/attention/shared_report.h).
    """

    object: str
    kernel: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    seconds: float
    dynamic_shared: int | None = None


@dataclass(frozen=True)
class ObjectReport:
    """Everything ptxas said about one object file."""

    kernels: tuple[KernelResources, ...]
    losses: tuple[str, ...]


def parse(object_name: str, log: str, seconds: float) -> ObjectReport:
    """Reads the output of nvcc -Xptxas -v for one object.

    A device function that was not inlined has its own properties and no "Used" line; its spills count for the object and
    are listed under its own name with 0 registers.
    """
    kernels: list[KernelResources] = []
    losses: list[str] = []
    entry, function = "", ""
    sizes: dict[str, tuple[int, int, int]] = {}
    for line in log.splitlines():
        if found := ENTRY.search(line):
            entry = found[1]
        elif found := PROPERTIES.search(line):
            function = found[1]
        elif found := STACK.search(line):
            stack, stores, loads = map(int, found.groups())
            sizes[function] = (stack, stores, loads)
            if function != entry and (stores or loads):
                kernels.append(KernelResources(object_name, function, 0, stack, stores, loads, 0, seconds))
        elif found := USED.search(line):
            shared = STATIC_SHARED.search(line)
            stack, stores, loads = sizes.get(entry, (0, 0, 0))
            static_shared = int(shared[1]) if shared else 0
            kernels.append(KernelResources(object_name, entry, int(found[1]), stack, stores, loads, static_shared, seconds))
        elif found := LOSS.search(line):
            losses.append(found[0].strip())
    return ObjectReport(tuple(kernels), tuple(dict.fromkeys(losses)))


def with_dynamic_shared(report: ObjectReport, symbols: str) -> ObjectReport:
    """Adds what `nm -C` of the object says about dynamic shared memory."""
    sizes = [int(size) for size in DYNAMIC_SHARED.findall(symbols)]
    kernels = [replace(kernel, dynamic_shared=max(sizes, default=None)) for kernel in report.kernels]
    return ObjectReport(tuple(kernels), report.losses)


def faults(reports: dict[str, ObjectReport], may_spill: frozenset[str] = MAY_SPILL) -> list[str]:
    """One line for everything that must not be shipped."""
    found = []
    for name, report in reports.items():
        for kernel in report.kernels:
            if (kernel.spill_stores or kernel.spill_loads) and name not in may_spill:
                spilled = f"{kernel.spill_stores} bytes spill stores, {kernel.spill_loads} bytes spill loads"
                found.append(f"{name}: {shown(kernel.kernel)} spills registers ({spilled})")
        found += [f"{name}: {loss}" for loss in report.losses]
    return found


def table(reports: dict[str, ObjectReport]) -> str:
    """One aligned line per kernel."""
    heads = ("object", "registers", "stack", "spill st", "spill ld", "static smem", "dynamic smem", "seconds", "kernel")
    rows = [
        (
            k.object,
            str(k.registers),
            str(k.stack),
            str(k.spill_stores),
            str(k.spill_loads),
            str(k.static_shared),
            "-" if k.dynamic_shared is None else str(k.dynamic_shared),
            f"{k.seconds:.1f}",
            shown(k.kernel),
        )
        for report in reports.values()
        for k in report.kernels
    ]
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    last = len(heads) - 1
    lines = []
    for row in (heads, *rows):
        cells = [row[i].ljust(widths[i]) if i in (0, last) else row[i].rjust(widths[i]) for i in range(len(heads))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_csv(reports: dict[str, ObjectReport], path: Path) -> None:
    names = [field.name for field in fields(KernelResources)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(kernel, name) for name in names] for report in reports.values() for kernel in report.kernels)


def shown(symbol: str) -> str:
    """A mangled name as a person reads it: no namespaces, and template arguments only where they fit a terminal."""
    name = symbol
    if symbol.startswith("_Z") and shutil.which("c++filt"):
        name = subprocess.run(["c++filt", "-p", symbol], capture_output=True, text=True, timeout=30, check=False).stdout.strip() or symbol
    name = NAMESPACE.sub("", name)
    return name if len(name) <= MAX_LABEL else name.split("<")[0][:MAX_LABEL]
