"""Files at the root agree with each other: versions, metadata, change log, what a source distribution holds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import magi_attention
from tests.rules.tree import PACKAGE, ROOT, cpp_files, package_files

PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_changelog_has_an_open_section() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    sections = [line for line in lines if line.startswith("## ")]
    assert sections and sections[0] == "## [Unreleased]"
    assert all(re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", line) for line in sections[1:])
    kinds = {line for line in lines if line.startswith("### ")}
    assert kinds <= {f"### {kind}" for kind in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")}


def test_pre_commit_uses_the_linters_of_pyproject() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    for name in ("ruff", "clang-format"):
        wanted = re.findall(rf'"({name}==[^"]+)"', PYPROJECT)
        assert len(wanted) == 1
        assert set(re.findall(rf'"({name}==[^"]+)"', hooks)) == set(wanted)


def test_licence_is_complete() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text and len(text.splitlines()) > 190


def test_version_is_known() -> None:
    assert re.match(r"\d+\.\d+\.\d+", magi_attention.__version__)


def test_continuous_integration_runs_what_a_person_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = re.findall(r"\bmake ([a-z-]+)", script)
    assert used[0] == "test" and set(used) <= targets
    assert {"lint", "types", "cpp-test", "rules", "wheel-check", "docs", "kernels"} <= set(used)
    assert "set -euo pipefail" in script


def test_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file() and '"py.typed"' in PYPROJECT


def test_importing_the_planner_needs_no_torch() -> None:
    """In a process where torch cannot be imported, masks and plans still can."""
    code = "import sys; sys.modules['torch'] = None; import magi_attention.plan.build, magi_attention.mask.builders, magi_attention.doctor"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_importing_the_api_needs_no_framework() -> None:
    """transformers, Megatron and matplotlib are never needed to import the package (case I25)."""
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in ("transformers", "megatron", "matplotlib", "triton", "nvshmem"))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {blocked} import magi_attention.api"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("versioningit") is None, reason="the build needs versioningit: make test installs it")
def test_source_distribution_can_be_built_from(tmp_path: Path) -> None:
    """Every source of the package is in it, headers included."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.split("/", 1)[-1] for name in content.getnames()}
    wanted = {path.relative_to(ROOT).as_posix() for path in (*package_files(), *cpp_files())}
    wanted |= {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "Makefile",
        "pyproject.toml",
        "setup.py",
        "magi_attention/py.typed",
        "ci/torch_args.py",
        "ci/kernel_build/library.py",
        "csrc/attention/variants.txt",
    }
    assert not wanted - names, f"MANIFEST.in leaves out {sorted(wanted - names)}"
    assert not [name for name in names if name.endswith(".so")]
