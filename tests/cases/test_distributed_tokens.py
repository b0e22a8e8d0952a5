"""Cases D and M of the catalogue as a user meets them: keys, dispatch, labels, losses and a training run. Names start with the case."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from magi_attention import api
from magi_attention.api import DispatchConfig, DistAttnConfig, InputError
from magi_attention.testing.numerics import AttentionCase, AttentionResult
from magi_attention.testing.workers import RankPool
from tests.cases.by_keys import run_with_key
from tests.cases.single import assert_same_within_rule, by_the_door
from tests.kernels.problems import causal as causal_mask
from tests.runtime.harness import Problem, as_numpy, causal

EVEN = DistAttnConfig(dispatch_config=DispatchConfig(uneven_shard=False, chunk_size=2))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def varlen_key(cu_seqlens: list[int], heads: tuple[int, int, int], group: Any = None, **options: Any) -> api.DistAttnKey:
    return api.magi_attn_varlen_key(cu_seqlens, cu_seqlens, *heads, 0, group, causal=True, **options)


def attend(x: torch.Tensor, key: api.DistAttnKey, seed: int = 1) -> torch.Tensor:
    """One layer: x [tokens, width] -> [tokens, width], every rank with the same weights."""
    facts = key.identity
    width_q, width_kv = facts.num_heads_q * facts.head_dim, facts.num_heads_kv * facts.head_dim
    q, k, v = (x @ draw(x.shape[1], width, seed=seed + idx, dtype=x.dtype) / 4 for idx, width in enumerate((width_q, width_kv, width_kv)))
    q, k, v = q.unflatten(1, (-1, facts.head_dim)), k.unflatten(1, (-1, facts.head_dim)), v.unflatten(1, (-1, facts.head_dim))
    return api.calc_attn(q, k, v, key)[0].flatten(1)


def closed_form_on_rank(rank: int, num_ranks: int) -> list[list[float]]:
    found = []
    for config in (DistAttnConfig(), EVEN):
        for kind in ("full", "causal"):
            key = api.magi_attn_flex_key([[0, 7]], [[0, 7]], kind, 7, 7, 1, 1, 64, 0, None, config)
            v = torch.tensor([1.0, 1, 1, 1, 2, 2, 2])[:, None, None].expand(7, 1, 64)
            v_local = api.dispatch(v, key, pad_value=100.0)
            zeros = torch.zeros(v_local.shape)
            out = api.undispatch(api.calc_attn(zeros, zeros, v_local, key)[0], key)
            assert torch.equal(out, out[..., :1].expand_as(out))
            found.append(out[:, 0, 0].tolist())
    return found


def test_d01_closed_form_and_padding_never_leaks(rank_pool: RankPool) -> None:
    full, causal = [10 / 7] * 7, [1, 1, 1, 1, 6 / 5, 8 / 6, 10 / 7]
    for found in rank_pool.run(2, closed_form_on_rank):
        for got, expected in zip(found, (full, causal, full, causal), strict=True):
            assert got == pytest.approx(expected, abs=1e-6)


def alternating_on_rank(rank: int, num_ranks: int, makes_window_first: bool) -> np.ndarray:
    """D09: four layers, causal and window (127, 0) in turn, on one dispatch."""
    total, heads = 4096, (1, 1, 16)
    full = varlen_key([0, total], heads)
    keys = {"full": full, "window": None}
    if makes_window_first:
        base = api.magi_attn_varlen_key([0, total], [0, total], *heads, 0, None, causal=True, window_size=(127, 0))
        keys["window"] = base
        keys["full"] = api.make_varlen_key_for_new_mask_after_dispatch([0, total], [0, total], base, causal=True)
    else:
        keys["window"] = api.make_varlen_key_for_new_mask_after_dispatch([0, total], [0, total], full, causal=True, window_size=(127, 0))
    whole = draw(total, 16, dtype=torch.float64).requires_grad_()
    x, layers = api.dispatch(whole, keys["full"]), []
    for layer, name in enumerate(("full", "window", "full", "window")):
        x = x + attend(x, keys[name], seed=10 * layer)
        layers.append(api.undispatch(x, keys["full"]))
    layers[-1].square().sum().backward()
    return np.stack([layer.detach().numpy() for layer in (*layers, whole.grad)])


def test_d09_each_layer_uses_its_own_mask(rank_pool: RankPool) -> None:
    (alone,) = rank_pool.run(1, alternating_on_rank, False)
    for makes_window_first in (False, True):
        for found in rank_pool.run(4, alternating_on_rank, makes_window_first):
            assert np.allclose(found, alone, rtol=1e-9, atol=1e-9)


def positions_on_rank(rank: int, num_ranks: int) -> None:
    """D11: ids, positions (B, S) and 3-axis positions (3, B, S)."""
    documents = [0, 24, 64]
    key = varlen_key(documents, (2, 1, 8), chunk_size=4)
    mine = api.get_position_ids(key)
    in_document = torch.cat([torch.arange(24), torch.arange(40)])
    batch = torch.stack([in_document, in_document + 1000])  # (B, S)
    ids, axes = torch.arange(64) + 100, torch.stack([batch, batch * 2, batch * 3])  # (3, B, S)
    assert torch.equal(api.dispatch(ids, key), ids[mine])
    assert torch.equal(api.dispatch(batch, key, dim=1), batch[:, mine])
    assert torch.equal(api.undispatch(mine, key), torch.arange(64))
    assert torch.equal(api.dispatch(axes, key, dim=-1), axes[:, :, mine])
    assert torch.equal(api.get_position_ids(key, within_documents=True), in_document[mine])
    for dim in (0, 1):
        with pytest.raises(InputError, match="64 tokens"):
            api.dispatch(axes, key, dim=dim)


def test_d11_positions(rank_pool: RankPool) -> None:
    rank_pool.run(2, positions_on_rank)


def labels_on_rank(rank: int, num_ranks: int) -> list[int]:
    key = varlen_key([0, 5, 16], (1, 1, 8), chunk_size=3)
    return api.undispatch(api.shift_labels(api.dispatch(torch.arange(16), key), key), key).tolist()


def test_d13_labels(rank_pool: RankPool) -> None:
    expected = [1, 2, 3, 4, -100, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, -100]
    assert rank_pool.run(2, labels_on_rank) == [expected] * 2


def loss_on_rank(rank: int, num_ranks: int, counts: list[int], token_losses: list[float], dtype: torch.dtype) -> tuple[float, np.ndarray]:
    """The reduced loss, and the gradient of a shared parameter after the framework's averaging.

    Token i's loss is its rank's constant where the parameter is 1, and has a slope of its own. One rank gets all the tokens.
    """
    weight = torch.ones(8, dtype=dtype, requires_grad=True)
    sums, ranks = [], range(len(counts)) if num_ranks == 1 else [rank]
    for part in ranks:
        slopes = draw(counts[part], 8, seed=part).to(dtype)
        sums.append((token_losses[part] * (1 + slopes @ (weight - 1))).sum())
    loss = api.reduce_loss(torch.stack(sums).sum(), sum(counts[part] for part in ranks))
    loss.backward()
    assert weight.grad is not None
    if num_ranks > 1:
        dist.all_reduce(weight.grad)
        weight.grad /= num_ranks
    return loss.item(), as_numpy(weight.grad)


@pytest.mark.parametrize(
    ("counts", "token_losses", "mean"), [([100] * 8, [1.0] * 8, 1.0), ([100, 0], [2.0, 0.0], 2.0)], ids=["equal", "one_empty"]
)
def test_d15_loss(rank_pool: RankPool, counts: list[int], token_losses: list[float], mean: float) -> None:
    ((_, exact),) = rank_pool.run(1, loss_on_rank, counts, token_losses, torch.float64)
    ((alone_loss, alone),) = rank_pool.run(1, loss_on_rank, counts, token_losses, torch.float32)
    assert alone_loss == mean and np.abs(exact).min() > 0
    for loss, grad in rank_pool.run(len(counts), loss_on_rank, counts, token_losses, torch.float32):
        assert loss == mean
        assert np.abs(grad - exact).max() <= 2 * np.abs(alone - exact).max() + 1e-5


class TinyGpt(torch.nn.Module):
    """D16: 2 layers, hidden 256, 8 heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(64, 256)
        self.position = torch.nn.Embedding(1024, 256)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(256, 768) for _ in range(2))
        self.project = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(2))
        self.head = torch.nn.Linear(256, 64)

    def forward(self, ids: torch.Tensor, key: api.DistAttnKey) -> torch.Tensor:
        x = self.embedding(ids) + self.position(api.get_position_ids(key))
        for qkv, project in zip(self.qkv, self.project, strict=True):
            q, k, v = qkv(F.layer_norm(x, (256,))).unflatten(1, (3, 8, 32)).unbind(1)
            x = x + project(api.calc_attn(q, k, v, key)[0].flatten(1))
        return self.head(F.layer_norm(x, (256,)))


def train_on_rank(rank: int, num_ranks: int, dtype: torch.dtype, compute: torch.dtype | None) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of 5 AdamW steps, and the first step's gradients after the framework's averaging; parameters in `dtype`."""
    key = varlen_key([0, 1024], (8, 8, 32))
    model = TinyGpt().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = api.dispatch(torch.randint(0, 64, (1024,), generator=torch.Generator().manual_seed(3)), key)
    labels = api.shift_labels(ids, key)
    losses, grads = [], {}
    for step in range(5):
        with torch.autocast("cpu", compute, enabled=compute is not None):
            logits = model(ids, key)
        loss_sum = F.cross_entropy(logits.to(dtype), labels, reduction="sum")
        loss = api.reduce_loss(loss_sum, (labels != -100).sum())
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None and parameter.grad.dtype == dtype
            if num_ranks > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= num_ranks
        if step == 0:
            grads = {name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, grads


@pytest.mark.parametrize(("compute", "loss_error"), [(None, 1e-4), (torch.bfloat16, 5e-3)], ids=["fp32", "bf16"])
def test_d16_training(rank_pool: RankPool, compute: torch.dtype | None, loss_error: float) -> None:
    """fp32 parameters on N ranks are no further from float64 than 2 x what they are on one rank, and the loss curves overlap."""
    ((exact_losses, exact),) = rank_pool.run(1, train_on_rank, torch.float64, None, timeout_s=120)
    ((alone_losses, alone),) = rank_pool.run(1, train_on_rank, torch.float32, compute, timeout_s=120)
    assert exact_losses[-1] < exact_losses[0] - 0.1
    for num_ranks in (2, 4, 8):
        for losses, grads in rank_pool.run(num_ranks, train_on_rank, torch.float32, compute, timeout_s=120):
            assert losses == pytest.approx(exact_losses, abs=loss_error)
            assert losses == pytest.approx(alone_losses, abs=loss_error)
            for name, grad in grads.items():
                budget = 2 * np.abs(alone[name] - exact[name]).max() + 1e-5
                assert np.abs(grad - exact[name]).max() <= budget, f"{name} on {num_ranks} ranks"


BATCH = Problem(causal([1000] * 4), 4000, num_heads_q=2, num_heads_kv=1, head_dim=128, dtype=torch.bfloat16)


def batch_on_rank(rank: int, num_ranks: int) -> dict[str, np.ndarray]:
    """D26: four sequences of 1,000 in one call of the batch helpers."""
    cu_seqlens_q, cu_seqlens_k = api.infer_varlen_mask_from_batch(4, 1000)
    x = torch.arange(4000).view(4, 1000)
    assert torch.equal(api.squash_batch_dim(x), torch.arange(4000))
    return run_with_key(BATCH, api.magi_attn_varlen_key(cu_seqlens_q, cu_seqlens_k, 2, 1, 128, 0, None, causal=True))


def test_d26_batch_equals_separate_runs(rank_pool: RankPool) -> None:
    mask, inputs = causal_mask(1000), BATCH.inputs()
    found = rank_pool.run(2, batch_on_rank)
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    for idx in range(4):
        rows = slice(1000 * idx, 1000 * (idx + 1))
        dense = torch.ones(1000, 1000, dtype=torch.bool).tril()
        case = AttentionCase({name: inputs[name][rows] for name in "qkv"}, dense, inputs["dout"][rows], None, {})
        twins = case.reference(), case.eager()
        ours = AttentionResult({name: torch.from_numpy(array[rows]) for name, array in found[0].items()})
        case.check(f"D26 sequence {idx}", ours, *twins)
        assert_same_within_rule(f"D26 sequence {idx}", ours, by_the_door(case, mask), twins)
