"""What a build is asked for and what it refuses within seconds (case I19): options, memory, compilers, source distribution, record."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from kernel_build import record
from kernel_build.machine import GIB, choose_jobs, free_memory, num_cpus
from kernel_build.options import KNOWN_ARCHS, SETTINGS, Options, parse_archs, read_options
from kernel_build.toolchain import Toolchain, toolchains_of
from kernel_build.variants import BuildError

from magi_attention import _build_record
from tests.rules.tree import PACKAGE, ROOT

SECONDS_TO_REFUSE = 30  # on a busy machine; a refusal alone takes about 2


@pytest.mark.parametrize(
    ("cpus", "gib", "count"),
    [(2, 22.0, 2), (64, 16.0, 8), (8, 16.0, 8), (96, 512.0, 96), (4, 3.9, 1), (4, 1.1, 1)],
)
def test_jobs_come_from_cpus_and_memory(cpus: int, gib: float, count: int) -> None:
    jobs = choose_jobs("", cpus, int(gib * GIB))
    assert jobs.count == count
    assert str(jobs) == f"{count} at a time ({cpus} CPUs, {gib:.1f} GiB free, 2 GiB each)"


def test_too_little_memory_stops_with_what_is_needed() -> None:
    with pytest.raises(BuildError, match=r"needs 2 GiB of free memory and 0\.5 GiB are here.*MAX_JOBS=1.*published wheel"):
        choose_jobs("", 8, GIB // 2)
    assert choose_jobs("1", 8, GIB // 2).count == 1  # somebody insists
    for wrong in ("0", "many", "-1", "1.5"):
        with pytest.raises(BuildError, match="must be a positive number"):
            choose_jobs(wrong, 8, 16 * GIB)


def files(folder: Path, **contents: str) -> Path:
    for name, text in contents.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    meminfo = files(tmp_path, meminfo="MemTotal: 99 kB\nMemAvailable:   33554432 kB\n") / "meminfo"
    assert free_memory(meminfo, tmp_path / "none") == 32 * GIB
    two = files(
        tmp_path / "v2", memory_DOT_max=str(16 * GIB), memory_DOT_current=str(6 * GIB), memory_DOT_stat=f"anon 1\ninactive_file {GIB}\n"
    )
    assert free_memory(meminfo, two) == 11 * GIB
    assert free_memory(meminfo, files(tmp_path / "free", memory_DOT_max="max", memory_DOT_current="7")) == 32 * GIB
    one = {"memory__memory_DOT_limit_in_bytes": str(4 * GIB), "memory__memory_DOT_usage_in_bytes": str(5 * GIB)}
    assert free_memory(meminfo, files(tmp_path / "v1", **one)) == 0
    no_limit = {"memory__memory_DOT_limit_in_bytes": "9223372036854771712", "memory__memory_DOT_usage_in_bytes": "1"}
    assert free_memory(meminfo, files(tmp_path / "v1free", **no_limit)) == 32 * GIB


def test_a_containers_cpus_count(tmp_path: Path) -> None:
    here = len(os.sched_getaffinity(0))
    assert num_cpus(tmp_path) == here
    assert num_cpus(files(tmp_path / "a", cpu_DOT_max="max 100000")) == here
    assert num_cpus(files(tmp_path / "b", cpu_DOT_max="50000 100000")) == 1
    assert num_cpus(files(tmp_path / "c", cpu__cpu_DOT_cfs_quota_us="-1", cpu__cpu_DOT_cfs_period_us="100000")) == here
    assert num_cpus(files(tmp_path / "d", cpu__cpu_DOT_cfs_quota_us="100000", cpu__cpu_DOT_cfs_period_us="100000")) == 1


def test_options_are_read_and_wrong_ones_refused() -> None:
    assert read_options({}) == Options("", "", KNOWN_ARCHS, ())
    given = {"MAGI_BUILD_KERNELS": "1", "MAGI_BUILD_VARIANTS": "forward", "MAGI_BUILD_ARCHS": "9.0a", "MAGI_BUILD_CUDA": "/a:/b c"}
    assert read_options(given) == Options("1", "forward", ("sm_90a",), (Path("/a"), Path("/b c")))
    with pytest.raises(BuildError, match="must be 0"):
        read_options({"MAGI_BUILD_KERNELS": "yes"})


def test_architectures_without_kernels_are_refused() -> None:
    assert parse_archs("sm_90a, 9.0a;sm_90a") == ("sm_90a",)
    for wrong in ("sm_100a", "9.0a;10.0a", "90", "native"):
        with pytest.raises(BuildError, match="there are kernels for sm_90a and none for"):
            parse_archs(wrong)


def test_no_gpu_and_no_torch_is_looked_at() -> None:
    """The architecture comes from an option, so a machine without a GPU builds the same."""
    sources = [ROOT / "setup.py", *(ROOT / "ci" / "kernel_build").glob("*.py"), *(ROOT / "ci" / "backend").glob("*.py")]
    assert len(sources) > 8
    for path in sources:
        text = path.read_text()
        assert not [word for word in ("nvidia-smi", "cuInit", "import torch", "/dev/nvidia", "nvml") if word in text], path


def fake_toolkit(home: Path, version: str) -> Path:
    for name in ("nvcc", "ptxas"):
        program = home / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.86'\n")
        program.chmod(0o755)
    return home


def test_toolkits_are_one_per_major(tmp_path: Path) -> None:
    twelve, thirteen = fake_toolkit(tmp_path / "12", "12.9"), fake_toolkit(tmp_path / "13", "13.0")
    assert [toolchain.major for toolchain in toolchains_of([thirteen, twelve])] == [12, 13]
    with pytest.raises(BuildError, match="both of CUDA 13; one per major"):
        toolchains_of([thirteen, fake_toolkit(tmp_path / "other", "13.1")])
    with pytest.raises(BuildError, match=r"names .*absent: no .*nvcc"):
        toolchains_of([tmp_path / "absent"])


def test_flags_follow_the_architectures() -> None:
    flags = Toolchain("nvcc", "13.0.88", "", archs=("sm_90a", "sm_100a")).compile_flags
    assert flags[-2:] == ("-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_100a,code=sm_100a")


def setup_py(tmp_path: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """`setup.py build_ext` of this tree, into another folder."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={tmp_path / 'lib'}", f"--build-temp={tmp_path / 'temp'}"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    return done, time.monotonic() - start


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"MAGI_BUILD_KERNELS": "0", "CC": "no-such-compiler", "CXX": "no-such-compiler"}, "install g++ 11 or newer"),
        ({"MAGI_BUILD_ARCHS": "sm_100a"}, "there are kernels for sm_90a"),
        ({"MAGI_BUILD_CUDA": "OLD"}, "older than 12.9"),
        ({"MAX_JOBS": "none"}, "must be a positive number"),
        ({"MAGI_BUILD_VARIANTS": "sideways"}, "matches none of"),
    ],
    ids=["no compiler", "no such kernels", "old nvcc", "jobs", "variants"],
)
def test_what_is_missing_is_said_in_seconds(tmp_path: Path, environment: dict[str, str], says: str) -> None:
    if "MAGI_BUILD_VARIANTS" in environment:
        environment = {**environment, "MAGI_BUILD_CUDA": str(fake_toolkit(tmp_path / "new", "13.0"))}
    if environment.get("MAGI_BUILD_CUDA") == "OLD":
        environment = {"MAGI_BUILD_CUDA": str(fake_toolkit(tmp_path / "old", "11.8"))}
    done, seconds = setup_py(tmp_path, **environment)
    assert done.returncode != 0 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and seconds < SECONDS_TO_REFUSE
    assert not list(tmp_path.rglob("*.so"))


def test_options_by_name_reach_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci" / "backend"))
    import build_backend

    seen: dict[str, str | None] = {}

    def build_wheel(folder: str, settings: object, metadata: str | None) -> str:
        seen.update({name: os.environ.get(name) for name in SETTINGS.values()})
        seen["rest"] = repr(settings)
        return "x.whl"

    monkeypatch.setattr(build_backend.build_meta, "build_wheel", build_wheel)
    for name in SETTINGS.values():
        monkeypatch.delenv(name, raising=False)
    given = {"variants": ["forward:bf16", "backward"], "jobs": "3", "cuda": ["/a", "/b"], "--build-option": "-q"}
    assert build_backend.build_wheel("out", given) == "x.whl"
    assert (seen["MAGI_BUILD_VARIANTS"], seen["MAX_JOBS"], seen["MAGI_BUILD_CUDA"]) == ("forward:bf16,backward", "3", "/a:/b")
    assert seen["rest"] == "{'--build-option': '-q'}" and "MAX_JOBS" not in os.environ
    with pytest.raises(SystemExit, match="no build option varients"):
        build_backend.build_wheel("out", {"varients": "x"})


def test_the_version_of_a_source_distribution_needs_no_git(tmp_path: Path) -> None:
    """The same one as in the clone, in a folder with a space, where git finds no repository."""
    ask = [sys.executable, "setup.py", "-q"]
    command = [*ask, "egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=120)
    (archive,) = tmp_path.glob("*.tar.gz")
    place = tmp_path / "a folder"
    with tarfile.open(archive) as content:
        content.extractall(place, filter="data")
    (tree,) = place.iterdir()
    done = subprocess.run(
        [*ask, "--version"], capture_output=True, text=True, cwd=tree, timeout=60, env={**os.environ, "PATH": "/nonexistent"}
    )
    assert archive.name == f"magi_attention-{done.stdout.strip().splitlines()[-1]}.tar.gz", done.stderr
    assert all((tree / name).is_file() for name in ("ci/wheels.sh", "ci/matrix.yaml", "ci/wheel/sysroot.sh", "csrc/bindings/exports.map"))
    assert not (tree / "magi_attention" / "_build.json").exists()


def test_the_record_says_what_the_files_say(tmp_path: Path) -> None:
    solver = next(PACKAGE.glob("_solver*.so"))
    shutil.copy(solver, tmp_path / "_solver.so")
    needs = record.symbol_versions(solver)
    entry = record.kernel_entry(solver, Toolchain("nvcc", "12.5.40", "", ptxas="12.9.86"), ("forward:bf16:64:0",))
    assert entry["glibc"] == needs["GLIBC"] and (entry["cuda"], entry["ptxas"], entry["archs"]) == ("12.5.40", "12.9.86", ["sm_90a"])
    record.replace_library(tmp_path, "_ffa.so", entry)
    assert not (tmp_path / "_build.json").exists()  # nothing to correct
    record.write(tmp_path, {"version": "1.2.0", "libraries": {}})
    record.replace_library(tmp_path, "_ffa.so", entry)
    assert _build_record.read_record(tmp_path) == {"schema": 1, "version": "1.2.0", "libraries": {"_ffa.so": entry}}
    (tmp_path / "_build.json").write_text("{")
    assert _build_record.read_record(tmp_path) == {}


def test_the_revision_comes_from_git_or_from_the_version(tmp_path: Path) -> None:
    assert record.revision(tmp_path, "0.1.0.dev3+gabcdef1.dirty") == "abcdef1"
    assert record.revision(tmp_path, "1.2.0") is None
    if (ROOT / ".git").exists():
        assert len(record.revision(ROOT, "1.2.0") or "") == 40


def test_the_backend_is_found_where_the_metadata_says() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'build-backend = "build_backend"' in text and 'backend-path = ["ci/backend"]' in text
    # Anything else there would hide a package of its name from setuptools.
    assert [path.name for path in (ROOT / "ci" / "backend").iterdir() if path.name != "__pycache__"] == ["build_backend.py"]
    assert json.loads(json.dumps(SETTINGS))  # plain names, which docs/contributing/build_kernels.md lists
    page = (ROOT / "docs" / "contributing" / "build_kernels.md").read_text()
    assert not [name for pair in SETTINGS.items() for name in pair if f"`{name}`" not in page and f"`{name}=" not in page]
