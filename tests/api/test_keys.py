"""Keys in one process: equality, caching, bad input, one-rank use. Groups of several ranks are simulated: planning needs no peer."""

from __future__ import annotations

import copy
import gc
import itertools
import resource
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from magi_attention.api import (
    AttnRanges,
    ContiguousDispatchAlg,
    DispatchConfig,
    DistAttnConfig,
    DistAttnKey,
    GrpCollConfig,
    InputError,
    OverlapConfig,
    calc_attn,
    clear_cache,
    dispatch,
    flex_flash_attn_func,
    get_most_recent_key,
    get_position_ids,
    magi_attn_flex_dispatch,
    magi_attn_flex_key,
    magi_attn_varlen_dispatch,
    magi_attn_varlen_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_varlen_key_for_new_mask_after_dispatch,
    shift_labels,
    undispatch,
)
from magi_attention.api.key_cache import MAX_PLANS_PER_GROUP, cache_of
from magi_attention.plan.check import PlanError
from magi_attention.plan.types import RankPlan
from tests.api import key_makers
from tests.api.key_makers import CU, flex_key, local_tensors, simulated_group, varlen_key

# ---- equality and caching ----


def test_equal_inputs_in_any_form_give_an_equal_key_and_one_plan() -> None:
    clear_cache()
    ranges = [[0, 137], [137, 300], [300, 512]]
    keys = [
        varlen_key(),
        varlen_key(cu_seqlens_q=np.array(CU), cu_seqlens_k=torch.tensor(CU)),
        varlen_key(causal=False, window_size=(-1, 0)),
        flex_key(),
        flex_key(q_ranges=torch.tensor(ranges, dtype=torch.int32), k_ranges=np.array(ranges), attn_mask_type=[1, 1, 1]),
        flex_key(q_ranges=AttnRanges.from_ranges(ranges), k_ranges=torch.tensor(ranges), attn_mask_type=torch.ones(3).int()),
    ]
    assert len(set(keys)) == 1
    assert all(key.plan is keys[0].plan for key in keys)


DIFFERENT: dict[str, dict[str, Any]] = {
    "documents (D34)": {"cu_seqlens_q": [0, 138, 300, 512], "cu_seqlens_k": [0, 138, 300, 512]},
    "length": {"cu_seqlens_q": [0, 137, 300, 511], "cu_seqlens_k": [0, 137, 300, 511]},
    "causal": {"causal": False},
    "window": {"window_size": (64, 0)},
    "num_heads_q": {"num_heads_q": 8},
    "num_heads_kv": {"num_heads_kv": 4},
    "head_dim": {"head_dim": 32},
    "chunk_size": {"chunk_size": 32},
    "dispatch algorithm": {"dist_attn_config": DistAttnConfig(dispatch_config=DispatchConfig(alg=ContiguousDispatchAlg()))},
    "deterministic": {"dist_attn_config": DistAttnConfig(deterministic=True)},
    "timeout": {"dist_attn_config": DistAttnConfig(grpcoll_config=GrpCollConfig(timeout_s=5.0))},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_any_difference_makes_another_key(what: str) -> None:
    group = simulated_group(4)
    key = varlen_key(group)
    other = varlen_key(group, **DIFFERENT[what])
    assert key != other and len({key, other}) == 2
    assert key == varlen_key(group) and key.plan is varlen_key(group).plan


def test_groups_and_dispatches_tell_keys_apart() -> None:
    four, also_four = simulated_group(4), simulated_group(4)
    assert varlen_key(four) != varlen_key(also_four), "two groups, even of the same ranks"
    base = varlen_key(four, chunk_size=64)
    moved = varlen_key(four, chunk_size=32)
    on_base = make_varlen_key_for_new_mask_after_dispatch(CU, CU, base, causal=True, window_size=(50, 0))
    on_moved = make_varlen_key_for_new_mask_after_dispatch(CU, CU, moved, causal=True, window_size=(50, 0))
    assert on_base != on_moved and on_base.plan.dispatch_q is base.plan.dispatch_q
    assert on_base == make_varlen_key_for_new_mask_after_dispatch(CU, CU, base, causal=True, window_size=(50, 0))
    flex = make_flex_key_for_new_mask_after_dispatch(*on_base.mask.to_ranges(), base)
    assert flex.mask.area() == on_base.mask.area() and flex.plan.dispatch_q is base.plan.dispatch_q


def test_a_key_is_a_frozen_handle() -> None:
    key = varlen_key()
    assert copy.copy(key) is key and copy.deepcopy({"key": key})["key"] is key
    with pytest.raises(AttributeError):
        key.group = None  # type: ignore[misc,assignment]
    assert "512" in repr(key) and "4:2" in repr(key)
    assert (key.cp_size, key.cp_rank, key.num_local_q, key.num_local_k, key.pad_size) == (1, 0, 512, 512, 0)
    assert key.cu_seqlens_q is not None and key.cu_seqlens_q.tolist() == CU and not key.cu_seqlens_q.flags.writeable


def test_a_key_knows_its_documents() -> None:
    halves = varlen_key(cu_seqlens_q=[0, 4, 8], cu_seqlens_k=[0, 4, 8])
    whole = varlen_key(cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 8])
    x = torch.arange(8)
    assert (
        flex_key().cu_seqlens_q is None
        and make_flex_key_for_new_mask_after_dispatch([[0, 8]], [[0, 8]], None, halves).cu_seqlens_q is not None
    )
    assert shift_labels(x, halves).tolist() == [1, 2, 3, -100, 5, 6, 7, -100]
    assert shift_labels(x, whole).tolist() == [1, 2, 3, 4, 5, 6, 7, -100]


def test_most_recent_key_and_clear_cache() -> None:
    clear_cache()
    group = simulated_group(2)
    with pytest.raises(InputError, match="cp_group has no key"):
        get_most_recent_key(group)  # type: ignore[arg-type]
    first, second = varlen_key(group), varlen_key(group, causal=False)
    assert get_most_recent_key(group) == second and get_most_recent_key(group).plan is second.plan  # type: ignore[arg-type]
    varlen_key(group)
    assert get_most_recent_key(group) == first, "found again counts as most recent"  # type: ignore[arg-type]
    assert get_most_recent_key(group).cu_seqlens_q is not None  # type: ignore[arg-type]
    plan = first.plan
    clear_cache(group)  # type: ignore[arg-type]
    assert varlen_key(group).plan is not plan and first.plan is plan
    other = simulated_group(3)
    kept = varlen_key(other).plan
    clear_cache(group)  # type: ignore[arg-type]
    assert varlen_key(other).plan is kept, "the other group's cache stays"


def test_cache_goes_with_its_group() -> None:
    group = simulated_group(2)
    key = varlen_key(group)
    watch = weakref.ref(group)
    del group, key
    gc.collect()
    assert watch() is None


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_ten_thousand_keys_do_not_grow() -> None:
    group = simulated_group(2)
    config = DistAttnConfig(overlap_config=OverlapConfig(enable=False))  # one step, so that planning is quick
    first = varlen_key(group, dist_attn_config=config)

    def make(start: int, end: int) -> None:
        for idx in range(start, end):
            edges = [0, 1 + idx % 5000, 6000]
            magi_attn_varlen_key(edges, edges, 4, 2, 8 + idx // 5000, 0, group, True, dist_attn_config=config)

    make(0, 1_000)
    gc.collect()
    before = resident_bytes()
    make(1_000, 10_000)
    gc.collect()
    assert len(cache_of(group).plans) == MAX_PLANS_PER_GROUP
    alive = sum(type(thing) is RankPlan and thing.cp_size == 2 for thing in gc.get_objects())
    assert alive <= 2 * MAX_PLANS_PER_GROUP, f"{alive} plans are alive"
    assert resident_bytes() - before < 16 * 2**20, f"{resident_bytes() - before} bytes more after 9,000 more keys"
    assert varlen_key(group, dist_attn_config=config) == first, "an evicted key is planned again and equal"
    assert first.num_local_q == first.plan.dispatch_q.rank_tokens[0], "and still carries its own plan"


def test_validation_of_ten_thousand_slices_is_quick() -> None:
    edges = np.arange(10_001) * 3
    ranges = torch.from_numpy(np.stack([edges[:-1], edges[1:]], axis=1))
    bad = ranges.clone()
    bad[-1, 1] += 1
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        with pytest.raises(InputError):
            flex_key(q_ranges=bad, k_ranges=ranges, total_seqlen_q=30_000, total_seqlen_k=30_000)
        best = min(best, time.perf_counter() - start)
    assert best < 0.05, f"{best * 1e3:.1f} ms; the aim is 5 ms on an idle machine"


def test_check_mode_checks_new_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_cache()
    wrong = varlen_key(causal=False).plan
    monkeypatch.setattr("magi_attention.api.keys.plan_attention", lambda *args, **kwargs: wrong)
    monkeypatch.setenv("MAGI_CHECK", "1")
    with pytest.raises(PlanError):
        varlen_key()
    monkeypatch.undo()
    monkeypatch.setenv("MAGI_CHECK", "1")
    config = DistAttnConfig(dispatch_config=DispatchConfig(uneven_shard=False))
    assert varlen_key(cu_seqlens_q=[0, 511], cu_seqlens_k=[0, 511], dist_attn_config=config).plan.rank_areas.sum() == 511 * 512 // 2


# ---- padding, one rank, layers ----


def test_pad_size_is_deprecated_and_ignored() -> None:
    with pytest.warns(DeprecationWarning, match="pad_size=8 is ignored") as caught:
        key = varlen_key(pad_size=8)
    assert caught[0].filename == key_makers.__file__, "the line that calls the library, in the function that makes keys for tests"
    assert key == varlen_key() and key.pad_size == 0


@pytest.mark.parametrize("chunk_size", [None, 16, 100])
def test_even_shards_pad_every_rank_to_the_same_number_of_tokens(chunk_size: int | None) -> None:
    config = DistAttnConfig(dispatch_config=DispatchConfig(chunk_size=chunk_size, uneven_shard=False))
    for total in (0, 1, 511, 512):
        keys = [
            varlen_key(simulated_group(4, rank), cu_seqlens_q=[0, total], cu_seqlens_k=[0, total], dist_attn_config=config)
            for rank in range(4)
        ]
        local = {key.num_local_q for key in keys}
        assert len(local) == 1 and keys[0].pad_size == 4 * local.pop() - total and keys[0].total_seqlen_q == total
        assert keys[0].plan.rank_areas.sum() == total * (total + 1) // 2
        if chunk_size is not None:
            assert (total + keys[0].pad_size) % (4 * chunk_size) == 0 and keys[0].pad_size < 4 * chunk_size


def test_one_rank_equals_the_single_device_to_the_bit() -> None:
    """D27: without torch.distributed everything works and dispatch changes nothing."""
    q, k, v = (x.requires_grad_() for x in local_tensors())
    key = varlen_key()
    assert torch.equal(dispatch(q, key), q) and torch.equal(get_position_ids(key), torch.arange(512))
    restarting = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(CU)])
    assert torch.equal(get_position_ids(key, within_documents=True), restarting)
    out, meta = calc_attn(*(dispatch(x, key) for x in (q, k, v)), key, return_max_logits=True)
    ours = torch.autograd.grad(undispatch(out, key).square().sum() + meta.lse.sum(), (q, k, v))
    single, single_meta = flex_flash_attn_func(q, k, v, mask=key.mask, return_max_logits=True)
    theirs = torch.autograd.grad(single.square().sum() + single_meta.lse.sum(), (q, k, v))
    assert torch.equal(out, single) and torch.equal(meta.lse, single_meta.lse)
    assert meta.max_logits is not None and single_meta.max_logits is not None and torch.equal(meta.max_logits, single_meta.max_logits)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_key_and_dispatch_in_one_call() -> None:
    x = torch.randn(512, 5)
    ranges = [[0, 512]]
    local, key = magi_attn_flex_dispatch(x, ranges, ranges, "full", 512, 512, 4, 2, 16, 0, None)
    assert torch.equal(local, x) and key == magi_attn_flex_key(ranges, ranges, "full", 512, 512, 4, 2, 16, 0, None)
    local, key = magi_attn_varlen_dispatch(x, CU, CU, 4, 2, 16, 0, None, causal=True)
    assert torch.equal(local, x) and key == varlen_key()


def test_later_layers_plan_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A07: after the first layer neither planner nor work-list builder runs."""
    key = varlen_key()
    tensors = [x.requires_grad_() for x in local_tensors()]
    calc_attn(*tensors, key)[0].sum().backward()

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a later layer planned")

    monkeypatch.setattr("magi_attention.api.keys.plan_attention", never)
    monkeypatch.setattr("magi_attention._native.run", never)
    for _ in range(3):
        calc_attn(*tensors, key)[0].sum().backward()
        assert varlen_key_from_cache() == key


def varlen_key_from_cache() -> DistAttnKey:
    """Building the same key again needs the mask's slices, which the solver tightens; with flex ranges the mask is remembered too."""
    return get_most_recent_key(None)


def test_no_warning_without_cause() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        key = varlen_key(simulated_group(3))
        make_varlen_key_for_new_mask_after_dispatch(CU, CU, key, causal=True, num_heads_q=8)
