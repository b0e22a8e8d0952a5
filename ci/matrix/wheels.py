"""Finds the wheels that the cells install, as ci/wheels.sh lays them out. Builds nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matrix.environments import NotHere

FAT = ("fat", "fat-cu13-only")  # the second is the first, with its CUDA 12 part taken away after the installation


@dataclass(frozen=True)
class Wheels:
    """A folder with the fat wheel and whl/<label>/ for each pinned one; or, with `single`, that file as the fat wheel."""

    folder: Path
    single: Path | None = None

    def folder_of(self, name: str) -> Path:
        """The index folder of a pair."""
        return self.folder if name in FAT else self.folder / "whl" / name

    def find(self, name: str) -> Path:
        """The newest file of a wheel, by the time it was written."""
        if self.single is not None and name in FAT:
            found = [self.single] if self.single.is_file() else []
        else:
            found = sorted(self.folder_of(name).glob("magi_attention-*.whl"), key=lambda path: path.stat().st_mtime)
        if not found:
            place = self.single if self.single is not None and name in FAT else self.folder_of(name)
            raise NotHere(f"no wheel {name} in {place}; bash ci/wheels.sh --out {self.folder} makes them")
        return found[-1].resolve()


def facts_of(path: Path) -> dict[str, Any]:
    """Which file a result is about."""
    return {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "version": path.name.split("-")[1],
        "tag": path.stem.split("-", 2)[2],
        "mib": round(path.stat().st_size / 2**20, 2),
    }
