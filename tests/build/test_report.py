"""The resource report, read from text that nvcc 13.0 printed for small kernels."""

from __future__ import annotations

import csv
from pathlib import Path

from kernel_build import report

# A kernel that spills, one that calls a function which was not inlined, and that function.
SPILLING = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compile time = 17.261 ms
ptxas info    : Function properties for _Z5otherf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z5spillILi160EEvPKfPf' for 'sm_90a'
ptxas info    : Function properties for _Z5spillILi160EEvPKfPf
    2736 bytes stack frame, 3196 bytes spill stores, 3628 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 2736 bytes cumulative stack size
ptxas info    : Compile time = 388.474 ms
"""
LOSING = """\
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : (C7519) warpgroup.arrive is injected in around line 60 by compiler to allow use of registers in GMMA in function 'serial'
ptxas info    : (C7517) warpgroup.wait is injected in around line 98 by compiler to allow use of registers defined by GMMA in \
function 'serial'
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources \
for the wgmma pipeline in the function 'serial'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'serial' for 'sm_90a'
ptxas info    : Function properties for serial
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
"""


def test_resources_of_each_kernel() -> None:
    told = report.parse("x", SPILLING, 2.5)
    assert told.losses == ()
    plain, spill = told.kernels
    assert plain == report.KernelResources("x", "plain", 10, 0, 0, 0, 128, 2.5)
    assert spill == report.KernelResources("x", "_Z5spillILi160EEvPKfPf", 64, 2736, 3196, 3628, 0, 2.5)


def test_a_spill_is_a_fault_unless_allowed() -> None:
    told = {"x": report.parse("x", SPILLING, 1.0)}
    (fault,) = report.faults(told)
    assert fault.startswith("x: ") and "3196 bytes spill stores, 3628 bytes spill loads" in fault
    assert report.faults(told, frozenset({"x"})) == []
    assert frozenset() == report.MAY_SPILL


def test_spills_of_a_function_that_was_not_inlined_count() -> None:
    text = SPILLING.split("ptxas info    : Compiling entry function '_Z5spill")[0]
    assert report.faults({"x": report.parse("x", text, 1.0)}) == []
    head, function = text.split("_Z5otherf")
    text = f"{head}_Z5otherf{function.replace('0 bytes spill stores', '4 bytes spill stores')}"
    (fault,) = report.faults({"x": report.parse("x", text, 1.0)})
    assert "4 bytes spill stores" in fault


def test_a_lost_pipeline_is_a_fault_and_inserted_waits_are_not() -> None:
    told = report.parse("y", LOSING, 1.0)
    assert [kernel.registers for kernel in told.kernels] == [30]
    assert [loss[1:6] for loss in told.losses] == ["C7508", "C7511"]
    assert len(report.faults({"y": told})) == 2


def test_host_code_has_no_kernel() -> None:
    assert report.parse("launch.cu", "", 1.0) == report.ObjectReport((), ())
    assert report.table({"launch.cu": report.parse("launch.cu", "", 1.0)}).count("\n") == 0


def test_dynamic_shared_memory_from_the_symbols() -> None:
    told = report.parse("x", SPILLING, 1.0)
    symbols = "".join(f"0000 t magi_dynamic_shared(std::integral_constant<int, {size}>)\n" for size in (231424, 64))
    assert [kernel.dynamic_shared for kernel in report.with_dynamic_shared(told, symbols).kernels] == [231424, 231424]
    assert [kernel.dynamic_shared for kernel in report.with_dynamic_shared(told, "0000 t main\n").kernels] == [None, None]


def test_table_is_aligned_and_csv_complete(tmp_path: Path) -> None:
    told = {"forward:bf16:128:0": report.parse("forward:bf16:128:0", SPILLING, 12.34), "y": report.parse("y", LOSING, 1.0)}
    lines = report.table(told).splitlines()
    assert len(lines) == 4 and all("  " in line for line in lines)
    ends = {line.index(value) + len(value) for line, value in zip(lines, ["registers", " 10 ", " 64 ", " 30 "], strict=True)}
    assert max(ends) - min(ends) <= 1  # the numbers end where their head ends; the samples carry one blank more
    path = tmp_path / "report.csv"
    report.write_csv(told, path)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["registers"] for row in rows] == ["10", "64", "30"]
    assert rows[1]["spill_loads"] == "3628" and rows[0]["dynamic_shared"] == "" and rows[2]["object"] == "y"


def test_long_names_lose_their_template_arguments() -> None:
    assert report.shown("plain") == "plain" and report.shown("_ZN4magi4sm906kernelIiEEvv") in ("kernel<int>", "_ZN4magi4sm906kernelIiEEvv")
    assert (
        len(report.shown("_ZN4magi4sm90" + "14forward_kernelINS0_13ForwardTraitsI13__nv_bfloat16Li128ELb0EEEEEvNS0_13ForwardParamsE")) <= 60
    )
