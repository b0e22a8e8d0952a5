"""Cases D of the catalogue about long use, odd use and misuse over ranks. Names start with the case."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from magi_attention import api
from magi_attention.api import DispatchConfig, DistAttnConfig, GrpCollConfig, InputError, UnsupportedError
from magi_attention.api.key_cache import MAX_PLANS_PER_GROUP
from magi_attention.testing.workers import RankPool
from tests.runtime.harness import Problem, as_numpy, assert_near_twins, eager, full, reference


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def causal_key(total: int, heads: tuple[int, int, int], group: Any = None, **options: Any) -> api.DistAttnKey:
    return api.magi_attn_varlen_key([0, total], [0, total], *heads, 0, group, causal=True, **options)


# ---- D27: one rank, no torch.distributed ----


def test_d27_one_rank_equals_the_plain_kernel() -> None:
    """Neither torch.distributed nor NVSHMEM, and still the same bits."""
    assert not dist.is_initialized()
    key = causal_key(333, (8, 2, 128), chunk_size=8)
    tensors = {"q": 8, "k": 2, "v": 2}
    inputs = [draw(333, heads, 128, seed=idx, dtype=torch.bfloat16) for idx, heads in enumerate(tensors.values())]
    dout = draw(333, 8, 128, seed=9, dtype=torch.bfloat16)
    found = []
    for is_distributed in (True, False):
        q, k, v, sink = (x.clone().requires_grad_() for x in (*inputs, draw(1, 8, seed=4)))
        if is_distributed:
            local = [api.dispatch(x, key) for x in (q, k, v)]
            out_local, meta = api.calc_attn(*local, key, sink)
            out, lse = api.undispatch(out_local, key), api.undispatch(meta.lse, key)
        else:
            out, meta = api.flex_flash_attn_func(q, k, v, [[0, 333]], [[0, 333]], [1], sink=sink)
            lse = meta.lse
        grads = torch.autograd.grad([out, lse], [q, k, v, sink], [dout, torch.ones_like(lse)])
        found.append([as_numpy(x) for x in (out, lse, *grads)])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert not dist.is_initialized() and key.group.backends == {}
    assert not [name for name in sys.modules if "nvshmem" in name.lower() and "magi" not in name]


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


WHOLE = Problem(
    full(NUM_TEXT + NUM_VIDEO, NUM_TEXT + NUM_VIDEO),
    NUM_TEXT + NUM_VIDEO,
    num_heads_q=2,
    num_heads_kv=1,
    head_dim=128,
    dtype=torch.bfloat16,
)


def replicated_text_on_rank(rank: int, num_ranks: int) -> dict[str, np.ndarray]:
    """Every rank computes the text's q, k, v itself; dispatch takes each token once and gives back its whole gradient."""
    total, inputs = WHOLE.total_q, WHOLE.inputs()
    key = api.magi_attn_flex_key([[0, total]], [[0, total]], "full", total, total, 2, 1, 128, 0, None)
    text = {name: inputs[name][:NUM_TEXT].clone().requires_grad_() for name in "qkv"}
    video = {name: inputs[name][NUM_TEXT:].clone().requires_grad_() for name in "qkv"}
    out_local, meta = api.calc_attn(*(api.dispatch(torch.cat([text[name], video[name]]), key) for name in "qkv"), key)
    out = api.undispatch(out_local, key)
    out.backward(inputs["dout"])
    grads = {f"d{name}": torch.cat([text[name].grad, video[name].grad]) for name in "qkv"}
    return {name: as_numpy(x) for name, x in {"out": out, "lse": api.undispatch(meta.lse, key), **grads}.items()}


def test_d31_replicated_text_counts_once(rank_pool: RankPool) -> None:
    twins = reference(WHOLE), eager(WHOLE)
    for found in rank_pool.run(2, replicated_text_on_rank):
        assert_near_twins({name: torch.from_numpy(array) for name, array in found.items()}, twins, "D31 ")


# ---- D32: a new mask in each step ----

SAMPLED = (0, 24, 49, 74, 99)
# One mask more than the cache remembers: each is forgotten before it comes back, and one period later the same plans are remembered.
PERIOD = MAX_PLANS_PER_GROUP + 1
TOTALS = np.random.default_rng(5).integers(1, 5001, size=PERIOD).tolist()
LOOKED_AT = (20, 25, 30, 20 + PERIOD, 25 + PERIOD, 30 + PERIOD)


def new_mask(step: int) -> dict[str, Any]:
    """Arguments of the step's key: documents and a window of its own."""
    rng, total = np.random.default_rng((7, step % PERIOD)), TOTALS[step % PERIOD]
    borders = [0, *sorted(rng.integers(0, total + 1, size=3).tolist()), total]
    return {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "causal": True, "window_size": (int(rng.integers(0, 200)), 0)}


def held_bytes() -> int:
    """The least of several looks: the transport's thread may still hold a payload that has just arrived; what leaks stays."""
    looks = []
    for _ in range(5):
        gc.collect()
        looks.append(sum(obj.untyped_storage().nbytes() for obj in gc.get_objects() if type(obj) is torch.Tensor))
        time.sleep(0.05)
    return min(looks)


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps of freed memory is not held by anyone
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()


def one_new_mask(step: int, dtype: torch.dtype) -> list[np.ndarray]:
    whole = draw(TOTALS[step % PERIOD], 1, 8, seed=step + PERIOD).to(dtype).requires_grad_()
    key = api.magi_attn_varlen_key(**new_mask(step), num_heads_q=1, num_heads_kv=1, head_dim=8, pad_size=0, cp_group_or_mesh=None)
    x = api.dispatch(whole, key)
    out = api.undispatch(api.calc_attn(x, x, x, key)[0], key)
    out.sum().backward()
    return [as_numpy(out), as_numpy(whole.grad)]


def many_masks_on_rank(rank: int, num_ranks: int) -> tuple[list[list[np.ndarray]], list[int], list[int], int]:
    """Results at the sampled steps; bytes of tensors and of the process after LOOKED_AT; bytes of tensors left without the cache."""
    api.clear_cache()
    before = held_bytes()
    for step in range(-MAX_PLANS_PER_GROUP, 0):  # the bounded cache is full before the first counted step
        one_new_mask(step, torch.float32)
    found, held, resident = [], [], []
    for step in range(100):
        results = one_new_mask(step, torch.float32)
        if step in SAMPLED:
            found.append(results)
        if step in LOOKED_AT:
            held.append(held_bytes())
            resident.append(resident_bytes())
    api.clear_cache()
    return found, held, resident, held_bytes() - before


@pytest.mark.timeout(240)
def test_d32_new_masks_leave_nothing_behind(rank_pool: RankPool) -> None:
    """Tensors alive between steps are index tables of remembered plans: to the byte as many when the same plans are remembered again."""
    expected = [one_new_mask(step, torch.float64) for step in SAMPLED]
    for found, held, resident, left in rank_pool.run(4, many_masks_on_rank, timeout_s=150):
        for ours, exact in zip(found, expected, strict=True):
            assert all(np.abs(array - wanted).max() <= 1e-5 for array, wanted in zip(ours, exact, strict=True))
        assert held[3:] == held[:3] and max(held) <= MAX_PLANS_PER_GROUP * 5000 * 8 * 8
        assert max(resident) <= resident[0] + (4 << 20), f"{(max(resident) - resident[0]) >> 10} KiB more after step 20"
        assert left == 0, f"{left} bytes of tensors are alive without any cache"


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
