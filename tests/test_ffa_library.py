"""The loader of the compiled kernels where there are none, where the file is damaged, and on what this build has."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from magi_attention import _ffa_library
from magi_attention._whole_file import reason_cut_off
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


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_told_and_never_mapped(share: float, tmp_path: Path) -> None:
    whole = next(PACKAGE.glob("_solver*.so"))
    path = tmp_path / "_ffa.so"
    path.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * share)])
    loaded = _ffa_library.load(path)  # mapped, it would end the process with SIGBUS
    assert loaded.handle is None and loaded.is_damaged
    assert re.search(rf"was cut off: it has {path.stat().st_size} of at least {whole.stat().st_size} bytes; install", loaded.error)
    assert reason_cut_off(whole) == "" and not reason_cut_off(Path(__file__))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda whole: whole[: len(whole) // 2], "was cut off"),
        (lambda _: b"", "does not load"),
        (lambda _: b"not a library", "does not load"),
    ],
    ids=["cut off", "empty", "another file"],
)
def test_a_damaged_solver_is_one_sentence(damage: Callable[[bytes], bytes], told: str, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "magi_attention", ignore=shutil.ignore_patterns("__pycache__", "_ffa.so"))
    solver = next((tmp_path / "magi_attention").glob("_solver*.so"))
    solver.write_bytes(damage(solver.read_bytes()))
    code = "from magi_attention import _native; _native.run('work_list')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("magi_attention.errors.InstallError") and told in last and "install" in last


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
