"""Recipes of stand-ins for what conda-forge would bring: its names, versions and constraints, with the files of this machine.

Each is a folder of this machine that a .pth file or an activation script names, so a stand-in of a 2 GB torch has one line. What they
prove is how our package builds, solves and runs beside them; nothing about conda-forge's own files. Knows nothing of our recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Recipe = dict[str, Any]


@dataclass(frozen=True)
class PythonTree:
    """An installed CPython. `version` is like "3.12.1", `folder` its sys.base_prefix."""

    version: str
    folder: Path

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])

    @property
    def tag(self) -> str:
        return self.minor.replace(".", "")


@dataclass(frozen=True)
class TorchFolder:
    """A torch for one Python, named the way conda-forge names it.

    `cuda` is the variant it stands for, `folder` its site-packages, None for one that builds take pins from and nothing imports.
    """

    version: str
    cuda: str
    python: PythonTree
    folder: Path | None


def _recipe(name: str, version: str, build: Recipe, **more: Any) -> Recipe:
    return {
        "package": {"name": name, "version": version},
        "build": {"number": 0, "dynamic_linking": {"overlinking_behavior": "ignore", "missing_dso_allowlist": ["*"]}, **build},
        "about": {"license": "LicenseRef-stand-in", "summary": f"local stand-in for conda-forge's {name}"},
        **more,
    }


def python(tree: PythonTree) -> list[Recipe]:
    """The interpreter, copied so that it finds its own prefix, and the python_abi that goes with it."""
    minor = tree.minor
    script = f"""
mkdir -p $PREFIX/bin $PREFIX/lib/python{minor}/site-packages $PREFIX/include
cp -a {tree.folder}/bin/python{minor} $PREFIX/bin/
ln -s python{minor} $PREFIX/bin/python3
ln -s python{minor} $PREFIX/bin/python
cp -a {tree.folder}/include/. $PREFIX/include/
cd {tree.folder}/lib
tar --exclude=__pycache__ --exclude=site-packages --exclude=test --exclude=tests --exclude=idlelib --exclude='*.a' -cf - python{minor} |
  tar -C $PREFIX/lib -xf -
"""
    abi = f"python_abi {minor}.* *_cp{tree.tag}"
    interpreter = _recipe(
        "python",
        tree.version,
        {"string": "0_cpython", "script": script, "prefix_detection": {"ignore": True}, "python": {"skip_pyc_compilation": ["**/*"]}},
        requirements={"run_exports": {"weak": [abi], "noarch": ["python"]}},
    )
    interpreter["build"]["dynamic_linking"]["rpath_allowlist"] = ["*"]
    constraint = {"run_constraints": [f"python {minor}.* *_cpython"]}
    return [_recipe("python_abi", minor, {"string": f"8_cp{tree.tag}", "noarch": "generic"}, requirements=constraint), interpreter]


def _path_file(name: str, folder: Path) -> str:
    return f"""
mkdir -p "$SP_DIR"
echo {folder} > "$SP_DIR/{name}-stand-in.pth"
"""


def python_tool(name: str, version: str, folder: Path, python_minor: str) -> Recipe:
    """A package of plain Python that builds need, like setuptools."""
    build = {"noarch": "python", "script": _path_file(name, folder)}
    return _recipe(name, version, build, requirements={"host": [f"python {python_minor}.*"], "run": ["python"]})


def numpy(version: str, tree: PythonTree, folder: Path) -> Recipe:
    build = {"string": f"py{tree.tag}_0", "script": _path_file("numpy", folder)}
    return _recipe("numpy", version, build, requirements={"host": [f"python {tree.minor}.*"], "run": ["python"]})


def pytorch(torch: TorchFolder) -> Recipe:
    """The CUDA build of conda-forge's pytorch: needs a driver, and pins its own minor version and build on what is built against it."""
    major, following = torch.cuda.split(".")[0], int(torch.cuda.split(".")[0]) + 1
    minor = int(torch.version.split(".")[1])
    # Solvers prefer the higher number, so that the empty one is taken by builds alone.
    number = int(torch.folder is not None)
    build: Recipe = {"number": number, "string": f"cuda{torch.cuda.replace('.', '')}_generic_py{torch.python.tag}_h0_{number}"}
    if torch.folder is not None:
        build["script"] = _path_file("pytorch", torch.folder)
    requirements = {
        "host": [f"python {torch.python.minor}.*"],
        "run": ["python", "numpy", "__cuda", f"cuda-version >={torch.cuda if major != '12' else '12'},<{following}"],
        "run_exports": {"weak": [f"pytorch >={torch.version},<2.{minor + 1}.0a0", "pytorch * cuda*"]},
    }
    return _recipe("pytorch", torch.version, build, requirements=requirements)


def cuda_version(version: str) -> Recipe:
    constraints = [f"cudatoolkit ==1.0|{version}.*", f"__cuda >={version.split('.')[0]}"]
    return _recipe("cuda-version", version, {"noarch": "generic"}, requirements={"run_constraints": constraints})


def nvcc(version: str, home: Path, platform: str) -> list[Recipe]:
    """conda-forge's CUDA compiler: an activation script that names a toolkit. Its export is what ties a package to a CUDA major."""
    following = int(version.split(".")[0]) + 1
    script = f"""
mkdir -p $PREFIX/etc/conda/activate.d
echo 'export CUDA_HOME={home}' > $PREFIX/etc/conda/activate.d/cuda-nvcc_stand_in.sh
"""
    exports = {"strong": [f"cuda-version >={version},<{following}"]}
    compiler = _recipe(f"cuda-nvcc_{platform}", f"{version}.0", {"script": script}, requirements={"run_exports": exports})
    runtime = _recipe("cuda-cudart-static", f"{version}.0", {}, requirements={"run": [f"cuda-version =={version}"]})
    return [compiler, runtime]


def host_compiler(version: str, libc: str, platform: str) -> list[Recipe]:
    """g++ with the libraries its binaries need, and the C library as a constraint on the machine."""
    activate = """
mkdir -p $PREFIX/etc/conda/activate.d
printf 'export CC=gcc CXX=g++\\n' > $PREFIX/etc/conda/activate.d/gxx_stand_in.sh
"""
    copy = """
mkdir -p $PREFIX/lib
cp -L "$(g++ -print-file-name=libstdc++.so.6)" "$(g++ -print-file-name=libgcc_s.so.1)" $PREFIX/lib/
"""
    library = _recipe("libstdcxx", f"{version}.0.0", {"script": copy})
    compiler = _recipe(
        f"gxx_{platform}",
        f"{version}.0.0",
        {"script": activate},
        requirements={"run_exports": {"strong": [f"libstdcxx >={version}"]}},
    )
    constraint = {"strong": [f"__glibc >={libc},<3.0.a0"]}
    sysroot = _recipe(f"sysroot_{platform}", libc, {"noarch": "generic"}, requirements={"run_exports": constraint})
    return [library, compiler, sysroot]
