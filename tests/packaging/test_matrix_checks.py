"""The checks of the matrix notice what they are there for: a foreign symbol, a raw loader error, a missing word, a crash."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs the extra `matrix`: pip install -e '.[matrix]'")
pytest.importorskip("elftools", reason="needs the extra `matrix`: pip install -e '.[matrix]'")

import run_matrix
from matrix import checks, refusals, results
from matrix.cells import Cell, Matrix, load
from matrix.environments import Environment, Environments, NotHere
from matrix.wheels import Wheels, facts_of

from tests.packaging.test_matrix_environments import compiled

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
WHEEL = "magi_attention-1.2.3-py3-none-manylinux_2_28_x86_64.whl"


def cell_named(name: str) -> Cell:
    (found,) = [cell for cell in load().cells if cell.name == name]
    return found


@pytest.fixture
def report() -> results.Report:
    return results.Report(cell_named("no-torch"), print)


@pytest.fixture
def installed(tmp_path: Path) -> Environment:
    """An environment with an empty package folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "lib" / f"python{VERSION}" / "site-packages" / "magi_attention").mkdir(parents=True)
    return Environment(tmp_path)


def symbols_of(installed: Environment, tag: str, report: results.Report) -> results.Check:
    checks.symbols(installed, tag, report)
    return report.checks[-1]


def test_a_library_of_c_alone_passes(installed: Environment, report: results.Report) -> None:
    compiled(installed.site_packages / "magi_attention" / "_good.so", "#include <stdlib.h>\nint f(void) { return abs(-1); }")
    found = symbols_of(installed, "py3-none-manylinux_2_28_x86_64", report)
    assert found.passed, found.detail


@pytest.mark.parametrize(
    "source, options, says",
    [
        ("int PyErr_Occurred(void); int f(void) { return PyErr_Occurred(); }", (), "PyErr_Occurred"),
        ("int f(void) { return 0; }", ("-Wl,--no-as-needed", "-lresolv"), "libresolv"),
    ],
)
def test_foreign_symbols_and_libraries_are_named(
    installed: Environment, report: results.Report, source: str, options: tuple[str, ...], says: str
) -> None:
    compiled(installed.site_packages / "magi_attention" / "_bad.so", source, *options)
    found = symbols_of(installed, "py3-none-manylinux_2_28_x86_64", report)
    assert not found.passed and says in found.detail


def test_a_tag_that_promises_too_much_is_noticed(installed: Environment, report: results.Report) -> None:
    source = "#include <pthread.h>\n#include <math.h>\ndouble f(double x) { return pow(x, x); }"
    compiled(installed.site_packages / "magi_attention" / "_new.so", source, "-lm")
    assert symbols_of(installed, "py3-none-manylinux_2_40_x86_64", report).passed
    found = symbols_of(installed, "py3-none-manylinux_2_5_x86_64", report)
    assert not found.passed and "needs glibc 2." in found.detail


def test_no_library_at_all_is_a_failure(installed: Environment, report: results.Report) -> None:
    assert not symbols_of(installed, "py3-none-manylinux_2_28_x86_64", report).passed


@pytest.mark.parametrize(
    "sentence, passes",
    [
        ("built for torch 2.11, and torch 2.13 is here; python -m pip install 'torch==2.11.*'", True),
        ("built for torch 2.11; python -m pip install 'torch==2.11.*'", False),
        ("torch 2.11 2.13 pip install: _ffa.so: undefined symbol: _ZN3c104cuda", False),
        ("", False),
    ],
)
def test_a_sentence_must_say_everything_and_nothing_raw(report: results.Report, sentence: str, passes: bool) -> None:
    refusals.check_sentence(sentence, [r"2\.11", r"2\.13", "pip install"], report)
    assert report.checks[-1].passed is passes


@pytest.mark.parametrize(
    "load, spent, used, passes",
    [(0.5, 59, 50, True), (0.5, 61, 10, False), (99.0, 300, 40, True), (99.0, 300, 61, False)],
    ids=["in time", "too slow on a free machine", "a busy machine", "too much work on a busy machine"],
)
def test_the_clock_counts_on_a_free_machine_only(
    report: results.Report, monkeypatch: pytest.MonkeyPatch, load: float, spent: float, used: float, passes: bool
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    checks.time_spent(spent, used, 60, report)
    assert report.checks[-1].passed is passes


def test_the_tag_says_the_oldest_glibc_it_promises() -> None:
    assert checks.glibc_of("py3-none-manylinux_2_17_x86_64.manylinux_2_28_x86_64") == (2, 17)
    assert checks.glibc_of("py3-none-linux_x86_64") is None


def test_a_report_hides_folders_and_fails_when_empty(report: results.Report) -> None:
    assert report.outcome == "failed"
    report.hidden = {"/secret/place": "<environment>"}
    report.check("one", True, "at /secret/place/x", where=["/secret/place"], by={"key": "/secret/place"})
    record = report.as_record()
    assert record["outcome"] == "passed" and "/secret/place" not in json.dumps(record)
    report.check("two", False)
    assert report.outcome == "failed"


def test_wheels_are_found_or_named(tmp_path: Path) -> None:
    wheels = Wheels(tmp_path)
    with pytest.raises(NotHere, match=r"no wheel cu130-torch2\.11 .* ci/wheels\.sh"):
        wheels.find("cu130-torch2.11")
    folder = tmp_path / "whl" / "cu130-torch2.11"
    folder.mkdir(parents=True)
    (folder / WHEEL).write_bytes(b"x")
    assert wheels.find("cu130-torch2.11").name == WHEEL
    facts = facts_of(folder / WHEEL)
    assert facts["version"] == "1.2.3" and facts["tag"] == "py3-none-manylinux_2_28_x86_64" and len(facts["sha256"]) == 64


class RunnerOf:
    """A runner in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.results = folder / "results"
        environments = Environments(folder / "cache", print)
        self.runner = run_matrix.Runner(load(), environments, Wheels(folder / "dist"), self.results, keep_cells=False)

    def run(self, cell: Cell) -> tuple[str, dict[str, Any] | None]:
        outcome = self.runner.run(cell, "")
        return outcome, results.read(cell, self.results)


def program(name: str, command: str) -> Cell:
    options = {"command": command, "what": "a program"}
    return Cell(name, "program", "conda", "x86_64", "3.12", "tested", options=options)


def test_programs_pass_and_fail_by_their_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_matrix, "ROOT", tmp_path)
    (tmp_path / "good.sh").write_text("echo all is well\n")
    (tmp_path / "bad.sh").write_text("echo it broke; exit 3\n")
    outcome, record = RunnerOf(tmp_path).run(program("good", "bash good.sh"))
    assert outcome == "passed" and record is not None and record["checks"][0]["detail"] == "all is well"
    outcome, record = RunnerOf(tmp_path).run(program("bad", "bash bad.sh"))
    assert outcome == "failed" and record is not None and record["checks"][0]["values"]["exit_code"] == 3


def test_what_cannot_run_here_has_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_matrix, "ROOT", tmp_path)
    outcome, record = RunnerOf(tmp_path).run(program("absent", "bash absent.sh"))
    assert outcome.startswith("not run") and record is None


def test_a_crash_of_a_check_is_a_failed_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: Environment) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / WHEEL).write_bytes(b"x")

    def crash(*arguments: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(run_matrix.refusals, "refusal", crash)
    monkeypatch.setattr(run_matrix.Runner, "_environment", lambda self, cell: installed)
    outcome, record = RunnerOf(tmp_path).run(cell_named("no-torch"))
    assert outcome == "failed" and record is not None and "ZeroDivisionError" in record["checks"][-1]["detail"]


def test_the_exit_code_counts_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["no-torch", "doctor", "--results", str(tmp_path), "--cache", str(tmp_path / "cache"), "--wheels", str(tmp_path)]
    for outcome, code in (("passed", 0), ("failed", 1), ("not run: no GPU", 0)):
        monkeypatch.setattr(run_matrix.Runner, "run", lambda self, cell, prefix, outcome=outcome: outcome)
        assert run_matrix.main(arguments) == code
    assert run_matrix.main([*arguments, "--strict"]) == 1
    assert "no-torch: not run: no GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, says", [([], "say which cells"), (["torch9"], "no cell"), (["doctor", "--jobs", "0"], "must be 1 or more")]
)
def test_wrong_arguments_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_matrix.main(arguments)
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_the_list_names_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_matrix.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    matrix: Matrix = load()
    assert [line.split()[0] for line in lines] == [cell.name for cell in matrix.cells]


def test_the_tests_on_a_gpu_do_not_take_the_package_of_the_tree() -> None:
    from matrix.surroundings import BESIDE_THE_TESTS, ROOT

    assert "magi_attention" not in BESIDE_THE_TESTS and all((ROOT / name).exists() for name in BESIDE_THE_TESTS)
