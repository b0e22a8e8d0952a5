"""A container engine for one run: the one that answers, or a docker daemon started here, with folders of its own, and stopped again.

Knows no image of the project.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commands import Done

STARTUP_S = 60
# Of a daemon without the capability to raise its own limits.
ULIMIT = "nofile=20000:20000"


class EngineError(Exception):
    """No engine can be had, or a command of it failed; the text is for a person."""


@dataclass(frozen=True)
class Engine:
    """`program` is the command line's start. The classic builder is asked for: what it builds, BuildKit builds too."""

    program: tuple[str, ...]
    name: str
    environment: dict[str, str] = field(default_factory=lambda: {**os.environ, "DOCKER_BUILDKIT": "0"})

    def call(self, *arguments: str, timeout_s: float = 120) -> Done:
        command = [*self.program, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return Done(124, "", f"no answer in {timeout_s:.0f} s")
        return Done(done.returncode, done.stdout, done.stderr)

    def must(self, *arguments: str, timeout_s: float = 120) -> str:
        done = self.call(*arguments, timeout_s=timeout_s)
        if done.code:
            raise EngineError(f"{self.name} {' '.join(arguments[:4])}: {(done.out + done.err).strip()[-2000:]}")
        return done.out.strip()

    def import_root(self, root: Path, image: str) -> None:
        """A folder as an image of one layer."""
        with subprocess.Popen(
            ["tar", "-C", str(root), "--exclude=./proc/*", "--exclude=./sys/*", "-cf", "-", "."], stdout=subprocess.PIPE
        ) as packed:
            done = subprocess.run(
                [*self.program, "import", "-", image],
                stdin=packed.stdout,
                capture_output=True,
                text=True,
                env=self.environment,
                check=False,
            )
        if done.returncode or packed.returncode:
            raise EngineError(f"{self.name} import of {root}: {done.stderr.strip()[-2000:]}")

    def build(self, context: Path, target: str, image: str, arguments: dict[str, str], log: Path) -> float:
        """Build a stage of docker/Dockerfile; seconds. What the engine says goes to `log`."""
        given = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
        command = [*self.program, "build", "--network=host", "-f", str(context / "docker" / "Dockerfile"), "--target", target, "-t", image]
        start = time.monotonic()
        with log.open("a") as file:
            done = subprocess.run(
                [*command, *given, str(context)], stdout=file, stderr=subprocess.STDOUT, env=self.environment, check=False
            )
        if done.returncode:
            raise EngineError(f"the stage {target} does not build, the last lines of {log}:\n{_tail(log)}")
        return time.monotonic() - start

    def size(self, image: str) -> int:
        return int(self.must("image", "inspect", "--format", "{{.Size}}", image))


def _tail(file: Path, count: int = 25) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-count:])


@contextlib.contextmanager
def engine(work: Path, wish: str = "") -> Iterator[Engine]:
    """The engine for one run. What a daemon started here stored is removed with it; images of another engine are the caller's to remove.

    Args:
        work: for the daemon's state.
        wish: docker or podman; "" takes a docker that answers, else starts one, else podman.
    """
    docker = shutil.which("docker")
    if wish in ("", "docker") and docker and _answers((docker,)):
        yield Engine((docker,), "docker")
    elif wish in ("", "docker") and docker and shutil.which("dockerd") and os.geteuid() == 0:
        with _daemon(docker, work) as started:
            yield started
    elif wish in ("", "podman") and (podman := shutil.which("podman")):
        yield Engine((podman,), "podman")
    else:
        raise EngineError("no container engine: start docker, or as root install one (Debian/Ubuntu: apt-get install docker.io, or podman)")


def _answers(program: Sequence[str]) -> bool:
    return subprocess.run([*program, "info"], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def _daemon(docker: str, work: Path) -> Iterator[Engine]:
    state = work / "docker"
    _remove(state)
    state.mkdir(parents=True)
    socket = f"unix://{state}/socket"
    command = ["dockerd", "--data-root", f"{state}/data", "--exec-root", f"{state}/exec", "-p", f"{state}/pid", "-H", socket]
    with (state / "log").open("w") as log:
        process = subprocess.Popen([*command, "--default-ulimit", ULIMIT], stdout=log, stderr=log)
    started = Engine((docker, "-H", socket), "docker")
    try:
        until = time.monotonic() + STARTUP_S
        while not _answers(started.program):
            if process.poll() is not None or time.monotonic() > until:
                raise EngineError(f"a docker daemon does not start here, the last lines of its log:\n{_tail(state / 'log')}")
            time.sleep(0.5)
        yield started
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _remove(state)


def _remove(state: Path) -> None:
    """The daemon's folder with what it leaves mounted there: the network namespace of the host, and layers after a crash."""
    if not state.is_dir():
        return
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in sorted((place for place in mounted if place.startswith(f"{state}/")), reverse=True):
        subprocess.run(["umount", place], check=True)
    shutil.rmtree(state)
