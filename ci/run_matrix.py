"""`python ci/run_matrix.py [FILTER ...]`: makes the environment of each cell of ci/matrix.yaml, installs the wheel in it, checks it.

A filter is a part of a cell's name, or a glob; --list prints the names. One JSON file per cell goes to ci/results/. Exit code: 0 every
chosen cell passed, 1 one failed, 2 wrong arguments; a cell that this machine cannot run gets no result and is no failure unless
--strict. What a cell checks is in ci/matrix/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from matrix import checks, refusals, results
from matrix.cells import HERE, ROOT, Cell, Matrix, MatrixError, load
from matrix.environments import Environment, Environments, NotHere
from matrix.surroundings import CHECKS, Place
from matrix.wheels import Wheels, facts_of

PROGRAM_TIMEOUT_S = 3600
_printing = threading.Lock()


def say(line: str) -> None:
    with _printing:
        print(line, flush=True)


@dataclass(frozen=True)
class Runner:
    """Runs cells one at a time; several may be used from several threads for cells of different environments."""

    matrix: Matrix
    environments: Environments
    wheels: Wheels
    results: Path
    keep_cells: bool

    def run(self, cell: Cell, prefix: str) -> str:
        """passed, failed, or "not run: why"; writes the result unless it was not run."""
        say(f"{prefix} {cell.name}")
        report = results.Report(cell, lambda line: say(f"{prefix}   {line}"), {str(ROOT): "."})
        try:
            if cell.kind == "program":
                self._run_program(report)
            else:
                self._run_in_environment(cell, report)
        except NotHere as reason:
            say(f"{prefix} {cell.name}: not run, {reason}")
            return f"not run: {reason}"
        except Exception as error:  # a check that cannot go on is a failed one; the other cells still run
            report.check("the checks ran to their end", False, f"{type(error).__name__}: {error}")
        results.write(report.as_record(), self.results)
        say(f"{prefix} {cell.name}: {report.outcome}")
        return report.outcome

    def _run_in_environment(self, cell: Cell, report: results.Report) -> None:
        file = self.wheels.find(cell.wheel)
        report.wheel = facts_of(file)
        environment = self._environment(cell)
        report.environment = dict(environment.facts)
        report.hidden = {str(environment.folder): "<environment>", **report.hidden, str(Path.home()): "~"}
        report._last = time.perf_counter()  # making the environment is no part of the first check
        try:
            if cell.kind == "wheel":
                checks.wheel(cell, self.matrix, environment, file, report)
            elif cell.kind == "refusal":
                refusals.refusal(cell, environment, file, report)
            else:
                CHECKS[cell.options["check"]](Place(cell, self.matrix, environment, self.wheels, report))
        finally:
            if not self.keep_cells:
                shutil.rmtree(environment.folder, ignore_errors=True)

    def _environment(self, cell: Cell) -> Environment:
        if cell.options.get("torch") == HERE:
            return self.environments.here(cell.name)
        return self.environments.fresh(self.environments.base(cell.torch, cell.python), cell.name)

    def _run_program(self, report: results.Report) -> None:
        command = report.cell.options["command"]
        script = ROOT / command.split()[1]
        if not command.startswith("bash ") or not script.is_file():
            raise NotHere(f"{command!r} is for another machine")
        environment = {"PYTHON": sys.executable, **os.environ}  # an interpreter that has what the build needs, unless one is named
        log = self.environments.cache / "logs" / f"{report.cell.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stream:
            try:
                done = subprocess.run(
                    command.split(),
                    cwd=ROOT,
                    env=environment,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    timeout=PROGRAM_TIMEOUT_S,
                    check=False,
                )
                code = done.returncode
            except subprocess.TimeoutExpired:
                code = 124
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        report.check(command, code == 0, lines[-1] if code == 0 else " / ".join(lines[-5:]), exit_code=code)


def run_all(runner: Runner, cells: list[Cell], jobs: int, drop_bases: bool) -> dict[str, str]:
    """Outcome by name. Cells of one environment run one after another, since they share its base."""
    by_environment = sorted(cells, key=lambda cell: (cell.environment, runner.matrix.cells.index(cell)))
    groups = [(name, list(members)) for name, members in groupby(by_environment, key=lambda cell: cell.environment)]
    numbers = iter(range(1, len(cells) + 1))

    def run_group(group: tuple[str, list[Cell]]) -> dict[str, str]:
        name, members = group
        outcomes = {}
        for cell in members:
            with _printing:
                number = next(numbers)
            outcomes[cell.name] = runner.run(cell, f"[{number}/{len(cells)}]")
        if drop_bases and name:
            shutil.rmtree(runner.environments.cache / "bases" / name, ignore_errors=True)
        return outcomes

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        found: dict[str, str] = {}
        for outcomes in pool.map(run_group, groups):
            found |= outcomes
    return found


def listing(matrix: Matrix, folder: Path) -> Iterator[str]:
    """One line per cell: name, status, last result."""
    for cell in matrix.cells:
        record = results.read(cell, folder)
        last = f"{record['outcome']} {record['when'][:10]} in {record['seconds']:.0f} s" if record else "no result"
        marks = " subset" if cell.subset else ""
        yield f"{cell.name:<44} {cell.status:<10} {last}{marks}{f' (needs {cell.machine})' if cell.machine else ''}"


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Callable[[str], None]]:
    parser = argparse.ArgumentParser(
        prog="python ci/run_matrix.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("filters", nargs="*", metavar="FILTER", help="part of a cell's name, or a glob such as 'fat-torch2.1[45]*'")
    parser.add_argument("--all", action="store_true", help="every cell with status tested")
    parser.add_argument("--subset", action="store_true", help="the cells that every change runs")
    parser.add_argument("--list", action="store_true", help="print the cells with their last results, run nothing")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", metavar="DIR", help="what ci/wheels.sh wrote (dist)")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="this file as the fat wheel")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "matrix", metavar="DIR", help="environments (build/matrix)")
    parser.add_argument("--results", type=Path, default=results.RESULTS, metavar="DIR", help="where results go (ci/results)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="environments at once (1; times are only right with 1)")
    parser.add_argument("--drop-bases", action="store_true", help="remove each environment after its last cell: 2 GB of disk instead of 20")
    parser.add_argument("--keep-cells", action="store_true", help="leave each cell's environment in the cache, to look at")
    parser.add_argument("--strict", action="store_true", help="a cell that cannot be run here is a failure")
    return parser.parse_args(arguments), parser.error


def main(arguments: list[str] | None = None) -> int:
    options, fail = parse(arguments)
    try:
        matrix = load()
        if options.list:
            print("\n".join(listing(matrix, options.results)))
            return 0
        if options.filters:
            cells = matrix.select(options.filters)
        elif options.subset:
            cells = [cell for cell in matrix.cells if cell.subset]
        elif options.all:
            cells = [cell for cell in matrix.cells if cell.status == "tested"]
        else:
            fail("say which cells: a FILTER, --subset or --all; --list prints their names")
    except MatrixError as error:
        fail(str(error))
    if options.jobs < 1:
        fail(f"--jobs {options.jobs} must be 1 or more")
    start = time.perf_counter()
    cache = options.cache.resolve()
    wheels = Wheels(options.wheels.resolve(), options.wheel.resolve() if options.wheel else None)
    runner = Runner(matrix, Environments(cache, say), wheels, options.results, options.keep_cells)
    outcomes = run_all(runner, cells, options.jobs, options.drop_bases)
    bad = [name for name, outcome in outcomes.items() if outcome == "failed"]
    skipped = [name for name, outcome in outcomes.items() if outcome.startswith("not run")]
    for name in (*bad, *skipped):
        print(f"{name}: {outcomes[name]}")
    passed = len(outcomes) - len(bad) - len(skipped)
    print(f"{passed} passed, {len(bad)} failed, {len(skipped)} not run in {time.perf_counter() - start:.0f} s")
    return int(bool(bad) or (options.strict and bool(skipped)))


if __name__ == "__main__":
    sys.exit(main())
