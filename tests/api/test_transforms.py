"""Doors under second derivatives, torch.func, inference mode, compile, odd dtypes, copies and threads."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from magi_attention import api
from magi_attention.api import AttnMask, DispatchConfig, DistAttnConfig, InputError, UnsupportedError
from magi_attention.testing.workers import RankPool

NUM_TOKENS = 13
CU_SEQLENS = [0, 5, NUM_TOKENS]
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex128)
SMALL_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def make_key(**config: Any) -> api.DistAttnKey:
    group = dist.group.WORLD if dist.is_initialized() else None
    chosen = DistAttnConfig(dispatch_config=DispatchConfig(chunk_size=2, **config))
    return api.magi_attn_varlen_key(CU_SEQLENS, CU_SEQLENS, 4, 2, 8, 0, group, causal=True, dist_attn_config=chosen)


def local_inputs(key: api.DistAttnKey) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((NUM_TOKENS, 4, 8), (NUM_TOKENS, 2, 8), (NUM_TOKENS, 2, 8))
    return [api.dispatch(torch.randn(size, generator=generator), key) for size in sizes]


def steps_of(key: api.DistAttnKey) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Every differentiable operation, as a function of this rank's queries alone."""
    _, k, v = local_inputs(key)
    return {
        "attention": lambda q: api.calc_attn(q, k, v, key)[0],
        "roll": lambda q: api.roll(q, 1, 0, key),
        "undispatch with is_partial_grad": lambda q: api.undispatch(q, key, is_partial_grad=True),
        "dispatch": lambda q: api.dispatch(torch.nn.functional.pad(q, (0, 0, 0, 0, 0, NUM_TOKENS - len(q))), key),
    }


# ---- second derivatives ----


def second_derivatives_on_rank(rank: int, num_ranks: int) -> list[str]:
    """What went wrong: a gradient that is recorded and differentiated again must raise, also when the first loss is linear."""
    key = make_key()
    wrong = []
    for name, step in steps_of(key).items():
        q = local_inputs(key)[0].requires_grad_()
        (grad,) = torch.autograd.grad((step(q) * q.sum()).sum(), q, create_graph=True)
        try:
            grad.square().sum().backward()
            wrong.append(f"{name} lost a second derivative in silence")
        except UnsupportedError as error:
            if name.split(maxsplit=1)[0] not in str(error):
                wrong.append(f"{name}: {error}")
    return wrong


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_second_derivatives_are_refused(rank_pool: RankPool, num_ranks: int) -> None:
    assert rank_pool.run(num_ranks, second_derivatives_on_rank) == [[]] * num_ranks


def test_a_penalty_on_the_gradient_of_a_plain_sum_is_refused() -> None:
    """dout is a constant here, so torch's own once_differentiable would have let it pass."""
    mask = AttnMask.from_ranges([[0, 8]], [[0, 8]], "causal", 8, 8)
    q, k, v = (torch.randn(8, 2, 4, requires_grad=True) for _ in range(3))
    (grad,) = torch.autograd.grad(api.flex_flash_attn_func(q, k, v, mask=mask)[0].sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"no second derivative.*create_graph"):
        grad.square().sum().backward()


# ---- torch.func ----


def func_on_rank(rank: int, num_ranks: int) -> dict[str, bool]:
    key = make_key()
    same = {}
    for name, step in steps_of(key).items():
        q = local_inputs(key)[0]
        leaf = q.clone().requires_grad_()
        step(leaf).square().sum().backward()
        assert leaf.grad is not None
        same[name] = torch.equal(torch.func.grad(lambda x, step=step: step(x).square().sum())(q), leaf.grad)
    return same


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_torch_func_grad_equals_backward(rank_pool: RankPool, num_ranks: int) -> None:
    for same in rank_pool.run(num_ranks, func_on_rank):
        assert all(same.values()), same


# ---- inference mode ----


def test_inference_tensors_are_refused_before_the_exchange_and_work_without_gradients() -> None:
    key = make_key()
    q, k, v = local_inputs(key)
    want = api.calc_attn(q, k, v, key)[0]
    with torch.inference_mode():
        made_there = q.clone()
        assert torch.equal(api.calc_attn(made_there, k, v, key)[0], want)
    with torch.no_grad():
        assert torch.equal(api.calc_attn(made_there, k.clone().requires_grad_(), v, key)[0], want)
    with pytest.raises(InputError, match=r"inference_mode.*clone"):
        api.calc_attn(made_there, k.clone().requires_grad_(), v, key)


# ---- compile ----


def test_compiled_models_break_their_graph_at_doors_that_exchange() -> None:
    key = make_key()
    q, k, v = local_inputs(key)
    labels = torch.arange(NUM_TOKENS)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        own = api.magi_attn_varlen_key(CU_SEQLENS, CU_SEQLENS, 4, 2, 8, 0, None, causal=True)
        out = api.calc_attn(q * 2, k, v, own)[0] * 2
        moved = api.undispatch(api.roll(api.dispatch(out, own), 1, 0, own), own) + 1
        loss = api.reduce_loss(moved.sum(), 3) * 2
        return [moved, loss, api.shift_labels(labels, own), api.get_position_ids(own)]

    want = model(q, k, v)
    torch._dynamo.reset()
    got = torch.compile(model, backend="eager")(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_scales_may_change_in_one_compiled_graph() -> None:
    ranges = torch.tensor([[0, 8]])
    q = torch.randn(8, 2, 4)

    def model(q: torch.Tensor, scale: float) -> torch.Tensor:
        return api.flex_flash_attn_func(q, q, q, ranges, ranges, softmax_scale=scale, softcap=scale)[0]

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for scale in (0.5, 1.25, 2.0):
        assert torch.equal(compiled(q, scale), model(q, scale))


# ---- any dtype, lazy views ----


@pytest.mark.parametrize("dtype", (*DTYPES, *UNSIGNED, *SMALL_FLOATS), ids=str)
@pytest.mark.parametrize("uneven_shard", (True, False), ids=("", "padded"))
def test_tokens_of_any_dtype_move(dtype: torch.dtype, uneven_shard: bool) -> None:
    key = make_key(uneven_shard=uneven_shard)
    x = torch.randint(0, 2, (NUM_TOKENS, 3)).to(dtype)
    bits = x.view(torch.uint8)
    local = api.dispatch(x, key, pad_value=1)
    back = api.undispatch(local, key)
    assert back.dtype == dtype and torch.equal(back.view(torch.uint8), bits)
    rolled = api.undispatch(api.roll(local, 1, 0, key, within_documents=True, fill_value=1), key)
    want = torch.cat([torch.ones(1, 3).to(dtype), x[:4], torch.ones(1, 3).to(dtype), x[5:-1]])
    assert torch.equal(rolled.view(torch.uint8), want.view(torch.uint8))


def test_lazy_conjugates_and_negatives_move_by_value() -> None:
    key = make_key()
    x = torch.randn(NUM_TOKENS, 3, dtype=torch.complex64)
    assert torch.equal(api.undispatch(x.conj(), key), x.conj().resolve_conj())
    assert torch.equal(api.undispatch(x.conj().imag, key), -x.imag)


def complex_gradients_on_rank(rank: int, num_ranks: int) -> bool:
    """The gradient of a roll and of a partial undispatch, against torch on the whole tensor."""
    key = make_key()
    whole = torch.randn(NUM_TOKENS, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    weight = torch.arange(NUM_TOKENS * 3, dtype=torch.float64).reshape(NUM_TOKENS, 3)
    leaf = whole.clone().requires_grad_()
    (torch.roll(leaf, 1, 0) * weight).abs().square().sum().backward()
    local = api.dispatch(whole, key).requires_grad_()
    rolled = api.undispatch(api.roll(local, 1, 0, key), key, is_partial_grad=True)
    mine = torch.zeros(NUM_TOKENS, dtype=torch.bool)
    mine[api.get_position_ids(key)] = True  # each rank's loss is a part: its own tokens
    (rolled * weight)[mine].abs().square().sum().backward()
    assert leaf.grad is not None and local.grad is not None
    return torch.allclose(local.grad, api.dispatch(leaf.grad, key))


def test_complex_tensors_have_gradients(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, complex_gradients_on_rank) == [True, True]


# ---- tables ----


def test_tables_without_columns_see_nothing_and_tables_of_four_dims_are_refused() -> None:
    q = torch.randn(8, 2, 4)
    out, meta = api.flex_flash_attn_func(q, q, q, index_attn_indices=torch.zeros(8, 0, dtype=torch.int32))
    assert not out.any() and torch.isneginf(meta.lse).all()
    with pytest.raises(InputError, match="num_q_blocks, topk"):
        api.flex_flash_attn_func(q, q, q, index_attn_indices=torch.zeros(8, 1, 1, 1, dtype=torch.int32))


# ---- copies and threads ----


def test_plans_can_be_copied_after_use_and_keys_say_why_they_cannot() -> None:
    key = make_key()
    api.roll(api.dispatch(torch.zeros(NUM_TOKENS), key), 1, 0, key)
    for made in (pickle.loads(pickle.dumps(key.plan)), copy.deepcopy(key.plan)):
        assert np.array_equal(made.dispatch_q.chunk_owner, key.plan.dispatch_q.chunk_owner)
        assert made.dispatch_q.rank_tokens.tolist() == key.plan.dispatch_q.rank_tokens.tolist()
    assert copy.deepcopy(key) is key
    with pytest.raises(InputError, match="build it in the other process"):
        pickle.dumps(key)


def test_threads_plan_and_attend_at_once() -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        sizes = np.random.default_rng(seed).integers(1, 40, 15).tolist()
        for idx, size in enumerate(sizes):
            key = api.magi_attn_varlen_key([0, size], [0, size], 2, 2, 4, 0, None, causal=True)
            q, k, v = (torch.randn(size, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
            out = api.calc_attn(q, k, v, key)[0]
            out.sum().backward()
            scores = torch.einsum("qhd,khd->hqk", q, k) * 0.5
            weights = scores.masked_fill(~torch.ones(size, size, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
            if not torch.allclose(torch.einsum("hqk,khd->qhd", weights, v), out):
                wrong.append(f"{size} tokens of thread {seed}")
            try:
                AttnMask.from_slices([[0, size + seed + 1, 0, size, 0, 0]], size, size)
            except InputError as error:
                if f"[0, {size + seed + 1})" not in str(error):
                    wrong.append(f"thread {seed} got the error of another: {error}")
            if idx % 5 == 0:
                api.clear_cache()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
