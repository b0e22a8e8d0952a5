"""What one run builds and installs: which torch stands for which CUDA variant, on which Python. Reads ci/matrix.yaml, builds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from matrix.cells import Torch, load

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipe"
PLATFORMS = ("linux-64", "linux-aarch64")


class PlanError(Exception):
    """The run was asked for something that the recipe or the matrix has not; the text is one sentence."""


@dataclass(frozen=True)
class Place:
    """One installation: a machine with a driver for `cuda`, this Python, this torch. `cuda` is also the variant that must be chosen."""

    cuda: str
    torch: Torch
    python: str

    def __str__(self) -> str:
        return f"driver {self.cuda}, torch {self.torch.name}, Python {self.python}"


def recipe_variants() -> dict[str, list[str]]:
    """conda_build_config.yaml as it is, without zip_keys."""
    content = yaml.safe_load((RECIPE / "conda_build_config.yaml").read_text(encoding="utf-8"))
    return {name: values for name, values in content.items() if name != "zip_keys"}


def matrix_torches() -> tuple[tuple[Torch, str], ...]:
    """Every (torch, Python) of the matrix that environments are made of, in the order of the file."""
    cells = [cell for cell in load().cells if cell.kind == "wheel" and cell.torch is not None]
    return tuple(dict.fromkeys((cell.torch, cell.python) for cell in cells if cell.torch is not None))


def variant_of(torch: Torch) -> str | None:
    """The CUDA variant of the recipe that a torch stands for: that of its CUDA major."""
    for cuda in recipe_variants()["cuda_compiler_version"]:
        if torch.cuda and torch.cuda.split(".")[0] == cuda.split(".")[0]:
            return cuda
    return None


def places(every: bool, pythons: Sequence[str] = ()) -> tuple[Place, ...]:
    """What to install: one place per CUDA variant, or every torch with CUDA of the matrix on each of its Pythons.

    Args:
        every: all of them.
        pythons: only these; all when empty.

    Raises:
        PlanError: a CUDA variant for which the matrix has no torch on a wanted Python.
    """
    variants = recipe_variants()["cuda_compiler_version"]
    found = [Place(variant, torch, python) for torch, python in matrix_torches() if (variant := variant_of(torch)) is not None]
    if not every and not pythons:
        # The newest Python that every variant has, so that one interpreter is copied.
        shared = set.intersection(*({place.python for place in found if place.cuda == cuda} for cuda in variants))
        pythons = sorted(shared, key=minor_number)[-1:]
    found = [place for place in found if not pythons or place.python in pythons]
    first = {cuda: next((place for place in found if place.cuda == cuda), None) for cuda in variants}
    absent = [cuda for cuda, place in first.items() if place is None]
    if absent:
        wanted = " or ".join(pythons) or "that the others have"
        raise PlanError(
            f"ci/matrix.yaml has no torch for CUDA {absent[0]} on a Python {wanted}; add a torch line or ask for other --pythons"
        )
    return tuple(found) if every else tuple(place for place in first.values() if place is not None)


def minor_number(version: str) -> int:
    """ "3.12" -> 12, so that 3.9 comes before 3.10."""
    return int(version.split(".")[1])


def missing_torch_lines() -> tuple[str, ...]:
    """Minor versions of torch that the matrix tests and the recipe does not build for, or the other way round."""
    of_matrix = {torch.minor for torch, _ in matrix_torches()}
    return tuple(sorted(of_matrix ^ set(recipe_variants()["pytorch"]), key=minor_number))


def write_torch_lines() -> bool:
    """Give conda_build_config.yaml the torch lines of the matrix. Whether that changed it."""
    path = RECIPE / "conda_build_config.yaml"
    lines = path.read_text(encoding="utf-8").splitlines()
    start = lines.index("pytorch:") + 1
    end = next((number for number, line in enumerate(lines[start:], start) if not line.startswith("  - ")), len(lines))
    minors = sorted({torch.minor for torch, _ in matrix_torches()}, key=minor_number)
    changed = [*lines[:start], *(f'  - "{minor}"' for minor in minors), *lines[end:]]
    path.write_text("\n".join(changed) + "\n", encoding="utf-8")
    return changed != lines
