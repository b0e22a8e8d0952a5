"""What happens where a wheel does not fit: one sentence with what was built, what is here and the next step. No raw loader error.

Knows the words a sentence must have only from the matrix.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from matrix import checks
from matrix.cells import Cell
from matrix.environments import Environment
from matrix.results import Report

IMPORT = "import magi_attention.api"
ERROR_LINE = re.compile(r"[\w.]*Error: (.+)")


def pretend_version(environment: Environment, version: str) -> None:
    """Make the installed torch say that it is another version, as a vendor's container does. New files, since the old ones are shared."""
    file = environment.site_packages / "torch" / "version.py"
    text = re.sub(r"^__version__ = .*$", f"__version__ = {version!r}", file.read_text(), flags=re.MULTILINE)
    _replace(file, text)
    (folder,) = environment.site_packages.glob("torch-*.dist-info")
    metadata = folder / "METADATA"
    _replace(metadata, re.sub(r"^Version: .*$", f"Version: {version}", metadata.read_text(), count=1, flags=re.MULTILINE))
    folder.rename(folder.with_name(f"torch-{version}.dist-info"))


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    os.replace(beside, path)


def check_sentence(sentence: str, says: list[str], report: Report) -> None:
    """One line, with every fact it must have."""
    missing = [pattern for pattern in says if not re.search(pattern, sentence)]
    raw = checks.RAW_ERROR.search(sentence)
    passed = bool(sentence) and "\n" not in sentence and not missing and raw is None
    report.check("one sentence", passed, f"without {', '.join(missing)}: {sentence}" if missing else sentence, sentence=sentence)


def check_refused(environment: Environment, says: list[str], report: Report) -> None:
    """The import raises; the last line of what Python prints is the sentence; the doctor, which must run anyway, says it once."""
    for name, arguments in (("import", ("-c", IMPORT)), ("self-test", ("-m", "magi_attention.selftest"))):
        done = environment.run(*arguments)
        raised = ERROR_LINE.fullmatch(done.last_line)
        raw = checks.RAW_ERROR.search(done.text)
        report.check(f"{name} is refused", done.code != 0 and raised is not None and raw is None, "" if raised else done.last_line)
        check_sentence(raised[1] if raised else done.last_line, says, report)
    code, found, why = checks.doctor(environment)
    broken = [finding for finding in found.get("findings", []) if finding["severity"] == "broken"]
    complete = code == 2 and len(broken) == 1 and bool(broken[0]["fix"])
    report.check("the doctor names it once", complete, why or "; ".join(finding["text"] for finding in broken), exit_code=code)


def check_without_kernels(environment: Environment, says: list[str], report: Report) -> None:
    """The package works on, CPU tensors included; only the kernels are off, with the sentence."""
    facts, why = checks.probe(environment)
    if not report.check("import", bool(facts), why):
        return
    found = facts["build_info"]["kernels"]
    report.check("kernels are off", not found["variants"], f"{len(found['variants'])} variants")
    check_sentence(found["error"] or "", says, report)
    checks.selftest(environment, report)
    code, found, why = checks.doctor(environment)
    about = [finding for finding in found.get("findings", []) if "kernel" in finding["name"]]
    report.check("the doctor names it once", len(about) == 1 and bool(about[0]["fix"]), why or f"{len(about)} findings", exit_code=code)


def refusal(cell: Cell, environment: Environment, file: Path, report: Report) -> None:
    """One line of `refusals`: put the wheel there as somebody in a hurry does, and look at what it says."""
    if version := cell.options.get("as_version"):
        pretend_version(environment, version)
    checks.install(environment, file, report, "--no-deps")
    environment.pip("install", "-q", "numpy")
    if cell.wheel == "fat-cu13-only":
        shutil.rmtree(environment.site_packages / "magi_attention" / "_cu12", ignore_errors=True)
    check = check_refused if cell.options["refused"] else check_without_kernels
    check(environment, cell.options["says"], report)
