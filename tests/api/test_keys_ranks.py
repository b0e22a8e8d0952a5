"""Keys on several gloo ranks: parity with one rank, agreement, caches, errors that leave no rank waiting."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from magi_attention.api import (
    AttnMask,
    DispatchConfig,
    DistAttnConfig,
    InputError,
    calc_attn,
    clear_cache,
    dispatch,
    flex_flash_attn_func,
    get_most_recent_key,
    get_position_ids,
    magi_attn_flex_key,
    magi_attn_varlen_key,
    make_varlen_key_for_new_mask_after_dispatch,
    reduce_loss,
    roll,
    shift_labels,
    undispatch,
)
from magi_attention.api.key_cache import MAX_PLANS_PER_GROUP, cache_of
from magi_attention.comm import comm_group
from magi_attention.testing.workers import RankPool

CU = [0, 37, 37, 150, 251]
TOTAL = CU[-1]


def tensors(total_q: int = TOTAL, total_k: int = TOTAL, heads: tuple[int, int] = (4, 2), dim: int = 8, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v in float64, equal on every rank, so that parity is a matter of the plan and not of rounding."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(total_q, heads[0], dim), (total_k, heads[1], dim), (total_k, heads[1], dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def assert_equals_single_device(inputs: list[torch.Tensor], key: Any, k_role: str = "q") -> None:
    """Forward and every gradient through dispatch, calc_attn, undispatch against flex_flash_attn_func on the same mask."""
    q, k, v = inputs
    local = (dispatch(q, key), dispatch(k, key, role=k_role), dispatch(v, key, role=k_role))
    out_local, meta = calc_attn(*local, key, return_max_logits=True)
    out, lse = undispatch(out_local, key), undispatch(meta.lse, key)
    gradients = torch.autograd.grad(out.square().sum() + lse.clamp(min=-9).sum(), inputs)
    single, single_meta = flex_flash_attn_func(q, k, v, mask=key.mask, return_max_logits=True)
    expected = torch.autograd.grad(single.square().sum() + single_meta.lse.clamp(min=-9).sum(), inputs)
    torch.testing.assert_close(out, single, rtol=0, atol=1e-11)
    torch.testing.assert_close(lse, single_meta.lse, rtol=0, atol=1e-11)
    torch.testing.assert_close(meta.max_logits, single_meta.max_logits, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


# ---- several keys at once ----


def interleave(rank: int, num_ranks: int) -> None:
    group = dist.group.WORLD
    causal = magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, group, causal=True, chunk_size=16)
    window = make_varlen_key_for_new_mask_after_dispatch(CU, CU, causal, causal=True, window_size=(9, 0))
    more_heads = make_varlen_key_for_new_mask_after_dispatch(CU, CU, causal, causal=True, num_heads_q=6, num_heads_kv=3)
    assert get_most_recent_key(group) == more_heads
    for key in (causal, window, causal):
        assert_equals_single_device(tensors(), key)
    assert_equals_single_device(tensors(heads=(6, 3)), more_heads)
    # Two micro-batches, forwards first, then backwards in the order of the forwards and in the other one.
    for order in ((0, 1), (1, 0)):
        batches = [tensors(seed=1), tensors(seed=2)]
        keys = (causal, window)
        outs = [calc_attn(*(dispatch(x, key) for x in batch), key)[0] for batch, key in zip(batches, keys, strict=True)]
        losses = [undispatch(out, key).square().sum() for out, key in zip(outs, keys, strict=True)]
        gradients: dict[int, Any] = {}
        for idx in order:
            gradients[idx] = torch.autograd.grad(losses[idx], batches[idx])
        for idx, key in enumerate(keys):
            expected = torch.autograd.grad(flex_flash_attn_func(*batches[idx], mask=key.mask)[0].square().sum(), batches[idx])
            for ours, theirs in zip(gradients[idx], expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_two_keys_interleave(rank_pool: RankPool, num_ranks: int) -> None:
    rank_pool.run(num_ranks, interleave)


# ---- padding and cross attention ----


def even_shards(rank: int, num_ranks: int) -> tuple[int, int]:
    config = DistAttnConfig(dispatch_config=DispatchConfig(uneven_shard=False, chunk_size=32))
    key = magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, dist.group.WORLD, causal=True, dist_attn_config=config)
    assert_equals_single_device(tensors(), key)
    x = torch.arange(1, TOTAL + 1)
    local = dispatch(x, key, pad_value=-7)
    assert local.shape[0] == key.num_local_q and torch.equal(undispatch(local, key), x)
    positions = get_position_ids(key)
    is_padding = positions >= TOTAL
    assert (local[is_padding] == -7).all() and torch.equal(local[~is_padding], positions[~is_padding] + 1)
    out, meta = calc_attn(*(dispatch(t, key, pad_value=100.0) for t in tensors()), key)
    assert not out[is_padding].any() and torch.isneginf(meta.lse[is_padding]).all(), "padding sees nothing"
    for shift in (-1, 3, TOTAL + 2):
        assert torch.equal(roll(local, shift, 0, key), dispatch(torch.roll(x, shift, 0), key))
    labels = shift_labels(local, key)
    assert (labels[is_padding] == -100).all() and torch.equal(undispatch(labels, key)[36], torch.tensor(-100))
    window = make_varlen_key_for_new_mask_after_dispatch(CU, CU, key, causal=True, window_size=(9, 0))
    assert window.pad_size == key.pad_size
    assert_equals_single_device(tensors(), window)
    cross_key = magi_attn_flex_key(
        [[0, 90]], [[20, 201]], "causal", 90, 201, 4, 2, 8, 0, dist.group.WORLD, config, is_same_source=False
    )  # fmt: skip
    assert_equals_single_device(tensors(90, 201), cross_key, k_role="k")
    return key.num_local_q, key.pad_size


def test_even_shards_pad_like_the_original(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, even_shards) == [(128, 5), (128, 5)]


def cross(rank: int, num_ranks: int) -> None:
    for is_k_permutable in (True, False):
        key = magi_attn_flex_key(
            [[0, 50], [50, 90]], [[0, 130], [40, 200]], ["causal", "full"], 90, 201, 4, 2, 8, 0, dist.group.WORLD,
            is_same_source=False, is_k_permutable=is_k_permutable,
        )  # fmt: skip
        assert_equals_single_device(tensors(90, 201), key, k_role="k")
        x = torch.arange(201)
        assert torch.equal(undispatch(dispatch(x, key, role="k"), key, role="k"), x)
        with pytest.raises(InputError, match="201 entries"):
            dispatch(x, key)
    key = magi_attn_flex_key([[0, 64]], [[0, 64]], "inv_causal", 64, 64, 4, 2, 8, 0, dist.group.WORLD, is_same_source=False)
    assert_equals_single_device(tensors(64, 64), key, k_role="k")


def test_cross_attention(rank_pool: RankPool) -> None:
    rank_pool.run(2, cross)


def empty_and_tiny(rank: int, num_ranks: int) -> None:
    for total in (0, 1, 3):
        key = magi_attn_varlen_key([0, total], [0, total], 4, 2, 8, 0, dist.group.WORLD, causal=True)
        assert_equals_single_device(tensors(total, total), key)


def test_fewer_tokens_than_ranks(rank_pool: RankPool) -> None:
    rank_pool.run(3, empty_and_tiny)


def on_a_mesh(rank: int, num_ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    key = magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, mesh, causal=True, chunk_size=16)
    assert (key.cp_size, key.cp_rank, key.group.num_nodes) == (4, rank, 2)
    assert any(step.hierarchical is not None for step in key.plan.forward)
    assert_equals_single_device(tensors(), key)
    assert key == magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, mesh, causal=True, chunk_size=16) == get_most_recent_key(mesh)
    row = magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, mesh["intra"], causal=True)
    assert (row.cp_size, row.cp_rank) == (2, rank % 2) and row != key
    assert_equals_single_device(tensors(seed=rank // 2), row)


def test_device_mesh_of_one_and_two_dims(rank_pool: RankPool) -> None:
    rank_pool.run(4, on_a_mesh)


# ---- token helpers ----


def move_labels(rank: int, num_ranks: int) -> None:
    cu = [0, 5, 16]
    key = magi_attn_varlen_key(cu, cu, 4, 2, 8, 0, dist.group.WORLD, causal=True, chunk_size=2)
    ids = torch.arange(16)
    expected = torch.tensor([1, 2, 3, 4, -100, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, -100])  # D13
    assert torch.equal(undispatch(shift_labels(dispatch(ids, key), key), key), expected)
    assert torch.equal(undispatch(roll(dispatch(ids, key), -1, 0, key, within_documents=True), key), expected)
    filled = roll(dispatch(ids, key), 1, 0, key, within_documents=True, cu_seqlens=[0, 16], fill_value=9)
    assert undispatch(filled, key).tolist() == [9, *range(15)]
    axes = torch.arange(3 * 2 * 16).reshape(3, 2, 16)
    assert torch.equal(undispatch(dispatch(axes, key, dim=-1), key, dim=-1), axes)
    assert torch.equal(dispatch(axes, key, dim=2)[0, 0], get_position_ids(key))
    mean = reduce_loss(torch.tensor(2.0 * 100 if rank == 0 else 0.0), 100 if rank == 0 else 0)  # D15 (b)
    assert mean.item() == 2.0


def test_labels_roll_axes_and_loss(rank_pool: RankPool) -> None:
    rank_pool.run(2, move_labels)


# ---- caches ----


def fill_cache(rank: int, num_ranks: int) -> tuple[list[str], str]:
    group = dist.group.WORLD
    clear_cache()
    generator = torch.Generator().manual_seed(3)
    for length in torch.randint(1, 90, (150,), generator=generator).tolist():
        magi_attn_varlen_key([0, length, 100], [0, length, 100], 4, 2, 8, 0, group, causal=True)
    cache = cache_of(comm_group(group))
    assert len(cache.plans) <= MAX_PLANS_PER_GROUP
    return [identity.digest for identity in cache.plans.keys()], get_most_recent_key(group).identity.digest  # type: ignore[attr-defined] # noqa: SIM118


def test_every_rank_keeps_and_evicts_the_same(rank_pool: RankPool) -> None:
    first, *others = rank_pool.run(2, fill_cache)
    assert len(first[0]) == MAX_PLANS_PER_GROUP
    assert all(other == first for other in others)


# ---- what goes wrong ----


def bad_call_on_one_rank(rank: int, num_ranks: int) -> None:
    """Rank 1 alone makes every bad call; rank 0 goes straight to the good one. A message sent for a bad call would break it."""
    key = magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, dist.group.WORLD, causal=True, chunk_size=16)
    q, k, v = (dispatch(x, key).detach() for x in tensors())
    if rank == 1:
        bad: list[tuple[Any, str]] = [
            (lambda: calc_attn(q[:-1], k, v, key), "q"),
            (lambda: calc_attn(q, k[:-1], v[:-1], key), "k"),
            (lambda: calc_attn(*tensors(), key), "dispatch"),
            (lambda: calc_attn(q[:, :2], k, v, key), "num_heads_q=4"),
            (lambda: calc_attn(q[..., :4], k[..., :4], v, key), "head_dim=8"),
            (lambda: calc_attn(q.transpose(0, 1).unsqueeze(0), k, v, key), "squash_batch_dim"),
            (lambda: calc_attn(q.float(), k, v, key), "float32"),
            (lambda: calc_attn(q, k, v, key, sink=torch.zeros(1, 3)), "sink"),
            (lambda: calc_attn(q, k, v, key, softcap=-1.0), "softcap=-1.0"),
            (lambda: undispatch(q[:-1], key), "entries along dim=0"),
            (lambda: roll(q, 1, 1, key), "dim=1"),
            (lambda: magi_attn_varlen_key([0, 9], [0, 8, 9], 4, 2, 8, 0, dist.group.WORLD), "cu_seqlens_q"),
        ]
        for call, words in bad:
            with pytest.raises(InputError, match=words):
                call()
    assert_equals_single_device(tensors(), key)


def test_bad_calls_send_nothing(rank_pool: RankPool) -> None:
    rank_pool.run(2, bad_call_on_one_rank, timeout_s=30)


def keys_of_dead_and_foreign_groups(rank: int, num_ranks: int) -> None:
    group = dist.new_group([0, 1])
    key = magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, group, causal=True)
    local = [dispatch(x, key).detach() for x in tensors()]
    again = magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, dist.group.WORLD, causal=True)
    assert key != again, "two groups of the same ranks"
    dist.destroy_process_group(group)
    for call in (
        lambda: calc_attn(*local, key),
        lambda: undispatch(local[0], key),
        lambda: magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, group),
    ):
        with pytest.raises(InputError, match="live"):
            call()
    assert_equals_single_device(tensors(), again)
    others = dist.new_group([1])
    if rank == 0:
        with pytest.raises(InputError, match="does not contain this process"):
            magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, others)
    else:
        alone = magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, others, causal=True)
        assert (alone.cp_size, alone.num_local_q) == (1, TOTAL)
        assert_equals_single_device(tensors(), alone)


def test_groups_that_are_dead_or_foreign(rank_pool: RankPool) -> None:
    rank_pool.run(2, keys_of_dead_and_foreign_groups)


def disagree(rank: int, num_ranks: int, how: str) -> tuple[str, float]:
    os.environ["MAGI_CHECK"] = "1"
    try:
        group = dist.group.WORLD
        good = magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, group, causal=True)  # cached: agreement comes before the look-up
        assert_equals_single_device(tensors(), good)
        start = time.monotonic()
        try:
            if how == "mask":
                cu = CU if rank == 0 else [0, 38, 150, 251]
                magi_attn_varlen_key(cu, cu, 4, 2, 8, 0, group, causal=True)
            elif how == "config":
                config = dataclasses.replace(DistAttnConfig(), deterministic=rank == 1)
                magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, group, causal=True, dist_attn_config=config)
            elif how == "refused on one":
                magi_attn_varlen_key(CU, CU, 4, 2 if rank == 0 else 3, 8, 0, group, causal=True)
            else:
                magi_attn_varlen_key(CU, CU, 4, 3, 8, 0, group, causal=True)
        except InputError as error:
            assert_equals_single_device(tensors(), good)  # the group still works
            return str(error), time.monotonic() - start
        raise AssertionError("no error")
    finally:
        del os.environ["MAGI_CHECK"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("mask", ["disagree", "mask_digest"]),
        ("config", ["disagree", "deterministic=True"]),
        ("refused on one", ["disagree", "refused", "num_heads_kv=3"]),
        ("refused on all", ["num_heads_q=4", "num_heads_kv=3"]),
    ],
)
def test_check_mode_raises_the_same_error_on_every_rank(rank_pool: RankPool, how: str, words: list[str]) -> None:
    results = rank_pool.run(2, disagree, how, timeout_s=40)
    assert len({text for text, _ in results}) == 1
    assert all(word in results[0][0] for word in words), results[0][0]
    assert max(seconds for _, seconds in results) < 10


def test_mask_helpers_have_the_reference_mask() -> None:
    """What the workers above compare against is itself compared with a dense mask in test_single_device; here: the key keeps it."""
    key = magi_attn_varlen_key(CU, CU, 4, 2, 8, 0, None, causal=True)
    ranges = [[a, b] for a, b in itertools.pairwise(CU)]
    assert key.mask == AttnMask.from_ranges(ranges, ranges, [1] * 4, TOTAL, TOTAL)
