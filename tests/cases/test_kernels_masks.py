"""The M cases that concern one device, on CPU tensors. Head counts are scaled down before lengths; the ids are the cases'."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magi_attention.errors import InputError
from magi_attention.kernels.ops import single_device_attention
from magi_attention.mask import AttnMask, builders
from magi_attention.mask.slices import UNBOUNDED
from magi_attention.testing.masks import random_slices
from tests.kernels.problems import attend, block_map_mask, causal, check, make_case, run_ours, typed

pytestmark = pytest.mark.usefixtures("one_thread")

TYPES = ("full", "causal", "inv_causal", "bi_causal")


def test_m01_one_key_per_segment(poisoned_memory: str) -> None:
    mask = typed([(0, 76, 0, 1, "causal"), (76, 110, 1, 2, "causal"), (110, 256, 2, 3, "causal")], 256, 3)
    case = make_case(mask, (1, 1), (32, 32), torch.float16)
    for x in case.tensors.values():
        x.mul_(3)
    ours = run_ours(case, mask).values
    rows = [75, 109, 255]
    empty = torch.ones(256, dtype=torch.bool)
    empty[rows] = False
    assert torch.equal(ours["out"][rows], case.tensors["v"])
    assert (ours["out"][empty] == 0).all() and (ours["lse"][empty] == -torch.inf).all() and torch.isfinite(ours["lse"][rows]).all()
    assert torch.equal(ours["dv"], case.dout[rows])
    assert ours["dq"].abs().max() <= 2e-3 and ours["dk"].abs().max() <= 2e-3 and (ours["dq"][empty] == 0).all()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", [*TYPES, None])
def test_m03_nothing_to_see(kind: str | None) -> None:
    mask = AttnMask.from_slices([], 128, 128) if kind is None else typed([(0, 128, 0, 0, kind)], 128, 0)
    ours = run_ours(make_case(mask), mask).values
    assert (ours["out"] == 0).all() and (ours["lse"] == -torch.inf).all()
    assert ours["out"].shape == (128, 4, 32) and ours["dk"].shape == ours["dv"].shape == (mask.total_k, 2, 32)
    assert all((ours[name] == 0).all() for name in ("dq", "dk", "dv"))


@pytest.mark.timeout(60)
def test_m05_empty_segments() -> None:
    mask = builders.from_cu_seqlens([0, 0, 0, 1023], [0, 0, 1, 2046], causal=True)
    assert mask.area() == 1_569_282
    ours = check("M05", mask, (4, 4), (64, 64)).values
    assert (ours["dk"][0] == 0).all() and (ours["dv"][0] == 0).all()


def test_m06_windows_that_are_causal() -> None:
    total = 16_384
    windows = [(None, 0), (total, 0), (total - 1, 0)]
    for window in windows:
        small = builders.sliding_window(16, 16, (None if window[0] is None else window[0] - total + 16, 0))
        assert small.area() == 136
    masks = [causal(total), *(builders.sliding_window(total, total, window) for window in windows)]
    # dout is 0 but for 512 rows, so the twins on these rows have all of dk, dv.
    rows = torch.from_numpy(np.unique(np.linspace(0, total - 1, 512).astype(int)))
    some = make_case(AttnMask.from_slices([], total, 1), (1, 1), (32, 32))
    keys = make_case(AttnMask.from_slices([], 1, total), (1, 1), (32, 32))
    tensors = {"q": some.tensors["q"], "k": keys.tensors["k"], "v": keys.tensors["v"]}
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    dout = torch.zeros_like(some.dout)
    dout[rows] = some.dout[rows]
    dense = torch.arange(total)[None] <= rows[:, None]
    case = type(some)({**tensors, "q": tensors["q"][rows].detach()}, dense, dout[rows], None, {})
    reference, eager = case.reference(), case.eager()
    for mask in masks:
        out, lse = attend(*leaves.values(), mask)
        dq, dk, dv = torch.autograd.grad(out, list(leaves.values()), dout)
        ours = type(reference)({"out": out[rows], "lse": lse[rows], "dq": dq[rows], "dk": dk, "dv": dv})
        case.check("M06", ours, reference, eager)


@pytest.mark.parametrize("window", [None, (None, 0), (-1, 0), (-1, -1)])
def test_m08_causal_batch_with_unbounded_windows(window: tuple[int | None, int] | None) -> None:
    borders = [0, 1024, 2048]
    is_causal = window in (None, (-1, -1))
    mask = builders.from_cu_seqlens(borders, borders, is_causal, window)
    assert mask == builders.from_cu_seqlens(borders, borders, causal=True)
    if window is None:
        ours = check("M08", mask, (2, 1), (128, 128)).values
        assert ours["out"].abs().max() > 0 and torch.isfinite(ours["lse"]).all()


def test_m10_rows_between_slices(poisoned_memory: str) -> None:
    mask = typed([(0, 128, 0, 128, "full"), (256, 512, 0, 512, "full")], 512, 512)
    ours = check("M10", mask, (2, 1), (64, 64)).values
    assert (ours["out"][128:256] == 0).all() and (ours["dq"][128:256] == 0).all()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("c", [0, 1, 63, 128, 500, 4096])
def test_m11_two_slices_equal_one(c: int) -> None:
    for q in (1, 17, 64, 100, 128, 129, 1000):
        single = typed([(0, q, 0, c + q, "causal")], q, c + q)
        two = typed([(0, q, 0, c, "full"), (0, q, c, c + q, "causal")], q, c + q)
        case = make_case(single, (2, 1), (32, 32))
        reference, eager = case.reference(), case.eager()
        for name, mask in (("one", single), ("two", two)):
            case.check(f"M11 q={q} c={c} {name}", run_ours(case, mask), reference, eager)


def test_m12_queries_past_the_end() -> None:
    q = torch.zeros(100, 2, 8)
    k = torch.zeros(200, 2, 8)
    slices = [[0, 100, 0, 100, -UNBOUNDED, UNBOUNDED], [100, 200, 100, 200, -UNBOUNDED, UNBOUNDED]]
    with pytest.raises(InputError, match=r"slices\[1\].*\(100, 200\).*100 rows"):
        single_device_attention(q, k, k, slices)


def test_m16_block_map_merged_and_not() -> None:
    merged, apart = block_map_mask(True), block_map_mask(False)
    assert len(merged.slices) < len(apart.slices)
    case = make_case(merged, (2, 1), (64, 64))
    reference, eager = case.reference(), case.eager()
    empty = ~case.dense.any(1)
    for mask in (merged, apart):
        ours = run_ours(case, mask)
        case.check("M16", ours, reference, eager)
        assert (ours.values["out"][empty] == 0).all()


@pytest.mark.parametrize(
    ("shape", "areas", "empty"),
    [
        ((8, 4), (32, 10, 10, 0), ([], [0, 1, 2, 3], [4, 5, 6, 7], [*range(8)])),
        ((4, 8), (32, 26, 26, 20), ([], [], [], [])),
        ((5, 5), (25, 15, 15, 5), ([], [], [], [])),
    ],
)
def test_m17_areas_and_empty_rows(shape: tuple[int, int], areas: tuple[int, ...], empty: tuple[list[int], ...]) -> None:
    for kind, area, rows in zip(TYPES, areas, empty, strict=True):
        mask = typed([(0, shape[0], 0, shape[1], kind)], *shape)
        assert mask.area() == area
        ours = check(f"M17 {kind}", mask).values
        assert (ours["lse"] == -torch.inf).all(1).nonzero()[:, 0].tolist() == rows
        assert (ours["out"][rows] == 0).all()


def test_m18_diagonal_and_first_key() -> None:
    total = 2048
    check("M18 a", causal(total), (1, 1), (64, 64))
    diagonal = builders.sliding_window(total, total, (0, 0))
    case = make_case(diagonal, (2, 2), (64, 64))
    q, k, v = case.tensors.values()
    out, lse = attend(q, k, v, diagonal)
    assert torch.equal(out, v)
    torch.testing.assert_close(lse, (q.float() * k.float()).sum(-1) / 8, rtol=0, atol=1e-4)
    out, _ = attend(q, k, v, typed([(0, total, 0, 1, "full")], total, total))
    assert torch.equal(out, v[:1].expand(total, -1, -1))


@pytest.mark.parametrize("total", [1, 127, 129, 1025])
def test_m22_causal_with_a_full_first_block(total: int) -> None:
    check("M22 causal", causal(total), (2, 1), (64, 64))
    both = typed([(0, total, 0, 64, "full"), (0, total, 64, 64 + total, "causal")], total, 64 + total)
    ours = check("M22 both", both, (2, 1), (64, 64)).values
    assert all(torch.isfinite(x).all() for x in ours.values())


def test_m23_random_slice_sets() -> None:
    rng = np.random.default_rng(0)
    for idx in range(250):
        total_q, total_k = (int(x) for x in rng.integers(1, 301, 2))
        mask = AttnMask.from_slices(random_slices(rng, total_q, total_k), total_q, total_k)
        dtype = torch.bfloat16 if idx % 5 == 0 else torch.float32
        check(f"M23 set {idx}: {mask.slices.tolist()}", mask, (2, 1), (16, 16), dtype)
