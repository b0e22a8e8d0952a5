"""What of this machine the stand-ins are made of: interpreters, torch, toolkits, tools of the build. Builds no package."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kernel_build.toolchain import find_toolchain
from matrix.environments import Environments, find_python

from conda import stand_ins as stand_ins_module
from conda.plan import Place, PlanError, minor_number, recipe_variants
from conda.stand_ins import PythonTree, Recipe, TorchFolder

PLATFORM = "linux-64"
BUILD_TOOLS = ("pip", "setuptools>=77", "versioningit>=3.1")


@dataclass(frozen=True)
class Toolkits:
    """CUDA major -> folder with bin/nvcc."""

    homes: dict[str, Path]

    @classmethod
    def find(cls, options: argparse.Namespace, root: Path) -> Toolkits:
        """The folders given or of CUDA12_HOME and CUDA13_HOME, else those of /usr/local; CUDA 12 is put together where there is none."""
        homes = {"12": options.cuda12_home or _home("12"), "13": options.cuda13_home or _home("13")}
        if homes["12"] is None:
            homes["12"] = root / "build" / "cuda12"
            subprocess.run(["bash", str(root / "ci" / "cuda12.sh"), str(homes["12"])], check=True)
        for major, home in homes.items():
            if home is None or not (home / "bin" / "nvcc").is_file():
                place = f"{home} has no bin/nvcc" if home else "/usr/local has no toolkit"
                raise PlanError(f"{place} of CUDA {major}; name one with --cuda{major}-home")
        return cls({major: home.resolve() for major, home in homes.items() if home is not None})


def _home(major: str) -> Path | None:
    """Where a toolkit of that major is. /usr/local/cuda may be of any."""
    named = os.environ.get(f"CUDA{major}_HOME")
    if named:
        return Path(named)
    for place in (*sorted(Path("/usr/local").glob(f"cuda-{major}*"), reverse=True), Path("/usr/local/cuda")):
        found = find_toolchain([place / "bin" / "nvcc"])[0]
        if found is not None and str(found.major) == major:
            return place
    return None


def version(root: Path) -> str:
    """The version of the tree, as a build from its git history would name it."""
    done = subprocess.run([sys.executable, "-m", "versioningit", str(root)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PlanError(f"versioningit cannot name the version of {root}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return done.stdout.strip()


def tree_of(python: str) -> PythonTree:
    code = "import json, platform, sys; print(json.dumps([platform.python_version(), sys.base_prefix]))"
    found, folder = json.loads(subprocess.run([str(find_python(python)), "-c", code], capture_output=True, text=True, check=True).stdout)
    return PythonTree(found, Path(folder))


def _pip_target(folder: Path, python: Path, *requirements: str) -> dict[str, str]:
    """Install into a folder, once; name -> version of what was asked for."""
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        command = [str(python), "-m", "pip", "install", "-q", "--no-compile", "--only-binary=:all:", "--target", str(part), *requirements]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        part.rename(folder)
    named = {path.name.split("-")[0].lower(): path.name.split("-")[1].removesuffix(".dist") for path in folder.glob("*.dist-info")}
    return {name: named[name] for name in (requirement.split(">")[0] for requirement in requirements)}


def stand_ins_of_python(python: str, work: Path) -> list[Recipe]:
    tree = tree_of(python)
    numpy = work / "stand-ins" / f"numpy-py{tree.tag}"
    versions = _pip_target(numpy, find_python(python), "numpy")
    return [*stand_ins_module.python(tree), stand_ins_module.numpy(versions["numpy"], tree, numpy)]


def stand_ins(wanted: tuple[Place, ...], toolkits: Toolkits, options: argparse.Namespace) -> list[Recipe]:
    """All recipes in an order in which they can be built."""
    pythons = sorted({place.python for place in wanted}, key=minor_number)
    recipes = [recipe for python in pythons for recipe in stand_ins_of_python(python, options.work)]
    tools = options.work / "stand-ins" / "build-tools"
    for name, found in _pip_target(tools, find_python(pythons[0]), *BUILD_TOOLS).items():
        recipes.append(stand_ins_module.python_tool(name, found, tools, pythons[0]))
    return recipes + _compilers(toolkits) + _torches(wanted, pythons[0], options.cache)


def _compilers(toolkits: Toolkits) -> list[Recipe]:
    variants = recipe_variants()
    recipes = []
    for number, cuda in enumerate(variants["cuda_compiler_version"]):
        recipes += [stand_ins_module.cuda_version(cuda), *stand_ins_module.nvcc(cuda, toolkits.homes[cuda.split(".")[0]], PLATFORM)]
        host = (variants["cxx_compiler_version"][number], variants["c_stdlib_version"][number])
        recipes += [recipe for recipe in stand_ins_module.host_compiler(*host, PLATFORM) if recipe not in recipes]
    return recipes


def _torches(wanted: tuple[Place, ...], oldest_python: str, cache: Path) -> list[Recipe]:
    """One per place. Where the Python that builds has no torch of a version, an empty one, for its pins."""
    environments = Environments(cache, lambda line: print(line, flush=True))
    trees = {place.python: tree_of(place.python) for place in wanted}
    recipes, with_files = [], {(place.cuda, place.torch.minor, place.python) for place in wanted}
    for place in wanted:
        folder = environments.base(place.torch, place.python).site_packages
        recipes.append(stand_ins_module.pytorch(TorchFolder(place.torch.version, place.cuda, trees[place.python], folder)))
        if (place.cuda, place.torch.minor, oldest_python) not in with_files:
            with_files.add((place.cuda, place.torch.minor, oldest_python))
            recipes.append(stand_ins_module.pytorch(TorchFolder(place.torch.version, place.cuda, trees[oldest_python], None)))
    return recipes
