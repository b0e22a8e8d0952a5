"""What this machine has, read once through replaceable probes. Judges nothing (doctor.py does) and never fails."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import magi_attention
from magi_attention import _build_record, _ffa_library, _native
from magi_attention._build_record import Refusal

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader,nounits")
NVSHMEM_PACKAGES = ("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13")


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver lists it, whether or not torch can use it. `capability` is like (9, 0)."""

    name: str
    capability: tuple[int, int]
    memory_mib: int


@dataclass(frozen=True)
class TorchFacts:
    """The installed torch.

    Attributes:
        version, cuda: torch's version and the CUDA it was built for (None: a CPU build).
        num_devices: CUDA devices torch can use.
        archs: compiled architectures, like ("sm_90",); empty in a CPU build.
        has_gloo, nccl: process group backends; nccl is its version or None.
        peers_reachable: every pair of GPUs can read each other's memory (True with fewer than two).
    """

    version: str
    cuda: str | None
    num_devices: int
    archs: tuple[str, ...]
    has_gloo: bool
    nccl: str | None
    peers_reachable: bool


@dataclass(frozen=True)
class KernelFacts:
    """What "auto" resolves to for bf16 tensors of one device type. `reasons` are those against the compiled CUDA kernels."""

    device_type: str
    chosen: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class CompiledKernels:
    """The library of compiled CUDA kernels of this build.

    Attributes:
        variants: names like "forward:bf16:128:0"; empty when there is no library.
        archs, nvcc: what they were compiled for and with.
        error: why there is no library; `is_damaged`: its file is there, but cannot be used.
        refusal: the file is whole, but compiled for another CUDA or machine; `error` is its sentence.
    """

    variants: tuple[str, ...]
    archs: tuple[str, ...]
    nvcc: str
    error: str
    is_damaged: bool
    refusal: Refusal | None = None


@dataclass(frozen=True)
class BuildFacts:
    """The record of the build: git revision, "release" or "source", pinned torch, and one line per library of what it was made for.

    `refusal` is why a published wheel is not for the torch that is here.
    """

    revision: str | None
    origin: str
    pin: str | None
    libraries: tuple[str, ...]
    refusal: Refusal | None


@dataclass(frozen=True)
class MachineFacts:
    """Everything the doctor judges. A part that could not be read is None, its error in `errors`."""

    package: str
    location: str
    python: str
    system: str
    num_cpus: int
    build: BuildFacts | None
    solver: str | None
    compiled: CompiledKernels | None
    torch: TorchFacts | None
    kernels: tuple[KernelFacts, ...]
    gpus: tuple[Gpu, ...]
    driver: str | None
    infiniband: tuple[str, ...]
    device_files: tuple[str, ...]
    nvshmem: dict[str, str]
    errors: dict[str, str]


def read_torch() -> TorchFacts:
    """Raises ImportError (or OSError from a broken library) when torch cannot be imported."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = ((a, b) for a in range(num_devices) for b in range(num_devices) if a != b)
    has_nccl = distributed.is_available() and distributed.is_nccl_available()
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        num_devices=num_devices,
        archs=tuple(torch.cuda.get_arch_list()) if num_devices else (),
        has_gloo=distributed.is_available() and distributed.is_gloo_available(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        peers_reachable=all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs),
    )


def read_kernels(has_gpu: bool) -> tuple[KernelFacts, ...]:
    """Asks the selection itself. Imported here by name because a broken torch must not keep the doctor from reporting."""
    select: Any = importlib.import_module("magi_attention.kernels.select")
    return tuple(KernelFacts(device_type, *select.resolve(device_type)) for device_type in (("cpu", "cuda") if has_gpu else ("cpu",)))


def read_solver() -> str:
    """Build line of the compiled solver, after one real call. Raises ImportError or OSError when it cannot be loaded."""
    half_empty = np.array([[0, 8, 0, 8, 0, 0], [8, 8, 0, 8, 0, 0]], dtype=np.int32)
    kept = _native.run("tighten", slices=half_empty)["slices"]
    if kept.size != 6:
        raise RuntimeError(f"the solver kept {kept.size // 6} of 1 slices")
    return _native.build_info()


def read_compiled() -> CompiledKernels:
    """Loads the library; needs no GPU and no torch."""
    variants, archs = _ffa_library.compiled_variants(), _ffa_library.compiled_archs()
    nvcc = _ffa_library.build_info().get("nvcc", "")
    return CompiledKernels(variants, archs, nvcc, _ffa_library.load_error(), _ffa_library.is_damaged(), _ffa_library.refusal())


def read_build() -> BuildFacts:
    """The record of the build against the torch that is here; looks into files only."""
    record = _build_record.read_record()
    lines = []
    for name, entry in sorted(record.get("libraries", {}).items()):
        archs = ", ".join(entry.get("archs", ()))
        made_with = f"CUDA {entry['cuda']} for {archs}" if "cuda" in entry else str(entry.get("compiler", "unknown compiler"))
        lines.append(f"{name}: {made_with}, glibc {entry.get('glibc', 'unknown')} or newer")
    return BuildFacts(
        record.get("revision"),
        record.get("origin", "source"),
        record.get("torch"),
        tuple(lines),
        _build_record.refusal_of_torch(record, _build_record.torch_here()),
    )


def read_nvidia_smi() -> str:
    """CSV lines of NVIDIA_SMI; empty without the program or without a driver."""
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def list_folder(path: str) -> tuple[str, ...]:
    folder = Path(path)
    return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Every look at the outside world. Tests pass their own; nothing else of the doctor touches the machine."""

    torch: Callable[[], TorchFacts] = read_torch
    kernels: Callable[[bool], tuple[KernelFacts, ...]] = read_kernels
    build: Callable[[], BuildFacts] = read_build
    solver: Callable[[], str] = read_solver
    compiled: Callable[[], CompiledKernels] = read_compiled
    nvidia_smi: Callable[[], str] = read_nvidia_smi
    package_version: Callable[[str], str | None] = read_package_version
    folder: Callable[[str], tuple[str, ...]] = list_folder


def _parse_gpus(csv_text: str) -> tuple[tuple[Gpu, ...], str | None]:
    gpus, driver = [], None
    for line in csv_text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4:
            continue
        name, driver, capability, memory = fields
        major, _, minor = capability.partition(".")
        is_known = major.isdigit() and minor.isdigit()
        gpus.append(Gpu(name, (int(major), int(minor)) if is_known else (0, 0), int(memory) if memory.isdigit() else 0))
    return tuple(gpus), driver


def read_machine(probes: Probes) -> MachineFacts:
    """Ask every probe once; one that raises leaves its part None and its error by name."""
    errors: dict[str, str] = {}

    def ask(name: str, probe: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return probe()
        except Exception as error:  # a broken library raises what it likes; the doctor must still report
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            return otherwise

    gpus, driver = _parse_gpus(ask("nvidia_smi", probes.nvidia_smi, ""))
    found = {name: ask(name, functools.partial(probes.package_version, name), None) for name in NVSHMEM_PACKAGES}
    torch = ask("torch", probes.torch, None)
    kernels = ask("kernels", functools.partial(probes.kernels, torch.num_devices > 0), ()) if torch else ()
    device_files = ask("devices", functools.partial(probes.folder, "/dev"), ())
    return MachineFacts(
        package=str(magi_attention.__version__),
        location=str(Path(magi_attention.__file__).parent),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver()) or 'unknown libc'}",
        num_cpus=os.cpu_count() or 1,
        build=ask("build", probes.build, None),
        solver=ask("solver", probes.solver, None),
        compiled=ask("compiled", probes.compiled, None),
        torch=torch,
        kernels=kernels,
        gpus=gpus,
        driver=driver,
        infiniband=ask("infiniband", functools.partial(probes.folder, "/sys/class/infiniband"), ()),
        device_files=tuple(name for name in ("infiniband", "gdrdrv") if name in device_files),
        nvshmem={name: version for name, version in found.items() if version is not None},
        errors=errors,
    )
