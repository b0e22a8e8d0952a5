"""Writes magi_attention/_build.json, what the package says about itself. Compiles nothing; the package reads it without this file."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernel_build.toolchain import Toolchain

RECORD_FILE = "_build.json"
SCHEMA = 1


def symbol_versions(library: Path) -> dict[str, str]:
    """The newest version of each family that a shared library needs: {"GLIBC": "2.17", "GLIBCXX": "3.4.21", ...}."""
    text = subprocess.run(["readelf", "-VW", str(library)], capture_output=True, text=True, check=True).stdout
    needs = text.partition("Version needs section")[2]
    newest: dict[str, tuple[int, ...]] = {}
    for family, version in re.findall(r"Name: (GLIBCXX|GLIBC|CXXABI)_([\d.]+)", needs):
        newest[family] = max(newest.get(family, ()), tuple(map(int, version.split("."))))
    return {family: ".".join(map(str, version)) for family, version in sorted(newest.items())}


def entry(library: Path, **facts: Any) -> dict[str, Any]:
    """One library: the given facts, and the oldest glibc and libstdc++ that can load it."""
    needs = symbol_versions(library)
    return {**facts, "glibc": needs.get("GLIBC", "2.2.5"), "glibcxx": needs.get("GLIBCXX", "3.4")}


def kernel_entry(library: Path, toolchain: Toolchain, variants: Iterable[object]) -> dict[str, Any]:
    compilers = {"cuda": toolchain.version, **({"ptxas": toolchain.ptxas} if toolchain.ptxas else {})}
    return entry(library, **compilers, archs=list(toolchain.archs), variants=[str(variant) for variant in variants])


def revision(root: Path, version: str) -> str | None:
    """Of git, or of the version of a source distribution that git's state went into; None when nobody knows."""
    try:
        done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        done = None
    if done is not None and done.returncode == 0 and (root / ".git").exists():
        return done.stdout.strip()
    found = re.search(r"\+g([0-9a-f]{7,40})", version)
    return found[1] if found else None


def write(folder: Path, record: dict[str, Any]) -> None:
    part = folder / f"{RECORD_FILE}.part"
    part.write_text(json.dumps({"schema": SCHEMA, **record}, indent=1) + "\n", encoding="utf-8")
    part.replace(folder / RECORD_FILE)


def replace_library(folder: Path, name: str, facts: dict[str, Any]) -> None:
    """Tell the record of an installed tree about one library that was built again; without a record nothing is written."""
    path = folder / RECORD_FILE
    if path.is_file():
        record = json.loads(path.read_text(encoding="utf-8"))
        record.setdefault("libraries", {})[name] = facts
        write(folder, record)
