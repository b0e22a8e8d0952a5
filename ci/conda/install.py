"""Solves and installs from the local channel, as `conda install` does, and looks at what came. Builds nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rattler import Channel, Gateway, VirtualPackage, VirtualPackageOverrides, install, solve
from rattler.exceptions import SolverError
from rattler.repo_data import RepoDataRecord

from conda.plan import Place

TOO_OLD_DRIVER = "11.8"
SELFTEST_TIMEOUT_S = 600
# Run by the environment's Python, outside of any source tree.
FACTS = """
import json, time
start = time.perf_counter()
import torch
between = time.perf_counter()
import magi_attention
from magi_attention import _ffa_library, api
print(json.dumps({
    "torch": torch.__version__, "torch_cuda": torch.version.cuda, "version": magi_attention.__version__,
    "import_s": round(time.perf_counter() - between, 2), "from": magi_attention.__path__[0],
    "kernels": _ffa_library.build_info(), "variants": _ffa_library.compiled_variants(), "why_none": _ffa_library.load_error(),
}))
"""


class CheckFailed(Exception):
    """An installation is not what it must be; the text says what was wanted and what came."""


@dataclass(frozen=True)
class Installer:
    """Environments from one channel. `work` gets `environments` and the package cache."""

    channel: Path
    work: Path

    def solution(self, specs: Sequence[str], driver: str) -> dict[str, RepoDataRecord]:
        """What a machine whose driver supports CUDA `driver` ("" for no driver) would get. Raises SolverError with the solver's words."""
        os.environ["CONDA_OVERRIDE_CUDA"] = driver
        machine = [found.into_generic() for found in VirtualPackage.detect(VirtualPackageOverrides.from_env())]
        gateway = Gateway(cache_dir=self.work / "repodata")
        records = asyncio.run(
            solve([Channel(self.channel.as_uri())], list(specs), gateway, platforms=["linux-64", "noarch"], virtual_packages=machine)
        )
        return {record.name.normalized: record for record in records}

    def install(self, records: dict[str, RepoDataRecord], name: str) -> Path:
        prefix = self.work / "environments" / name
        shutil.rmtree(prefix, ignore_errors=True)
        asyncio.run(install(list(records.values()), target_prefix=prefix, cache_dir=self.work / "packages", show_progress=False))
        return prefix


def run_in(prefix: Path, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` of an environment; PATH is the environment's own, so there is no compiler and no nvcc."""
    (prefix / "run").mkdir(exist_ok=True)
    kept = {"PATH": str(prefix / "bin"), "CONDA_PREFIX": str(prefix), "HOME": str(prefix / "run"), "OMP_NUM_THREADS": "1"}
    command = [str(prefix / "bin" / "python"), *arguments]
    return subprocess.run(command, cwd=prefix / "run", env=kept, capture_output=True, text=True, timeout=timeout_s, check=False)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}, no output"


def _require(is_right: bool, text: str) -> None:
    if not is_right:
        raise CheckFailed(text)


def check_place(installer: Installer, place: Place) -> dict[str, object]:
    """`conda install magi-attention` on a machine of that kind: what is chosen, how long it takes, import, kernels, self-test."""
    start = time.monotonic()
    records = installer.solution(["magi-attention", f"python {place.python}.*", f"pytorch {place.torch.minor}.*"], place.cuda)
    chosen, torch = records["magi-attention"], records["pytorch"]
    wanted = f"cuda{place.cuda.replace('.', '')}_torch{place.torch.minor.replace('.', '')}_"
    _require(str(chosen.build).startswith(wanted), f"{place}: {chosen.file_name} was chosen, must be {wanted}*")
    _require(
        str(torch.build).startswith(wanted.split("_")[0]), f"{place}: pytorch {torch.build} was chosen, must be {wanted.split('_')[0]}*"
    )
    prefix = installer.install(records, f"cuda{place.cuda}-torch{place.torch.minor}-py{place.python}")
    installed_s = time.monotonic() - start
    done = run_in(prefix, "-c", FACTS)
    _require(done.returncode == 0, f"{place}: the import fails: {_last_line(done)}")
    facts = json.loads(done.stdout)
    _require(str(prefix) in facts["from"], f"{place}: imported from {facts['from']}, not from {prefix}")
    found = str(facts["kernels"].get("nvcc", "none")).split(".")[0]
    _require(found == place.cuda.split(".")[0], f"{place}: kernels of CUDA {found} were loaded ({facts['why_none'] or 'no reason given'})")
    tested = run_in(prefix, "-m", "magi_attention.selftest", "--ranks", "2", timeout_s=SELFTEST_TIMEOUT_S)
    _require(tested.returncode == 0, f"{place}: the self-test fails: {_last_line(tested)}")
    return {
        "place": str(place),
        "chosen": chosen.file_name,
        "library": records["libmagi-attention"].file_name,
        "pytorch": f"{torch.version} {torch.build}",
        "install_s": round(installed_s, 1),
        "selftest": _last_line(tested),
        **facts,
    }


def check_choice_by_driver(installer: Installer, cuda: str) -> str:
    """Nothing but the driver is known: the build for it is chosen."""
    chosen = str(installer.solution(["magi-attention"], cuda)["magi-attention"].build)
    wanted = f"cuda{cuda.replace('.', '')}_"
    _require(chosen.startswith(wanted), f"driver {cuda}: {chosen} was chosen, must be {wanted}*")
    return chosen


def check_choice_by_torch(installer: Installer, older: Place, newest: Place) -> str:
    """A newer driver with an older torch pinned gets the build for that torch."""
    records = installer.solution(["magi-attention", f"python {older.python}.*", f"pytorch {older.torch.minor}.*"], newest.cuda)
    chosen = str(records["magi-attention"].build)
    wanted = f"cuda{older.cuda.replace('.', '')}_torch{older.torch.minor.replace('.', '')}_"
    _require(chosen.startswith(wanted), f"driver {newest.cuda} with pytorch {older.torch.minor}: {chosen} was chosen, must be {wanted}*")
    return chosen


def check_refusal(installer: Installer) -> str:
    """A driver older than every variant: the solver's words, which must name what is missing."""
    try:
        records = installer.solution(["magi-attention"], TOO_OLD_DRIVER)
    except SolverError as error:
        words = str(error)
        _require("__cuda" in words and "magi-attention" in words, f"driver {TOO_OLD_DRIVER}: the refusal does not name __cuda: {words}")
        return words
    raise CheckFailed(f"driver {TOO_OLD_DRIVER}: {records['magi-attention'].file_name} was chosen, must be refused")
