"""AttnMask: slice algebra, areas, conversions and refusals against dense arrays."""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention import _native
from magi_attention.common import AttnMask, AttnMaskType, AttnRange, AttnRanges
from magi_attention.errors import InputError, UnsupportedError
from magi_attention.mask import plot
from magi_attention.mask.dense import cover_count
from magi_attention.mask.slices import UNBOUNDED
from magi_attention.testing.masks import mask_catalogue, random_mask, random_slices, random_typed_ranges

TOTAL_Q, TOTAL_K = 14, 17
bands = st.integers(-20, 20)
single_slices = st.builds(
    lambda q, k, lo, hi: [*sorted(q), *sorted(k), lo, hi],
    st.tuples(st.integers(0, TOTAL_Q), st.integers(0, TOTAL_Q)),
    st.tuples(st.integers(0, TOTAL_K), st.integers(0, TOTAL_K)),
    st.just(-UNBOUNDED) | bands,
    st.just(UNBOUNDED) | bands,
)


def dense_types(q_ranges: Any, k_ranges: Any, types: Any, total_q: int, total_k: int) -> np.ndarray:
    """Cover count from the words of the four types, row by row."""
    cover = np.zeros((total_q, total_k), int)
    for (q0, q1), (k0, k1), kind in zip(q_ranges, k_ranges, types, strict=True):
        for i in range(q1 - q0):
            first = i if kind in (2, 3) else 0
            last = i + (k1 - k0) - (q1 - q0) if kind in (1, 3) else k1 - k0 - 1
            cover[q0 + i, k0 + first : k0 + max(min(last + 1, k1 - k0), first)] += 1
    return cover


# ---- algebra of one slice ----


@given(single_slices)
def test_tighten_keeps_cells_and_leaves_nothing_loose(record: list[int]) -> None:
    expected = cover_count(record, TOTAL_Q, TOTAL_K)
    mask = AttnMask.from_slices([record], TOTAL_Q, TOTAL_K)
    assert mask.area() == expected.sum()
    assert (mask.to_dense() == expected).all()
    assert mask.is_empty == (expected.sum() == 0)
    if not mask.is_empty:
        q0, q1, k0, k1, lo, hi = mask.slices[0].tolist()
        rows, keys = expected.any(axis=1).nonzero()[0], expected.any(axis=0).nonzero()[0]
        assert (q0, q1, k0, k1) == (rows[0], rows[-1] + 1, keys[0], keys[-1] + 1)
        assert expected[q0:q1].any(axis=1).all(), "every row of a tight slice sees a key"
        assert expected[q0, k0], "the corner that the order relies on"
        box = expected[q0:q1, k0:k1]
        distance = np.arange(k0, k1)[None] - np.arange(q0, q1)[:, None]
        assert lo == -UNBOUNDED or (~box.astype(bool) & (distance < lo)).any(), "a bound that cuts nothing is no bound"
        assert hi == UNBOUNDED or (~box.astype(bool) & (distance > hi)).any()


@given(single_slices)
def test_transpose(record: list[int]) -> None:
    mask = AttnMask.from_slices([record], TOTAL_Q, TOTAL_K)
    turned = mask.transpose()
    assert (turned.to_dense() == mask.to_dense().T).all() and turned.transpose() == mask


@given(single_slices, st.tuples(bands, bands), st.tuples(bands, bands))
def test_crop_is_clip_and_move(record: list[int], rows: tuple[int, int], keys: tuple[int, int]) -> None:
    q0, q1 = sorted(np.clip(rows, 0, TOTAL_Q).tolist())
    k0, k1 = sorted(np.clip(keys, 0, TOTAL_K).tolist())
    mask = AttnMask.from_slices([record], TOTAL_Q, TOTAL_K)
    assert (mask.crop(q0, q1, k0, k1).to_dense() == mask.to_dense()[q0:q1, k0:k1]).all()


@given(single_slices)
def test_four_types_express_every_band(record: list[int]) -> None:
    mask = AttnMask.from_slices([record], TOTAL_Q, TOTAL_K)
    q_ranges, k_ranges, types = mask.to_ranges()
    assert len(types) <= 3
    numbers = [kind.to_int_type() for kind in types]
    cover = dense_types(q_ranges.to_naive_ranges(), k_ranges.to_naive_ranges(), numbers, TOTAL_Q, TOTAL_K)
    assert (cover == mask.to_dense()).all()


def test_area_does_not_overflow_at_the_largest_mask() -> None:
    most = (1 << 30) - 1
    assert AttnMask.from_ranges([[0, most]], [[0, most]], None, most, most).area() == most * most
    causal = AttnMask.from_ranges([[0, most]], [[0, most]], "causal", most, most)
    assert causal.area() == most * (most + 1) // 2 == causal.transpose().area()
    corner = causal.crop(most - 5, most, most - 5, most)
    assert corner.area() == 15 and (corner.to_dense() == np.tri(5, dtype=bool)).all()


# ---- whole masks ----


def test_random_sets_survive_every_conversion() -> None:
    rng = np.random.default_rng(1)
    for _ in range(150):
        total_q, total_k = (int(total) for total in rng.integers(0, 140, 2))
        slices = random_slices(rng, total_q, total_k)
        expected = cover_count(slices, total_q, total_k)
        assert expected.max(initial=0) <= 1
        mask = AttnMask.from_slices(slices, total_q, total_k)
        assert (mask.to_dense() == expected).all() and mask.area() == expected.sum()
        assert AttnMask.from_slices(slices[::-1], total_q, total_k).digest == mask.digest, "order of the input must not matter"
        assert AttnMask.from_json(mask.to_json()) == mask
        assert (AttnMask.from_ranges(*mask.to_ranges(), total_q, total_k).to_dense() == expected).all()
        assert (mask.transpose().to_dense() == expected.T).all()
        share = grid_of(mask, 7)
        assert np.isclose(share, dense_shares(expected, 7)).all()


def grid_of(mask: AttnMask, max_cells: int) -> np.ndarray:
    return plot.visible_share(mask.slices, plot.grid_edges(mask.total_q, max_cells), plot.grid_edges(mask.total_k, max_cells))


def dense_shares(cover: np.ndarray, max_cells: int) -> np.ndarray:
    q, k = (plot.grid_edges(total, max_cells) for total in cover.shape)
    cells = [[cover[q[a] : q[a + 1], k[b] : k[b + 1]].mean() for b in range(len(k) - 1)] for a in range(len(q) - 1)]
    return np.array(cells).reshape(len(q) - 1, len(k) - 1)


def test_random_typed_ranges_mean_what_the_words_say() -> None:
    rng = np.random.default_rng(2)
    seen = set()
    for _ in range(150):
        total_q, total_k = (int(total) for total in rng.integers(1, 150, 2))
        q_ranges, k_ranges, types = random_typed_ranges(rng, total_q, total_k)
        seen |= set(types.tolist())
        cover = dense_types(q_ranges.tolist(), k_ranges.tolist(), types.tolist(), total_q, total_k)
        assert cover.max() <= 1
        assert (AttnMask.from_ranges(q_ranges, k_ranges, types, total_q, total_k).to_dense() == cover).all()
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("name", mask_catalogue())
def test_catalogue_is_valid(name: str) -> None:
    mask = mask_catalogue()[name]
    cover = cover_count(mask.slices, mask.total_q, mask.total_k)
    assert cover.max(initial=0) <= 1 and mask.area() == cover.sum()
    assert AttnMask.from_slices(mask.slices, mask.total_q, mask.total_k) == mask
    assert pickle.loads(pickle.dumps(mask)) == mask


def test_equal_masks_are_equal_keys() -> None:
    first = AttnMask.from_ranges([[0, 4], [4, 8]], [[0, 4], [0, 8]], [1, 0], 8, 8)
    again = AttnMask.from_ranges([[4, 8], [0, 4]], [[0, 8], [0, 4]], ["full", "causal"], 8, 8)
    longer = AttnMask.from_ranges([[0, 4], [4, 8]], [[0, 4], [0, 8]], [1, 0], 9, 8)
    assert first == again and hash(first) == hash(again) and first != longer
    assert first.digest == again.digest and len(first.digest) == 64
    assert not first.slices.flags.writeable
    assert repr(first) == "AttnMask(total_q=8, total_k=8, 2 slices, area=42)"


def test_digest_is_the_same_on_every_machine() -> None:
    mask = AttnMask.from_ranges([[0, 5]], [[0, 8]], ["causal"], 5, 8)
    expected = b"".join(number.to_bytes(8, "little") for number in (5, 8, 1))
    expected += b"".join(number.to_bytes(4, "little", signed=True) for number in (0, 5, 0, 8, -UNBOUNDED, 3))
    assert mask.digest == hashlib.sha256(expected).hexdigest()


# ---- what callers pass ----

RANGES = [[0, 4], [4, 9]]


@pytest.mark.parametrize(
    "ranges",
    [
        RANGES,
        tuple(map(tuple, RANGES)),
        np.array(RANGES, np.int32),
        np.array(RANGES, np.uint16),
        torch.tensor(RANGES, dtype=torch.int32),
        torch.tensor(RANGES, dtype=torch.int64),
        AttnRanges.from_ranges(RANGES),
        [AttnRange(0, 4), AttnRange(4, 9)],
        [[np.int64(0), np.int32(4)], [np.int64(4), np.int64(9)]],
    ],
    ids=lambda ranges: type(ranges).__name__,
)
@pytest.mark.parametrize(
    "types", [[1, 0], ["causal", "full"], [AttnMaskType.CAUSAL, "full"], torch.tensor([1, 0]), np.array([1, 0], np.int32)], ids=str
)
def test_every_way_of_writing_a_mask(ranges: Any, types: Any) -> None:
    mask = AttnMask.from_ranges(ranges, ranges, types, 9, 9)
    assert mask.slices.tolist() == [[0, 4, 0, 4, -UNBOUNDED, 0], [4, 9, 4, 9, -UNBOUNDED, UNBOUNDED]]


@pytest.mark.parametrize("nothing", [[], (), np.zeros((0, 2)), torch.zeros(0, 2), AttnRanges(), [[0, 0]], [[5, 5], [2, 2]]], ids=str)
def test_nothing_is_normal(nothing: Any) -> None:
    mask = AttnMask.from_ranges(nothing, nothing, None, 5, 6)
    assert mask.is_empty and mask.area() == 0 and mask.to_dense().shape == (5, 6)
    assert mask.transpose().total_q == 6 and AttnMask.from_json(mask.to_json()) == mask
    assert AttnMask.from_slices([], 0, 0).to_dense().shape == (0, 0)


def test_one_type_for_all() -> None:
    for kind in ("causal", AttnMaskType.CAUSAL):
        assert AttnMask.from_ranges(RANGES, RANGES, kind, 9, 9) == AttnMask.from_ranges(RANGES, RANGES, [1, 1], 9, 9)
    assert AttnMask.from_ranges(RANGES, RANGES, None, 9, 9) == AttnMask.from_ranges(RANGES, RANGES, [0, 0], 9, 9)


@pytest.mark.parametrize(
    ("q_ranges", "k_ranges", "types", "words"),
    [
        ([[0, 4.0]], [[0, 4]], None, ["q_ranges", "float", "4.0", "integers"]),
        (torch.tensor([[0.0, 4.0]]), [[0, 4]], None, ["q_ranges", "float32", "integers"]),
        (torch.tensor([[0, 4]], dtype=torch.bfloat16), [[0, 4]], None, ["q_ranges", "bfloat16"]),
        ([[0, 4]], np.array([[0, 4.5]]), None, ["k_ranges", "float64"]),
        ([["0", "4"]], [[0, 4]], None, ["q_ranges"]),
        ([[0, 1 << 70]], [[0, 4]], None, ["q_ranges", "2^30"]),
        ([[0, 4], [1]], [[0, 4]], None, ["q_ranges", "same length"]),
        ([0, 4], [[0, 4]], None, ["q_ranges", "[n, 2]"]),
        ([[0, 4, 5]], [[0, 4]], None, ["q_ranges", "[1, 3]", "[n, 2]"]),
        ([[0, 4], [-2, 4]], [[0, 4]] * 2, None, ["q_ranges[1]", "[-2, 4)", "below 0"]),
        ([[0, 4]], [[4, 1]], None, ["k_ranges[0]", "[4, 1)", "reversed", "[1, 4)"]),
        ([[0, 11]], [[0, 4]], None, ["q_ranges[0]", "[0, 11)", "total_q=10"]),
        ([[0, 4]], [[12, 12]], None, ["k_ranges[0]", "[12, 12)", "total_k=10"]),
        ([[0, 4]] * 3, [[0, 4]] * 3, [0, 1], ["attn_type_map", "2 types", "3 q_ranges"]),
        ([[0, 4]] * 3, [[0, 4]] * 2, None, ["q_ranges", "3", "k_ranges", "2"]),
        ([[0, 4]], [[0, 4]], [4], ["attn_type_map[0]=4", "3 (bi_causal)"]),
        ([[0, 4]], [[0, 4]], [-1], ["attn_type_map[0]=-1"]),
        ([[0, 4]], [[0, 4]], ["casual"], ["attn_type_map", "casual", "causal"]),
        ([[0, 4]], [[0, 4]], [1.0], ["attn_type_map", "float"]),
        ([[0, 4]], [[0, 4]], [None], ["attn_type_map"]),
    ],
)
def test_wrong_ranges_are_named(q_ranges: Any, k_ranges: Any, types: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        AttnMask.from_ranges(q_ranges, k_ranges, types, 10, 10)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("total", [-1, 1 << 30, 4.0, "8"])
def test_wrong_totals_are_named(total: Any) -> None:
    with pytest.raises(InputError, match="total_k"):
        AttnMask.from_slices([], 8, total)


@pytest.mark.parametrize("record", [[0, 9, 0, 4, 0, 0], [0, 4, 0, 9, 0, 0], [3, 2, 0, 4, 0, 0], [0, 4, -1, 4, 0, 0]])
def test_wrong_slices_are_named(record: list[int]) -> None:
    with pytest.raises(InputError, match=r"slices \([qk]\)\[1\]"):
        AttnMask.from_slices([[0, 1, 0, 1, 0, 0], record], 8, 8)
    with pytest.raises(InputError, match=r"\[n, 6\]"):
        AttnMask.from_slices([record[:5]], 8, 8)


def test_bounds_beyond_the_sentinel_are_no_bounds() -> None:
    far = 1 << 40
    assert AttnMask.from_slices([[0, 8, 0, 8, -far, far]], 8, 8) == AttnMask.from_ranges([[0, 8]], [[0, 8]], None, 8, 8)


def test_crop_outside_is_refused() -> None:
    with pytest.raises(InputError, match=r"crop \(q\)"):
        AttnMask.from_slices([], 8, 8).crop(0, 9, 0, 8)


# ---- JSON ----


def test_json_reads_both_forms() -> None:
    text = '{"total_q": 8, "total_k": 8, "slices": [[0, 4, 0, 4, "causal"], [4, 8, 0, 8, -3, null]]}'
    mask = AttnMask.from_json(text)
    assert mask == AttnMask.from_slices([[0, 4, 0, 4, -UNBOUNDED, 0], [4, 8, 0, 8, -3, UNBOUNDED]], 8, 8)
    assert json.loads(mask.to_json())["slices"] == [[0, 4, 0, 4, None, 0], [4, 8, 1, 8, -3, None]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "total_q"),
        ('{"total_q": 1, "slices": []}', "total_k"),
        ('{"total_q": 8, "total_k": 8, "slices": [[0, 4, 0]]}', "neither 5 nor 6"),
        ('{"total_q": 8, "total_k": 8, "slices": [[0, 4, 0, 4, "half"]]}', "half"),
        ('{"total_q": 8, "total_k": 8, "slices": [[0, 4, 0, 4, 0.5, null]]}', "float"),
        ('{"total_q": 8, "total_k": 8, "slices": [[0, 4, 0, 9, "full"]]}', "total_k=8"),
        ('{"total_q": 8.5, "total_k": 8, "slices": []}', "total_q"),
        ('{"total_q": 8, "total_k": 8, "slices": [[0, 4, 0, 4, "full"], [0, 1, 0, 1, "full"]]}', "1 cells twice"),
    ],
)
def test_wrong_json_is_named(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        AttnMask.from_json(text)


# ---- pictures ----


@pytest.mark.parametrize("name", ["empty", "no_keys", "window_cross", "documents_causal", "one_key_per_segment"])
def test_pictures_are_written(name: str, tmp_path: Any) -> None:
    path = tmp_path / "mask.png"
    mask_catalogue()[name].plot(path, max_cells=50)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_million_tokens_make_a_small_grid() -> None:
    total = 1 << 20
    mask = AttnMask.from_ranges([[0, total]], [[0, total]], "causal", total, total)
    share = grid_of(mask, 512)
    assert share.shape == (512, 512)
    assert (share[np.triu_indices(512, 1)] == 0).all() and (share[np.tril_indices(512, -1)] == 1).all()
    assert np.allclose(np.diag(share), 2049 / 4096)


@pytest.mark.parametrize("name", ["mask.abc", "mask"])
def test_a_picture_of_no_known_format_is_refused(name: str, tmp_path: Any) -> None:
    with pytest.raises(InputError, match=r"\.png, \.svg or \.pdf"):
        mask_catalogue()["causal"].plot(tmp_path / name)


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match="pip install"):
        mask_catalogue()["causal"].plot(tmp_path / "mask.png")


# ---- the C++ border ----


@settings(max_examples=50)
@given(st.lists(single_slices, max_size=5))
def test_tighten_and_canonical_agree(records: list[list[int]]) -> None:
    raw = np.array(records, np.int32).reshape(-1, 6)
    tight = _native.run("tighten", slices=raw)["slices"].reshape(-1, 6)
    found = _native.run("canonical", slices=raw, check=0)
    assert sorted(tight.tolist()) == sorted(found["slices"].reshape(-1, 6).tolist())
    for row, source in zip(found["slices"].reshape(-1, 6), found["source"], strict=True):
        alone = _native.run("tighten", slices=raw[source : source + 1])["slices"]
        assert alone.tolist() == row.tolist()


def test_random_mask_is_reproducible() -> None:
    first, again = (random_mask(np.random.default_rng(7), 200, 130).digest for _ in range(2))
    assert first == again
