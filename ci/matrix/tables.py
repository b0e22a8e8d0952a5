"""Tables of README.md and docs/install.md, from the matrix and its results. A cell without a passed result is never shown as supported.

Writes text and no file; no time or date goes into README's table, so that it only changes when what is supported does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from matrix.cells import Cell, Matrix
from matrix.checks import glibc_of

Record = dict[str, Any]
Read = Callable[[Cell], Record | None]
NOT_RUN = "not run"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def is_supported(cell: Cell, record: Record | None, newest_glibc: str) -> bool:
    """Whether a result lets us promise the cell: it passed, and with a wheel that can be published, not one built for one machine."""
    if record is None or record["outcome"] != "passed" or cell.status == "described":
        return False
    if cell.kind == "program":
        return True
    glibc = glibc_of(record["wheel"].get("tag", ""))
    return glibc is not None and glibc <= tuple(map(int, newest_glibc.split(".")))


def state(cell: Cell, record: Record | None, newest_glibc: str) -> str:
    """One word or two for a person."""
    if cell.status == "described":
        return "described"
    if record is None:
        return NOT_RUN
    if record["outcome"] != "passed":
        return "failed"
    return "passed" if is_supported(cell, record, newest_glibc) else "passed, with a wheel for one machine"


def value(record: Record | None, check: str, key: str) -> Any:
    """What a check of a result measured; None without it."""
    found = [one for one in (record or {}).get("checks", []) if one["name"] == check]
    return found[0]["values"].get(key) if found else None


def wheel_lines(matrix: Matrix, read: Read) -> list[list[str]]:
    """One row for each torch: Pythons and kernels of the cells that passed."""
    cells = [cell for cell in matrix.cells if cell.kind == "wheel" and cell.torch is not None and cell.status != "described"]
    rows = []
    for torch, members in groupby(cells, key=lambda cell: cell.torch):
        assert torch is not None
        passed = [cell for cell in members if is_supported(cell, read(cell), matrix.newest_glibc)]
        pythons = [[cell.python for cell in passed if (cell.wheel == "fat") is is_fat] for is_fat in (True, False)]
        archs = sorted({arch for cell in passed for arch in value(read(cell), "kernels load", "archs") or []})
        kernels = ", ".join(archs) or ("none, CPU build" if not torch.cuda and passed else "-")
        shown = [f"Python {', '.join(found)}" if found else NOT_RUN for found in pythons]
        rows.append([torch.version, torch.cuda or "CPU", kernels, shown[0], shown[1] if torch.label else "none"])
    return rows


def compatibility(matrix: Matrix, read: Read) -> str:
    """README's table."""
    head = ["torch", "its CUDA", "kernels", "wheel for every torch", "wheel for this torch"]
    others = [
        [
            cell.format if cell.kind == "program" else "wheel on a GPU",
            cell.arch,
            cell.options["what"],
            state(cell, read(cell), matrix.newest_glibc),
        ]
        for cell in matrix.cells
        if cell.kind == "program" or cell.options.get("torch") == "here"
    ]
    return f"{markdown(head, wheel_lines(matrix, read))}\n\n{markdown(['format', 'processor', 'what', 'state'], others)}"


def choices(matrix: Matrix) -> str:
    """Which index folder is for which torch."""
    lines: dict[str, list[str]] = {}
    for cell in matrix.cells:
        if cell.torch is not None and cell.torch.label and cell.kind == "wheel":
            driver = str(matrix.kernels[cell.torch.cuda.split(".")[0]]["first_driver"])
            lines[cell.torch.label] = [f"{cell.torch.minor}.x", cell.torch.cuda, f"`{cell.torch.label}`", driver]
    return markdown(["torch", "its CUDA", "LABEL", "driver from"], list(lines.values()))


def results(matrix: Matrix, read: Read) -> str:
    """Every cell that installs a wheel, with its times."""
    rows = []
    for cell in matrix.cells:
        if cell.kind == "program" or cell.status == "described":
            continue
        record = read(cell)
        seconds = [value(record, *where) for where in (("pip install", "seconds"), ("import", "seconds"), ("self-test", "seconds"))]
        wheel = (record or {}).get("wheel", {})
        rows.append(
            [
                f"`{cell.name}`",
                state(cell, record, matrix.newest_glibc),
                *("-" if one is None else f"{one:.2f}" if index == 1 else f"{one:.0f}" for index, one in enumerate(seconds)),
                wheel.get("version", "-"),
                record["when"][:10] if record else "-",
            ]
        )
    return markdown(["cell", "result", "install s", "import s", "self-test s", "version", "run on"], rows)


def refused(matrix: Matrix, read: Read) -> str:
    """What each refusal says, as it was said."""
    rows = []
    for cell in matrix.cells:
        sentence = value(read(cell), "one sentence", "sentence")
        if cell.kind == "refusal":
            torch = cell.options.get("as_version") or (cell.torch.name if cell.torch else "none")
            rows.append([cell.wheel, torch, f"`{sentence}`" if sentence else NOT_RUN])
    return markdown(["wheel", "torch that is there", "what it says"], rows)


def described(matrix: Matrix) -> str:
    """What waits for another machine, with the command for it."""
    rows = [
        [f"`{cell.name}`", cell.machine, f"`{cell.options.get('command', cell.command)}`"]
        for cell in matrix.cells
        if cell.status == "described"
    ]
    return markdown(["cell", "waits for", "command there"], rows)


def machine(matrix: Matrix, read: Read) -> str:
    """Where the times were taken; one line for each kind of machine."""
    seen = {}
    for cell in matrix.cells:
        record = read(cell)
        if record is not None and cell.kind != "program":
            found = record["machine"]
            seen[f"{found['cpus']} CPUs ({found['cpu']}), {found['memory_gib']} GiB, {found['system']}"] = True
    return "Machines: " + "; ".join(seen) + "." if seen else "No cell was run yet."
