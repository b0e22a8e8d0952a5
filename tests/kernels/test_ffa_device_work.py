"""Work lists made on the GPU: the host planner's list, record by record, and what bad input leaves; the ctypes records on any machine."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from magi_attention import _ffa_library
from magi_attention.kernels import ffa_device_work as planner
from magi_attention.kernels.tile_work import HEADER, TileWork, tile_work
from magi_attention.mask import AttnMask, builders
from magi_attention.mask.typed_ranges import bands_from_types
from magi_attention.testing.masks import mask_catalogue, random_mask, random_typed_ranges
from magi_attention.testing.tile_work_interpreter import WorkArrays, cover_of
from tests.kernels.twin_library import compiled, needs_compiler

CATALOGUE = mask_catalogue()
SHAPES = ((128, 128), (128, 64), (64, 128), (16, 8))
DEVICE = "cuda"

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or _ffa_library.library() is None, reason="no CUDA device or no compiled kernels"
)


class DeviceList:
    """A list being made on the device, and its arrays once they are asked for."""

    def __init__(self, totals: tuple[int, int], shape: tuple[int, int], transposed: bool, num_slices: int, **pointers: int) -> None:
        args = planner.DeviceWorkArgs(*totals, *shape, int(transposed), num_slices=num_slices, **pointers)
        self.layout, self.shape = planner.layout_of(args), shape
        # Whatever was in the memory before must not matter.
        self.workspace = torch.full((self.layout.workspace_size,), -1, dtype=torch.int32, device=DEVICE)
        args.workspace = self.workspace.data_ptr()
        planner.build(args, torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else 0)

    def arrays(self) -> tuple[list[int], WorkArrays]:
        values, layout = self.workspace.cpu().numpy(), self.layout
        header = values[:HEADER].tolist()
        _, num_segments, num_pieces, spare = header
        assert spare == 0 and layout.offset_segments % 4 == 0
        order = values[layout.offset_order :][: layout.num_tiles]
        offsets = values[layout.offset_segment_offsets :][: layout.num_tiles + 1]
        segments = values[layout.offset_segments :][: 4 * num_segments].reshape(-1, 4)
        pieces = values[layout.offset_pieces :][: 6 * num_pieces].reshape(-1, 6)
        return header, WorkArrays(order, offsets, segments, pieces, layout.num_rows, *self.shape)


def from_slices(mask: AttnMask, shape: tuple[int, int], transposed: bool) -> DeviceList:
    slices = torch.from_numpy(mask.slices.copy()).to(DEVICE)
    return DeviceList((mask.total_q, mask.total_k), shape, transposed, len(slices), slices=slices.data_ptr())


def from_ranges(
    ranges: tuple[npt.NDArray[np.int64], ...], totals: tuple[int, int], shape: tuple[int, int], transposed: bool, dtype: torch.dtype
) -> DeviceList:
    tensors = [torch.from_numpy(array.copy()).to(DEVICE, dtype) for array in ranges]
    size = dtype.itemsize
    names = ("q_ranges", "k_ranges", "types")
    pointers = {name: tensor.data_ptr() for name, tensor in zip(names, tensors, strict=False)}
    return DeviceList(totals, shape, transposed, len(ranges[0]), range_bytes=size, type_bytes=size, **pointers)


def host_list(mask: AttnMask, shape: tuple[int, int], transposed: bool) -> TileWork:
    return tile_work(mask.slices, mask.total_k if transposed else mask.total_q, *shape, transposed=transposed)


def assert_same(found: DeviceList, host: TileWork) -> None:
    (status, num_segments, num_pieces, _), work = found.arrays()
    assert (status, num_segments, num_pieces) == (0, host.num_segments, host.num_pieces)
    assert np.array_equal(work.order, host.order) and np.array_equal(work.segment_offsets, host.segment_offsets)
    assert np.array_equal(work.segments, host.segments) and np.array_equal(work.pieces, host.pieces)


def from_pieces(mask: AttnMask, times: int) -> AttnMask:
    """The mask cut along keys, so that tiles have many pieces."""
    edges = np.unique(np.linspace(0, mask.total_k, times + 1).astype(int))
    records = mask.slices.astype(np.int64).repeat(len(edges) - 1, axis=0)
    records[:, 2] = np.maximum(records[:, 2], np.tile(edges[:-1], len(mask.slices)))
    records[:, 3] = np.maximum(np.minimum(records[:, 3], np.tile(edges[1:], len(mask.slices))), records[:, 2])
    return AttnMask.from_slices(records, mask.total_q, mask.total_k)


# ---- any machine ----


@needs_compiler
def test_the_ctypes_records_are_those_of_the_compiler(tmp_path: Path) -> None:
    lines, expected = [], []
    for record in (planner.DeviceWorkArgs, planner.DeviceWorkLayout, planner.PoisonArgs):
        lines.append(f'std::printf("%zu\\n", sizeof(magi::{record.__name__}));')
        expected.append(ctypes.sizeof(record))
        for field, *_ in record._fields_:
            lines.append(f'std::printf("%zu\\n", offsetof(magi::{record.__name__}, {field}));')
            expected.append(getattr(record, field).offset)
    bits = ("kListTooLong", "kRangeOutside", "kUnknownType")
    lines += [f'std::printf("%d\\n", static_cast<int>(magi::{bit}));' for bit in bits]
    expected += [planner.LIST_TOO_LONG, planner.RANGE_OUTSIDE, planner.UNKNOWN_TYPE]
    source = tmp_path / "layout.cpp"
    body = "\n".join(lines)
    source.write_text(f'#include <cstddef>\n#include <cstdio>\n#include "attention/device_work.h"\nint main() {{\n{body}\n}}\n')
    printed = subprocess.run([compiled(source)], check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in printed.split()] == expected


def test_every_status_has_a_reason() -> None:
    assert planner.reasons(0) == [] and len(planner.reasons(planner.ANY_STATUS)) == 3
    assert "attn_type_map" in planner.reasons(planner.UNKNOWN_TYPE)[0]


# ---- on a GPU ----


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_random_masks(shape: tuple[int, int], transposed: bool) -> None:
    rng = np.random.default_rng(SHAPES.index(shape))
    for _ in range(100):
        totals = (int(rng.integers(0, 301)), int(rng.integers(0, 301)))
        mask = random_mask(rng, *totals, max_slices=20)
        assert_same(from_slices(mask, shape, transposed), host_list(mask, shape, transposed))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("transposed", [False, True])
def test_random_typed_ranges(dtype: torch.dtype, transposed: bool) -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        totals = (int(rng.integers(0, 301)), int(rng.integers(0, 301)))
        ranges = random_typed_ranges(rng, *totals, max_slices=20)
        mask = AttnMask.from_slices(bands_from_types(*ranges), *totals)
        assert_same(from_ranges(ranges, totals, (64, 32), transposed, dtype), host_list(mask, (64, 32), transposed))
        if not ranges[2].any():
            assert_same(from_ranges(ranges[:2], totals, (64, 32), transposed, dtype), host_list(mask, (64, 32), transposed))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue(name: str) -> None:
    mask = CATALOGUE[name]
    for shape in SHAPES:
        found = from_slices(mask, shape, False)
        assert_same(found, host_list(mask, shape, False))
        assert np.array_equal(cover_of(found.arrays()[1], mask.total_k), mask.to_dense())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("times", [150, 700])
def test_tiles_with_more_pieces_than_shared_memory_holds(times: int) -> None:
    mask = from_pieces(builders.block_causal_video(3, 700), times)
    for transposed in (False, True):
        assert_same(from_slices(mask, (128, 128), transposed), host_list(mask, (128, 128), transposed))


@pytest.mark.gpu
@needs_gpu
def test_many_slices_and_tiles() -> None:
    borders = np.concatenate([[0], np.cumsum(np.random.default_rng(0).integers(0, 160, 10_000))])
    masks = (
        builders.from_cu_seqlens(borders, borders, causal=True),
        builders.sliding_window(1 << 20, 1 << 20, (1023, 0)),
        builders.sliding_window(1 << 20, 1 << 20, (None, 0)),
        builders.from_cu_seqlens(np.arange(0, 65_537, 2), np.arange(0, 65_537, 2)),
    )
    for mask in masks:
        for transposed in (False, True):
            assert_same(from_slices(mask, (128, 128), transposed), host_list(mask, (128, 128), transposed))


@pytest.mark.gpu
@needs_gpu
def test_a_list_that_does_not_fit_is_empty_and_says_so() -> None:
    columns = 9000
    wide = [[0, 1 << 16, 2 * idx, 2 * idx + 1, -(1 << 30), 1 << 30] for idx in range(columns)]
    mask = AttnMask.from_slices(wide, 1 << 16, 2 * columns, check_overlap=False)
    header, work = from_slices(mask, (128, 128), False).arrays()
    assert header == [planner.LIST_TOO_LONG, 0, 0, 0]
    assert not work.segment_offsets.any() and sorted(work.order.tolist()) == list(range(512))


@pytest.mark.gpu
@needs_gpu
def test_bad_ranges_are_cut_and_reported() -> None:
    totals, shape = (100, 50), (16, 8)
    ranges = (np.array([[-5, 20], [90, 120], [40, 30], [0, 10]]), np.array([[0, 50], [0, 60], [0, 10], [0, 10]]), np.array([1, 0, 0, 7]))
    found = from_ranges(ranges, totals, shape, False, torch.int64)
    header, work = found.arrays()
    inside = AttnMask.from_slices([[0, 20, 0, 50, -(1 << 30), 30], [90, 100, 0, 50, -(1 << 30), 1 << 30]], *totals)
    assert header[0] == planner.RANGE_OUTSIDE | planner.UNKNOWN_TYPE
    assert np.array_equal(cover_of(work, 50), inside.to_dense())


@pytest.mark.gpu
@needs_gpu
def test_outputs_of_a_wrong_list_become_nan() -> None:
    stream = torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else 0
    for status in (0, planner.LIST_TOO_LONG, planner.RANGE_OUTSIDE):
        word = torch.tensor([status, 0, 0, 0], dtype=torch.int32, device=DEVICE)
        buffers = [
            torch.zeros(size, dtype=dtype, device=DEVICE) for size, dtype in ((1003, torch.bfloat16), (7, torch.float32), (0, torch.half))
        ]
        sizes = [(buffer.data_ptr(), buffer.nbytes) for buffer in buffers]
        reports = torch.zeros(len(planner.REASONS), dtype=torch.int32, pin_memory=DEVICE == "cuda")
        planner.poison(word.data_ptr(), sizes, stream, planner.LIST_TOO_LONG, reports.data_ptr())
        for buffer in buffers:
            assert bool(buffer.isnan().all() if status == planner.LIST_TOO_LONG else (buffer == 0).all())
        assert reports.tolist() == [int(status == planner.LIST_TOO_LONG), 0, 0]


@pytest.mark.gpu
@needs_gpu
def test_the_host_does_not_wait() -> None:
    mask = CATALOGUE["documents_causal"]
    slices = torch.from_numpy(mask.slices.copy()).to(DEVICE)
    args = planner.DeviceWorkArgs(mask.total_q, mask.total_k, 128, 128, num_slices=len(slices), slices=slices.data_ptr())
    workspace = torch.empty(planner.layout_of(args).workspace_size, dtype=torch.int32, device=DEVICE)
    args.workspace = workspace.data_ptr()
    stream = torch.cuda.current_stream().cuda_stream
    planner.build(args, stream)  # loading kernels for the first time may wait
    planner.poison(workspace.data_ptr(), [], stream)
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 29)  # about a third of a second
    planner.build(args, stream)
    planner.poison(workspace.data_ptr(), [], stream)
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "both calls came back while the device was still asleep"


@pytest.mark.gpu
@needs_gpu
def test_sizes_out_of_range_are_refused() -> None:
    good = {"total_q": 8, "total_k": 8, "tile_rows": 128, "block_cols": 128, "num_slices": 1}
    for name, value in (("total_q", -1), ("total_k", 1 << 30), ("tile_rows", 2048), ("block_cols", 0), ("num_slices", (1 << 24) + 1)):
        with pytest.raises(RuntimeError, match=f"{name}={value}"):
            planner.layout_of(planner.DeviceWorkArgs(**{**good, name: value}))
    with pytest.raises(RuntimeError, match="aligned to 16 bytes"):
        planner.build(planner.DeviceWorkArgs(**good, workspace=8), 0)
    workspace = torch.empty(64, dtype=torch.int32, device=DEVICE)
    with pytest.raises(RuntimeError, match="q_ranges and k_ranges"):
        planner.build(planner.DeviceWorkArgs(**good, workspace=workspace.data_ptr()), 0)
