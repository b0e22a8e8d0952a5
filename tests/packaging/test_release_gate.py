"""The gate before publishing: a file without the results of its cells, for its own hash and this commit, is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs the extra `matrix`: pip install -e '.[matrix]'")
pytest.importorskip("elftools", reason="needs the extra `matrix`: pip install -e '.[matrix]'")

import yaml
from matrix.cells import Cell, Matrix, load
from release import gate, jobs, record

from tests.rules.tree import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MATRIX = load()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture
def evidence(tmp_path: Path) -> gate.Evidence:
    (tmp_path / "results").mkdir()
    return gate.Evidence(MATRIX, tmp_path / "results", COMMIT)


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A fat wheel and the one of each label."""
    folder = tmp_path / "dist"
    names = ["magi_attention-0.2.0-py3-none-manylinux_2_28_x86_64.whl"]
    names += [f"whl/{label}/magi_attention-0.2.0+{label.replace('-', '')}-py3-none-manylinux_2_28_x86_64.whl" for label in MATRIX.labels]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def wheels(dist: Path) -> list[Path]:
    return sorted(dist.rglob("*.whl"))


def give_result(cell: Cell, path: Path, evidence: gate.Evidence, **changed: Any) -> None:
    result = {"cell": cell.name, "definition": cell.definition, "outcome": "passed", "commit": COMMIT[:12]}
    result["wheel"] = {"file": path.name, "sha256": record.sha256(path)}
    (evidence.results / f"{cell.name}.json").write_text(json.dumps({**result, **changed}))


def prove(dist: Path, evidence: gate.Evidence) -> None:
    for path in wheels(dist):
        for cell in gate.cells_of_wheel(MATRIX, gate.name_of_wheel(path, dist)):
            give_result(cell, path, evidence)


def faults(dist: Path, evidence: gate.Evidence) -> list[str]:
    return [fault for verdict in gate.judge(wheels(dist), dist, evidence) for fault in verdict.faults]


def test_with_all_results_everything_passes(dist: Path, evidence: gate.Evidence) -> None:
    prove(dist, evidence)
    assert faults(dist, evidence) == []


def test_without_results_nothing_passes(dist: Path, evidence: gate.Evidence) -> None:
    verdicts = gate.judge(wheels(dist), dist, evidence)
    assert len(verdicts) == len(MATRIX.labels) + 1 and all(verdict.faults and not verdict.proofs for verdict in verdicts)


def some_cell() -> Cell:
    return next(cell for cell in MATRIX.cells if cell.kind == "wheel" and cell.wheel == "fat")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"outcome": "failed"}, "the result is 'failed'"),
        ({"commit": "fedcba987654"}, "of commit fedcba987654"),
        ({"commit": ""}, "of commit"),
        ({"wheel": {"file": "other.whl", "sha256": "00"}}, "about another file, other.whl"),
        ({"definition": "older"}, "no result"),
    ],
)
def test_one_bad_result_refuses_the_wheel(dist: Path, evidence: gate.Evidence, changed: dict[str, Any], says: str) -> None:
    prove(dist, evidence)
    give_result(some_cell(), next(path for path in wheels(dist) if path.parent == dist), evidence, **changed)
    (fault,) = faults(dist, evidence)
    assert some_cell().name in fault and says in fault


def test_a_gpu_cell_is_among_what_the_fat_wheel_needs() -> None:
    assert any(jobs.needs_gpu(cell) for cell in gate.cells_of_wheel(MATRIX, "fat"))


def test_a_wheel_that_no_cell_installs_is_refused(dist: Path, evidence: gate.Evidence) -> None:
    other = dist / "whl" / "cu999-torch9.9" / "magi_attention-0.2.0+cu999torch9.9-py3-none-manylinux_2_28_x86_64.whl"
    other.parent.mkdir()
    other.touch()
    (verdict,) = gate.judge([other], dist, evidence)
    assert verdict.faults == ("no tested cell of ci/matrix.yaml installs the wheel cu999-torch9.9",)


@pytest.mark.parametrize("name", ["magi-attention-0.2.0-cuda130_0.conda", "magi_attention-0.2.0-py3-none-manylinux_2_28_aarch64.whl"])
def test_other_files_need_a_record_of_their_hash(dist: Path, evidence: gate.Evidence, name: str) -> None:
    path = dist / name
    path.write_text("package")
    assert gate.judge([path], dist, evidence)[0].faults
    record.write_record("some-checks", [path], evidence.results, COMMIT)
    assert gate.judge([path], dist, evidence)[0] == gate.Verdict(path, ("some-checks",), ())
    path.write_text("another package")
    assert gate.judge([path], dist, evidence)[0].faults
    record.write_record("some-checks", [path], evidence.results, "f" * 40)
    assert gate.judge([path], dist, evidence)[0].faults


def test_programs_need_results_too(evidence: gate.Evidence) -> None:
    tested = [cell.name for cell in MATRIX.cells if cell.kind == "program" and cell.status == "tested"]
    assert tested and [fault.split(":")[0] for fault in gate.judge_programs(evidence)] == tested


def test_an_empty_folder_is_no_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dist").mkdir()
    assert gate.main(["--dist", str(tmp_path / "dist"), "--results", str(tmp_path)]) == 1
    assert "holds no file" in capsys.readouterr().err


def test_every_tested_cell_has_exactly_one_job() -> None:
    named = [name for gpu in (False, True) for job in jobs.jobs(MATRIX, gpu) for name in job["cells"].split()]
    assert sorted(named) == sorted(cell.name for cell in MATRIX.cells if cell.status == "tested")
    assert all("gpu" in str(job["runner"]) for job in jobs.jobs(MATRIX, gpu=True))


def test_cells_that_are_only_described_get_no_job() -> None:
    cell = some_cell()
    described = Matrix(MATRIX.kernels, MATRIX.budgets, MATRIX.newest_glibc, (Cell(**{**vars(cell), "status": "described"}),))
    assert jobs.jobs(described, gpu=False) == []


def workflow(name: str) -> dict[str, Any]:
    content = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    assert isinstance(content, dict)
    return content


def ancestors(all_jobs: dict[str, Any], name: str) -> set[str]:
    needs = all_jobs[name].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct.union(*(ancestors(all_jobs, one) for one in direct))


def test_publishing_waits_for_everything() -> None:
    all_jobs = workflow("release.yml")["jobs"]
    assert ancestors(all_jobs, "publish") == set(all_jobs) - {"publish"}
    writing = [name for name, job in all_jobs.items() if "write" in str(job.get("permissions", ""))]
    assert writing == ["publish"] and all_jobs["publish"]["environment"] == "release"
    # No step of the gate or of publishing may go on after a failure.
    for name in ("gate", "publish"):
        assert not [step for step in all_jobs[name]["steps"] if "if" in step or step.get("continue-on-error")]


def test_what_is_published_is_what_passed_the_gate() -> None:
    steps = workflow("release.yml")["jobs"]["publish"]["steps"]
    got = [step["with"] for step in steps if str(step.get("uses", "")).startswith("actions/download-artifact")]
    assert [one["path"] for one in got if one.get("name") == "passed"] == ["dist"]
    assert {one.get("name") or one.get("pattern") for one in got} == {"passed", "sbom-*", "notes"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_name_what_exists(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"\b(?:bash|python3?) ((?:ci|docker)/[\w./-]+)", text):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"python3? -m (release\.\w+)", text):
        assert (ROOT / "ci" / (name.replace(".", "/") + ".py")).is_file(), name
    all_jobs = workflow(path.name)["jobs"]
    for name in all_jobs:
        assert ancestors(all_jobs, name) <= set(all_jobs)
        assert "runs-on" in all_jobs[name] or all_jobs[name].get("uses") == "./.github/workflows/matrix.yml"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_start_with_read_permissions(path: Path) -> None:
    assert workflow(path.name)["permissions"] == {"contents": "read"}


def test_the_gpu_label_is_one() -> None:
    """ci/release/jobs.py has it; the job of the release that runs images on GPUs has to agree."""
    assert workflow("release.yml")["jobs"]["images-gpu"]["runs-on"] == jobs.GPU
