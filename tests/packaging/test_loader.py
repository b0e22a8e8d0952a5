"""What a build says where torch, CUDA or the C library are not those it was made for: one sentence, and only then."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention import _build_record, _ffa_library
from magi_attention._build_record import TorchHere
from tests.rules.tree import PACKAGE, ROOT

RAW_ERRORS = re.compile(r"undefined symbol|GLIBC_|not found \(required|ELF class|cannot open shared")
CU13 = {"_solver.so": {"compiler": "g++"}, "_cu13/_ffa.so": {"cuda": "13.0.88", "archs": ["sm_90a"]}}
RELEASE = {"version": "1.2.0", "origin": "release", "torch": None, "index": None, "libraries": CU13}
FFA = """\
// A kernel library without kernels.
extern "C" const char* magi_ffa_variants() { return "forward:bf16:128:0"; }
extern "C" const char* magi_ffa_build_info() { return "arch=sm_90a nvcc=%s"; }
extern "C" const char* magi_ffa_error() { return ""; }
"""


def refusal(pin: str | None, version: str, cuda: str | None = "13.0", **changes: object) -> str:
    found = _build_record.refusal_of_torch({**RELEASE, "torch": pin, **changes}, TorchHere(version, cuda))
    return str(found) if found else ""


@pytest.mark.parametrize(
    ("pin", "version"),
    [
        ("2.11", "2.11.0+cu130"),
        ("2.11", "2.11.3"),
        ("2.11", "2.11.0a0+gitabc123"),
        ("2.11", "2.11.0+cpu"),
        ("2.11.0a0+nv26.02", "2.11.0a0+nv26.02"),
        (None, "2.15.0+cu132"),
        (None, "2.9.0+rocm6.4"),
    ],
)
def test_a_fitting_torch_is_taken(pin: str | None, version: str) -> None:
    assert refusal(pin, version) == ""


@pytest.mark.parametrize(
    ("pin", "version", "must_say"),
    [
        ("2.11", "2.12.1+cu130", ("torch 2.11", "torch 2.12.1+cu130", "pip install 'torch==2.11.*'")),
        ("2.11", "2.1.1+cu121", ("torch 2.11", "torch 2.1.1+cu121", "pip install 'torch==2.11.*'")),
        ("2.11", "2.11.0a0+nv26.02", ("torch 2.11", "2.11.0a0+nv26.02", "vendor", "pip install", "docker/README.md")),
        (None, "2.9.0a0+145a3a7bda.nv25.10", ("built for torch", "nv25.10", "vendor", "pip install")),
        ("2.11.0a0+nv26.02", "2.11.0+cu130", ("2.11.0a0+nv26.02", "2.11.0+cu130", "pip install 'torch==2.11.0a0+nv26.02'")),
        ("2.11.0a0+nv26.02", "2.11.0a0+nv26.03", ("nv26.02", "nv26.03", "vendor")),
    ],
)
def test_another_torch_is_refused_in_one_sentence(pin: str | None, version: str, must_say: tuple[str, ...]) -> None:
    said = refusal(pin, version)
    assert all(part in said for part in must_say), said
    assert "\n" not in said and not RAW_ERRORS.search(said) and "CUDA 13" in said


def test_a_known_index_is_named_with_the_folder_of_the_torch_that_is_here() -> None:
    said = refusal("2.11", "2.10.0+cu128", "12.8", index="https://example.org/whl")
    assert "--index-url https://example.org/whl/cu128-torch2.10 magi-attention" in said


def test_a_build_on_this_machine_takes_any_torch() -> None:
    assert refusal(None, "2.11.0a0+nv26.02", origin="source") == ""
    assert _build_record.refusal_of_torch({}, TorchHere("1.0+vendor", None)) is None
    assert _build_record.refusal_of_torch(RELEASE, None) is None


def make_package(folder: Path, **kernels: str) -> Path:
    """A package folder with a library per name: _cu12="12.5.40" or _ffa="13.0.88"."""
    for place, nvcc in kernels.items():
        target = folder / "_ffa.so" if place == "_ffa" else folder / place / "_ffa.so"
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(target)], input=FFA % nvcc, text=True, check=True)
    return folder


@pytest.fixture(scope="module")
def fat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("fat"), _cu12="12.5.40", _cu13="13.0.88")


@pytest.mark.parametrize(
    ("torch", "folder"),
    [
        (TorchHere("2.10.0+cu128", "12.8"), "_cu12"),
        (TorchHere("2.11.0+cu130", "13.0"), "_cu13"),
        (TorchHere("2.15.0+cu132", "13.2"), "_cu13"),
        (TorchHere("2.13.0+cpu", None), "_cu13"),
        (None, "_cu13"),
    ],
)
def test_the_library_of_torchs_cuda_is_taken(fat: Path, torch: TorchHere | None, folder: str) -> None:
    found = _ffa_library.find(fat, torch)
    assert found.handle is not None and found.path == fat / folder / "_ffa.so" and found.refusal is None


@pytest.mark.parametrize("kernels", [{"_cu13": "13.0.88"}, {"_ffa": "13.0.88"}])
def test_kernels_for_another_cuda_are_off_with_one_sentence(tmp_path: Path, kernels: dict[str, str]) -> None:
    package = make_package(tmp_path, **kernels)
    found = _ffa_library.find(package, TorchHere("2.10.0+cu128", "12.8"))
    assert found.handle is None and not found.is_damaged and found.refusal is not None
    assert found.error == str(found.refusal) and "\n" not in found.error
    assert all(part in found.error for part in ("for CUDA 13", "torch 2.10.0+cu128 with CUDA 12.8", "pip install"))
    assert _ffa_library.find(package, TorchHere("2.11.0+cu130", "13.0")).handle is not None


def test_without_any_library_the_old_sentence_stays(tmp_path: Path) -> None:
    found = _ffa_library.find(tmp_path, TorchHere("2.10.0+cu128", "12.8"))
    assert found.handle is None and found.refusal is None and "no CUDA kernel is compiled" in found.error


def spoilt(source: Path, target: Path, old: bytes, new: bytes) -> Path:
    content = source.read_bytes()
    assert old in content
    target.write_bytes(content.replace(old, new))
    return target


def test_a_newer_glibc_is_named_instead_of_its_symbol(tmp_path: Path) -> None:
    libc = tmp_path / "uses_libc.cpp"
    libc.write_text('#include <cstring>\nextern "C" void* f(void* a, void* b, int n) { return memcpy(a, b, n); }\n')
    made = tmp_path / "uses_libc.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-O0", str(libc), "-o", str(made)], check=True)
    wanted = next(name for name in (b"GLIBC_2.14", b"GLIBC_2.17") if name in made.read_bytes())
    other = spoilt(made, tmp_path / "newer.so", wanted, b"GLIBC_2.99")
    _change_hash_of_version(other, b"GLIBC_2.99")
    found = _ffa_library.load(other)
    assert found.handle is None and found.refusal is not None and not found.is_damaged
    assert "built for glibc 2.99 or newer" in found.error and f"glibc {_build_record.glibc_here()} is here" in found.error
    assert not RAW_ERRORS.search(found.error)


def _change_hash_of_version(path: Path, name: bytes) -> None:
    """The version table holds the ELF hash of each name; the loader compares both."""
    section = subprocess.run(["readelf", "-VW", str(path)], capture_output=True, text=True, check=True).stdout
    assert name.decode() in section
    content = bytearray(path.read_bytes())
    old = next(
        hash_of(old).to_bytes(4, "little") for old in (b"GLIBC_2.14", b"GLIBC_2.17") if hash_of(old).to_bytes(4, "little") in content
    )
    at = content.index(old)
    content[at : at + 4] = hash_of(name).to_bytes(4, "little")
    path.write_bytes(content)


def hash_of(name: bytes) -> int:
    value = 0
    for byte in name:
        value = (value << 4) + byte
        value = (value ^ ((value & 0xF0000000) >> 24)) & 0x0FFFFFFF
    return value


def test_a_library_for_another_processor_is_named(fat: Path, tmp_path: Path) -> None:
    content = bytearray((fat / "_cu13" / "_ffa.so").read_bytes())
    content[18] = 183 if content[18] != 183 else 62  # e_machine: AArch64, or x86-64 there
    other = tmp_path / "_ffa.so"
    other.write_bytes(content)
    found = _ffa_library.load(other)
    assert found.refusal is not None and "another machine" in found.error and not RAW_ERRORS.search(found.error)


def fake_torch(folder: Path, version: str, cuda: str | None) -> Path:
    """A torch whose version can be read and which must not be imported for that."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('torch was imported')\n")
    (package / "version.py").write_text(f"from typing import Optional\n__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n")
    return folder


def run(code: str, folder: Path, package: Path) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([str(package), str(folder)])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder, env={**os.environ, "PYTHONPATH": places}
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package as a published wheel pinned to torch 2.11 would lie there, without its Python caches."""
    folder = tmp_path / "site"
    folder.mkdir()
    package = folder / "magi_attention"
    package.mkdir()
    for path in PACKAGE.iterdir():
        if path.name not in ("__pycache__", "_build.json") and not path.name.startswith("_cu"):
            (package / path.name).symlink_to(path)
    (package / "_build.json").write_text(json.dumps({**RELEASE, "torch": "2.11"}))
    return folder


def test_the_import_refuses_and_imports_no_torch(installed: Path, tmp_path: Path) -> None:
    done = run("import magi_attention", fake_torch(tmp_path / "other", "2.12.0+cu130", "13.0"), installed)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("magi_attention.errors.InstallError: this wheel of magi_attention 1.2.0 was built for torch 2.11 and CUDA 13")
    done = run(
        "import magi_attention; print(magi_attention.build_info())", fake_torch(tmp_path / "right", "2.11.1+cu130", "13.0"), installed
    )
    assert done.returncode == 0, done.stderr
    assert "'torch': '2.11'" in done.stdout and "'torch_cuda': '13.0'" in done.stdout


def test_the_doctor_reports_what_the_import_refuses(installed: Path, tmp_path: Path) -> None:
    folder = fake_torch(tmp_path / "other", "2.12.0+cu130", "13.0")
    places = os.pathsep.join([str(installed), str(folder)])
    done = subprocess.run(
        [sys.executable, "-m", "magi_attention.doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": places},
    )
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["facts"]["build"]["pin"] == "2.11"


def test_without_torch_the_api_says_how_to_get_it(installed: Path, tmp_path: Path) -> None:
    done = run("import sys; sys.modules['torch'] = None; import magi_attention.plan.build, magi_attention.api", tmp_path, installed)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith("there is none here; python -m pip install 'torch==2.11.*'")


def test_build_info_has_what_was_built_and_what_is_here() -> None:
    code = "import json, magi_attention; print(json.dumps(magi_attention.build_info()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    told = json.loads(done.stdout)
    assert set(told) == {"version", "revision", "origin", "torch", "libraries", "solver", "kernels", "here"}
    assert told["solver"].startswith("solver C++20") and told["here"]["glibc"] == _build_record.glibc_here()
    assert (told["kernels"]["error"] is None) == bool(told["kernels"]["variants"])


def test_the_import_is_fast_beyond_torch() -> None:
    """At most 1.5 s (the promise of the installation guide); torch and numpy are there already in a process that uses both."""
    seconds = []
    for _ in range(3):
        code = "import time, torch; start = time.perf_counter(); import magi_attention.api; print(time.perf_counter() - start)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
        seconds.append(float(done.stdout))
    print(f"import magi_attention.api beyond torch: {min(seconds):.3f} s")
    assert min(seconds) < 1.5
