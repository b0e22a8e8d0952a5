"""What is looked at before a wheel is published (cases I07 and I09), each fault seen on a file that has it."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="needs the extra `matrix`: pip install -e '.[matrix]'")
pytest.importorskip("elftools", reason="needs the extra `matrix`: pip install -e '.[matrix]'")

from cubins import CubinError, embedded_archs, gpu_programs
from elftools.elf.elffile import ELFFile
from inspect_wheel import NEWEST, exported_names, inspect, linked_libraries, main, symbol_versions, variants_in
from kernel_build.record import symbol_versions as versions_by_readelf
from kernel_build.toolchain import find_toolchain
from wheel_archive import write_wheel

from tests.packaging.wheels_made_up import fat_wheel, library, record
from tests.rules.tree import PACKAGE

ADVERTISED = {"12": ["sm_90a"], "13": ["sm_90a"]}
TOOLCHAIN, WHY_NONE = find_toolchain()
needs_nvcc = pytest.mark.skipif(TOOLCHAIN is None, reason=f"needs nvcc: {WHY_NONE}")

KERNELS = """\
// Names as those of the real kernels.
struct __nv_bfloat16_ {};
namespace magi::sm90 {
template <typename T, int kDim, bool kCap, int kRows> struct ForwardTraits {};
template <typename Traits> __global__ void forward_kernel(float* out) { out[0] = sizeof(Traits); }
template __global__ void forward_kernel<ForwardTraits<%s, 64, true, 128>>(float*);
}
"""


def compiled(folder: Path, arch_flags: list[str], source: str = KERNELS % "__half") -> Path:
    assert TOOLCHAIN is not None
    file = folder / "k.cu"
    file.write_text("#include <cuda_fp16.h>\n" + source)
    target = folder / "k.so"
    flags = ["-shared", "-cudart=static", "-Xcompiler=-fPIC", "-std=c++20", *arch_flags]
    subprocess.run([TOOLCHAIN.nvcc, *flags, str(file), "-o", str(target)], check=True, capture_output=True)
    return target


@needs_nvcc
def test_programs_are_listed_with_architecture_and_kernels(tmp_path: Path) -> None:
    programs = gpu_programs(compiled(tmp_path, ["-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_80,code=compute_80"]))
    assert embedded_archs(programs) == ("compute_80", "sm_90a")
    assert variants_in(programs) == {"forward:fp16:64:1"}
    cuobjdump = shutil.which("cuobjdump") or _beside_nvcc("cuobjdump")
    if cuobjdump:  # NVIDIA's own tool agrees where it is installed
        told = subprocess.run([cuobjdump, "--list-elf", str(tmp_path / "k.so")], capture_output=True, text=True, check=True).stdout
        assert told.count(".cubin") == sum(program.arch.startswith("sm_") for program in programs)


def _beside_nvcc(name: str) -> str | None:
    assert TOOLCHAIN is not None
    place = Path(TOOLCHAIN.nvcc).with_name(name)
    return str(place) if place.is_file() else None


@needs_nvcc
def test_the_letter_of_an_architecture_is_read(tmp_path: Path) -> None:
    for arch in ("90", "90a"):
        programs = gpu_programs(compiled(tmp_path, [f"-gencode=arch=compute_{arch},code=sm_{arch}"]))
        assert embedded_archs(programs) == (f"sm_{arch}",)


def test_a_library_without_gpu_code_has_none(tmp_path: Path) -> None:
    library(tmp_path)
    assert gpu_programs(tmp_path / "made.so") == []


def test_a_compressed_program_is_an_error(tmp_path: Path) -> None:
    """Somebody's NVCC_APPEND_FLAGS may compress; then nothing can be said about the inside."""
    entry = struct.pack("<HHIQ", 2, 0x101, 64, 16) + bytes(12) + struct.pack("<I", 90) + bytes(8) + struct.pack("<Q", 0x2011) + bytes(16)
    container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry) + 16) + entry + b"compressed bytes"
    path = tmp_path / "blob.s"
    path.write_text(f'.section .nv_fatbin,"a"\n.byte {",".join(map(str, container))}\n')
    subprocess.run(["g++", "-shared", "-nostdlib", str(path), "-o", str(tmp_path / "blob.so")], check=True)
    with pytest.raises(CubinError, match="compressed cubin for sm_90"):
        gpu_programs(tmp_path / "blob.so")


def elf(content: bytes) -> ELFFile:
    return ELFFile(io.BytesIO(content))


def test_symbols_are_read_as_readelf_reads_them() -> None:
    for path in PACKAGE.glob("_solver*.so"):
        ours = symbol_versions(elf(path.read_bytes()))
        assert {name: ".".join(map(str, ours[name])) for name in ("GLIBC", "GLIBCXX", "CXXABI")} == versions_by_readelf(path)
        assert exported_names(elf(path.read_bytes())) and all(name.startswith("magi_") for name in exported_names(elf(path.read_bytes())))
        assert "libc.so.6" in linked_libraries(elf(path.read_bytes()))


def faults(path: Path, variants: set[str] | None = None) -> str:
    return "\n".join(inspect(path, ADVERTISED, variants or set()).faults)


def test_a_newer_glibc_a_foreign_library_and_a_stray_symbol_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = '#include <cstdio>\nextern "C" int magi_one() { return puts("x"); }\nint stray() { return 2; }\n'
    foreign = tmp_path / "libforeign.so.1"
    foreign.write_bytes(library(tmp_path, "int foreign() { return 1; }", "-Wl,-soname,libforeign.so.1"))
    content = library(tmp_path, source, "-Wl,--no-as-needed", str(foreign))
    wheel = fat_wheel()
    members = {**wheel.members, "magi_attention/_solver.so": (content, 0o755)}
    path = write_wheel(replace(wheel, members={k: v for k, v in members.items() if "_cu1" not in k}), tmp_path)
    monkeypatch.setitem(NEWEST, "GLIBC", (2, 2, 4))
    said = faults(path)
    assert "needs GLIBC_2.2.5" in said and "links libforeign.so.1" in said and "exports _Z5strayv" in said
    assert "_build.json lists" in said  # the kernel libraries of the record are not there


def test_the_record_and_the_metadata_must_agree(tmp_path: Path) -> None:
    content = library(tmp_path)
    pinned = fat_wheel(content, torch="2.11")
    assert "it requires torch ['>=2.10'], and its record says 2.11" in faults(write_wheel(pinned, tmp_path / "a"))
    assert "so it would take any torch" in faults(write_wheel(fat_wheel(content, origin="source"), tmp_path / "b"))
    assert "_build.json is of version 7" in faults(write_wheel(fat_wheel(content, version="7"), tmp_path / "c"))
    linux = replace(fat_wheel(content), tags="py3-none-linux_x86_64")
    assert "no manylinux tag" in faults(write_wheel(linux, tmp_path / "d"))


def test_advertised_code_that_is_missing_is_a_fault(tmp_path: Path) -> None:
    said = faults(write_wheel(fat_wheel(library(tmp_path)), tmp_path), {"forward:bf16:128:0"})
    assert said.count("has code for nothing, and sm_90a is advertised") == 2


@needs_nvcc
def test_a_missing_and_an_extra_variant_are_faults(tmp_path: Path) -> None:
    content = compiled(tmp_path, ["-gencode=arch=compute_90a,code=sm_90a"]).read_bytes()
    path = write_wheel(fat_wheel(content, **_with_variants(["forward:fp16:64:1"])), tmp_path)
    said = faults(path, {"forward:fp16:64:1", "backward:fp16:64:1"})
    assert "sm_90a lacks backward:fp16:64:1" in said and "nobody asked for" not in said
    assert "sm_90a has forward:fp16:64:1, which nobody asked for" in faults(path)


def _with_variants(variants: list[str]) -> dict[str, object]:
    libraries = record()["libraries"]
    return {"libraries": {name: {**entry, **({"variants": variants} if "cuda" in entry else {})} for name, entry in libraries.items()}}


def test_the_command_prints_the_sizes_and_fails_on_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_wheel(fat_wheel(library(tmp_path)), tmp_path)
    assert main([str(path)]) == 1
    told = capsys.readouterr()
    assert "MiB of at most" in told.out and f"fault: {path.name}: " in told.err
    assert main([str(tmp_path / "absent-1.0-py3-none-any.whl")]) == 1
    assert "cannot be read" in capsys.readouterr().err
