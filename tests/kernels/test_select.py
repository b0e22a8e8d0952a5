"""Which kernel takes what, every reason against, and refusals that name the tensor."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from magi_attention import _ffa_library
from magi_attention.errors import InputError, UnsupportedError
from magi_attention.kernels import select
from magi_attention.kernels.ops import single_device_attention
from magi_attention.kernels.select import AttentionDesc, choose, describe

GPU = AttentionDesc("cuda", torch.bfloat16, 8, 2, 128, 128, capability=(9, 0))
CPU = dataclasses.replace(GPU, device_type="cpu")
FULL = [[0, 4, 0, 4, -4, 4]]


@pytest.mark.parametrize("dtype", select.DTYPES)
def test_cpu_takes_every_dtype(dtype: torch.dtype) -> None:
    assert choose(dataclasses.replace(CPU, dtype=dtype)) == choose(dataclasses.replace(CPU, dtype=dtype), "blocked") == "blocked"


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A build without the library."""
    missing = _ffa_library.load(tmp_path / "_ffa.so")
    monkeypatch.setattr(_ffa_library, "_loaded", lambda: missing)


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for sm_90a with everything but fp16 of 128, and no backward of 64 with a cap."""
    shapes = itertools.product(("forward", "backward"), ("bf16", "fp16"), (64, 128), (0, 1))
    missing = {"forward:fp16:128:0", "forward:fp16:128:1", "backward:bf16:64:1"}
    names = tuple(name for name in (":".join(map(str, shape)) for shape in shapes) if name not in missing)
    monkeypatch.setattr(_ffa_library, "compiled_variants", lambda: names)
    monkeypatch.setattr(_ffa_library, "compiled_archs", lambda: ("sm_90a",))


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("desc", [GPU, dataclasses.replace(GPU, head_dim=256), dataclasses.replace(GPU, dtype=torch.float16)])
def test_a_gpu_without_compiled_kernels_is_refused_until_blocked_is_asked_for(desc: AttentionDesc) -> None:
    with pytest.raises(UnsupportedError, match=r"no CUDA kernel is compiled.*compiled: none.*backend='blocked'"):
        choose(desc)
    assert choose(desc, "blocked") == "blocked"


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0), None])
def test_a_gpu_of_another_architecture_is_refused(capability: tuple[int, int] | None) -> None:
    desc = dataclasses.replace(GPU, capability=capability)
    with pytest.raises(UnsupportedError, match=r"compute capability of the GPU .*compiled: sm_90a.*backend='blocked'"):
        choose(desc)
    assert choose(desc, "blocked") == "blocked"


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, "ffa"),
        ({"softcap": 3.0}, "ffa"),
        ({"head_dim": 64, "head_dim_v": 64, "dtype": torch.float16}, "ffa"),
        ({"head_dim": 40, "head_dim_v": 7}, "ffa"),
        ({"head_dim": 40, "head_dim_v": 96}, "ffa"),
        ({"head_dim": 192}, "blocked"),
        ({"head_dim_v": 129}, "blocked"),
        ({"dtype": torch.float64}, "blocked"),
    ],
)
def test_what_hopper_takes(change: dict[str, Any], chosen: str) -> None:
    assert choose(dataclasses.replace(GPU, **change)) == chosen


@pytest.mark.usefixtures("with_kernels")
def test_a_variant_that_was_left_out_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"forward:fp16:128:1 is not compiled \(compiled: forward:bf16:64:0, .*backend='blocked'"):
        choose(dataclasses.replace(GPU, dtype=torch.float16, softcap=1.0))
    narrow = dataclasses.replace(GPU, head_dim=64, head_dim_v=64, softcap=1.0)
    assert choose(narrow) == "ffa"
    with pytest.raises(UnsupportedError, match="backward:bf16:64:1 is not compiled"):
        choose(narrow, "auto", "backward")


@pytest.mark.usefixtures("with_kernels")
def test_what_is_slow_on_a_gpu_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    select._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "magi_attention"):
        for _ in range(3):
            assert choose(dataclasses.replace(GPU, head_dim=256)) == "blocked"
    assert len(caplog.records) == 1 and "the kernels take up to 128" in caplog.text


def test_fp32_on_gpu_needs_to_be_asked_for() -> None:
    desc = dataclasses.replace(GPU, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match=r"q has dtype torch\.float32.*backend='blocked'"):
        choose(desc)
    assert choose(desc, "blocked") == "blocked"


@pytest.mark.usefixtures("without_kernels")
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
