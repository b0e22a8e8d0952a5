"""Machines with one fault each, for the doctor of an installed wheel (case I26).

Imported, it arranges files of an environment. Run inside an environment with a name of PROBED, it is the doctor with answers that only
GPUs could give. Knows the names of findings, not their texts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matrix.environments import Environment

OLD_DRIVER = "#!/bin/sh\necho 'NVIDIA H200, 535.104.05, 9.0, 143771'\n"
NEW_DRIVER = "#!/bin/sh\necho 'NVIDIA H200, 580.95.05, 9.0, 143771'\n"
Undo = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A machine made of files. `finding` is the only fault that may be named (empty: none), `code` the exit code."""

    name: str
    arrange: Callable[[Environment], Undo]
    finding: str
    code: int


def _nothing(environment: Environment) -> Undo:
    return lambda: None


def _driver(script: str) -> Callable[[Environment], Undo]:
    def arrange(environment: Environment) -> Undo:
        program = environment.folder / "bin" / "nvidia-smi"
        program.write_text(script)
        program.chmod(0o755)
        return program.unlink

    return arrange


def _wrong_nvshmem(environment: Environment) -> Undo:
    """The entry of a package for the other CUDA, moved in place of the right one."""
    (right,) = environment.site_packages.glob("nvidia_nvshmem_cu13-*.dist-info")
    wrong = right.with_name("nvidia_nvshmem_cu12-3.4.5.dist-info")
    wrong.mkdir()
    (wrong / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nvshmem-cu12\nVersion: 3.4.5\n")
    aside = environment.folder / right.name
    right.rename(aside)

    def undo() -> None:
        (wrong / "METADATA").unlink()
        wrong.rmdir()
        aside.rename(right)

    return undo


def _no_solver(environment: Environment) -> Undo:
    library = environment.site_packages / "magi_attention" / "_solver.so"
    aside = library.rename(environment.folder / library.name)

    def undo() -> None:
        aside.rename(library)

    return undo


def _damaged_kernels(environment: Environment) -> Undo:
    (library,) = (environment.site_packages / "magi_attention").glob("_cu13/_ffa.so")
    aside = library.rename(environment.folder / "whole_ffa.so")
    library.write_bytes(b"\x7fELF, and then nothing")

    def undo() -> None:
        library.unlink()
        aside.rename(library)

    return undo


CASES = (
    Case("healthy, no GPU", _nothing, "", 0),
    Case("driver older than torch's CUDA", _driver(OLD_DRIVER), "driver", 1),
    Case("GPU that torch does not see", _driver(NEW_DRIVER), "gpus_hidden", 1),
    Case("NVSHMEM of the other CUDA", _wrong_nvshmem, "nvshmem_cuda", 1),
    Case("planner missing", _no_solver, "solver", 2),
    Case("kernels damaged", _damaged_kernels, "kernel_library", 1),
)
# (name, the finding that must be there, exit code); answered by main() below.
PROBED = (
    ("healthy, 8 GPUs", "", 0),
    ("no InfiniBand", "no_infiniband", 0),
    ("InfiniBand hidden from the container", "infiniband_hidden", 1),
)


def main(name: str) -> int:
    from magi_attention import doctor
    from magi_attention.machine_facts import Probes, TorchFacts

    torch = TorchFacts("2.11.0+cu130", "13.0", 8, ("sm_80", "sm_90", "sm_100"), True, "2.28.9", True)
    infiniband = () if name == "no InfiniBand" else ("mlx5_0",)
    devices = ("gdrdrv",) if "hidden" in name else ("gdrdrv", "infiniband")

    def folder(path: str) -> tuple[str, ...]:
        return {"/sys/class/infiniband": infiniband, "/dev": devices}.get(path, ())

    smi = "NVIDIA H200, 580.95.05, 9.0, 143771\n" * 8
    probes = replace(Probes(), torch=lambda: torch, nvidia_smi=lambda: smi, folder=folder, kernels=lambda has_gpu: ())
    return doctor.main(["--json"], probes)


if __name__ == "__main__":
    sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    sys.exit(main(sys.argv[1]))
