"""Tags, change log, bills of materials, licences: what a release checks about itself."""

from __future__ import annotations

import datetime
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from release import changelog, licences, record, tag
from release.tag import ReleaseError

from tests.rules.tree import ROOT

TODAY = datetime.date(2026, 12, 1)
LOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-11-30

### Added

- Wheels.

## [0.1.0] - 2026-01-01

- First.
"""


@pytest.mark.parametrize(("name", "version"), [("v0.2.0", "0.2.0"), ("v1.10.3rc2", "1.10.3rc2")])
def test_tags_name_versions(name: str, version: str) -> None:
    assert tag.version_of(name) == version


@pytest.mark.parametrize("name", ["0.2.0", "v0.2", "v0.2.0-rc1", "v0.2.0+cu130", "release", ""])
def test_other_tags_are_refused(name: str) -> None:
    with pytest.raises(ReleaseError, match=r"vMAJOR\.MINOR\.PATCH"):
        tag.version_of(name)


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository whose version comes from its tags, as this one's does."""
    pytest.importorskip("versioningit", reason="the build needs versioningit: make test installs it")
    git(tmp_path, "init", "-q")
    settings = (ROOT / "pyproject.toml").read_text()
    start, end = settings.index("[tool.versioningit]"), settings.index("[tool.versioningit.write]")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "magi-attention"\ndynamic = ["version"]\n' + settings[start:end])
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_an_annotated_tag_on_a_clean_head_is_released(clone: Path) -> None:
    git(clone, "tag", "-a", "v0.2.0", "-m", "0.2.0")
    assert tag.check_tag("v0.2.0", clone) == "0.2.0"


def test_a_plain_tag_is_refused(clone: Path) -> None:
    git(clone, "tag", "v0.2.0")
    with pytest.raises(ReleaseError, match=r"git tag -a v0\.2\.0"):
        tag.check_tag("v0.2.0", clone)


def test_a_tag_elsewhere_or_on_changed_files_is_refused(clone: Path) -> None:
    git(clone, "tag", "-a", "v0.2.0", "-m", "0.2.0")
    (clone / "pyproject.toml").write_text((clone / "pyproject.toml").read_text() + "# changed\n")
    with pytest.raises(ReleaseError, match="clean checkout"):
        tag.check_tag("v0.2.0", clone)
    git(clone, "commit", "-qam", "two")
    with pytest.raises(ReleaseError, match=r"git checkout v0\.2\.0"):
        tag.check_tag("v0.2.0", clone)


def test_notes_of_a_version() -> None:
    assert changelog.notes_of("0.2.0", LOG, TODAY) == "### Added\n\n- Wheels."


@pytest.mark.parametrize(
    ("version", "text", "says"),
    [
        ("0.3.0", LOG, r"rename \[Unreleased\] to \[0\.3\.0\] - 2026-12-01"),
        ("0.2.0", LOG.replace("2026-11-30", "2026-12-24"), r"has the date 2026-12-24"),
        ("0.2.0", LOG.replace(" - 2026-11-30", ""), r"has the date None"),
        ("0.2.0", LOG.replace("- Wheels.\n", ""), r"lists no change"),
        ("0.2.0", LOG.replace("## [Unreleased]\n", "## [Unreleased]\n\n- More.\n"), r"move them there"),
        ("0.3.0rc1", LOG, r"nothing under \[Unreleased\]"),
    ],
)
def test_a_change_log_that_is_not_ready_says_why(version: str, text: str, says: str) -> None:
    with pytest.raises(ReleaseError, match=says):
        changelog.notes_of(version, text, TODAY)


def test_a_candidate_takes_the_open_section() -> None:
    text = LOG.replace("## [Unreleased]\n", "## [Unreleased]\n\n- More.\n")
    assert changelog.notes_of("0.3.0rc1", text, TODAY) == "- More."


def test_the_change_log_of_this_tree_can_be_read() -> None:
    assert changelog.sections((ROOT / "CHANGELOG.md").read_text())["Unreleased"][1].startswith("### ")


def wheel(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "magi_attention-0.2.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


LICENCES = "magi_attention-0.2.0.dist-info/licenses/"


def test_kernels_need_nvidias_notice(tmp_path: Path) -> None:
    plain = {f"{LICENCES}LICENSE": "text", "magi_attention/_solver.so": ""}
    assert licences.missing_notices(wheel(tmp_path, plain)) == []
    with_kernels = {**plain, "magi_attention/_cu13/_ffa.so": ""}
    assert licences.missing_notices(wheel(tmp_path, with_kernels)) == ["licenses/NVIDIA-CUDA-runtime.md"]
    assert licences.main([str(wheel(tmp_path, with_kernels))]) == 1
    notice = {f"{LICENCES}licenses/NVIDIA-CUDA-runtime.md": "text"}
    assert licences.missing_notices(wheel(tmp_path, with_kernels | notice)) == []
    assert licences.missing_notices(wheel(tmp_path, {**with_kernels, f"{LICENCES}licenses/NVIDIA-CUDA-runtime.md": ""})) != []


def test_notices_are_part_of_every_package() -> None:
    for notice in licences.NOTICES.values():
        assert (ROOT / notice).is_file()
        assert f"- {notice}" in (ROOT / "recipe" / "recipe.yaml").read_text()
    assert '"licenses/*.md"' in (ROOT / "pyproject.toml").read_text()


METADATA = """Metadata-Version: 2.4
Name: magi-attention
Version: 0.2.0
Requires-Dist: numpy>=1.24
Requires-Dist: torch==2.11.*
Requires-Dist: pytest; extra == "test"
"""


def test_bill_of_a_wheel(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx", reason="needs pip install -r ci/release/requirements.txt")
    from release import sbom

    built = {"libraries": {"_cu13/_ffa.so": {"cuda": "13.0.88", "archs": ["sm_90a"]}}}
    files = {"magi_attention-0.2.0.dist-info/METADATA": METADATA, "magi_attention/_build.json": json.dumps(built)}
    path = wheel(tmp_path, {**files, "magi_attention/_cu13/_ffa.so": "kernels", "magi_attention/_solver.so": "planner"})
    assert sbom.main(["wheel", str(path), "--out", str(tmp_path)]) == 0
    bill = json.loads((tmp_path / f"{path.name}.cdx.json").read_text())
    assert bill["metadata"]["component"]["hashes"][0]["content"] == record.sha256(path)
    parts = {component["name"]: component for component in bill["components"]}
    assert set(parts) == {"magi_attention/_cu13/_ffa.so", "magi_attention/_solver.so", "numpy", "torch"}
    (runtime,) = parts["magi_attention/_cu13/_ffa.so"]["components"]
    assert runtime["name"] == "nvidia-cuda-runtime" and "NVIDIA" in runtime["licenses"][0]["license"]["name"]
    assert "components" not in parts["magi_attention/_solver.so"]
    assert parts["torch"]["properties"] == [{"name": "magi:requirement", "value": "torch==2.11.*"}]


def test_bill_of_an_image(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx", reason="needs pip install -r ci/release/requirements.txt")
    from release import sbom

    listing = 'deb libc6 2.36-9 amd64\npypi torch 2.11.0 -\npypi Typing_Extensions 4.1 -\npypi torch 2.11.0 -\nos debian\nos-version "12"\n'
    target = tmp_path / "image.cdx.json"
    assert sbom.write(sbom.bom_of_image("magi-attention:cu13", "sha256:12", listing), target) == 3
    bill = json.loads(target.read_text())
    assert bill["metadata"]["component"]["name"] == "magi-attention" and bill["metadata"]["component"]["version"] == "cu13"
    assert {part["purl"] for part in bill["components"]} == {
        "pkg:deb/debian/libc6@2.36-9?arch=amd64&distro=debian-12",
        "pkg:pypi/torch@2.11.0",
        "pkg:pypi/typing-extensions@4.1",
    }
    for wrong in ("", "sh: python: not found\n"):
        with pytest.raises(sbom.SbomError, match="cannot be read"):
            sbom.bom_of_image("image", "sha256:12", wrong)
