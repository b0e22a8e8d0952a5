"""Finds nvcc and says which flags it gets. Compiles nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kernel_build.variants import BuildError

ARCH = "sm_90a"
OLDEST_NVCC = (12, 3)  # the first whose ptxas handles wgmma with setmaxnreg well
COMPILE_FLAGS = (
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    f"-gencode=arch=compute_{ARCH[3:]},code={ARCH}",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-lineinfo",
    "-Xptxas=-v",
)
# Static and hidden cudart, nothing undefined: one library serves every torch and every Python of this CPU architecture.
LINK_FLAGS = (
    "-shared",
    "-cudart=static",
    "-Xcompiler=-fPIC",
    "-Xlinker=--exclude-libs,ALL",
    "-Xlinker=-Bsymbolic",
    "-Xlinker=--no-undefined",
    "-Xlinker=--as-needed",
)
# nvcc reads these itself, so they are part of what an object was made from.
NVCC_VARIABLES = ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "NVCC_CCBIN")


@dataclass(frozen=True)
class Toolchain:
    """A usable nvcc.

    Attributes:
        nvcc: the program.
        version: like "13.0.88".
        identity: text that changes when the same source could give another object (nvcc, host compiler, nvcc's variables).
        library_folders: where cudart lies when nvcc does not look there by itself (the PyPI packages).
    """

    nvcc: str
    version: str
    identity: str
    library_folders: tuple[str, ...] = ()


def candidates() -> list[Path]:
    """Where an nvcc may be, best first: CUDA_HOME, PATH, /usr/local/cuda, PyPI's nvidia-cuda-nvcc."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found = [home / "bin" / "nvcc" for home in homes]
    on_path = shutil.which("nvcc")
    found += [Path(on_path)] if on_path else []
    found.append(Path("/usr/local/cuda/bin/nvcc"))
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found += sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True)
    return found


def find_toolchain() -> tuple[Toolchain | None, str]:
    """(the first nvcc that is new enough, "") or (None, why not)."""
    refused = []
    for path in candidates():
        if not path.is_file():
            continue
        version = _nvcc_version(path)
        if version is None:
            refused.append(f"{path} does not run")
        elif version < OLDEST_NVCC:
            refused.append(f"{path} is {_dotted(version)}, older than {_dotted(OLDEST_NVCC)}")
        else:
            beside = path.parent.parent / "lib"
            folders = (str(beside),) if (beside / "libcudart_static.a").is_file() else ()
            return Toolchain(str(path), _dotted(version), _identity(version), folders), ""
    return None, "; ".join(refused) or "no nvcc in CUDA_HOME, PATH, /usr/local/cuda or the nvidia-cuda-nvcc package"


def require_toolchain() -> Toolchain:
    """Raises BuildError with the ways to get an nvcc."""
    toolchain, why = find_toolchain()
    if toolchain is None:
        packages = "nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl"
        raise BuildError(f"{why}; install the CUDA toolkit, point CUDA_HOME at one, or: pip install {packages}")
    return toolchain


def _nvcc_version(nvcc: Path) -> tuple[int, ...] | None:
    found = re.search(r"V(\d+)\.(\d+)\.(\d+)", _output([str(nvcc), "--version"]))
    return tuple(map(int, found.groups())) if found else None


def _identity(version: tuple[int, ...]) -> str:
    host = os.environ.get("NVCC_CCBIN") or "g++"
    host_version = _output([host, "--version"]).splitlines()[:1]
    return repr((_dotted(version), host_version, [(name, os.environ.get(name)) for name in NVCC_VARIABLES]))


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except OSError:
        return ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
