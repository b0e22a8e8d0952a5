"""Cases of tests/cases that concern one GPU, run on it: the same functions on tensors made there, with dq summed in any order and not."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from magi_attention.api import flex_flash_attn_func
from magi_attention.kernels.ops import single_device_attention
from tests.cases import single, test_kernels_masks, test_kernels_numeric
from tests.cases.test_kernels_masks import (
    test_m01_one_key_per_segment,
    test_m03_nothing_to_see,
    test_m05_empty_segments,
    test_m11_two_slices_equal_one,
    test_m16_block_map_merged_and_not,
    test_m17_areas_and_empty_rows,
    test_m18_diagonal_and_first_key,
    test_m22_causal_with_a_full_first_block,
)
from tests.cases.test_kernels_numeric import (
    test_n02_lse_is_differentiable,
    test_n03_causal_with_fewer_keys,
    test_n10_broadcast_and_strided_dout,
    test_n11_padding_rows,
    test_n19_head_ratios,
    test_n23_scores_up_to_200,
)
from tests.kernels import problems
from tests.kernels.cuda import on_gpu

__all__ = [
    "test_m01_one_key_per_segment",
    "test_m03_nothing_to_see",
    "test_m05_empty_segments",
    "test_m11_two_slices_equal_one",
    "test_m16_block_map_merged_and_not",
    "test_m17_areas_and_empty_rows",
    "test_m18_diagonal_and_first_key",
    "test_m22_causal_with_a_full_first_block",
    "test_n02_lse_is_differentiable",
    "test_n03_causal_with_fewer_keys",
    "test_n10_broadcast_and_strided_dout",
    "test_n11_padding_rows",
    "test_n19_head_ratios",
    "test_n23_scores_up_to_200",
]
pytestmark = on_gpu
COMPARE_BITS_OF_DQ = ("test_n02_lse_is_differentiable", "test_n10_broadcast_and_strided_dout", "test_n19_head_ratios")


@pytest.fixture(autouse=True, params=[False, True], ids=["any order", "deterministic"])
def cases_on_the_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    deterministic = request.param
    if not deterministic and request.node.originalname in COMPARE_BITS_OF_DQ:
        pytest.skip("compares dq to the bit")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # tests that poison memory ask torch for deterministic algorithms
    monkeypatch.setattr(problems, "DEVICE", "cuda")
    monkeypatch.setattr(single, "IS_DETERMINISTIC", deterministic)
    door: Any = functools.partial(flex_flash_attn_func, deterministic=deterministic)
    for module in (single, test_kernels_masks, test_kernels_numeric):
        monkeypatch.setattr(module, "flex_flash_attn_func", door)
    operation = functools.partial(single_device_attention, deterministic=deterministic)
    monkeypatch.setattr(problems, "single_device_attention", operation)
    with torch.device("cuda"):
        yield
