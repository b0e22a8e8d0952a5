"""The build backend: setuptools, plus options by name: `pip install . -C variants=forward:bf16:128:0 -C jobs=4`.

Translates each option of kernel_build/options.py into the environment that setup.py reads; everything else is setuptools' own.
In a folder of its own: the backend's folder is searched before all others, and ci/wheel/ would hide PyPI's package of that name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernel_build.options import SETTINGS

Settings = dict[str, Any] | None

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_wheel(folder: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    with _in_environment(config_settings) as rest:
        return str(build_meta.build_wheel(folder, rest, metadata_directory))


def build_editable(folder: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    with _in_environment(config_settings) as rest:
        return str(build_meta.build_editable(folder, rest, metadata_directory))


def build_sdist(folder: str, config_settings: Settings = None) -> str:
    with _in_environment(config_settings) as rest:
        return str(build_meta.build_sdist(folder, rest))


@contextmanager
def _in_environment(settings: Settings) -> Iterator[Settings]:
    """Our options as environment while setuptools runs; it gets what is not ours. A misspelt option stops the build."""
    given = dict(settings or {})
    ours = {key: given.pop(key) for key in SETTINGS if key in given}
    known_to_setuptools = {"--global-option", "--build-option", "editable_mode", "editable-mode"}
    unknown = sorted(set(given) - known_to_setuptools)
    if unknown:
        raise SystemExit(f"error: no build option {', '.join(unknown)}; there are {', '.join(SETTINGS)}")
    before = dict(os.environ)
    for key, value in ours.items():
        # A repeated option arrives as a list.
        separator = os.pathsep if key == "cuda" else ","
        os.environ[SETTINGS[key]] = separator.join(value) if isinstance(value, list) else str(value)
    try:
        yield given
    finally:
        os.environ.clear()
        os.environ.update(before)
