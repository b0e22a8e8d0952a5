"""`python -m magi_attention.selftest [--ranks N]`: is this installation right on this machine? No repository and no pytest needed.

Runs the checks of selftest_items.py and prints PASS, FAIL or SKIP for each. Exit code: 0 no FAIL, 1 at least one, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import magi_attention._needs_torch

# isort: split
import torch
import torch.distributed as dist

import magi_attention
from magi_attention import selftest_items as items
from magi_attention.testing.masks import mask_catalogue
from magi_attention.testing.workers import RankPool, RanksFailed

NAME_WIDTH = 44
RANK_TIMEOUT_S = 120.0
MAX_RANKS = 64
PLANNED_RANKS = (1, 3, 8)


class Skipped(Exception):
    """This machine cannot run the check; the text says why."""


@dataclass(frozen=True)
class Item:
    """One named check."""

    name: str
    check: Callable[[], str]


def _skip(reason: str) -> str:
    raise Skipped(reason)


def planning_items() -> Iterator[Item]:
    """What needs no tensor."""
    yield Item("areas of all masks", items.check_areas)
    for num_ranks in PLANNED_RANKS:
        yield Item(f"plans over {num_ranks} ranks", partial(items.check_plans_over, num_ranks))
    yield Item("wrong input is refused", items.check_wrong_input)


def device_items(device: torch.device) -> Iterator[Item]:
    """Parity on one device, every mask of the catalogue."""
    for name in mask_catalogue():
        yield Item(f"{device.type}: {name}", partial(items.check_attention, name, device))
    yield Item(f"{device.type}: sinks and softcap", partial(items.check_sink_and_softcap, device))


def rank_items(backend: str, num_ranks: int, pool: RankPool) -> Iterator[Item]:
    """Parity over several processes."""
    for check in items.RANK_CHECKS:
        for name in items.DISTRIBUTED_MASKS:
            yield Item(f"{backend} x {num_ranks}, {check}: {name}", partial(_run_on_ranks, pool, num_ranks, check, name))


def _run_on_ranks(pool: RankPool, num_ranks: int, check: str, mask_name: str) -> str:
    try:
        answers = pool.run(num_ranks, items.run_rank_check, check, mask_name, timeout_s=RANK_TIMEOUT_S)
    except RanksFailed as error:
        raise items.Failed(str(error)) from None
    wrong = [line for is_right, line in answers if not is_right]
    if wrong:
        raise items.Failed("\n".join(wrong))
    return str(answers[0][1])


def reason_against(backend: str, num_ranks: int, num_gpus: int) -> str | None:
    """Why the distributed checks cannot run over a backend, or None."""
    if num_ranks < 2:
        return f"--ranks {num_ranks}; 2 or more run them"
    if not _has(backend):
        return f"this torch has no {backend}"
    if backend == "nccl" and num_gpus < 2:
        return f"{num_gpus} CUDA devices; each rank needs one"
    return None


def all_items(num_ranks: int, pools: dict[str, RankPool]) -> Iterator[Item]:
    """Everything, cheap first; what this machine cannot run is there as a SKIP with its reason."""
    yield from planning_items()
    yield from device_items(torch.device("cpu"))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus:
        yield from device_items(torch.device("cuda", 0))
    else:
        yield Item("cuda: all masks", partial(_skip, "no CUDA device that torch can use"))
    for backend, pool in pools.items():
        reason = reason_against(backend, num_ranks, num_gpus)
        if reason is None:
            yield from rank_items(backend, min(num_ranks, num_gpus) if backend == "nccl" else num_ranks, pool)
        else:
            yield Item(f"{backend}: attention and tokens", partial(_skip, reason))


def _has(backend: str) -> bool:
    return dist.is_available() and dist.is_backend_available(backend)


def run_item(item: Item) -> tuple[str, str]:
    """(status, detail) of one check."""
    try:
        return "PASS", item.check()
    except Skipped as reason:
        return "SKIP", str(reason)
    except items.Failed as failure:
        return "FAIL", str(failure)
    except Exception as error:  # any other error is a failure of this item, not of the run
        return "FAIL", f"{type(error).__name__}: {error}"


def run(found: Iterator[Item]) -> dict[str, int]:
    """Print each item as it ends and count the outcomes."""
    counts = {"PASS": 0, "FAIL": 0, "SKIP": 0}
    for item in found:
        start = time.perf_counter()
        status, detail = run_item(item)
        counts[status] += 1
        head, *rest = detail.splitlines() or [""]
        print(f"{status}  {item.name:<{NAME_WIDTH}} {time.perf_counter() - start:6.2f} s  {head}", flush=True)
        for line in rest:
            print(f"      {line}")
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m magi_attention.selftest", description="Check results of this installation against float64."
    )
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="processes for the distributed checks; 0 or 1 skips them (default 2)"
    )
    num_ranks = parser.parse_args(arguments).ranks
    if not 0 <= num_ranks <= MAX_RANKS:
        parser.error(f"--ranks {num_ranks} must be from 0 to {MAX_RANKS}; each is a process of this machine")
    torch.set_num_threads(1)  # the problems are tiny; more threads only wait for each other
    print(f"magi_attention {magi_attention.__version__}, torch {torch.__version__}", flush=True)
    start = time.perf_counter()
    with contextlib.closing(RankPool("gloo")) as gloo, contextlib.closing(RankPool("nccl")) as nccl:
        counts = run(all_items(num_ranks, {"gloo": gloo, "nccl": nccl}))
    result = "FAIL" if counts["FAIL"] else "PASS"
    print(f"{result}: {counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped in {time.perf_counter() - start:.1f} s")
    return int(counts["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main())
