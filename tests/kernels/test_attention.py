"""The blocked kernels against the dense twin: every catalogue mask, every feature, merging, poison, determinism."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from magi_attention.kernels import blocked
from magi_attention.kernels.attention import attention_backward, attention_forward, merge, softmax_delta
from magi_attention.kernels.reference import attention_reference
from magi_attention.kernels.sink import sink_lse
from magi_attention.mask import AttnMask
from magi_attention.mask.dense import dense_mask
from magi_attention.testing.masks import mask_catalogue
from magi_attention.testing.numerics import MERGE_EPS
from tests.kernels.problems import check, make_case, run_ours

pytestmark = pytest.mark.usefixtures("one_thread")

CATALOGUE = mask_catalogue()


@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue_in_float64_with_every_feature(name: str) -> None:
    mask = CATALOGUE[name]
    case = make_case(mask, (4, 2), (12, 20), torch.float64, sink_shape=(2, 4), with_dlse=True, softcap=3.0, softmax_scale=0.4)
    ours, reference = run_ours(case, mask), case.reference()
    for key, value in ours.values.items():
        torch.testing.assert_close(
            value, reference.values[key].to(value.dtype), rtol=1e-9, atol=1e-9 if value.dtype == torch.float64 else 1e-5
        )


@pytest.mark.parametrize("name", ["documents_causal", "window_cross", "prefix_tree", "block_map", "rows_without_keys", "no_keys"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_catalogue_in_training_dtypes(name: str, dtype: torch.dtype) -> None:
    check(name, CATALOGUE[name], (6, 2), (24, 16), dtype)


@pytest.mark.parametrize("columns", [16, 37])
def test_results_do_not_hang_on_the_block_size(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK_COLUMNS", columns)
    monkeypatch.setattr(blocked, "SCORE_CELLS", 1000)
    for name in ("causal", "documents_window_global", "block_map_unmerged", "video"):
        check(name, CATALOGUE[name], (4, 4), (16, 16), torch.float32, sink_shape=(1, 4))


def test_many_intervals_in_one_row() -> None:
    rng = np.random.default_rng(5)
    cells = rng.random((40, 90)) < 0.5
    slices = [[i, i + 1, j, j + 1, -(1 << 30), 1 << 30] for i, j in np.argwhere(cells)]
    check("single cells", AttnMask.from_slices(slices, 40, 90), (2, 1), (8, 8), torch.float32)


@pytest.mark.parametrize("name", ["rows_without_keys", "documents_cross", "causal_more_queries", "block_map", "no_slices", "one_cell"])
def test_garbage_that_no_slice_sees_stays_out(name: str, poisoned_memory: str) -> None:
    mask = CATALOGUE[name]
    case = make_case(mask, (4, 2), (16, 8), torch.float32)
    expected = case.reference()
    garbage = float(poisoned_memory)
    dead_q, dead_k = ~case.dense.any(1), ~case.dense.any(0)
    assert dead_q.any() or dead_k.any()
    for key, dead in (("q", dead_q), ("k", dead_k), ("v", dead_k)):
        case.tensors[key][dead] = garbage
    case.dout[dead_q] = garbage
    ours = run_ours(case, mask)
    for key, value in ours.values.items():
        torch.testing.assert_close(value.double(), expected.values[key], rtol=1e-4, atol=1e-4)
    assert (ours.values["out"][dead_q] == 0).all() and (ours.values["dq"][dead_q] == 0).all()
    assert (ours.values["lse"][dead_q] == float("-inf")).all()
    assert (ours.values["dk"][dead_k] == 0).all() and (ours.values["dv"][dead_k] == 0).all()


def accumulate(case_dtype: torch.dtype, num_parts: int) -> None:
    """Keys arriving in parts give what all keys at once give, in out, lse, max_logits and every gradient."""
    mask = CATALOGUE["documents_window_global"]
    case = make_case(mask, (4, 2), (16, 24), case_dtype)
    q, k, v = case.tensors["q"], case.tensors["k"], case.tensors["v"]
    total, wide = mask.total_q, torch.float64 if case_dtype == torch.float64 else torch.float32
    sink = torch.randn(1, 4, generator=torch.Generator().manual_seed(3))
    out, lse = torch.zeros(total, 4, 24, dtype=wide), sink_lse(sink, "sh", total, 4, wide)
    top = torch.full((4,), -torch.inf, dtype=wide)
    options = {"softmax_scale": 0.3, "softcap": 0.0}
    borders = np.linspace(0, mask.total_k, num_parts + 1).astype(int)
    parts = []
    for start, end in itertools.pairwise(borders):
        own = mask.slices.copy()
        own[:, 2:4] = np.clip(own[:, 2:4], start, end) - start
        own[:, 4:] = np.where(np.abs(own[:, 4:]) < 1 << 30, own[:, 4:] - start, own[:, 4:])
        parts.append((slice(start, end), own[own[:, 2] < own[:, 3]]))
    for keys, own in parts:
        attention_forward(q, k[keys], v[keys], own, out=out, lse=lse, max_logits=top, **options)
    want_out, want_lse, want_top = attention_reference(q, k, v, case.dense, softmax_scale=0.3, sink=sink)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if wide == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    for ours, reference in ((out, want_out), (lse, want_lse), (top, want_top)):
        torch.testing.assert_close(ours.double(), reference, **tolerance)
    delta = softmax_delta(case.dout, out)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
    for keys, own in parts:
        attention_backward(case.dout, q, k[keys], v[keys], lse, delta, own, dq=dq, dk=dk[keys], dv=dv[keys], **options)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(attention_reference(*leaves, case.dense, softmax_scale=0.3, sink=sink)[0], leaves, case.dout.double())
    for ours, reference in zip((dq, dk, dv), want, strict=True):
        torch.testing.assert_close(ours.double(), reference, **tolerance)


@pytest.mark.parametrize("num_parts", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_keys_in_parts(num_parts: int, dtype: torch.dtype) -> None:
    accumulate(dtype, num_parts)


def test_rows_that_see_nothing_keep_what_they_hold() -> None:
    q, k, v = (torch.randn(8, 2, 4) for _ in range(3))
    out, lse = torch.randn(8, 2, 4), torch.randn(8, 2)
    before = out.clone(), lse.clone()
    attention_forward(q, k, v, [[0, 4, 0, 8, -(1 << 30), 1 << 30]], softmax_scale=1.0, softcap=0.0, out=out, lse=lse)
    torch.testing.assert_close(out[4:], before[0][4:])
    assert torch.equal(lse[4:], before[1][4:]) and not torch.equal(lse[:4], before[1][:4])


def test_merge_follows_its_rule() -> None:
    generator = torch.Generator().manual_seed(0)
    out_a, out_b = (torch.randn(50, 3, 8, generator=generator) for _ in range(2))
    lse_a, lse_b = (torch.randn(50, 3, generator=generator) * 5 for _ in range(2))
    lse_a[:10], lse_b[5:15] = -torch.inf, -torch.inf
    out_a[:10], out_b[5:15] = 0, 0
    weights = torch.softmax(torch.stack([lse_a, lse_b]).double(), 0).nan_to_num()
    want = weights[0][..., None] * out_a + weights[1][..., None] * out_b
    out, lse = out_a.clone(), lse_a.clone()
    merge(out, lse, out_b, lse_b)
    bound = MERGE_EPS * torch.finfo(torch.float32).eps * max(out_a.abs().max(), out_b.abs().max())
    assert (out.double() - want).abs().max() <= bound
    assert (out[5:10] == 0).all() and (lse[5:10] == -torch.inf).all()
    other, other_lse = out_b.clone(), lse_b.clone()
    merge(other, other_lse, out_a, lse_a)
    assert (other - out).abs().max() <= bound and torch.equal(other_lse, lse)
    twice, twice_lse = out_a.clone(), lse_a.clone()
    merge(twice, twice_lse, out_a, lse_a)
    torch.testing.assert_close(twice, out_a)
    torch.testing.assert_close(twice_lse, lse_a + np.log(2.0))
    same, same_lse = out_a.clone(), lse_a.clone()
    merge(same, same_lse, torch.zeros_like(out_a), torch.full_like(lse_a, -torch.inf))
    assert torch.equal(same, out_a) and torch.equal(same_lse, lse_a)


def test_reference_is_the_softmax_of_the_definition() -> None:
    mask = CATALOGUE["documents_cross"]
    dense = torch.from_numpy(np.array(dense_mask(mask.slices, mask.total_q, mask.total_k)))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(mask.total_q, 1, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(mask.total_k, 1, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    out, lse, top = attention_reference(q, k, v, dense, softmax_scale=0.5)
    for row in range(mask.total_q):
        keys = dense[row].nonzero()[:, 0]
        scores = [float(0.5 * (q[row, 0] @ k[j, 0])) for j in keys]
        total = sum(np.exp(scores))
        want = sum((np.exp(s) * v[j, 0] for s, j in zip(scores, keys, strict=True)), torch.zeros(8, dtype=torch.float64)) / (total or 1.0)
        torch.testing.assert_close(out[row, 0], want)
        assert float(lse[row, 0]) == pytest.approx(np.log(total) if len(keys) else -np.inf)
    assert float(top[0]) == pytest.approx(float((0.5 * q[:, 0] @ k[:, 0].T)[dense].max()))
