"""The container route without a container: which engine and image are taken, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import cibw
import pytest
from wheel_archive import WheelError


def program(folder: Path, name: str, code: int) -> None:
    """Writes what it was called with, and answers `info` and `image inspect` with `code`."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$0 $@" >> {folder}/calls\nexit {code}\n')
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of its own, besides the shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CONTAINER_ENGINE", "MAGI_MANYLINUX_IMAGE", "CONTAINERS_CONF"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_an_engine_that_answers_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path, "podman", 1)
    program(path, "docker", 0)
    assert cibw.engine() == "docker"
    program(path, "podman", 0)
    assert cibw.engine() == "podman"
    monkeypatch.setenv("CONTAINER_ENGINE", "docker")
    assert cibw.engine() == "docker"


def test_without_an_engine_the_other_way_is_named(path: Path) -> None:
    program(path, "podman", 1)
    with pytest.raises(WheelError, match=r"neither podman nor docker answers.*--no-container"):
        cibw.engine()


def test_the_image_may_be_named_and_is_not_made_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path, "podman", 0)
    assert cibw.image("podman") == cibw.LOCAL_IMAGE
    assert "image inspect localhost/magi-manylinux" in (path / "calls").read_text()
    monkeypatch.setenv("MAGI_MANYLINUX_IMAGE", "quay.io/pypa/manylinux_2_28_x86_64")
    assert cibw.image("podman") == "quay.io/pypa/manylinux_2_28_x86_64"


def test_a_missing_image_that_cannot_be_made_is_an_error(path: Path) -> None:
    program(path, "podman", 1)
    program(path, "bash", 1)
    with pytest.raises(WheelError, match=r"could not be made.*docker/manylinux/README\.md"):
        cibw.image("podman")


def test_a_wheel_that_fails_in_the_image_is_an_error(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path, "podman", 0)
    cibw.try_in_container(tmp_path / "x-1-py3-none-any.whl")
    called = (path / "calls").read_text()
    assert f"--volume={tmp_path}:/wheels:ro" in called and "--no-deps" in called and "/wheels/x-1-py3-none-any.whl" in called
    (path / "podman").write_text('#!/bin/sh\n[ "$1" = run ] && exit 3\nexit 0\n')
    with pytest.raises(WheelError, match="does not work in the image"):
        cibw.try_in_container(tmp_path / "x-1-py3-none-any.whl")
