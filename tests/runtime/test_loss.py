"""Labels and losses over ranks."""

from __future__ import annotations

import pytest
import torch

from magi_attention.comm import comm_group
from magi_attention.errors import InputError
from magi_attention.runtime.loss import reduce_loss, shift_labels
from magi_attention.runtime.tokens import dispatch, undispatch
from magi_attention.testing.workers import RankPool
from tests.runtime.harness import owners_of
from tests.runtime.test_tokens import spread


def labels_on_rank(rank: int, num_ranks: int) -> list[list[int]]:
    owners = owners_of(spread(16, 3, num_ranks, 1), rank)
    ids = dispatch(torch.arange(16), owners)
    documents = undispatch(shift_labels(ids, owners, [0, 5, 16]), owners)
    whole = undispatch(shift_labels(ids[None], owners, dim=1, fill_value=-1), owners, dim=1)[0]
    padded = owners_of(spread(16, 3, num_ranks, 1), rank, num_tokens=14)
    local = shift_labels(dispatch(torch.arange(14), padded), padded, [0, 5, 14])
    return [documents.tolist(), whole.tolist(), local[padded.num_real_local_tokens :].tolist()]


@pytest.mark.parametrize("num_ranks", (1, 2, 3))
def test_labels_stay_in_documents(rank_pool: RankPool, num_ranks: int) -> None:
    num_padded = 0
    for documents, whole, padded in rank_pool.run(num_ranks, labels_on_rank):
        assert documents == [1, 2, 3, 4, -100, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, -100]
        assert whole == [*range(1, 16), -1]
        assert set(padded) <= {-100}
        num_padded += len(padded)
    assert num_padded == 2


def loss_on_rank(rank: int, num_ranks: int, counts: list[int], token_losses: list[float], grad_reduction: str) -> tuple[float, float]:
    """The value, and the gradient of a shared parameter after the framework's reduction."""
    group = comm_group(None).flat if num_ranks > 1 else None
    weight = torch.ones((), requires_grad=True)
    loss_sum = weight * token_losses[rank] * counts[rank]
    value = reduce_loss(loss_sum, torch.tensor(counts[rank]), group, grad_reduction=grad_reduction)
    value.backward()
    grad = weight.grad.clone()
    if group is not None:
        torch.distributed.all_reduce(grad, group=group)
    return value.item(), (grad / num_ranks if grad_reduction == "avg" else grad).item()


@pytest.mark.parametrize("grad_reduction", ("avg", "sum"))
@pytest.mark.parametrize(
    ("counts", "token_losses", "mean"),
    [([100] * 4, [1.0] * 4, 1.0), ([100, 0], [2.0, 5.0], 2.0), ([3, 1], [1.0, 5.0], 2.0), ([0, 0], [1.0, 1.0], 0.0), ([4], [3.0], 3.0)],
)
def test_mean_over_all_tokens(rank_pool: RankPool, counts: list[int], token_losses: list[float], mean: float, grad_reduction: str) -> None:
    """The parameter scales every token loss, so its gradient is the mean loss."""
    for value, grad in rank_pool.run(len(counts), loss_on_rank, counts, token_losses, grad_reduction):
        assert value == mean
        assert grad == pytest.approx(mean, abs=1e-6)


def test_loss_keeps_its_precision() -> None:
    assert reduce_loss(torch.tensor(2.0, dtype=torch.bfloat16), 4).dtype == torch.float32
    assert reduce_loss(torch.tensor(2.0, dtype=torch.float64), 4).dtype == torch.float64
    assert reduce_loss(torch.tensor([2.0]), torch.tensor([4])).shape == ()


def test_wrong_losses_are_named() -> None:
    with pytest.raises(InputError, match="loss_sum"):
        reduce_loss(torch.zeros(3), 3)
    with pytest.raises(InputError, match="loss_sum"):
        reduce_loss(torch.tensor(3), 3)
    with pytest.raises(InputError, match="count"):
        reduce_loss(torch.tensor(3.0), torch.zeros(2))
    with pytest.raises(InputError, match="grad_reduction"):
        reduce_loss(torch.tensor(3.0), 3, grad_reduction="mean")
