"""Builds packages with rattler-build's engine into a local channel. Installs nothing; knows stand-ins only as recipes.

Run in a process of its own: the engine was seen to crash the interpreter at exit after an exception that nobody caught.
"""

from __future__ import annotations

import asyncio
import collections
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import rattler_build
import rattler_build.progress
from rattler.index import index_fs

from conda.plan import RECIPE
from conda.stand_ins import Recipe

KEPT_LINES = 40
LEFT_BY_BUILDS = ("bld", "build_cache", "src_cache", "test")


class BuildLog(rattler_build.progress.ProgressCallback):
    """What the engine says, into a file; the last lines also for the error of a failing build or test, which has none of its own."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8")
        self._last: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)

    def on_log(self, event: rattler_build.progress.LogEvent) -> None:
        self._last.append(event.message)
        self._file.write(event.message + "\n")
        self._file.flush()

    def last_lines(self) -> str:
        return "\n".join(self._last)


def prepare(folder: Path) -> None:
    """An empty channel."""
    shutil.rmtree(folder, ignore_errors=True)
    for platform in ("noarch", "linux-64"):
        (folder / platform).mkdir(parents=True)


def finish(folder: Path) -> None:
    """Drop what builds leave behind and write the channel's index."""
    for name in LEFT_BY_BUILDS:
        shutil.rmtree(folder / name, ignore_errors=True)
    pending = index_fs(folder)
    if asyncio.iscoroutine(pending):
        asyncio.run(pending)


def build_stand_ins(folder: Path, recipes: Iterable[Recipe]) -> list[str]:
    """Build each in order (later ones may need earlier ones); file names."""
    made = []
    for recipe in recipes:
        results = rattler_build.Stage0Recipe.from_dict(recipe).run_build(output_dir=folder, channels=[folder.as_uri()])
        made += [Path(package).name for result in results for package in result.packages]
    return made


def render(config: dict[str, list[str]] | None, platform: str) -> list[rattler_build.RenderedVariant]:
    """recipe.yaml for one platform, each output once. `config` replaces values of conda_build_config.yaml."""
    platforms = rattler_build.PlatformConfig(target_platform=platform, build_platform="linux-64", host_platform=platform)
    recipe = rattler_build.Stage0Recipe.from_file(RECIPE / "recipe.yaml")
    jinja = rattler_build.JinjaConfig(platform=platforms)
    variants = rattler_build.VariantConfig.from_conda_build_config(RECIPE / "conda_build_config.yaml", jinja)
    if config:
        kept = {**variants.to_dict(), **config}
        variants = rattler_build.VariantConfig(kept, zip_keys=variants.zip_keys)
    found: dict[tuple[str, str], rattler_build.RenderedVariant] = {}
    for output in recipe.render(variants, rattler_build.RenderConfig(platform=platforms)):
        found.setdefault((name_of(output), build_of(output)), output)
    return list(found.values())


def name_of(output: rattler_build.RenderedVariant) -> str:
    return str(output.recipe.to_dict()["package"]["name"])


def build_of(output: rattler_build.RenderedVariant) -> str:
    return str(output.recipe.to_dict()["build"]["string"])


def build(folder: Path, outputs: Iterable[rattler_build.RenderedVariant], driver: str) -> list[dict[str, object]]:
    """Build outputs of the recipe and run their tests, as on a machine whose driver supports CUDA `driver`.

    Raises what the engine raises: a failing build or test; the package is then under `folder`/broken.
    """
    os.environ["CONDA_OVERRIDE_CUDA"] = driver
    tools = rattler_build.ToolConfiguration(test_strategy="native")
    log = BuildLog(folder.with_name("build.log"))
    built: list[dict[str, object]] = []
    for output in outputs:
        start = time.monotonic()
        try:
            result = output.run_build(tool_config=tools, output_dir=folder, channels=[folder.as_uri()], progress_callback=log)
        except Exception as error:
            raise RuntimeError(f"{name_of(output)} {build_of(output)}: {error}; the last lines:\n{log.last_lines()}") from None
        for package in map(Path, result.packages):
            built.append({"file": package.name, "bytes": package.stat().st_size, "seconds": round(time.monotonic() - start, 1)})
    return built
