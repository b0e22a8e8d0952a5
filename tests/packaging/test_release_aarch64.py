"""ci/aarch64.sh says what it lacks. Nothing is compiled or emulated here."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from release import aarch64

from tests.rules.tree import PACKAGE

HERE = platform.machine()


def test_without_a_cross_compiler_the_package_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(aarch64.NotHere, match="apt-get install g\\+\\+-aarch64-linux-gnu"):
        aarch64.need_programs()


@pytest.mark.skipif(HERE == "aarch64", reason="this is the machine that it is for")
def test_wheels_are_installed_on_that_processor_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert aarch64.main(["--wheel", str(tmp_path), "--work", str(tmp_path)]) == 1
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["status"] == "failed" and f"this is {HERE}" in record["reason"]
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed"


def test_a_library_for_another_processor_is_noticed() -> None:
    if HERE == "aarch64":
        pytest.skip("this machine's own libraries are right here")
    with pytest.raises(aarch64.NotHere, match="is not for aarch64"):
        aarch64.facts_of(PACKAGE / "_solver.so")


def test_a_toolkit_is_found_through_a_script_that_calls_nvcc(tmp_path: Path) -> None:
    script = tmp_path / "nvcc"
    script.write_text("#!/bin/sh\necho '#$ TOP=/opt/toolkit/bin/..' >&2\n")
    script.chmod(0o755)
    assert aarch64.toolkit_of(str(script)) == Path("/opt/toolkit")
    script.write_text("#!/bin/sh\necho broken >&2\n")
    with pytest.raises(aarch64.NotHere, match="does not say where its toolkit is: broken"):
        aarch64.toolkit_of(str(script))
