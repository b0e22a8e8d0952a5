"""Cases of the native transport and of speed (D23, D35, A10): what a CPU can show runs; the rest skips and says what is missing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from magi_attention.api import AttnMask, DistAttnConfig, GrpCollConfig, InputError, UnsupportedError, flex_flash_attn_func
from magi_attention.comm import SINGLE
from magi_attention.kernels.select import resolve
from magi_attention.mask import builders
from magi_attention.runtime.steps import select_exchange_rule
from magi_attention.testing.workers import RankPool
from tests.runtime.harness import Problem, assert_parity, causal, run_on_rank


def require_native_transport(case: str) -> None:
    """Skips without the native transport. Once a build has it, the case must be written here, so its absence fails."""
    try:
        select_exchange_rule(DistAttnConfig(grpcoll_config=GrpCollConfig(backend="native")), SINGLE)
    except UnsupportedError as error:
        pytest.skip(f"{case} needs the native transport: {error}")
    pytest.fail(f"this build has a native transport: case {case} must be written for it")


@pytest.mark.parametrize("wrong", [{"backend": "nvshmem"}, {"timeout_s": 0.0}, {"timeout_s": -1.0}])
def test_d23_wrong_transport_settings_raise_at_construction(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(InputError, match=f"{name}={value!r} must be"):
        GrpCollConfig(**wrong)


def test_d23_128_tokens_per_rank_exactly(rank_pool: RankPool) -> None:
    problem = Problem(causal([256]), 256, num_heads_q=8, num_heads_kv=2, head_dim=128, dtype=torch.bfloat16, chunk_size=64)
    parts = [found[0] for found in rank_pool.run(2, run_on_rank, [problem], timeout_s=30)]
    assert [len(part["out"]) for part in parts] == [128, 128]
    assert_parity(problem, parts)


@pytest.mark.gpu
def test_d23_native_buffers_and_sms() -> None:
    require_native_transport("D23")


@pytest.mark.gpu
def test_d35_native_that_fails_on_one_rank() -> None:
    require_native_transport("D35")


# ---- A10: speed without flags ----

TOTAL, HEADS_Q, HEADS_KV, HEAD_DIM = 32_768, 64, 8, 128
FLAGS = ("auto_range_merge", "swap_ab", "pack_gqa", "cat_gqa", "sparse_load", "swap_bwd_qk_loop")


def speed_masks() -> dict[str, AttnMask]:
    documents = list(range(0, TOTAL + 1, 512))
    blocks = np.random.default_rng(0).random((TOTAL // 64, TOTAL // 64)) < 0.1
    return {
        "full": builders.sliding_window(TOTAL, TOTAL, None),
        "causal": builders.sliding_window(TOTAL, TOTAL, (None, 0)),
        "documents": builders.from_cu_seqlens(documents, documents, causal=True),
        "blocks": builders.block_map(blocks, TOTAL, TOTAL, 64, 64),
    }


def median_seconds(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(600)
def test_a10_fast_without_flags(record_property: Callable[[str, object], None]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("A10 needs a CUDA device")
    chosen, reasons = resolve("cuda")
    if chosen != "ffa":
        pytest.skip(f"A10 needs compiled attention kernels: {'; '.join(reasons)}")
    heads = (HEADS_Q, HEADS_KV, HEADS_KV)
    leaves = [torch.randn(TOTAL, num, HEAD_DIM, device="cuda", dtype=torch.bfloat16).requires_grad_() for num in heads]
    dout = torch.randn_like(leaves[0])
    speeds = {}
    for name, mask in speed_masks().items():

        def call(mask: AttnMask = mask, **flags: bool) -> None:
            torch.autograd.grad(flex_flash_attn_func(*leaves, mask=mask, **flags)[0], leaves, dout)

        seconds = median_seconds(call)
        speeds[name] = 14 * mask.area() * HEADS_Q * HEAD_DIM / seconds / 1e12  # 4 flop per cell and width forward, 10 backward
        record_property(f"{name}_tflops", speeds[name])
        for flag in FLAGS:
            flagged = median_seconds(lambda call=call, flag=flag: call(**{flag: True}))
            assert seconds <= 1.2 * flagged, f"{flag} gains {seconds / flagged:.2f} x on {name}"
    assert speeds["documents"] >= 0.5 * speeds["causal"], speeds
