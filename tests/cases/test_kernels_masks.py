"""The M cases that concern one device, on CPU tensors, at the catalogue's sizes unless the README of this folder says otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magi_attention.api import InputError, flex_flash_attn_func, magi_attn_flex_key
from magi_attention.kernels.ops import single_device_attention
from magi_attention.mask import AttnMask, builders
from magi_attention.mask.slices import UNBOUNDED
from magi_attention.testing.masks import random_slices
from magi_attention.testing.numerics import AttentionResult
from tests.cases.single import HEADS, assert_same_within_rule, by_the_door, case_of, check, is_exact_zero, run_both
from tests.kernels.problems import attend, block_map_mask, causal, make_case, typed

pytestmark = pytest.mark.usefixtures("one_thread")

TYPES = ("full", "causal", "inv_causal", "bi_causal")


def test_m01_one_key_per_segment(poisoned_memory: str) -> None:
    mask = typed([(0, 76, 0, 1, "causal"), (76, 110, 1, 2, "causal"), (110, 256, 2, 3, "causal")], 256, 3)
    case = case_of(mask, (1, 1), (32, 32), torch.float16)
    for x in (*case.tensors.values(), case.dout):
        x.mul_(3)
    ours = run_both(case, mask).values
    rows = [75, 109, 255]
    empty = torch.ones(256, dtype=torch.bool)
    empty[rows] = False
    assert torch.equal(ours["out"][rows], case.tensors["v"]) and int(empty.sum()) == 253
    assert is_exact_zero(ours["out"][empty]) and (ours["lse"][empty] == -torch.inf).all() and torch.isfinite(ours["lse"][rows]).all()
    assert torch.equal(ours["dv"], case.dout[rows])
    assert ours["dq"].abs().max() <= 2e-2 and ours["dk"].abs().max() <= 2e-2 and is_exact_zero(ours["dq"][empty])
    assert not any(x.isnan().any() for x in ours.values())


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", [*TYPES, None])
def test_m03_nothing_to_see(kind: str | None) -> None:
    mask = AttnMask.from_slices([], 128, 128) if kind is None else typed([(0, 128, 0, 0, kind)], 128, 0)
    case = case_of(mask)
    ours = run_both(case, mask).values
    assert is_exact_zero(ours["out"]) and (ours["lse"] == -torch.inf).all()
    assert ours["out"].shape == ours["dq"].shape == (128, 8, 128) and ours["dk"].shape == ours["dv"].shape == (mask.total_k, 2, 128)
    assert all(is_exact_zero(ours[name]) for name in ("dq", "dk", "dv"))
    ranges = ([], []) if kind is None else ([[0, 128]], [[0, 0]])
    out, meta = flex_flash_attn_func(*case.tensors.values(), *ranges, [] if kind is None else [kind])
    assert is_exact_zero(out) and (meta.lse == -torch.inf).all()


@pytest.mark.timeout(60)
def test_m05_empty_segments() -> None:
    mask = builders.from_cu_seqlens([0, 0, 0, 1023], [0, 0, 1, 2046], causal=True)
    assert mask.area() == 1_569_282
    ours = check("M05", mask, (4, 4)).values
    assert is_exact_zero(ours["dk"][0]) and is_exact_zero(ours["dv"][0])


def test_m06_windows_that_are_causal() -> None:
    total = 16_384
    windows = [(None, 0), (total, 0), (total - 1, 0)]
    masks = [causal(total), *(builders.sliding_window(total, total, window) for window in windows)]
    # dout is 0 but for 256 rows, so the twins on these rows have all of dk, dv.
    rows = torch.from_numpy(np.unique(np.linspace(0, total - 1, 256).astype(int)))
    some = make_case(AttnMask.from_slices([], total, 1), (1, 1))
    keys = make_case(AttnMask.from_slices([], 1, total), (1, 1))
    tensors = {"q": some.tensors["q"], "k": keys.tensors["k"], "v": keys.tensors["v"]}
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    dout = torch.zeros_like(some.dout)
    dout[rows] = some.dout[rows]
    dense = torch.arange(total)[None] <= rows[:, None]
    case = type(some)({**tensors, "q": tensors["q"][rows].detach()}, dense, dout[rows], None, {})
    twins = case.reference(), case.eager()
    found: list[AttentionResult] = []
    for mask in masks:
        out, meta = flex_flash_attn_func(*leaves.values(), mask=mask)
        dq, dk, dv = torch.autograd.grad(out, list(leaves.values()), dout)
        ours = AttentionResult({"out": out[rows].detach(), "lse": meta.lse[rows].detach(), "dq": dq[rows], "dk": dk, "dv": dv})
        case.check("M06", ours, *twins)
        for other in found:
            assert_same_within_rule("M06", ours, other, twins)
        found.append(ours)


@pytest.mark.parametrize("q", [1, 17, 64, 100, 128, 129, 1000])
@pytest.mark.parametrize("c", [0, 1, 63, 128, 500, 4096])
@pytest.mark.timeout(30)
def test_m11_two_slices_equal_one(q: int, c: int) -> None:
    single = typed([(0, q, 0, c + q, "causal")], q, c + q)
    two = typed([(0, q, 0, c, "full"), (0, q, c, c + q, "causal")], q, c + q)
    case = case_of(single, (2, 1))
    twins = case.reference(), case.eager()
    one, both = run_both(case, single), run_both(case, two)
    case.check("M11 one slice", one, *twins)
    case.check("M11 two slices", both, *twins)
    assert_same_within_rule("M11", both, one, twins)


def test_m10_rows_between_slices(poisoned_memory: str) -> None:
    mask = typed([(0, 128, 0, 128, "full"), (256, 512, 0, 512, "full")], 512, 512)
    ours = check("M10", mask).values
    assert is_exact_zero(ours["out"][128:256]) and is_exact_zero(ours["dq"][128:256])
    assert (ours["lse"][128:256] == -torch.inf).all()


def test_m12_queries_past_the_end() -> None:
    q = torch.zeros(100, *HEADS[:1], 8)
    k = torch.zeros(200, HEADS[1], 8)
    ranges = [[0, 100], [100, 200]]
    with pytest.raises(InputError, match=r"q_ranges\[1\].*200.*100"):
        flex_flash_attn_func(q, k, k, ranges, ranges)
    with pytest.raises(InputError, match=r"q_ranges\[1\].*200.*total_q=100"):
        magi_attn_flex_key(ranges, ranges, "full", 100, 200, 8, 2, 8, 0, None, is_same_source=False)
    slices = [[0, 100, 0, 100, -UNBOUNDED, UNBOUNDED], [100, 200, 100, 200, -UNBOUNDED, UNBOUNDED]]
    with pytest.raises(InputError, match=r"slices\[1\].*\(100, 200\).*100 rows"):
        single_device_attention(q, k, k, slices)


def test_m13_double_cover_is_refused_at_every_door() -> None:
    q_ranges, k_ranges = [[0, 128], [64, 192]], [[0, 128], [0, 128]]
    q, k = torch.zeros(192, 8, 8), torch.zeros(128, 2, 8)
    words = r"entry 0 .*\[0, 128\).*entry 1 .*\[64, 192\).* 8192 cells twice"
    with pytest.raises(InputError, match=words):
        flex_flash_attn_func(q, k, k, q_ranges, k_ranges)
    with pytest.raises(InputError, match=words):
        magi_attn_flex_key(q_ranges, k_ranges, "full", 192, 128, 8, 2, 8, 0, None, is_same_source=False)


def test_m16_block_map_merged_and_not() -> None:
    merged, apart = block_map_mask(True), block_map_mask(False)
    assert len(merged.slices) < len(apart.slices)
    case = case_of(merged)
    twins = case.reference(), case.eager()
    empty = ~case.dense.any(1)
    assert int(empty.sum()) == 128, "the map has a row of blocks that sees nothing"
    found = [run_both(case, mask) for mask in (merged, apart)]
    for ours in found:
        case.check("M16", ours, *twins)
        assert is_exact_zero(ours.values["out"][empty]) and is_exact_zero(ours.values["dq"][empty])
        assert (ours.values["lse"][empty] == -torch.inf).all()
    assert_same_within_rule("M16", *found, twins)


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
        assert is_exact_zero(ours["out"][rows]) and is_exact_zero(ours["dq"][rows])


def test_m18_diagonal_and_first_key() -> None:
    total = 2048
    check("M18 a", causal(total), (2, 1))
    diagonal = builders.sliding_window(total, total, (0, 0))
    case = case_of(diagonal)
    q, k, v = case.tensors.values()
    ours = by_the_door(case, diagonal).values
    assert torch.equal(ours["out"], v.repeat_interleave(4, 1))
    scores = (q.double() * k.double().repeat_interleave(4, 1)).sum(-1) * 128**-0.5
    torch.testing.assert_close(ours["lse"].double(), scores, rtol=0, atol=1e-4)
    dv = case.dout.double().view(total, 2, 4, 128).sum(2)
    torch.testing.assert_close(ours["dv"].double(), dv, rtol=2**-8, atol=1e-5)
    out, _ = attend(q, k, v, typed([(0, total, 0, 1, "full")], total, total))
    assert torch.equal(out, v[:1].repeat_interleave(4, 1).expand(total, -1, -1))


@pytest.mark.parametrize("total", [1, 127, 129, 1025])
def test_m22_causal_with_a_full_first_block(total: int) -> None:
    check("M22 causal", causal(total), (2, 1))
    block = min(128, total)
    union = [(0, total, 0, block, "full"), (0, total, block, total, "causal")]  # causal, and all of the first block of keys
    before = [(0, total, 0, 128, "full"), (0, total, 128, 128 + total, "causal")]  # causal, and a block of keys in front of it
    for name, rows, total_k in (("union", union, total), ("in front", before, 128 + total)):
        ours = check(f"M22 {name}", typed(rows, total, total_k), (2, 1)).values
        assert all(torch.isfinite(x).all() for x in ours.values())


def test_m23_random_slice_sets() -> None:
    rng = np.random.default_rng(0)
    for idx in range(2000):
        total_q, total_k = (int(x) for x in rng.integers(1, 301, 2))
        mask = AttnMask.from_slices(random_slices(rng, total_q, total_k), total_q, total_k)
        dtype = torch.bfloat16 if idx % 5 == 0 else torch.float32
        case = make_case(mask, (2, 1), (16, 16), dtype)
        case.check(f"M23 set {idx}: {mask.slices.tolist()}", by_the_door(case, mask))
