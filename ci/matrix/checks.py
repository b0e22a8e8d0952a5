"""What every installed wheel is asked: install as a user would, import, self-test, doctor, symbols, times.

Runs commands in an environment and files their outcome; knows neither how environments are made nor how results are shown.
"""

from __future__ import annotations

import json
import os
import re
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matrix import elf
from matrix.cells import Cell, Matrix
from matrix.environments import Environment
from matrix.results import Report

PROBE = Path(__file__).with_name("probe.py")
IMPORT_RUNS = 3
# The libraries are C with the C++ run time: of torch, Python and the CUDA run time they may need nothing.
MAY_NEED = re.compile(r"(ld-linux-.*|lib(c|m|dl|pthread|rt|stdc\+\+|gcc_s))\.so\.\d+")
SUMMARY = re.compile(r"(PASS|FAIL): (\d+) passed, (\d+) failed, (\d+) skipped in ([\d.]+) s")
RAW_ERROR = re.compile(r"undefined symbol|symbol lookup error|cannot open shared object|Segmentation fault")


def install(environment: Environment, wheel: Path, report: Report, *options: str) -> float:
    """`pip install WHEEL`, which may not touch torch or build anything. Its seconds."""
    before = version_of_torch(environment)
    start = time.perf_counter()
    done = environment.pip("install", *options, str(wheel))
    seconds = time.perf_counter() - start
    after = version_of_torch(environment)
    built = [line for line in done.text.splitlines() if "Building wheel" in line or "Running setup.py" in line]
    passed = done.code == 0 and before == after and not built
    detail = "" if passed else f"torch {before} -> {after}; {' '.join(built)} {done.last_line}"
    report.check("pip install", passed, detail, seconds=round(seconds, 1))
    return seconds


def version_of_torch(environment: Environment) -> str:
    """As pip sees it, from the folder's name: reading it takes no time and works for a torch that does not import."""
    found = sorted(path.name for path in environment.site_packages.glob("torch-*.dist-info"))
    return found[0].removeprefix("torch-").removesuffix(".dist-info") if found else ""


def probe(environment: Environment) -> tuple[dict[str, Any], str]:
    """(what the probe printed, "") or ({}, why it did not)."""
    done = environment.run(str(PROBE))
    if done.code:
        return {}, done.last_line
    return json.loads(done.out.strip().splitlines()[-1]), ""


def import_package(environment: Environment, report: Report, budget_s: float) -> dict[str, Any]:
    """Import and build information; the time is the best of several runs, since a busy machine only ever adds."""
    facts: dict[str, Any] = {}
    seconds = []
    for _ in range(IMPORT_RUNS):
        facts, why = probe(environment)
        if not facts:
            report.check("import", False, why)
            return {}
        seconds.append(facts["import_package_s"])
    from_wheel = str(environment.folder.resolve()) in str(Path(facts["file"]).resolve())
    best = min(seconds)
    detail = f"{best:.2f} s beyond torch" if from_wheel else f"imported from {facts['file']}, not from the wheel"
    report.check("import", from_wheel and best <= budget_s, detail, seconds=best, torch_seconds=facts["import_torch_s"])
    report.check("no compiler is there", not facts["build_programs"], ", ".join(facts["build_programs"]))
    info = facts["build_info"]
    known = bool(info["version"] and info["solver"] and "no compiled solver" not in info["solver"])
    report.check("build information", known, f"{info['version']}: {info['solver']}", build_info=info)
    return facts


def kernels(cell: Cell, matrix: Matrix, facts: dict[str, Any], report: Report) -> None:
    """The library that fits torch's CUDA loads without a GPU and holds the architectures that are advertised."""
    found = facts["build_info"]["kernels"]
    cuda = (cell.torch.cuda if cell.torch else facts["cuda"]) or ""
    if not cuda:
        report.check(
            "kernels load", bool(found["variants"]), found["error"] or f"{len(found['variants'])} variants (not usable: CPU torch)"
        )
        return
    major = cuda.split(".")[0]
    advertised = set(matrix.kernels[major]["archs"])
    right_file = f"_cu{major}/" in (found["file"] or "")
    passed = bool(found["variants"]) and right_file and set(found["archs"]) == advertised
    detail = found["error"] or f"{len(found['variants'])} variants for {', '.join(found['archs'])} from {Path(found['file']).parent.name}"
    report.check("kernels load", passed, detail, archs=found["archs"], num_variants=len(found["variants"]))


def selftest(environment: Environment, report: Report) -> float:
    """`python -m magi_attention.selftest` as the README says it. Its seconds, start of Python included."""
    start = time.perf_counter()
    done = environment.run("-m", "magi_attention.selftest", timeout_s=600)
    seconds = time.perf_counter() - start
    summary = SUMMARY.search(done.out)
    passed = done.code == 0 and summary is not None and summary[1] == "PASS"
    detail = summary[0] if summary else done.last_line
    if not passed:
        detail += " " + " ".join(line for line in done.out.splitlines() if line.startswith("FAIL"))
    report.check("self-test", passed, detail, seconds=round(seconds, 1))
    return seconds


def doctor(environment: Environment, *, variables: dict[str, str] | None = None) -> tuple[int, dict[str, Any], str]:
    """(exit code, its JSON, what went wrong)."""
    done = environment.run("-m", "magi_attention.doctor", "--json", variables=variables)
    try:
        return done.code, json.loads(done.out), ""
    except ValueError:
        return done.code, {}, done.last_line


def healthy(environment: Environment, report: Report) -> None:
    code, found, why = doctor(environment)
    serious = [finding["name"] for finding in found.get("findings", []) if finding["severity"] != "note"]
    report.check("doctor", code == 0 and bool(found) and not serious, why or f"{found['verdict']}; {', '.join(serious) or 'no faults'}")


def libraries_of(environment: Environment) -> list[Path]:
    return sorted((environment.site_packages / "magi_attention").rglob("*.so"))


def _newest(versions: Iterable[str]) -> str:
    return max(versions, key=lambda version: tuple(map(int, version.split("."))), default="0")


def glibc_of(tag: str) -> tuple[int, ...] | None:
    """The newest glibc that a platform tag lets a wheel need; None for one that promises nothing (a wheel built for this machine)."""
    found = [tuple(map(int, numbers)) for numbers in re.findall(r"manylinux_(\d+)_(\d+)", tag)]
    return min(found) if found else None


def symbols(environment: Environment, tag: str, report: Report) -> None:
    """Each library needs the C and C++ run time only, in versions that the wheel's tag promises, and names no Python or torch symbol."""
    faults, found = [], {}
    promised = glibc_of(tag)
    for path in libraries_of(environment):
        library = elf.read(path)
        name = path.relative_to(environment.site_packages).as_posix()
        faults += [f"{name} needs {wanted}" for wanted in library.libraries if not MAY_NEED.fullmatch(wanted)]
        foreign = [one.name for one in library.needed if not one.version and not one.is_weak]
        faults += [f"{name} has undefined symbols without an owner: {', '.join(foreign[:5])}"] * bool(foreign)
        glibc = _newest(version.removeprefix("GLIBC_") for _, version in library.versions if re.fullmatch(r"GLIBC_[\d.]+", version))
        if promised is not None and tuple(map(int, glibc.split("."))) > promised:
            faults.append(f"{name} needs glibc {glibc}, and the wheel's tag is {tag}")
        found[name] = {"glibc": glibc, "needs": list(library.libraries), "exports": len(library.defined)}
    report.check("symbols", bool(found) and not faults, "; ".join(faults) or f"{len(found)} libraries", libraries=found)


def seconds_of_children() -> float:
    """Processor time of the commands that have ended. With several jobs it holds that of other cells too."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def time_spent(spent: float, used: float, budget: float, report: Report) -> None:
    """A machine that is busy with other things says little by its clock: there the processor time must fit the budget."""
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    is_busy = load > cpus
    detail = f"installed and self-tested in {spent:.0f} s of {budget}" + (
        f" on a busy machine (load {load:.0f}), {used:.0f} s of work" if is_busy else ""
    )
    passed = spent <= budget or (is_busy and used <= budget)
    report.check("time", passed, detail, seconds=round(spent, 1), cpu_seconds=round(used, 1), load=round(load, 1), cpus=cpus)


def wheel(cell: Cell, matrix: Matrix, environment: Environment, file: Path, report: Report) -> None:
    """Everything of a cell that installs a wheel under a torch it is for."""
    before = seconds_of_children()
    spent = install(environment, file, report)
    used = seconds_of_children() - before
    facts = import_package(environment, report, matrix.budgets["import"])
    if not facts:
        return
    report.environment |= {key: facts[key] for key in ("python", "torch", "cuda", "gpus")}
    kernels(cell, matrix, facts, report)
    before = seconds_of_children()
    spent += selftest(environment, report)
    used += seconds_of_children() - before
    time_spent(spent, used, matrix.budgets["install_and_selftest"], report)
    healthy(environment, report)
    symbols(environment, report.wheel["tag"], report)
