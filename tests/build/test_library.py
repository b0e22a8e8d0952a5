"""The build itself on a tree of three small files: cache, filter, faults and what the linked library shows."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from compile_kernels import main
from kernel_build.library import Library, build_library, find_sources, wanted_sources
from kernel_build.objects import Unit, content_key, own_files
from kernel_build.toolchain import Toolchain, find_toolchain, require_toolchain
from kernel_build.variants import BuildError

from magi_attention import _ffa_library
from tests.rules.tree import ROOT

TOOLCHAIN, WHY_NONE = find_toolchain()
needs_nvcc = pytest.mark.skipif(TOOLCHAIN is None, reason=f"needs nvcc: {WHY_NONE}")

VARIANT_CU = """\
// One tiny kernel per variant.
#include "attention/shared_report.h"
#include "sizes.h"
MAGI_REPORT_DYNAMIC_SHARED(kShared + MAGI_VARIANT_HEAD_DIM)
static __global__ void copy(const float* a, float* b) { b[threadIdx.x] = a[threadIdx.x]; }
#define NAME_(dtype, dim, cap) forward_##dtype##_d##dim##_cap##cap
#define NAME(dtype, dim, cap) NAME_(dtype, dim, cap)
int NAME(MAGI_VARIANT_DTYPE, MAGI_VARIANT_HEAD_DIM, MAGI_VARIANT_SOFTCAP)(float* a) {
    copy<<<1, 32, kShared>>>(a, a);
    return cudaGetLastError();
}
"""
LAUNCH_CU = """\
// Exports the names of the variants.
#define MAGI_EXPORT extern "C" __attribute__((visibility("default")))
#define MAGI_VARIANT(direction, dtype, dim, cap) int direction##_##dtype##_d##dim##_cap##cap(float*);
#include "magi_variants.inc"
#undef MAGI_VARIANT
#include "magi_build.inc"
#define MAGI_VARIANT(direction, dtype, dim, cap) +direction##_##dtype##_d##dim##_cap##cap(a)
MAGI_EXPORT int magi_ffa_forward(float* a) {
    return 0
#include "magi_variants.inc"
        ;
}
#undef MAGI_VARIANT
#define MAGI_VARIANT(direction, dtype, dim, cap) "," #direction ":" #dtype ":" #dim ":" #cap
static const char names[] = ""
#include "magi_variants.inc"
    ;
MAGI_EXPORT const char* magi_ffa_variants() { return sizeof(names) > 1 ? names + 1 : names; }
MAGI_EXPORT const char* magi_ffa_build_info() { return "arch=" MAGI_BUILD_ARCH " nvcc=" MAGI_BUILD_NVCC; }
MAGI_EXPORT const char* magi_ffa_error() { return ""; }
"""
SPILL_CU = """\
// Keeps 160 numbers alive in 64 registers.
__global__ void __launch_bounds__(1024) spill(const float* a, float* b) {
    float v[160];
#pragma unroll
    for (int i = 0; i < 160; ++i) v[i] = a[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float s = 0;
#pragma unroll
        for (int i = 0; i < 160; ++i) s += v[i] * v[(i * 7 + j) % 160];
        b[j * 1024 + threadIdx.x] = s;
    }
}
"""


def make_tree(root: Path) -> Path:
    """A source tree with two forward variants and no backward source."""
    attention = root / "csrc" / "attention"
    (attention / "sm90").mkdir(parents=True)
    (root / "magi_attention").mkdir()
    (attention / "variants.txt").write_text("forward bf16 64,128 0\nbackward bf16 64 0\n")
    (attention / "sm90" / "forward_variant.cu").write_text(VARIANT_CU)
    (attention / "sm90" / "sizes.h").write_text("// Sizes.\nconstexpr int kShared = 4096;\n")
    (attention / "launch.cu").write_text(LAUNCH_CU)
    shutil.copy(ROOT / "csrc" / "attention" / "shared_report.h", attention)
    return root


def build(root: Path, patterns: str = "", say: Callable[[str], None] = print) -> Library:
    sources = find_sources(root)
    assert sources is not None
    return build_library(sources, require_toolchain(), patterns, say)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("a folder with blanks"))  # nvcc hands some of its arguments on unquoted


@needs_nvcc
def test_library_loads_without_a_gpu_and_only_changes_are_compiled(tree: Path) -> None:
    lines: list[str] = []
    made = build(tree, say=lines.append)
    assert made.num_compiled == 3 and made.faults == []
    assert any("no backward kernels" in line for line in lines)
    loaded = _ffa_library.load(made.path)
    assert loaded.handle is not None, loaded.error
    assert loaded.handle.magi_ffa_variants() == b"forward:bf16:64:0,forward:bf16:128:0"
    assert b"arch=sm_90a nvcc=" in loaded.handle.magi_ffa_build_info()
    assert build(tree).num_compiled == 0

    sizes = tree / "csrc" / "attention" / "sm90" / "sizes.h"
    before = sizes.read_text()
    sizes.write_text(before.replace("4096", "8192"))
    changed = build(tree)
    assert changed.num_compiled == 2  # the variants include it, launch.cu does not
    dynamic = {kernel.object: kernel.dynamic_shared for told in changed.reports.values() for kernel in told.kernels}
    assert dynamic == {"forward:bf16:64:0": 8256, "forward:bf16:128:0": 8320}
    sizes.write_text(before)
    assert build(tree).num_compiled == 0  # both states are kept

    part = build(tree, "forward:*:64")
    assert part.num_compiled == 1  # launch.cu, whose list of variants is another one
    assert part.path != made.path and made.path.is_file()
    assert (tree / "build" / "kernel_report.csv").read_text().count("\n") == 2


@needs_nvcc
def test_a_spill_makes_the_build_fail(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tree / "csrc" / "attention" / "spill.cu"
    source.write_text(SPILL_CU)
    try:
        assert main(["forward:*:64", "--inplace"], tree) == 1
        told = capsys.readouterr()
        assert "fault: attention/spill.cu: spill spills registers" in told.err
        assert not (tree / "magi_attention" / "_ffa.so").exists()
        assert main(["forward:*:64", "--inplace", "--allow-faults"], tree) == 0
        assert "fault: " in capsys.readouterr().err
        assert _ffa_library.load(tree / "magi_attention" / "_ffa.so").handle is not None
    finally:
        source.unlink()


@needs_nvcc
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("// Wrong.\nint f() { return no_such_name; }\n", "no_such_name"),
        ("// Undefined.\nint g();\nint f() { return g(); }\n", "do not link"),
        ("// Needs a driver.\n#include <cuda.h>\nint f() { return cuInit(0); }\n", "cuInit"),
    ],
    ids=["compile", "link", "driver"],
)
def test_what_cannot_be_built_is_told(tree: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = tree / "csrc" / "attention" / "wrong.cu"
    source.write_text(text)
    try:
        assert main(["forward:*:64"], tree) == 1
        assert says in capsys.readouterr().err
    finally:
        source.unlink()


@needs_nvcc
def test_a_source_edited_meanwhile_is_not_kept(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "edited")
    source = root / "csrc" / "attention" / "launch.cu"

    def edit_when_compiled(line: str) -> None:
        if "launch.cu" in line:
            source.write_text(LAUNCH_CU + "// edited\n")

    with pytest.raises(BuildError, match="changed during the build"):
        build(root, "forward:*:64", edit_when_compiled)
    assert build(root, "forward:*:64").num_compiled == 1


def test_objects_depend_on_everything_they_include(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "tree")
    csrc = root / "csrc"
    toolchain = Toolchain("nvcc", "13.0.88", "identity")
    source = csrc / "attention" / "sm90" / "forward_variant.cu"
    assert {path.name for path in own_files(source, (csrc,))} == {"forward_variant.cu", "sizes.h", "shared_report.h"}
    unit = Unit("forward", "forward", source, ("-DA=1",))
    key = content_key(unit, (csrc,), toolchain)
    assert key == content_key(unit, (csrc,), toolchain)
    assert key != content_key(dataclasses.replace(unit, defines=("-DA=2",)), (csrc,), toolchain)
    assert key != content_key(unit, (csrc,), dataclasses.replace(toolchain, identity="another"))
    header = csrc / "attention" / "shared_report.h"
    header.write_text(header.read_text() + "\n")
    assert key != content_key(unit, (csrc,), toolchain)


def test_wishes_of_an_installation(tmp_path: Path) -> None:
    root, bare = make_tree(tmp_path / "tree"), tmp_path / "bare"
    (bare / "csrc" / "attention").mkdir(parents=True)
    toolchain = Toolchain("nvcc", "13.0.88", "identity")
    sources, why = wanted_sources(root, "", toolchain, "")
    assert sources is not None and why == "" and [path.name for path in sources.plain] == ["launch.cu"]
    assert wanted_sources(root, "", None, "no nvcc") == (None, "no nvcc")
    assert wanted_sources(root, "0", toolchain, "") == (None, "MAGI_BUILD_KERNELS=0")
    assert "launch.cu" in wanted_sources(bare, "", toolchain, "")[1]
    for tree, found in ((root, None), (bare, toolchain)):
        with pytest.raises(BuildError, match="MAGI_BUILD_KERNELS=1, but"):
            wanted_sources(tree, "1", found, "no nvcc")
    with pytest.raises(BuildError, match=r"11\.8, older than 12\.9; point CUDA_HOME"):
        wanted_sources(root, "", None, "11.8, older than 12.9", is_nvcc_here=True)
    assert wanted_sources(root, "0", None, "11.8, older than 12.9", is_nvcc_here=True) == (None, "MAGI_BUILD_KERNELS=0")


def test_sources_of_this_tree() -> None:
    sources = find_sources(ROOT)
    assert sources is not None and len(sources.variants) == 16
    assert not {path.name for path in sources.plain} & {"forward_variant.cu", "backward_variant.cu"}


def test_without_nvcc_the_command_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kernel_build.toolchain.candidates", lambda: [tmp_path / "nvcc"])
    root = make_tree(tmp_path / "tree")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["--if-nvcc"], root) == 0
        assert main([], root) == 1
    assert "kernels are not compiled: no nvcc" in out.getvalue()
    assert "CUDA_HOME" in err.getvalue() and "pip install nvidia-cuda-nvcc" in err.getvalue()


def test_an_old_nvcc_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    old.chmod(0o755)
    monkeypatch.setattr("kernel_build.toolchain.candidates", lambda: [old])
    assert find_toolchain()[0] is None
    assert "11.8.89, older than 12.9" in find_toolchain()[1]
    old.write_text(old.read_text().replace("11.8", "12.5"))
    assert "ptxas beside" in find_toolchain()[1] and "12.5.89, older than 12.9" in find_toolchain()[1]
    # A newer assembler beside it makes it fit, and its objects others.
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(old.read_text().replace("12.5", "12.9"))
    ptxas.chmod(0o755)
    found, _ = find_toolchain()
    assert found is not None and (found.version, found.ptxas) == ("12.5.89", "12.9.89") and "12.9.89" in found.identity
    ptxas.write_text(old.read_text().replace("12.5", "13.0"))
    old.write_text(ptxas.read_text())
    found, _ = find_toolchain()
    assert found is not None and (found.version, found.ptxas) == ("13.0.89", "")
