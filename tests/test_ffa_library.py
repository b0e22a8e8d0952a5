"""The loader of the compiled kernels where there are none, where the file is damaged, and on what this build has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention import _ffa_library
from tests.rules.tree import PACKAGE, ROOT


def test_no_library_says_how_to_get_one(tmp_path: Path) -> None:
    loaded = _ffa_library.load(tmp_path / "_ffa.so")
    assert loaded.handle is None and not loaded.is_damaged
    assert str(tmp_path) in loaded.error and "nvcc" in loaded.error


def test_damaged_library_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "_ffa.so"
    path.write_bytes(b"")
    loaded = _ffa_library.load(path)
    assert loaded.handle is None and loaded.is_damaged and "does not load" in loaded.error


def test_another_library_is_refused() -> None:
    loaded = _ffa_library.load(next(PACKAGE.glob("_solver*.so")))
    assert loaded.handle is None and loaded.is_damaged and "another version" in loaded.error


def test_parts_agree() -> None:
    variants, handle = _ffa_library.compiled_variants(), _ffa_library.library()
    assert (handle is None) == bool(_ffa_library.load_error())
    assert (handle is None) == (_ffa_library.compiled_archs() == ())
    assert not _ffa_library.is_damaged(), _ffa_library.load_error()
    assert all(variant.count(":") == 3 for variant in variants) and len(set(variants)) == len(variants)
    assert handle is not None or not variants


def test_loading_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from magi_attention import _ffa_library; print(_ffa_library.compiled_variants())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_90a", (8, 9), False),
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_120", (12, 1), True),
        ("sm_100f", (10, 3), True),
    ],
)
def test_which_gpus_code_runs_on(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert _ffa_library.runs_on(arch, capability) is runs
