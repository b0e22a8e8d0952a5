"""The ctypes structs are those of csrc/attention/launch.h, byte by byte, and the symbols have the signatures of the header."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from magi_attention import _ffa_library
from magi_attention.kernels import ffa_library
from tests.kernels.twin_library import compiled, install_twin, needs_compiler, remove_twin
from tests.rules.tree import ROOT

STRUCTS = (
    ffa_library.TokenTensor,
    ffa_library.AttentionShape,
    ffa_library.Work,
    ffa_library.ForwardArgs,
    ffa_library.BackwardArgs,
)
HEADERS = ROOT / "csrc" / "attention"


@needs_compiler
def test_sizes_and_offsets_are_those_of_the_compiler(tmp_path: Path) -> None:
    lines, expected = [], {}
    for struct in STRUCTS:
        name = struct.__name__
        lines.append(f'std::printf("{name} %zu\\n", sizeof(magi::{name}));')
        expected[name] = ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            place = f"{name}.{field}"
            lines.append(f'std::printf("{place} %zu\\n", 1000 * offsetof(magi::{name}, {field}) + sizeof(magi::{name}::{field}));')
            expected[place] = 1000 * getattr(struct, field).offset + getattr(struct, field).size
    source = tmp_path / "layout.cpp"
    body = "\n".join(lines)
    source.write_text(f'#include <cstddef>\n#include <cstdio>\n#include "attention/launch.h"\nint main() {{\n{body}\n}}\n')
    printed = subprocess.run([compiled(source)], check=True, capture_output=True, text=True).stdout
    assert {name: int(value) for name, value in map(str.split, printed.splitlines())} == expected


def test_a_packed_forward_is_the_struct() -> None:
    shape = ffa_library.AttentionShape(*range(1, 7), 0.5, 0.25, 9)
    work = ffa_library.Work(11, 12, 13, 14, 15, 16, 17, 18, 19)
    values = list(range(100, 100 + sum(code not in "x@" for code in ffa_library.FORWARD_TAIL.format)))
    packed = ffa_library.forward_head(shape) + bytes(work) + ffa_library.FORWARD_TAIL.pack(*values)
    assert len(packed) == ctypes.sizeof(ffa_library.ForwardArgs)
    args = ffa_library.ForwardArgs.from_buffer_copy(packed)
    assert bytes(args.shape) == bytes(shape) and bytes(args.work) == bytes(work)
    tensors = [number for x in (args.q, args.k, args.v) for number in (x.data, x.token_stride, x.head_stride)]
    names = [field for field, *_ in ffa_library.ForwardArgs._fields_]
    assert tensors + [getattr(args, name) for name in names[names.index("v") + 1 :]] == values


def test_no_field_of_the_header_is_missing() -> None:
    text = re.sub(r"//[^\n]*", "", (HEADERS / "launch.h").read_text() + (HEADERS / "work.h").read_text())
    for struct in STRUCTS:
        found = re.search(rf"struct {struct.__name__} {{(.*?)}};", text, re.DOTALL)
        assert found is not None, f"{struct.__name__} is not in the headers"
        declared = [name for line in found[1].split(";") for name in re.findall(r"\*?(\w+)\s*(?=,|$)", line.strip())]
        assert declared == [field for field, *_ in struct._fields_]


def test_every_function_of_the_header_is_bound() -> None:
    declared = set(re.findall(r"(magi_ffa_\w+)\(", (HEADERS / "launch.h").read_text()))
    bound = {"magi_ffa_variants", "magi_ffa_build_info", "magi_ffa_error", "magi_ffa_stats_floats"}
    bound |= {"magi_ffa_forward", "magi_ffa_backward", *ffa_library.TILE_FUNCTIONS.values()}
    assert declared <= bound, f"not bound: {sorted(declared - bound)}"


@needs_compiler
def test_a_refused_launch_tells_the_reason_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    install_twin(monkeypatch)
    try:
        with pytest.raises(RuntimeError, match=r"forward: head_dim is not 64 or 128; .*backend='blocked'"):
            ffa_library.run_forward(bytes(ffa_library.ForwardArgs()), 0)
        with pytest.raises(RuntimeError, match=r"backward: head_dim is not 64 or 128; .*backend='blocked'"):
            ffa_library.run_backward(ffa_library.BackwardArgs(), 0)
        assert ffa_library.tile_of("forward", 64) == (48, 16) and ffa_library.tile_of("dq", 64) == (40, 8)
        with pytest.raises(RuntimeError, match="forward tile: no such head_dim"):
            ffa_library.tile_of("forward", 80)
    finally:
        remove_twin()


def test_a_build_without_the_library_says_so(tmp_path: Path) -> None:
    found = _ffa_library.load(tmp_path / "_ffa.so")
    assert found.handle is None and "no CUDA kernel is compiled into this build" in found.error and not found.is_damaged
