"""Installations in a special surrounding: no NVSHMEM, no compiler, with and without frameworks, broken machines, a GPU.

Each function is named by a cell's `check`. What runs inside the environment is written here as short programs that raise on failure.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from matrix import checks, doctor_cases
from matrix.cells import ROOT, Cell, Matrix
from matrix.environments import Environment, NotHere
from matrix.results import Report
from matrix.wheels import Wheels

NATIVE_IS_REFUSED = """
import torch
import torch.distributed as dist
from magi_attention.api import GrpCollConfig, DistAttnConfig, UnsupportedError, calc_attn, dispatch, magi_attn_varlen_key
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def attend(backend):
    config = DistAttnConfig(grpcoll_config=GrpCollConfig(backend=backend))
    key = magi_attn_varlen_key([0, 64], [0, 64], 2, 1, 32, 0, dist.group.WORLD, causal=True, dist_attn_config=config)
    q, k = dispatch(torch.randn(64, 2, 32), key), dispatch(torch.randn(64, 1, 32), key)
    return calc_attn(q, k, k, key)[0]
assert attend("auto").isfinite().all()
try:
    attend("native")
except UnsupportedError as error:
    print(error)
else:
    raise SystemExit("the native transport was not refused")
"""
NO_FRAMEWORK = """
import importlib.util
assert importlib.util.find_spec("transformers") is None and importlib.util.find_spec("megatron") is None
import magi_attention.api
from magi_attention.integrations.transformers import KeyedAttention
try:
    KeyedAttention(None).register("magi_attention")
except magi_attention.api.UnsupportedError as error:
    print(error)
else:
    raise SystemExit("registering without transformers was not refused")
"""
NEWEST_FRAMEWORK = """
import importlib.metadata as metadata, importlib.util
import transformers, megatron.core
import magi_attention.api
from magi_attention.integrations.transformers import KeyedAttention
KeyedAttention(None).register("magi_attention")
print(f"transformers {metadata.version('transformers')}, megatron-core {metadata.version('megatron-core')}")
"""
# What the tests marked gpu read beside the package; magi_attention itself stays behind, so that the wheel's is imported.
BESIDE_THE_TESTS = (
    "tests",
    "benchmarks",
    "docs",
    "examples",
    "csrc",
    "ci",
    "pyproject.toml",
    "setup.py",
    "Makefile",
    "README.md",
    "CMakeLists.txt",
)


@dataclass(frozen=True)
class Place:
    """What a check works with."""

    cell: Cell
    matrix: Matrix
    environment: Environment
    wheels: Wheels
    report: Report

    def install(self) -> None:
        checks.install(self.environment, self.wheels.find(self.cell.wheel), self.report)

    def run(self, name: str, code: str, *says: str) -> None:
        """A program that must end well and say something with all of `says`."""
        done = self.environment.run("-c", code)
        missing = [words for words in says if words not in done.out]
        passed = done.code == 0 and not missing
        self.report.check(
            name, passed, done.out.strip() if passed else f"{done.last_line} {' '.join(f'(without {one!r})' for one in missing)}"
        )


def torch_stays(place: Place) -> None:
    """From the index folder of the pair, as docs/install.md says it: our wheel is found, and torch is no part of the plan.

    The folder is the only index, since PyPI's package of this name is another one.
    """
    file = place.wheels.find(place.cell.wheel)
    folder = place.wheels.folder_of(place.cell.wheel)
    if not (folder / "magi-attention" / "index.html").is_file():
        raise NotHere(f"{folder} is no index yet: python ci/wheel/index.py {folder.parent} writes its pages")
    place.environment.pip("install", "-q", "numpy")
    planned = place.environment.folder / "plan.json"
    source = ("--isolated", "--index-url", folder.as_uri(), "--report", str(planned))
    done = place.environment.pip("install", "--dry-run", "--quiet", *source, "magi-attention")
    plan = (
        {one["metadata"]["name"]: one["metadata"]["version"] for one in json.loads(planned.read_text())["install"]}
        if done.code == 0
        else {}
    )
    chosen = plan.get("magi-attention", "nothing")
    right = Version(chosen) == Version(file.name.split("-")[1]) if plan else False
    place.report.check("pip finds the wheel of the pair", right, f"magi-attention {chosen}" if plan else done.last_line)
    others = sorted(set(plan) - {"magi-attention"})
    place.report.check("torch and all else stay as they are", bool(plan) and not others, ", ".join(others), planned=plan)


def no_nvshmem(place: Place) -> None:
    place.install()
    found = [path.name for path in place.environment.site_packages.rglob("*nvshmem*") if path.suffix in (".so", ".dist-info", ".3")]
    place.report.check("no NVSHMEM is there", not found, ", ".join(found))
    place.run("exchange works, native is refused by name", NATIVE_IS_REFUSED, "GrpCollConfig.backend", "backend='auto'")


def no_compiler(place: Place) -> None:
    place.install()
    facts = checks.import_package(place.environment, place.report, place.matrix.budgets["import"])
    checks.healthy(place.environment, place.report)
    done = place.environment.run("-c", "import os; print('CUDA_HOME' in os.environ, os.environ['PATH'])")
    place.report.check("PATH is the environment's alone", done.out.split() == ["False", str(place.environment.folder / "bin")], done.out)
    place.report.check("the version prints", bool(facts.get("version")), str(facts.get("version", "")))


def no_frameworks(place: Place) -> None:
    place.install()
    place.run("import works, the adapter names what it takes", NO_FRAMEWORK, "pip install 'transformers>=")


def newest_frameworks(place: Place) -> None:
    place.install()
    before = checks.version_of_torch(place.environment)
    done = place.environment.pip("install", "-q", "--only-binary=:all:", "transformers", "megatron-core")
    after = checks.version_of_torch(place.environment)
    place.report.check("transformers and megatron-core install", done.code == 0 and before == after, done.last_line if done.code else after)
    place.run("import and adapter work", NEWEST_FRAMEWORK, "transformers", "megatron-core")


def doctor_faults(place: Place) -> None:
    """Broken machines, as far as files can play them; what needs GPUs is answered by probes inside the doctor."""
    place.install()
    for case in doctor_cases.CASES:
        environment = place.environment
        undo = case.arrange(environment)
        try:
            code, found, why = checks.doctor(environment, variables={"PATH": str(environment.folder / "bin")})
        finally:
            undo()
        _check_findings(place, case.name, case.finding, case.code, (code, found, why))
    for name, finding, code in doctor_cases.PROBED:
        done = place.environment.run(str(Path(doctor_cases.__file__)), name)
        try:
            found = json.loads(done.out)
        except ValueError:
            found = {}
        _check_findings(place, name, finding, code, (done.code, found, "" if found else done.last_line))


def _check_findings(place: Place, name: str, wanted: str, code: int, answer: tuple[int, dict, str]) -> None:
    exit_code, found, why = answer
    findings = [one for one in found.get("findings", []) if one["severity"] != "note" or one["name"] == wanted]
    names = [one["name"] for one in findings]
    right = names == ([wanted] if wanted else []) and all(one["fix"] for one in findings)
    shown = "; ".join(f"{one['text']} -> {one['fix']}" for one in findings) or "no faults"
    place.report.check(f"doctor, {name}", exit_code == code and bool(found) and right, why or f"exit code {exit_code}: {shown}")


def on_gpu(place: Place) -> None:
    """The wheel where the kernels can run: self-test, doctor, and the tests marked gpu against the installed package."""
    place.install()
    facts = checks.import_package(place.environment, place.report, place.matrix.budgets["import"])
    if not facts:
        return
    checks.kernels(place.cell, place.matrix, facts, place.report)
    checks.selftest(place.environment, place.report)
    checks.healthy(place.environment, place.report)
    run = place.environment.folder / "run"
    for name in BESIDE_THE_TESTS:
        source = ROOT / name
        copy: Callable[..., object] = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, run / name)
    where = place.environment.run("-c", "import magi_attention; print(magi_attention.__file__)").out.strip()
    place.report.check("tests import the wheel", "site-packages" in where, where)
    # tests/packaging looks at the tree, not at the package.
    options = ("-m", "gpu", "--ignore=tests/packaging", "-q", "-p", "no:cacheprovider", "--no-header", "-o", "addopts=--strict-markers")
    path = os.environ.get("PATH", "")
    done = place.environment.run("-m", "pytest", "tests", *options, timeout_s=1500, variables={"PATH": path})
    # All of them skipped is an exit code of 0 too.
    place.report.check("tests marked gpu", done.code == 0 and re.search(r"\d+ passed", done.last_line) is not None, done.last_line)


CHECKS: dict[str, Callable[[Place], None]] = {
    check.__name__: check for check in (torch_stays, no_nvshmem, no_compiler, no_frameworks, newest_frameworks, doctor_faults, on_gpu)
}
