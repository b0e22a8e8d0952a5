"""Finds nvcc and says which flags it gets. Compiles nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_build.options import KNOWN_ARCHS
from kernel_build.variants import BuildError

# The first ptxas that serialises no wgmma of ours: 12.5 does in every variant, 12.6 and 12.8 in the forward kernels for 128. A newer
# ptxas may be put beside an older nvcc of the same major, as ci/cuda12.sh does.
OLDEST_NVCC, OLDEST_PTXAS = (12, 3), (12, 9)
COMPILE_FLAGS = (
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-lineinfo",
    "-Xptxas=-v",
)
# Static and hidden cudart, nothing undefined: one library serves every torch and every Python of this CPU architecture.
LINK_FLAGS = (
    "-shared",
    "-cudart=static",
    "-cudadevrt=none",  # no kernel starts another one
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
        archs: what it compiles for.
        ptxas: its assembler's version where that is another one, else empty.
    """

    nvcc: str
    version: str
    identity: str
    library_folders: tuple[str, ...] = ()
    archs: tuple[str, ...] = KNOWN_ARCHS
    ptxas: str = ""

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])

    @property
    def compile_flags(self) -> tuple[str, ...]:
        return (*COMPILE_FLAGS, *self._arch_flags)

    @property
    def link_flags(self) -> tuple[str, ...]:
        # Without architectures nvcc would add an empty program for its own default one.
        return (*LINK_FLAGS, *self._arch_flags, *(f"-L{folder}" for folder in self.library_folders))

    @property
    def _arch_flags(self) -> tuple[str, ...]:
        return tuple(f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in self.archs)


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


def find_toolchain(places: Sequence[Path] | None = None) -> tuple[Toolchain | None, str]:
    """(the first nvcc that is new enough, "") or (None, why not); of `places`, or of everywhere one may be."""
    refused = []
    for path in map(Path.absolute, candidates() if places is None else places):  # steps run in folders of their own
        if not path.is_file():
            continue
        version, ptxas = _version(path), _version(path.with_name("ptxas"))
        if version is None:
            refused.append(f"{path} does not run")
        elif version < OLDEST_NVCC:
            refused.append(f"{path} is {_dotted(version)}, older than {_dotted(OLDEST_PTXAS)}")
        elif (ptxas or version) < OLDEST_PTXAS:
            refused.append(f"ptxas beside {path} is {_dotted(ptxas or version)}, older than {_dotted(OLDEST_PTXAS)}")
        else:
            beside = path.parent.parent / "lib"
            folders = (str(beside),) if (beside / "libcudart_static.a").is_file() else ()
            assembler = _dotted(ptxas) if ptxas not in (None, version) else ""
            return Toolchain(str(path), _dotted(version), _identity(version, assembler), folders, ptxas=assembler), ""
    nowhere = "no nvcc in CUDA_HOME, PATH, /usr/local/cuda or the nvidia-cuda-nvcc package"
    return None, "; ".join(refused) or (nowhere if places is None else f"no {' and no '.join(map(str, places))}")


def has_nvcc() -> bool:
    """Some nvcc is here, old ones too: its owner expects kernels."""
    return any(path.is_file() for path in candidates())


def toolchains_of(homes: Sequence[Path]) -> tuple[Toolchain, ...]:
    """The nvcc of each toolkit folder. Raises BuildError when one is missing or too old, or two are of one CUDA major."""
    found: dict[int, Toolchain] = {}
    for home in homes:
        toolchain, why = find_toolchain([home / "bin" / "nvcc"])
        if toolchain is None:
            raise BuildError(f"MAGI_BUILD_CUDA names {home}: {why}")
        if (twin := found.setdefault(toolchain.major, toolchain)) is not toolchain:
            raise BuildError(f"MAGI_BUILD_CUDA names {twin.nvcc} and {toolchain.nvcc}, both of CUDA {toolchain.major}; one per major")
    return tuple(found[major] for major in sorted(found))


def require_toolchain() -> Toolchain:
    """Raises BuildError with the ways to get an nvcc."""
    toolchain, why = find_toolchain()
    if toolchain is None:
        packages = "nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl"
        raise BuildError(f"{why}; install the CUDA toolkit, point CUDA_HOME at one, or: pip install {packages}")
    return toolchain


def _version(program: Path) -> tuple[int, ...] | None:
    found = re.search(r"V(\d+)\.(\d+)\.(\d+)", _output([str(program), "--version"]))
    return tuple(map(int, found.groups())) if found else None


def _identity(version: tuple[int, ...], ptxas: str) -> str:
    host = os.environ.get("NVCC_CCBIN") or "g++"
    host_version = _output([host, "--version"]).splitlines()[:1]
    return repr((_dotted(version), ptxas, host_version, [(name, os.environ.get(name)) for name in NVCC_VARIABLES]))


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except OSError:
        return ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
