"""Puts the host twin of the compiled kernels (ffa_twin.cpp) behind the binding, for tests of the Python side without a GPU."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from magi_attention import _ffa_library
from magi_attention.api import clear_cache
from magi_attention.kernels import attention, ffa_library, ops
from magi_attention.runtime import attention as runtime_attention
from magi_attention.runtime import direct
from tests.rules.tree import ROOT

COMPILER = shutil.which("g++") or shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def compiled(source: Path, *options: str) -> Path:
    """The source compiled against csrc/; `options` may name other sources."""
    target = Path(tempfile.mkdtemp()) / source.stem
    subprocess.run([str(COMPILER), "-std=c++20", "-O2", f"-I{ROOT / 'csrc'}", *options, str(source), "-o", str(target)], check=True)
    return target


_PLANNER = [str(ROOT / "csrc" / "solver" / name) for name in ("tile_order.cpp", "tile_work.cpp", "work_list.cpp")]


@functools.cache
def _twin() -> _ffa_library.LoadedLibrary:
    found = _ffa_library.load(compiled(Path(__file__).with_name("ffa_twin.cpp"), "-fPIC", "-shared", *_PLANNER))
    assert found.handle is not None, found.error
    return found


def install_twin(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors run "compiled" kernels from here to the end of the test. Returns the list of launches, growing as they come."""
    launches: list[str] = []
    monkeypatch.setattr(_ffa_library, "_loaded", _twin)
    for cached in (ffa_library._symbols, ffa_library.tile_of):
        cached.cache_clear()

    def counted(name: str, run: Any) -> Any:
        def launch(*args: Any) -> None:
            launches.append(name)
            run(*args)

        return launch

    monkeypatch.setattr("magi_attention.kernels.ffa_forward.run_forward", counted("forward", ffa_library.run_forward))
    monkeypatch.setattr("magi_attention.kernels.ffa_backward.run_backward", counted("backward", ffa_library.run_backward))
    for module in (attention, ops, runtime_attention, direct):
        monkeypatch.setattr(module, "choose", lambda desc, *_: "ffa")
    monkeypatch.setattr(direct, "_forms", {})
    monkeypatch.setattr(direct, "reasons_against_ffa", lambda *_: [])
    clear_cache()
    return launches


def remove_twin() -> None:
    """Forget symbols and lists of the twin."""
    for cached in (ffa_library._symbols, ffa_library.tile_of):
        cached.cache_clear()
    clear_cache()
