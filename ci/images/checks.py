"""What an image must show when it is run, by case. Builds nothing."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from images.engine import Engine

SELFTEST_TIMEOUT_S = 600
DRIVERS = ("535.183.01", "550.54.15", "580.65.06", "595.10")
FIRST_DRIVER = {"12": 525, "13": 580}  # of ci/matrix.yaml; a test compares them
# Of the open and of the older kernel module.
VERSION_LINES = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (builder)  Fri Feb  6 00:00:00 UTC 2026",
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Sun May 12 19:39:15 UTC 2024",
)
BUILT_FOR = """
import json, magi_attention
from magi_attention import _build_record
print(sorted({str(entry["cuda"]).split(".")[0] for entry in _build_record.read_record()["libraries"].values() if "cuda" in entry}))
"""


@dataclass(frozen=True)
class Finding:
    """One check: `text` is what was seen."""

    name: str
    passed: bool
    text: str


def check_image(engine: Engine, image: str, cuda: str, work: Path) -> list[Finding]:
    found = [_selftest(engine, image), _user(engine, image), _no_compiler(engine, image), _built_for(engine, image, cuda)]
    with tempfile.TemporaryDirectory(dir=work) as folder:
        for number, version in enumerate(DRIVERS):
            for has_compat in (True, False):
                line = VERSION_LINES[number % 2].format(version=version)
                found.append(_driver(engine, image, cuda, Mock(version, line, has_compat, Path(folder))))
    return found


def _selftest(engine: Engine, image: str) -> Finding:
    """I23: the default command, without a network, a volume or a place to write but /tmp."""
    done = engine.call("run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", image, timeout_s=SELFTEST_TIMEOUT_S)
    # The summary is the last line of the output proper; torch may warn beside it, for example that the host's name leads nowhere.
    last = (done.out.strip().splitlines() or [done.last_line])[-1]
    summary = re.fullmatch(r"PASS: \d+ passed, 0 failed, \d+ skipped in [\d.]+ s", last)
    skips = [line for line in done.out.splitlines() if line.startswith("SKIP")]
    explained = any("cuda" in line for line in skips)
    return Finding("I23 default command, no network, no volume, no GPU", done.code == 0 and bool(summary) and explained, last)


def _user(engine: Engine, image: str) -> Finding:
    done = engine.call("run", "--rm", "--network=none", image, "id", "-u")
    return Finding("runs as another user than root", done.code == 0 and done.out.strip() not in ("", "0"), f"uid {done.last_line}")


def _no_compiler(engine: Engine, image: str) -> Finding:
    """I05: what runs needs nothing that builds."""
    done = engine.call("run", "--rm", "--network=none", image, "sh", "-c", "for p in gcc g++ nvcc git make; do command -v $p; done; true")
    return Finding(
        "I05 no compiler, nvcc or git", done.code == 0 and not done.out.strip(), done.out.strip().replace("\n", " ") or "none of them"
    )


def _built_for(engine: Engine, image: str, cuda: str) -> Finding:
    done = engine.call("run", "--rm", "--network=none", image, "python", "-c", BUILT_FOR)
    return Finding(f"kernels are for CUDA {cuda}", done.code == 0 and done.out.strip() == f"['{cuda}']", done.last_line)


@dataclass(frozen=True)
class Mock:
    """A host driver that is not there."""

    version: str
    line: str
    has_compat: bool
    folder: Path


def _driver(engine: Engine, image: str, cuda: str, mock: Mock) -> Finding:
    """I10: the compatibility library below the first driver and never from it on; without one, the driver to install is named."""
    stem = f"{mock.version}-{mock.has_compat}"
    file, compat = mock.folder / f"version-{stem}", mock.folder / f"compat-{stem}"
    file.write_text(f"{mock.line}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    compat.mkdir()
    if mock.has_compat:
        (compat / "libcuda.so.1").touch()
    mounts = [f"--volume={file}:/mock/version:ro", f"--volume={compat}:/mock/compat:ro"]
    # A base image that has the folder in its path already is not to win.
    given = {
        "MAGI_DRIVER_VERSION_FILE": "/mock/version",
        "MAGI_COMPAT_FOLDER": "/mock/compat",
        "LD_LIBRARY_PATH": "/mock/compat:/opt/other",
    }
    variables = [f"--env={name}={value}" for name, value in given.items()]
    done = engine.call("run", "--rm", "--network=none", *mounts, *variables, image, "sh", "-c", 'echo "path=$LD_LIBRARY_PATH"')
    first = FIRST_DRIVER[cuda]
    is_old = int(mock.version.split(".")[0]) < first
    wanted = "path=/mock/compat:/opt/other" if is_old and mock.has_compat else "path=/opt/other"
    said = (str(first) in done.err and mock.version in done.err) if is_old else not done.err.strip()
    what = f"I10 driver {mock.version}, {'with' if mock.has_compat else 'without'} a compatibility library"
    return Finding(what, done.code == 0 and done.out.strip() == wanted and said, f"{done.out.strip()} {done.err.strip()}".strip())
