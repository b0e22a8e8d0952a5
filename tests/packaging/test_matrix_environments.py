"""Environments of the matrix: what a command sees, what a copy shares, and stand-ins that load where NVIDIA's libraries are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="needs the extra `matrix`: pip install -e '.[matrix]'")
pytest.importorskip("elftools", reason="needs the extra `matrix`: pip install -e '.[matrix]'")

from commands import Done
from matrix import elf, standins
from matrix.environments import Environment, Environments, NotHere, find_python
from matrix.refusals import pretend_version
from packaging.requirements import Requirement
from packaging.version import Version

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def compiled(target: Path, source: str, *options: str) -> Path:
    """A small shared library."""
    command = ["gcc", "-shared", "-fPIC", "-o", str(target), "-x", "c", "-", f"-Wl,-soname,{target.name}", "-x", "none", *options]
    subprocess.run(command, input=source, text=True, check=True)
    return target


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """The folders of an environment with this Python and a torch that is two files."""
    folder = tmp_path / "base"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    site = folder / "lib" / f"python{VERSION}" / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    (site / "torch-2.11.0.dist-info").mkdir()
    (site / "torch-2.11.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.11.0\n")
    return Environment(folder)


def test_a_command_sees_no_compiler_and_no_cuda(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    done = environment.run("-c", "import os, shutil; print(sorted(os.environ), shutil.which('gcc'), os.environ['PATH'])")
    assert done.code == 0 and "CUDA_HOME" not in done.out and "LD_LIBRARY_PATH" not in done.out
    assert "PIP_INDEX_URL" in done.out and done.out.split()[-2:] == ["None", str(environment.folder / "bin")]


def test_a_command_that_hangs_is_stopped(environment: Environment) -> None:
    done = environment.run("-c", "import time; time.sleep(60)", timeout_s=0.5)
    assert done.code == 124 and "no answer in" in done.last_line


def test_the_last_line_of_silence_is_the_exit_code() -> None:
    assert Done(3, "", "").last_line == "exit code 3, no output"


def test_a_copy_can_change_without_changing_its_base(environment: Environment, tmp_path: Path) -> None:
    copy = Environments(tmp_path, print).fresh(environment, "cell")
    files = [one.site_packages / "torch" / "version.py" for one in (environment, copy)]
    assert os.path.samefile(*files)
    pretend_version(copy, "2.11.0a0+nv25.10")
    assert "2.11.0+cu130" in files[0].read_text() and "nv25.10" in files[1].read_text()
    assert [path.name for path in copy.site_packages.glob("torch-*")] == ["torch-2.11.0a0+nv25.10.dist-info"]
    assert [path.name for path in environment.site_packages.glob("torch-*")] == ["torch-2.11.0.dist-info"]


def test_pythons_are_found_or_named() -> None:
    assert find_python(VERSION).exists()
    with pytest.raises(NotHere, match=r"no Python 3\.99 here"):
        find_python("3.99")


@pytest.mark.parametrize(
    "text", ["triton~=3.8.0", "cuda-bindings<14,>=13.0.3", "nvidia-cufft==12.0.*", "cuda-toolkit[cudart,cublas]==13.0.2"]
)
def test_a_recorded_package_satisfies_its_requirement(environment: Environment, text: str) -> None:
    requirement = Requirement(text)
    name, version = standins.record_package(environment.site_packages, requirement).split()
    assert Version(version) in requirement.specifier and name == requirement.name
    (folder,) = environment.site_packages.glob(f"{name.replace('-', '_')}-{version}.dist-info")
    metadata = (folder / "METADATA").read_text()
    assert f"Version: {version}\n" in metadata and all(f"Provides-Extra: {extra}\n" in metadata for extra in requirement.extras)


def test_requirements_that_are_replaced_depend_on_the_markers() -> None:
    lines = ["sympy>=1.13.3", "triton==3.6.0; platform_system == 'Linux'", "nvidia-x==1; python_version < '3.0'", "nvidia-y==2"]
    assert [one.name for one in standins.replaced_requirements(lines, {"python_version": "3.12", "extra": ""})] == ["triton", "nvidia-y"]


def test_elf_tables_are_read(tmp_path: Path) -> None:
    library = elf.read(compiled(tmp_path / "libone.so", "double cos(double); double twice(double x) { return 2 * cos(x); }", "-lm"))
    assert library.soname == "libone.so" and "libm.so.6" in library.libraries and "twice" in library.defined
    (cosine,) = [symbol for symbol in library.needed if symbol.name == "cos"]
    assert cosine.library == "libm.so.6" and cosine.version.startswith("GLIBC_") and not cosine.is_weak


def test_stand_ins_load_where_the_real_libraries_are_missing(tmp_path: Path) -> None:
    """With the versions of symbols that were linked against, and without one for what the environment has."""
    real, lib, work = tmp_path / "real", tmp_path / "lib", tmp_path / "work"
    for folder in (real, lib, work):
        folder.mkdir()
    script = real / "blas.map"
    script.write_text("libcublas.so.13 { global: cublasCreate; };\n")
    compiled(real / "libcublas.so.13", "int cublasCreate(void) { return 7; }", f"-Wl,--version-script={script}")
    compiled(real / "libnccl.so.2", "int ncclGetVersion(int* v) { *v = 1; return 0; }")
    compiled(real / "libcudart.so.13", "int cudaGetDevice(void) { return 0; }")
    uses = "int cublasCreate(void); int ncclGetVersion(int*); int cudaGetDevice(void);"
    body = "int ask(void) { int v = 0; return cublasCreate() + ncclGetVersion(&v) + v; } int gpu(void) { return cudaGetDevice(); }"
    names = ("libcublas.so.13", "libnccl.so.2", "libcudart.so.13")
    torch = compiled(lib / "libtorch_cuda.so", uses + body, "-Wl,-rpath,$ORIGIN", *(str(real / name) for name in names))
    for name in names:
        (real / name).unlink()

    load = [sys.executable, "-c", "import ctypes, sys; print(ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_LOCAL).ask())", str(torch)]
    assert "libcublas.so.13" in subprocess.run(load, capture_output=True, text=True, check=False).stderr
    compiled(lib / "libcudart.so.13", "int cudaGetDevice(void) { return 0; }")
    assert standins.make_libraries(lib, {"libcudart.so.13"}, work) == ["libcublas.so.13", "libnccl.so.2"]
    answer = subprocess.run(load, capture_output=True, text=True, check=True).stdout
    assert int(answer) == standins.NCCL_VERSION
    assert ("libcublas.so.13", "libcublas.so.13") in elf.read(torch).versions


def test_without_a_gpu_the_cell_for_one_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of this Python are found in the new environment, and the answer of its torch decides."""
    monkeypatch.setenv("HOME", str(tmp_path))
    told: list[str] = []
    real = Environment.run

    def run(self: Environment, *arguments: str, **options: object) -> Done:
        done = real(self, "-c", "import torch; print(torch.__file__)")
        told.append(done.out.strip())
        return Done(0, "3.12.1 2.11.0 13.0 False\n", "")

    monkeypatch.setattr(Environment, "run", run)
    with pytest.raises(NotHere, match="needs a GPU"):
        Environments(tmp_path, print).here("h200")
    assert told and told[0].endswith("torch/__init__.py")
