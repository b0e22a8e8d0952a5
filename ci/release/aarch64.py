"""`bash ci/aarch64.sh`: the package on aarch64, natively from wheels, or cross-compiled here and run under qemu (case I20).

Cross-compiling proves that the sources build and load for that processor; its files are not published. Knows no kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel_build.library import build_library, find_sources
from kernel_build.record import symbol_versions
from kernel_build.toolchain import find_toolchain
from kernel_build.variants import BuildError

from release.tag import ROOT

CROSS = "aarch64-linux-gnu-"
QEMU = "qemu-aarch64-static"
DEBIAN = ("bookworm", "3.11")  # a suite and its Python
DEBIAN_PACKAGES = (
    "python3.11",
    "libpython3.11-stdlib",
    "libstdc++6",
    "libgomp1",
    "zlib1g",
    "libexpat1",
    "libssl3",
    "libffi8",
    "libbz2-1.0",
    "liblzma5",
)
# The last torch whose aarch64 build on PyPI is one for CPUs: no library of NVIDIA is needed to import it.
TORCH = ("torch==2.10.0", "numpy<2.4", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock", "typing_extensions")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64", "any")
EMULATED_TIMEOUT_S = 3000


class NotHere(Exception):
    """This machine cannot do a step; the text says what it lacks."""


def run(*command: str, timeout_s: float = 1200, **more: Any) -> str:
    """Output of a command. Raises NotHere with its last words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **more)
    except OSError as error:
        raise NotHere(f"{command[0]} does not run: {error}") from None
    except subprocess.TimeoutExpired:
        raise NotHere(f"{' '.join(command[:4])} has not ended in {timeout_s:.0f} s") from None
    if done.returncode:
        raise NotHere(f"{' '.join(command[:6])}: {(done.stdout + done.stderr).strip()[-1500:]}")
    return done.stdout


def need_programs() -> None:
    absent = [name for name in (f"{CROSS}g++", "nvcc") if not shutil.which(name) and not (name == "nvcc" and find_toolchain()[0])]
    if absent:
        raise NotHere(f"no {' and no '.join(absent)}; Debian/Ubuntu: apt-get install g++-aarch64-linux-gnu, and an nvcc of any machine")
    # setup.py runs with this Python, outside pip's own environment.
    for name in ("setuptools.command.bdist_wheel", "versioningit"):
        try:
            importlib.import_module(name)
        except ImportError:
            need = "'setuptools>=77' versioningit"
            raise NotHere(f"{sys.executable} has no {name}, which builds the planner; {sys.executable} -m pip install {need}") from None


def build_planner(target: Path, work: Path) -> Path:
    """The Python part and the planner, by setup.py with another compiler."""
    tools = {"CC": f"{CROSS}gcc", "CXX": f"{CROSS}g++", "LDSHARED": f"{CROSS}gcc -shared", "LDCXXSHARED": f"{CROSS}g++ -shared"}
    variables = {**os.environ, **tools, "MAGI_BUILD_KERNELS": "0"}
    folders = ["--build-base", str(work / "planner"), "--build-lib", str(target)]
    run(sys.executable, "setup.py", "-q", "build", *folders, cwd=ROOT, env=variables)
    return target / "magi_attention" / "_solver.so"


def build_kernels(target: Path, work: Path, variants: str) -> Path:
    """The kernels, by the project's own build: nvcc with the cross compiler behind it and the runtime of aarch64."""
    found, why = find_toolchain()
    sources = find_sources(ROOT)
    if found is None or sources is None:
        raise NotHere(why or "this tree has no kernels")
    home = toolkit_of(found.nvcc)
    runtime = work / "runtime"
    if not runtime.is_dir():
        pip("download", "-d", str(work / "wheel"), f"nvidia-cuda-runtime=={'.'.join(found.version.split('.')[:2])}.*")
        (wheel,) = (work / "wheel").glob("nvidia_cuda_runtime-*.whl")
        shutil.unpack_archive(wheel, runtime, "zip")
    (library_folder,) = {path.parent for path in runtime.rglob("libcudart_static.a")}
    includes = [f"-I{folder}" for folder in (home / "include", home / "include" / "cccl") if folder.is_dir()]
    os.environ |= {"NVCC_CCBIN": f"{CROSS}g++", "NVCC_APPEND_FLAGS": " ".join(includes), "MAGI_BUILD_OBJECTS": str(work / "kernels")}
    found, why = find_toolchain()
    assert found is not None, why
    toolchain = dataclasses.replace(found, library_folders=(str(library_folder),))
    library = build_library(sources, toolchain, variants, lambda line: print(line, flush=True))
    place = target / "magi_attention" / f"_cu{toolchain.major}" / "_ffa.so"
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(library.path, place)
    return place


def toolkit_of(nvcc: str) -> Path:
    """Where its headers are, in nvcc's own words: the program on PATH may be a script that calls it. A cross build does not look there."""
    told = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull], capture_output=True, text=True, check=False
    ).stderr
    found = re.search(r"^#\$ TOP=(.+)$", told, re.MULTILINE)
    if not found:
        raise NotHere(f"{nvcc} does not say where its toolkit is: {told.strip()[-300:]}")
    return Path(found[1].strip()).resolve()


def pip(verb: str, *arguments: str) -> None:
    """pip for aarch64 and the Python of DEBIAN; requirements are named one by one, since pip would follow those of this machine."""
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    command = [sys.executable, "-m", "pip", verb, "-q", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    variables = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    run(*command, "--python-version", DEBIAN[1], *platforms, *arguments, env=variables)


def facts_of(library: Path) -> dict[str, Any]:
    header = run("readelf", "-h", str(library))
    if "AArch64" not in header:
        raise NotHere(f"{library} is not for aarch64:\n{header}")
    return {"file": library.name, "bytes": library.stat().st_size, "needs": symbol_versions(library)}


def debian_root(work: Path) -> Path:
    """Python of a Debian for aarch64, unpacked and not configured: nothing of it runs here, so it takes seconds and no root."""
    root = work / "root"
    if (root / "ready").is_file():
        return root
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / "apt" / folder).mkdir(parents=True, exist_ok=True)
    (work / "apt" / "status").touch()
    from images.base import debian_mirror

    (work / "apt" / "sources.list").write_text(
        f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {debian_mirror()} {DEBIAN[0]} main\n"
    )
    settings = {
        "Dir::Etc::sourcelist": work / "apt" / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": work / "apt" / "lists",
        "Dir::State::status": work / "apt" / "status",
        "Dir::Cache": work / "apt" / "cache",
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "APT::Sandbox::User": "root",
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    run("apt-get", *options, "-qq", "update")
    run("apt-get", *options, "-qq", "-y", "--no-install-recommends", "--download-only", "install", *DEBIAN_PACKAGES)
    for package in sorted((work / "apt" / "cache" / "archives").glob("*.deb")):
        run("dpkg-deb", "-x", str(package), str(root))
    shutil.rmtree(work / "apt")
    (root / "ready").touch()
    return root


def emulate(root: Path, paths: Sequence[Path], *arguments: str) -> str:
    python = root / "usr" / "bin" / f"python{DEBIAN[1]}"
    variables = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": ":".join(map(str, paths)),
        "PYTHONHOME": str(root / "usr"),
        "OMP_NUM_THREADS": "1",
    }
    return run(QEMU, "-L", str(root), str(python), *arguments, timeout_s=EMULATED_TIMEOUT_S, env=variables, cwd=root)


def run_emulated(target: Path, kernels: Path, work: Path) -> dict[str, Any]:
    """Load the kernels; import the package and run its self-test beside an aarch64 torch."""
    if not shutil.which(QEMU):
        raise NotHere(f"no {QEMU}; Debian/Ubuntu: apt-get install qemu-user-static")
    root = debian_root(work)
    packages = work / "packages"
    if not packages.is_dir():
        pip("install", "--target", str(work / "packages.part"), *TORCH)
        (work / "packages.part").rename(packages)
    answer: dict[str, Any] = {}
    code = (
        "import ctypes, platform, sys; lib = ctypes.CDLL(sys.argv[1]); lib.magi_ffa_build_info.restype = ctypes.c_char_p; "
        "print(platform.machine(), lib.magi_ffa_build_info().decode())"
    )
    answer["kernels"] = emulate(root, [], "-c", code, str(kernels)).strip()
    print(f"kernels load: {answer['kernels']}", flush=True)
    start = time.monotonic()
    code = "import torch, magi_attention.api, platform; print(platform.machine(), torch.__version__, magi_attention.__version__)"
    answer["import"] = emulate(root, [target, packages], "-c", code).strip()
    answer["import_s"] = round(time.monotonic() - start, 1)
    print(f"imported in {answer['import_s']} s: {answer['import']}", flush=True)
    start = time.monotonic()
    # One process: programs that it would start are of another processor than this machine's.
    answer["selftest"] = emulate(root, [target, packages], "-m", "magi_attention.selftest", "--ranks", "1").strip().splitlines()[-1]
    answer["selftest_s"] = round(time.monotonic() - start, 1)
    print(f"self-test in {answer['selftest_s']} s: {answer['selftest']}", flush=True)
    return answer


def cross(options: argparse.Namespace) -> dict[str, Any]:
    need_programs()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    target = work / "package"
    shutil.rmtree(target, ignore_errors=True)
    planner = build_planner(target, work)
    kernels = build_kernels(target, work, options.variants)
    answer: dict[str, Any] = {"libraries": [facts_of(planner), facts_of(kernels)]}
    for library in answer["libraries"]:
        print(f"{library['file']}: aarch64, {library['bytes']:,} bytes, needs {library['needs']}", flush=True)
    if options.run:
        answer["emulated"] = run_emulated(target, kernels, work)
    return answer


def native(folder: Path, work: Path) -> dict[str, Any]:
    """What a user does: a new environment, torch, the wheel, its self-test."""
    if platform.machine() != "aarch64":
        raise NotHere(f"--wheel installs on an aarch64 machine, and this is {platform.machine()}; without it the package is cross-compiled")
    wheels = sorted(folder.glob("magi_attention-*aarch64.whl"))
    if not wheels:
        raise NotHere(f"no aarch64 wheel in {folder}; make it with: bash ci/wheels.sh --cuda 13 --out {folder}")
    environment = work.resolve() / "environment"
    shutil.rmtree(environment, ignore_errors=True)
    run(sys.executable, "-m", "venv", str(environment))
    python = str(environment / "bin" / "python")
    run(python, "-m", "pip", "install", "-q", str(wheels[-1].resolve()))
    selftest = run(python, "-m", "magi_attention.selftest", timeout_s=EMULATED_TIMEOUT_S, cwd=environment).strip().splitlines()[-1]
    print(f"{wheels[-1].name}: {selftest}")
    return {"wheel": wheels[-1].name, "selftest": selftest}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bash ci/aarch64.sh", description="The package on aarch64.")
    parser.add_argument("--wheel", type=Path, metavar="DIR", help="install the wheels of DIR, on an aarch64 machine")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "aarch64", help="folder for all this makes (default build/aarch64)")
    parser.add_argument("--variants", default="forward:bf16:128:0,backward:bf16:128:0", help="kernels to cross-compile; '' for all")
    parser.add_argument("--no-run", dest="run", action="store_false", help="do not import under qemu")
    parser.add_argument("--result", type=Path, help="where the record goes (default WORK/result.json)")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    try:
        record = {"status": "passed", **(native(options.wheel, options.work) if options.wheel else cross(options))}
    except (NotHere, BuildError) as reason:
        print(f"error: {reason}", file=sys.stderr)
        record = {"status": "failed", "reason": str(reason)}
    target = options.result or options.work / "result.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"name": "aarch64", **record, "seconds": round(time.monotonic() - start, 1)}, indent=1) + "\n")
    passed = record["status"] == "passed"
    print(f"{target}: {record['status']}\n{int(passed)} passed, {int(not passed)} failed")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
