"""Cases D and M of the catalogue about long use, odd use and misuse over ranks. Names start with the case."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from magi_attention import api
from magi_attention.api import DispatchConfig, DistAttnConfig, GrpCollConfig, InputError, UnsupportedError
from magi_attention.testing.workers import RankPool
from tests.runtime.harness import as_numpy


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def causal_key(total: int, heads: tuple[int, int, int], group: Any = None, **options: Any) -> api.DistAttnKey:
    return api.magi_attn_varlen_key([0, total], [0, total], *heads, 0, group, causal=True, **options)


# ---- M08: four ways to say causal ----


def windows_on_rank(rank: int, num_ranks: int) -> dict[str, np.ndarray]:
    cu_seqlens, heads = [0, 1024, 2048], (8, 2, 128)
    keys = [
        api.magi_attn_varlen_key(cu_seqlens, cu_seqlens, *heads, 0, None, causal=is_causal, window_size=window)
        for window, is_causal in (((-1, -1), True), ((None, 0), False), ((-1, 0), False), ((-1, -1), True))
    ]
    assert all(key == keys[0] for key in keys)  # one mask, so one plan: what holds for one holds for all
    q, k, v = (api.dispatch(draw(2048, heads, 128, seed=idx, dtype=torch.bfloat16), keys[0]) for idx, heads in enumerate((8, 2, 2)))
    out, meta = api.calc_attn(q, k, v, keys[1])
    return {"out": as_numpy(api.undispatch(out, keys[0])), "lse": as_numpy(api.undispatch(meta.lse, keys[0]))}


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_m08_windows_that_mean_causal(rank_pool: RankPool, num_ranks: int) -> None:
    alone, meta = api.flex_flash_attn_func(
        *(draw(2048, heads, 128, seed=idx, dtype=torch.bfloat16) for idx, heads in enumerate((8, 2, 2))),
        [[0, 1024], [1024, 2048]],
        [[0, 1024], [1024, 2048]],
        [1, 1],
    )
    for found in rank_pool.run(num_ranks, windows_on_rank):
        assert np.isfinite(found["lse"]).all()
        assert np.abs(found["out"]).max() > 0
        assert np.abs(found["out"] - as_numpy(alone)).max() <= 2**-7
        assert np.abs(found["lse"] - as_numpy(meta.lse)).max() <= 1e-3


# ---- D27: one rank, no torch.distributed ----


def test_d27_one_rank_equals_the_plain_kernel() -> None:
    assert not dist.is_initialized()
    key = causal_key(77, (4, 2, 16), chunk_size=8)
    tensors = [draw(77, heads, 16, seed=idx, dtype=torch.bfloat16) for idx, heads in enumerate((4, 2, 2))]
    dout = draw(77, 4, 16, seed=9, dtype=torch.bfloat16)
    found = []
    for is_distributed in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        if is_distributed:
            local = [api.dispatch(x, key) for x in (q, k, v)]
            out = api.undispatch(api.calc_attn(*local, key)[0], key)
        else:
            out, _ = api.flex_flash_attn_func(q, k, v, [[0, 77]], [[0, 77]], [1])
        out.backward(dout)
        found.append([as_numpy(x) for x in (out, q.grad, k.grad, v.grad)])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert not dist.is_initialized()


# ---- D29: round trips ----


def round_trip_on_rank(rank: int, num_ranks: int) -> None:
    key = api.magi_attn_varlen_key([0, 137, 2178, 2267], [0, 137, 2178, 2267], 2, 1, 16, 0, None, causal=True)
    for dtype in (torch.int64, torch.bfloat16, torch.bool):
        for shape in ((2267,), (2267, 3)):
            x = draw(*shape, seed=len(shape)) > 0 if dtype == torch.bool else (100 * draw(*shape)).to(dtype)
            if dtype.is_floating_point:
                x.requires_grad_()
            back = api.undispatch(api.dispatch(x, key), key)
            assert back.dtype == dtype
            assert torch.equal(back, x)
            if dtype.is_floating_point:
                weight = draw(*shape, seed=7, dtype=dtype)
                back.backward(weight)
                assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("num_ranks", (3, 8))
def test_d29_round_trip(rank_pool: RankPool, num_ranks: int) -> None:
    rank_pool.run(num_ranks, round_trip_on_rank)


# ---- D31: text that every rank holds, video that is spread ----

NUM_TEXT, NUM_VIDEO = 226, 1024


def replicated_text_on_rank(rank: int, num_ranks: int) -> dict[str, np.ndarray]:
    """Every rank computes the text's q, k, v itself; dispatch takes each token once and gives back its whole gradient."""
    total = NUM_TEXT + NUM_VIDEO
    key = api.magi_attn_flex_key([[0, total]], [[0, total]], "full", total, total, 2, 1, 16, 0, None)
    text = {
        name: draw(NUM_TEXT, heads, 16, seed=idx).requires_grad_() for idx, (name, heads) in enumerate({"q": 2, "k": 1, "v": 1}.items())
    }
    video = {name: draw(NUM_VIDEO, heads, 16, seed=10 + idx) for idx, (name, heads) in enumerate({"q": 2, "k": 1, "v": 1}.items())}
    out, _ = api.calc_attn(*(api.dispatch(torch.cat([text[name], video[name]]), key) for name in "qkv"), key)
    whole = api.undispatch(out, key)
    whole.backward(draw(total, 2, 16, seed=20))
    return {"out": as_numpy(whole), **{f"d{name}": as_numpy(x.grad) for name, x in text.items()}}


def test_d31_replicated_text_counts_once(rank_pool: RankPool) -> None:
    total = NUM_TEXT + NUM_VIDEO
    own = [
        torch.cat([draw(NUM_TEXT, heads, 16, seed=idx), draw(NUM_VIDEO, heads, 16, seed=10 + idx)]).double().requires_grad_()
        for idx, heads in enumerate((2, 1, 1))
    ]
    out, _ = api.flex_flash_attn_func(*own, [[0, total]], [[0, total]])
    out.backward(draw(total, 2, 16, seed=20).double())
    expected = {"out": out, **{f"d{name}": x.grad[:NUM_TEXT] for name, x in zip("qkv", own, strict=True)}}
    for found in rank_pool.run(2, replicated_text_on_rank):
        for name, array in found.items():
            assert np.allclose(array, as_numpy(expected[name]), rtol=1e-4, atol=2e-5), name


# ---- D32: a new mask in each step ----

SAMPLED = (0, 24, 49, 74, 99)


def many_masks_on_rank(rank: int, num_ranks: int) -> tuple[list[np.ndarray], list[int]]:
    """Outputs at the sampled steps, and bytes held by tensors after every tenth step from 20 on."""
    rng = np.random.default_rng(5)
    outputs, held = [], []
    for step in range(100):
        total = int(rng.integers(1, 5001))
        borders = [0, *sorted(rng.integers(0, total + 1, size=3).tolist()), total]
        key = api.magi_attn_varlen_key(borders, borders, 1, 1, 8, 0, None, causal=True, window_size=(int(rng.integers(0, 200)), 0))
        x = api.dispatch(draw(total, 1, 8, seed=step).requires_grad_(), key)
        out, _ = api.calc_attn(x, x, x, key)
        out.sum().backward()
        if step in SAMPLED:
            outputs.append(as_numpy(api.undispatch(out.detach(), key)))
        del key, x, out
        if step >= 20 and step % 10 == 0:  # a full collection is slow
            gc.collect()
            held.append(sum(obj.untyped_storage().nbytes() for obj in gc.get_objects() if type(obj) is torch.Tensor))
    return outputs, held


def test_d32_new_masks_leave_nothing_behind(rank_pool: RankPool) -> None:
    """Tensors alive between steps are index tables of remembered plans; 64 plans of at most 5,000 tokens are kept."""
    ((expected, _),) = rank_pool.run(1, many_masks_on_rank, timeout_s=150)
    for outputs, held in rank_pool.run(4, many_masks_on_rank, timeout_s=150):
        for ours, alone in zip(outputs, expected, strict=True):
            assert np.abs(ours - alone).max() <= 1e-5
        assert max(held) <= 64 * 5000 * 8 * 8
        assert max(held[-2:]) <= 1.5 * held[-3]  # once the cache is full (step 64) it stays level


# ---- D34 and D35: wrong use, missing transports ----


def test_d34_tensors_of_another_length() -> None:
    key = causal_key(4096, (1, 1, 8))
    x = torch.zeros(1024, 1, 8)
    with pytest.raises(InputError, match=r"1024.*4096"):
        api.calc_attn(x, x, x, key)
    with pytest.raises(InputError, match="4096 tokens"):
        api.dispatch(x, key)
    other = api.magi_attn_varlen_key([0, 96, 4096], [0, 96, 4096], 1, 1, 8, 0, None, causal=True)
    assert key != other
    assert key == causal_key(4096, (1, 1, 8))


def transports_on_rank(rank: int, num_ranks: int) -> list[str]:
    """What each transport says on this machine; "same" when it gives the numbers of the default."""
    expected, said = None, []
    for backend in ("auto", "a2av", "native", "hierarchical"):
        config = DistAttnConfig(dispatch_config=DispatchConfig(chunk_size=4), grpcoll_config=GrpCollConfig(backend=backend))
        key = causal_key(40, (1, 1, 8), dist_attn_config=config)
        x = api.dispatch(draw(40, 1, 8), key)
        try:
            out = as_numpy(api.calc_attn(x, x, x, key)[0])
        except (UnsupportedError, InputError) as error:
            said.append(str(error))
            continue
        expected = out if expected is None else expected
        said.append("same" if np.array_equal(out, expected) else "other")
    return said


def test_d35_missing_transports_are_refused_on_every_rank(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, transports_on_rank)
    assert first == second
    assert first[:2] == ["same", "same"]
    assert "no native transport" in first[2]
    assert "2-D DeviceMesh" in first[3]


def two_level_on_rank(rank: int, num_ranks: int) -> dict[str, np.ndarray]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("inter", "intra"))
    found = {}
    for backend in ("auto", "a2av", "hierarchical"):
        config = DistAttnConfig(dispatch_config=DispatchConfig(chunk_size=8), grpcoll_config=GrpCollConfig(backend=backend))
        key = causal_key(200, (2, 1, 16), mesh, dist_attn_config=config)
        whole = [draw(200, heads, 16, seed=idx).requires_grad_() for idx, heads in enumerate((2, 1, 1))]
        out = api.undispatch(api.calc_attn(*(api.dispatch(x, key) for x in whole), key)[0], key)
        out.backward(draw(200, 2, 16, seed=3))
        found[backend] = np.concatenate([as_numpy(x).ravel() for x in (out, *(x.grad for x in whole))])
    return found


def test_two_levels_by_the_public_door(rank_pool: RankPool) -> None:
    per_rank = rank_pool.run(4, two_level_on_rank)
    whole = [draw(200, heads, 16, seed=idx).double().requires_grad_() for idx, heads in enumerate((2, 1, 1))]
    out, _ = api.flex_flash_attn_func(*whole, [[0, 200]], [[0, 200]], [1])
    out.backward(draw(200, 2, 16, seed=3).double())
    expected = np.concatenate([as_numpy(x).ravel() for x in (out, *(x.grad for x in whole))])
    for found in per_rank:
        for backend, array in found.items():
            assert np.allclose(array, expected, rtol=1e-4, atol=1e-5), backend
