"""Compiles object files side by side and keeps them by the hash of everything they were made from. Knows no variant."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from kernel_build.machine import jobs_here
from kernel_build.toolchain import Toolchain
from kernel_build.variants import BuildError

QUOTED_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
# Seconds of one nvcc on one core of a common server, for the estimate that is printed before the wait: variants, other files.
SECONDS_OF_A_VARIANT, SECONDS_OF_A_FILE = 14, 6
# Older objects of one name that are kept, so that going back and forth between two states compiles nothing.
KEPT_PER_NAME = 8

Say = Callable[[str], None]


@dataclass(frozen=True)
class Unit:
    """One call of nvcc. `name` is the object's name, `label` what people call it."""

    name: str
    label: str
    source: Path
    defines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Built:
    """An object file, what the compiler printed when it was made and how long that took."""

    path: Path
    log: str
    seconds: float
    was_cached: bool


def own_files(source: Path, include_folders: tuple[Path, ...]) -> tuple[Path, ...]:
    """The source and every file it includes in quotes, also through others, whatever the preprocessor would skip.

    Toolkit headers come in angle brackets and with the toolkit's version.
    """
    found: dict[Path, None] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        for name in QUOTED_INCLUDE.findall(path.read_text(encoding="utf-8")):
            places = [folder / name for folder in (path.parent, *include_folders)]
            waiting += [place for place in places if place.is_file()][:1]
    return tuple(sorted(found))


def content_key(unit: Unit, include_folders: tuple[Path, ...], toolchain: Toolchain) -> str:
    digest = hashlib.sha256(repr((toolchain.compile_flags, unit.defines, toolchain.identity)).encode())
    for path in own_files(unit.source, include_folders):
        # Length first, so that moving bytes from one file to the next is a change.
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()[:20]


def compile_all(
    units: tuple[Unit, ...], include_folders: tuple[Path, ...], folder: Path, toolchain: Toolchain, say: Say
) -> dict[str, Built]:
    """Label -> object. Compiles only what `folder` does not hold.

    Raises:
        BuildError: with the compiler's words, or the files that were edited meanwhile (their objects are not kept).
    """
    folder.mkdir(parents=True, exist_ok=True)
    keys = {unit: content_key(unit, include_folders, toolchain) for unit in units}
    built: dict[Unit, Built] = {}
    for unit in units:
        if (known := _recall(_object_path(folder, unit, keys[unit]))) is not None:
            built[unit] = known
    missing = {unit: keys[unit] for unit in units if unit not in built}
    if missing:
        jobs = jobs_here()
        minutes = sum(SECONDS_OF_A_VARIANT if unit.defines else SECONDS_OF_A_FILE for unit in missing) / jobs.count / 60
        say(f"nvcc {toolchain.version}: {len(missing)} of {len(units)} objects to compile, {jobs}, about {max(1, round(minutes))} min")
        for unit, result in _compile_side_by_side(missing, include_folders, folder, toolchain, jobs.count):
            say(f"  {unit.label:<28} {result.seconds:6.1f} s")
            built[unit] = result
    changed = [unit.label for unit in units if content_key(unit, include_folders, toolchain) != keys[unit]]
    if changed:
        raise BuildError(f"sources of {', '.join(changed)} changed during the build, objects may not fit together; build again")
    for unit in units:
        _forget_oldest(folder, unit.name)
    return {unit.label: built[unit] for unit in units}


def _object_path(folder: Path, unit: Unit, key: str) -> Path:
    return folder / f"{unit.name}-{key}.o"


def _compile_side_by_side(
    missing: dict[Unit, str], include_folders: tuple[Path, ...], folder: Path, toolchain: Toolchain, jobs: int
) -> Iterator[tuple[Unit, Built]]:
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_compile, unit, key, include_folders, folder, toolchain): unit for unit, key in missing.items()}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        finally:
            for future in running:
                future.cancel()  # after a failure: finish what runs, start nothing


def _compile(unit: Unit, key: str, include_folders: tuple[Path, ...], folder: Path, toolchain: Toolchain) -> Built:
    target = _object_path(folder, unit, key)
    part = target.with_suffix(".part.o")
    # Relative to csrc, since the binary keeps the name of its source: the same file whatever folder the tree lies in.
    csrc = include_folders[0]
    includes = [f"-I{folder}" for folder in (Path("."), *include_folders[1:])]
    source = str(unit.source.relative_to(csrc))
    command = [toolchain.nvcc, *toolchain.compile_flags, *unit.defines, *includes, "-c", source, "-o", str(part)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=csrc)
    seconds = time.monotonic() - start
    log = done.stdout + done.stderr
    if done.returncode:
        part.unlink(missing_ok=True)
        raise BuildError(f"{unit.label} does not compile:\n{' '.join(command)}\n{log[-8000:].rstrip()}")
    if content_key(unit, include_folders, toolchain) != key:
        part.unlink()  # nobody knows which state the compiler read
        raise BuildError(f"sources of {unit.label} changed while it was compiled; build again")
    # The object last: whoever sees it also finds its log.
    target.with_suffix(".json").write_text(json.dumps({"seconds": seconds, "log": log}))
    part.replace(target)
    return Built(target, log, seconds, was_cached=False)


def _recall(target: Path) -> Built | None:
    try:
        kept = json.loads(target.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return None
    if not target.is_file():
        return None
    os.utime(target)
    return Built(target, kept["log"], kept["seconds"], was_cached=True)


def _forget_oldest(folder: Path, name: str) -> None:
    objects = sorted(folder.glob(f"{name}-{'?' * 20}.o"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in objects[KEPT_PER_NAME:]:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)


@contextlib.contextmanager
def one_build_at_a_time(folder: Path, say: Say) -> Iterator[None]:
    """Two builds of one tree would compile the same objects twice; the second waits and finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another build compiles into {folder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
