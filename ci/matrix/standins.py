"""Stand-ins for NVIDIA's libraries, so that a CUDA torch can be imported without 3 GB of packages and without a GPU.

A stand-in has the file name, the symbols and the symbol versions that torch's libraries ask for; each function returns 0. Nothing that
computes may be run on top of it: what this proves is that things are found, load and say what is wrong. Knows nothing of the package.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from matrix import elf

# What every Linux has, what the driver brings, and the CUDA runtime: small, so the real one is installed.
NOT_REPLACED = re.compile(r"(ld-linux.*|lib(c|m|dl|pthread|rt|stdc\+\+|gcc_s|z|quadmath|gomp|cuda|cudart))\.so.*")
# Symbols without a recorded owner that are Python's, the C++ library's or the compiler's, not NVIDIA's: those are plain C names.
OF_OTHERS = re.compile(r"_?Py[A-Z_]|_Z|__")
# Requirements of torch that are replaced by an entry in the list of installed packages, so that pip finds the environment complete.
REPLACED = re.compile(r"(nvidia-.*|cuda-toolkit|cuda-bindings|triton)$")
NCCL_VERSION = 22809  # asked for by torch.cuda.nccl.version(), which fails without an answer
C_NAME = re.compile(r"[A-Za-z_]\w*$")


def _source(names: list[str]) -> str:
    """One function per symbol. Data symbols are not told apart from functions; torch has none of them here."""
    lines = []
    for name in names:
        if name == "ncclGetVersion":
            lines.append(f"int ncclGetVersion(int* version) {{ *version = {NCCL_VERSION}; return 0; }}")
        elif C_NAME.match(name):
            lines.append(f"int {name}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def _version_script(versions: dict[str, list[str]]) -> str:
    return "".join(f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n" for version, names in versions.items())


def make_libraries(torch_lib: Path, provided: set[str], work: Path) -> list[str]:
    """Put a stand-in for each missing library into torch's own folder, where its libraries look first. Their names.

    Args:
        torch_lib: the folder torch/lib of an environment.
        provided: libraries that the environment has, like libcudart.so.13.
        work: a folder for sources, removed by the caller.
    """
    libraries = [elf.read(path) for path in sorted(torch_lib.glob("*.so*"))]
    present = {path.name for path in torch_lib.glob("*.so*")} | provided
    asked = {name for library in libraries for name in library.libraries}
    missing = sorted(name for name in asked - present if not NOT_REPLACED.fullmatch(name))
    defined = frozenset().union(*(library.defined for library in libraries))
    versioned: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    plain = set()
    for symbol in (symbol for library in libraries for symbol in library.needed):
        if symbol.library in missing:
            versioned[symbol.library][symbol.version].append(symbol.name)
        elif not (symbol.version or symbol.is_weak or symbol.name in defined or OF_OTHERS.match(symbol.name)):
            plain.add(symbol.name)
    for name in missing:
        _compile(torch_lib / name, sorted(plain), {version: sorted(set(names)) for version, names in versioned[name].items()}, work)
    return missing


def _compile(target: Path, plain: list[str], versions: dict[str, list[str]], work: Path) -> None:
    """Symbols without a recorded owner go into every stand-in: the loader takes the first, and all do the same."""
    source, script = work / f"{target.name}.c", work / f"{target.name}.map"
    named = {name for names in versions.values() for name in names}
    source.write_text(_source(sorted(named | set(plain))))
    command = ["gcc", "-shared", "-fPIC", "-w", "-O0", str(source), "-o", str(target), f"-Wl,-soname,{target.name}"]
    if versions:
        script.write_text(_version_script(versions))
        command.append(f"-Wl,--version-script={script}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"no stand-in for {target.name}: {done.stderr.strip().splitlines()[-1]}")


def replaced_requirements(metadata: list[str], environment: dict[str, str]) -> list[Requirement]:
    """Those requirements of torch that are replaced, for one Python."""
    found = [Requirement(line) for line in metadata]
    wanted = [requirement for requirement in found if requirement.marker is None or requirement.marker.evaluate(environment)]
    return [requirement for requirement in wanted if REPLACED.match(requirement.name)]


def record_package(site_packages: Path, requirement: Requirement) -> str:
    """Make pip believe that a package is installed in the version asked for. Returns "name version"."""
    named = [Version(one.version.removesuffix(".*")) for one in requirement.specifier]
    version = str(max(version for version in named if version in requirement.specifier))
    folder = site_packages / f"{requirement.name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    extras = "".join(f"Provides-Extra: {extra}\n" for extra in sorted(requirement.extras))
    text = f"Metadata-Version: 2.1\nName: {requirement.name}\nVersion: {version}\nSummary: stand-in without files\n{extras}"
    (folder / "METADATA").write_text(text)
    (folder / "INSTALLER").write_text("stand-in\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))
    return f"{requirement.name} {version}"
