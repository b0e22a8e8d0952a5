"""Environments of the cells: one base per torch and Python with everything but the package, and a fresh copy of it for each cell.

The copy shares its files with the base (hard links), so it takes seconds and no space; nothing here writes into a file that exists.
Knows nothing of what is checked in an environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from commands import Done
from packaging.requirements import Requirement
from torch_args import CPU_INDEX, answers

from matrix import standins
from matrix.cells import Torch

READY = "ready.json"
# Of the person's environment only this reaches a command: how to get to the network. No CUDA_HOME, no LD_LIBRARY_PATH, no PYTHONPATH.
KEPT_PREFIXES = ("PIP_", "SSL_", "REQUESTS_")
KEPT = ("HOME", "LANG", "TMPDIR", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
INSTALL_TIMEOUT_S = 1200


class NotHere(Exception):
    """This machine or network lacks what the environment needs; the text says what. The cell then has no result."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment and how commands run in it.

    Attributes:
        folder: its root.
        facts: how it was made: python, torch, cuda, stand_ins.
        variables: set in addition for every command.
    """

    folder: Path
    facts: dict[str, object] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (found,) = (self.folder / "lib").glob("python3*/site-packages")
        return found

    def run(self, *arguments: str, timeout_s: float = 300, variables: dict[str, str] | None = None) -> Done:
        """`python ARGUMENTS` in a folder without sources. PATH is the environment's own: no compiler, no git, no nvcc."""
        kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
        kept |= {"PATH": str(self.folder / "bin"), "PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        kept |= self.variables | (variables or {})
        (self.folder / "run").mkdir(exist_ok=True)
        try:
            done = subprocess.run(
                [str(self.python), *arguments],
                cwd=self.folder / "run",
                env=kept,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Done(124, "", f"no answer in {timeout_s:.0f} s")
        return Done(done.returncode, done.stdout, done.stderr)

    def pip(self, *arguments: str) -> Done:
        return self.run("-m", "pip", *arguments, timeout_s=INSTALL_TIMEOUT_S)


def find_python(version: str) -> Path:
    """The interpreter "3.12", from PATH or from pyenv."""
    candidates = [sys.executable] if version == f"{sys.version_info.major}.{sys.version_info.minor}" else []
    candidates += [found for found in (shutil.which(f"python{version}"),) if found]
    candidates += map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True))
    for candidate in candidates:
        done = subprocess.run(
            [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys._base_executable)"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0 and done.stdout.split()[0] == version:
            return Path(done.stdout.split(maxsplit=1)[1].strip())
    raise NotHere(f"there is no Python {version} here (neither python{version} on PATH nor one of pyenv)")


@dataclass(frozen=True)
class Environments:
    """Makes environments in a cache folder.

    Attributes:
        cache: `bases`, `cells` and `downloads` (torch files to use instead of downloading) are in it.
        say: told what takes long.
    """

    cache: Path
    say: Callable[[str], None]

    def base(self, torch: Torch | None, python: str) -> Environment:
        """An environment with torch and all it asks for, made once; without torch for None."""
        name = f"torch{torch.name}-py{python}" if torch else f"no-torch-py{python}"
        folder = self.cache / "bases" / name
        if (folder / READY).is_file():
            return Environment(folder, json.loads((folder / READY).read_text()))
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        interpreter = find_python(python)
        self.say(f"making {name}")
        subprocess.run([str(interpreter), "-m", "venv", str(folder)], check=True, capture_output=True)
        environment = Environment(folder)
        facts: dict[str, object] = {"python": environment.run("-c", "import platform; print(platform.python_version())").out.strip()}
        try:
            facts |= self._add_torch(environment, torch) if torch else {}
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        (folder / READY).write_text(json.dumps(facts, indent=1))
        return Environment(folder, facts)

    def fresh(self, base: Environment, name: str) -> Environment:
        """A copy of a base for one cell; an older one of that name is removed."""
        folder = self.cache / "cells" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(base.folder, folder, symlinks=True, copy_function=os.link)
        return Environment(folder, base.facts)

    def here(self, name: str) -> Environment:
        """An environment over the packages of the Python that runs this, torch included; that Python may be of an environment itself."""
        folder = self.cache / "cells" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        environment = Environment(folder)
        packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (environment.site_packages / "here.pth").write_text("\n".join(packages) + "\n")
        asked = "import platform, torch; print(platform.python_version(), torch.__version__, torch.version.cuda, torch.cuda.is_available())"
        done = environment.run("-c", asked)
        if done.code or not done.out.strip().endswith("True"):
            raise NotHere(f"this cell needs a GPU that torch of {sys.executable} can use: {done.last_line}")
        python, torch, cuda, _ = done.out.split()
        gpu = environment.run("-c", "import torch; print(torch.cuda.get_device_name())").out.strip()
        return Environment(folder, {"python": python, "torch": torch, "cuda": cuda, "gpu": gpu, "stand_ins": []})

    def _add_torch(self, environment: Environment, torch: Torch) -> dict[str, object]:
        wanted = f"torch=={torch.version}+cpu" if torch.build == "cpu" else f"torch=={torch.version}"
        source = ["--find-links", str(self.cache / "downloads")] if (self.cache / "downloads").is_dir() else []
        if torch.index:
            source += ["--index-url", torch.index]
        elif torch.build == "cpu" and answers(CPU_INDEX):
            source += ["--extra-index-url", CPU_INDEX]
        # Only what is imported is compiled to bytecode: for all of torch that takes as long as unpacking it.
        options = ("-q", "--no-deps", "--no-cache-dir", "--no-compile", "--only-binary=:all:")
        done = environment.pip("install", *options, *source, wanted)
        if done.code:
            raise NotHere(f"{wanted} for Python {environment.facts.get('python', environment.folder.name)} cannot be had: {done.last_line}")
        found = _version_of_torch(environment)
        if not found["torch"].endswith(f"+{torch.build}"):
            raise NotHere(f"asked for torch {torch.name}, the index has {found['torch']}")
        made = [] if torch.build == "cpu" else self._stand_in(environment, found["cuda"])
        rest = environment.pip("install", "-q", "--no-cache-dir", *_other_requirements(environment))
        checked = environment.pip("check")
        imported = environment.run("-c", "import torch, torch.distributed; print(torch.__version__)")
        for step in (rest, checked, imported):
            if step.code:
                raise NotHere(f"torch {torch.name} does not work in a new environment: {step.last_line}")
        return {**found, "stand_ins": made}

    def _stand_in(self, environment: Environment, cuda: str) -> list[str]:
        major = cuda.split(".")[0]
        runtime = f"nvidia-cuda-runtime-cu12=={cuda}.*" if major == "12" else f"nvidia-cuda-runtime=={cuda}.*"
        done = environment.pip("install", "-q", "--no-deps", "--no-cache-dir", runtime)
        if done.code:
            raise NotHere(f"{runtime} cannot be had: {done.last_line}")
        metadata, markers = _requirements(environment)
        for requirement in standins.replaced_requirements(metadata, markers):
            if not requirement.name.startswith("nvidia-cuda-runtime"):
                standins.record_package(environment.site_packages, requirement)
        with tempfile.TemporaryDirectory() as work:
            return standins.make_libraries(environment.site_packages / "torch" / "lib", {f"libcudart.so.{major}"}, Path(work))


def _version_of_torch(environment: Environment) -> dict[str, str]:
    """Read from the file: without its libraries torch cannot be imported yet."""
    code = "import runpy, sys; v = runpy.run_path(sys.argv[1]); print(v['__version__'], v['cuda'])"
    version, cuda = environment.run("-c", code, str(environment.site_packages / "torch" / "version.py")).out.split()
    return {"torch": version, "cuda": "" if cuda == "None" else cuda}


def _requirements(environment: Environment) -> tuple[list[str], dict[str, str]]:
    """(requirements of the installed torch, the markers of this Python)."""
    code = (
        "import importlib.metadata as m, json, platform, sys; print(json.dumps([m.requires('torch'), {"
        "'python_version': '%d.%d' % sys.version_info[:2], 'python_full_version': platform.python_version(), 'extra': ''}]))"
    )
    metadata, markers = json.loads(environment.run("-c", code).out)
    return metadata, markers


def _other_requirements(environment: Environment) -> list[str]:
    metadata, markers = _requirements(environment)
    found = [Requirement(line) for line in metadata]
    wanted = [requirement for requirement in found if requirement.marker is None or requirement.marker.evaluate(markers)]
    return [f"{one.name}{one.specifier}" for one in wanted if not standins.REPLACED.match(one.name)]
