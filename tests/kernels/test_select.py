"""Which kernel takes what, every reason against, and refusals that name the tensor."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from magi_attention.errors import InputError, UnsupportedError
from magi_attention.kernels import select
from magi_attention.kernels.ops import single_device_attention
from magi_attention.kernels.select import AttentionDesc, choose, describe

GPU = AttentionDesc("cuda", torch.bfloat16, 8, 2, 128, 128)
CPU = dataclasses.replace(GPU, device_type="cpu")
FULL = [[0, 4, 0, 4, -4, 4]]


@pytest.mark.parametrize("dtype", select.DTYPES)
def test_cpu_takes_every_dtype(dtype: torch.dtype) -> None:
    assert choose(dataclasses.replace(CPU, dtype=dtype)) == choose(dataclasses.replace(CPU, dtype=dtype), "blocked") == "blocked"


def test_gpu_runs_blocked_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    select._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "magi_attention"):
        for _ in range(3):
            assert choose(GPU) == "blocked"
    assert len(caplog.records) == 1 and "no CUDA kernel is compiled" in caplog.text


def test_fp32_on_gpu_needs_to_be_asked_for() -> None:
    desc = dataclasses.replace(GPU, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match=r"q has dtype torch\.float32.*backend='blocked'"):
        choose(desc)
    assert choose(desc, "blocked") == "blocked"


def test_ffa_tells_every_reason() -> None:
    with pytest.raises(UnsupportedError) as caught:
        choose(dataclasses.replace(CPU, dtype=torch.float32), "ffa")
    for reason in ("compiled: none", "q is on cpu", "torch.float32"):
        assert reason in str(caught.value)


def test_unknown_backend() -> None:
    with pytest.raises(InputError, match="'fast' must be one of auto, blocked, ffa"):
        choose(CPU, "fast")


def tensors(**changed: torch.Tensor) -> dict[str, Any]:
    return {"q": torch.zeros(4, 4, 8), "k": torch.zeros(4, 2, 8), "v": torch.zeros(4, 2, 8), **changed}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"k": torch.zeros(4, 2, 8, dtype=torch.bfloat16)}, r"^k: dtype torch\.bfloat16, but q has torch\.float32"),
        ({"v": torch.zeros(4, 2, 8, dtype=torch.float64)}, r"^v: dtype torch\.float64"),
        ({"k": torch.zeros(4, 2, 8, device="meta")}, r"^k: on meta, but q is on cpu"),
        ({"q": torch.zeros(1, 4, 4, 8)}, r"^q: .*4 dimensions.*squash_batch_dim\(q\)"),
        ({"v": torch.zeros(4, 16)}, r"^v: .*2 dimensions"),
        ({"q": torch.zeros(4, 4, 8, dtype=torch.int64)}, r"^q: dtype torch\.int64"),
        ({"v": torch.zeros(5, 2, 8)}, r"^v: 5 rows, but k has 4"),
        ({"v": torch.zeros(4, 1, 8)}, r"^v: 1 heads, but k has 2"),
        ({"k": torch.zeros(4, 2, 6)}, r"^k: head_dim 6, but q has 8"),
        ({"q": torch.zeros(4, 3, 8)}, "num_heads_q=3, num_heads_kv=2"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(changed: dict[str, torch.Tensor], told: str) -> None:
    with pytest.raises(InputError, match=told):
        single_device_attention(**tensors(**changed), slices=FULL)


def test_negative_softcap() -> None:
    with pytest.raises(InputError, match="softcap=-1"):
        describe(**tensors(), softcap=-1.0)


def test_the_backend_is_chosen_before_anything_runs() -> None:
    with pytest.raises(UnsupportedError, match="ffa"):
        single_device_attention(**tensors(), slices=FULL, backend="ffa")
