"""The list of kernel variants and the filter, without a compiler."""

from __future__ import annotations

import pytest
from kernel_build.variants import BuildError, Variant, parse_list, select

from tests.rules.tree import ROOT

SHIPPED = parse_list((ROOT / "csrc" / "attention" / "variants.txt").read_text())


def test_shipped_list_is_every_combination_once() -> None:
    wanted = {
        f"{direction}:{dtype}:{dim}:{cap}"
        for direction in ("forward", "backward")
        for dtype in ("bf16", "fp16")
        for dim in (64, 128)
        for cap in (0, 1)
    }
    assert {str(variant) for variant in SHIPPED} == wanted and len(SHIPPED) == len(wanted) == 16


def test_names_of_a_variant() -> None:
    variant = Variant("forward", "bf16", 128, 0)
    assert str(variant) == "forward:bf16:128:0"
    assert variant.file_name == "forward_bf16_d128_cap0"
    assert variant.defines == ("-DMAGI_VARIANT_DTYPE=bf16", "-DMAGI_VARIANT_HEAD_DIM=128", "-DMAGI_VARIANT_SOFTCAP=0")
    assert len({variant.file_name for variant in SHIPPED}) == len(SHIPPED)


@pytest.mark.parametrize(
    ("patterns", "number", "sample"),
    [
        ("", 16, "backward:fp16:64:1"),
        (" , ", 16, "backward:fp16:64:1"),
        ("forward:bf16:128:0", 1, "forward:bf16:128:0"),
        ("forward", 8, "forward:fp16:64:1"),
        ("*:bf16:128", 4, "backward:bf16:128:1"),
        ("forward:bf16:128:0, backward:*:64:0", 3, "backward:fp16:64:0"),
        ("forward,forward:bf16", 8, "forward:bf16:64:0"),
        ("*ward:[bf]*16:1*:0", 4, "backward:fp16:128:0"),
    ],
)
def test_filter_selects_in_the_order_of_the_list(patterns: str, number: int, sample: str) -> None:
    chosen = select(SHIPPED, patterns)
    assert len(chosen) == number and sample in map(str, chosen)
    assert list(chosen) == [variant for variant in SHIPPED if variant in chosen]


@pytest.mark.parametrize("patterns", ["forward:bf17", "backwards", "forward:bf16:128:0:1", "forward::128", ":", "forward,nothing"])
def test_wrong_filter_is_named(patterns: str) -> None:
    with pytest.raises(BuildError, match="variant filter"):
        select(SHIPPED, patterns)


def test_filter_of_an_empty_list() -> None:
    assert parse_list("# only a comment\n\n") == () and select((), "") == ()
    with pytest.raises(BuildError, match="an empty list"):
        select((), "forward")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("forward bf16 128", "list:1: 3 columns"),
        ("# head\nforward bf16 128 0 extra", "list:2: 5 columns"),
        ("sideways bf16 128 0", "direction 'sideways', must be one of forward, backward"),
        ("forward fp8 128 0", "dtype 'fp8'"),
        ("forward bf16 64,96 0", "head_dim '96'"),
        ("forward bf16 64, 0", "head_dim ''"),
        ("forward bf16 64 2", "softcap '2'"),
        ("forward bf16 64 0\nforward bf16,fp16 64 0", "list:2: forward:bf16:64:0 is listed twice"),
    ],
)
def test_wrong_line_is_named(text: str, says: str) -> None:
    with pytest.raises(BuildError) as caught:
        parse_list(text, "list")
    assert says in str(caught.value)
