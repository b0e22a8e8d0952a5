"""What a person asked a build for, from the environment. Looks at no toolkit, tree or GPU.

`pip install . -C variants=...` reaches this file as MAGI_BUILD_VARIANTS: ci/build_backend.py translates.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernel_build.variants import BuildError

# Kernels are written for these architectures only; another name is refused instead of compiled into something that cannot run.
KNOWN_ARCHS = ("sm_90a",)
# config-settings key -> environment
SETTINGS = {
    "kernels": "MAGI_BUILD_KERNELS",
    "variants": "MAGI_BUILD_VARIANTS",
    "archs": "MAGI_BUILD_ARCHS",
    "cuda": "MAGI_BUILD_CUDA",
    "jobs": "MAX_JOBS",
    "objects": "MAGI_BUILD_OBJECTS",
}


@dataclass(frozen=True)
class Options:
    """The wishes of one build.

    Attributes:
        kernels: "" takes kernels where they can be built, "0" none, "1" makes their absence an error.
        variants: the filter of kernel_build.variants; empty is all.
        archs: what is compiled for.
        cuda_homes: toolkits for a package with one library per CUDA major; empty: the one that is found, into one library.
    """

    kernels: str = ""
    variants: str = ""
    archs: tuple[str, ...] = KNOWN_ARCHS
    cuda_homes: tuple[Path, ...] = ()


def read_options(environment: Mapping[str, str] = os.environ) -> Options:
    """Raises BuildError for values that cannot be meant."""
    kernels = environment.get(SETTINGS["kernels"], "")
    if kernels not in ("", "0", "1"):
        raise BuildError(f"MAGI_BUILD_KERNELS={kernels!r}: must be 0 (build none), 1 (an error without nvcc) or not set")
    homes = tuple(Path(part) for part in environment.get(SETTINGS["cuda"], "").split(os.pathsep) if part)
    return Options(kernels, environment.get(SETTINGS["variants"], ""), parse_archs(environment.get(SETTINGS["archs"], "")), homes)


def parse_archs(text: str) -> tuple[str, ...]:
    """ "sm_90a" or "9.0a", separated by commas, semicolons or spaces; all that there are kernels for when empty."""
    asked = text.replace(",", " ").replace(";", " ").split()
    named = tuple(dict.fromkeys(part if part.startswith("sm_") else f"sm_{part.replace('.', '')}" for part in asked))
    unknown = [name for name in named if name not in KNOWN_ARCHS]
    if unknown:
        raise BuildError(
            f"MAGI_BUILD_ARCHS={text!r}: there are kernels for {', '.join(KNOWN_ARCHS)} and none for {', '.join(unknown)}; other GPUs run "
            "the blocked torch path, so leave the option out"
        )
    return named or KNOWN_ARCHS
