"""The Dockerfile and its entry point. No image is built here: bash ci/images.sh does that."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from images import base
from images.checks import DRIVERS, FIRST_DRIVER, VERSION_LINES

from tests.rules.tree import ROOT

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"
OPEN_MODULE, OLDER_MODULE = VERSION_LINES


def enter(tmp_path: Path, version: str, cuda: str = "13", *, line: str = OPEN_MODULE, has_compat: bool = True) -> tuple[str, str, int]:
    """(LD_LIBRARY_PATH of the command, what was said, exit code)."""
    compat = tmp_path / "compat"
    compat.mkdir()
    if has_compat:
        (compat / "libcuda.so.1").touch()
    file = tmp_path / "version"
    if version:
        file.write_text(line.format(version=version) + "\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    variables = {"MAGI_IMAGE_CUDA": cuda, "MAGI_COMPAT_FOLDER": str(compat), "MAGI_DRIVER_VERSION_FILE": str(file)}
    variables |= {"LD_LIBRARY_PATH": f"{compat}:/opt/other", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", str(ENTRYPOINT), "sh", "-c", 'printf %s "$LD_LIBRARY_PATH"'], env=variables, capture_output=True, text=True, check=False
    )
    return done.stdout.replace(str(compat), "COMPAT"), done.stderr, done.returncode


@pytest.mark.parametrize("line", VERSION_LINES, ids=["open", "older"])
@pytest.mark.parametrize("version", DRIVERS)
def test_compatibility_library_below_the_first_driver_only(tmp_path: Path, version: str, line: str) -> None:
    """Case I10."""
    path, said, code = enter(tmp_path, version, line=line)
    assert code == 0
    if int(version.split(".")[0]) < 580:
        assert path == "COMPAT:/opt/other" and version in said and "580" in said
    else:
        assert path == "/opt/other" and not said


def test_without_the_library_the_driver_to_install_is_named(tmp_path: Path) -> None:
    """Case I10."""
    path, said, code = enter(tmp_path, "550.54.15", has_compat=False)
    assert path == "/opt/other" and code == 0
    assert "driver 550.54.15 is older than 580" in said and "update the driver to 580 or newer" in said


@pytest.mark.parametrize(("version", "is_old"), [("515.105.01", True), ("525.60.13", False), ("535.183.01", False)])
def test_the_image_for_cuda_12_starts_at_525(tmp_path: Path, version: str, is_old: bool) -> None:
    path, said, _ = enter(tmp_path, version, "12")
    assert (path == "COMPAT:/opt/other") == is_old == bool(said)


def test_without_a_driver_nothing_is_said(tmp_path: Path) -> None:
    assert enter(tmp_path, "") == ("/opt/other", "", 0)


def test_exit_code_is_the_commands(tmp_path: Path) -> None:
    variables = {"PATH": os.environ["PATH"], "MAGI_DRIVER_VERSION_FILE": str(tmp_path / "none")}
    assert subprocess.run(["sh", str(ENTRYPOINT), "sh", "-c", "exit 7"], env=variables, check=False).returncode == 7


def test_an_unknown_cuda_is_refused(tmp_path: Path) -> None:
    path, said, code = enter(tmp_path, "580.65.06", "14")
    assert code == 2 and not path and "neither 12 nor 13" in said


def test_first_drivers_are_those_of_the_matrix() -> None:
    yaml = pytest.importorskip("yaml", reason="needs the extra `matrix`: pip install -e '.[matrix]'")
    of_matrix = {
        major: line["first_driver"] for major, line in yaml.safe_load((ROOT / "ci" / "matrix.yaml").read_text())["kernels"].items()
    }
    of_script = {major: int(first) for major, first in re.findall(r"^FIRST_DRIVER_(\d+)=(\d+)$", ENTRYPOINT.read_text(), re.MULTILINE)}
    assert of_matrix == of_script == FIRST_DRIVER


def test_dockerfile_needs_no_buildkit() -> None:
    for feature in ("--mount=", "--chmod", "--link", "--parents", "<<EOF", "# syntax="):
        assert feature not in DOCKERFILE
    assert os.access(ENTRYPOINT, os.X_OK), "COPY keeps the mode of git"


def test_stages_stand_on_each_other() -> None:
    """An image whose self-test failed must not exist, and what runs has no compiler."""
    stages = dict(re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE))
    assert {stage: on for on, stage in stages.items()} == {
        "build": "${BASE_IMAGE}",
        "base": "${RUNTIME_IMAGE}",
        "wheel-test": "base",
        "runtime": "wheel-test",
        "dev": "build",
    }
    runtime = DOCKERFILE.split(" AS runtime\n")[1].split("\nFROM ")[0]
    assert re.findall(r"^USER (\S+)$", runtime, re.MULTILINE)[-1] == "magi"
    assert 'CMD ["python", "-m", "magi_attention.selftest"]' in runtime


def test_readme_lines_use_the_arguments_of_the_dockerfile() -> None:
    text = (ROOT / "docker" / "README.md").read_text()
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    used = set(re.findall(r"--build-arg (\w+)=", text))
    assert used <= declared and {"BASE_IMAGE", "CUDA", "TORCH"} <= used
    assert set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE)) & {"build", "wheel-test", "runtime", "dev"}


def test_ignored_files_are_not_needed_to_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ".git" not in ignored, "the history names the version"
    for needed in ("csrc", "ci", "docker", "magi_attention", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        assert needed not in ignored


def test_debian_mirror_is_read_from_both_formats(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    with pytest.raises(base.BaseError, match="give a base image with --base"):
        base.debian_mirror(tmp_path)
    (tmp_path / "sources.list.d" / "debian.sources").write_text("Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\n")
    (tmp_path / "sources.list.d" / "old.sources.disabled").write_text("URIs: http://disabled.example/debian\n")
    assert base.debian_mirror(tmp_path) == "http://mirror.example/debian"
    (tmp_path / "sources.list").write_text("deb [signed-by=/key] https://other.example/debian bookworm main\n")
    assert base.debian_mirror(tmp_path) == "https://other.example/debian"
