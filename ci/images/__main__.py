"""`python -m images`: base, both images, what they must show, one record. Run by ci/images.sh."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torch_args import CPU_INDEX, answers

from images.base import BaseError, debian_root, give_packages
from images.checks import check_image
from images.engine import Engine, EngineError, engine

ROOT = Path(__file__).resolve().parents[2]
PULLED_BASE = "debian:bookworm"
PULL_TIMEOUT_S = 600
LOCAL_BASE = "magi-attention-base:local"
VARIANTS = "forward:bf16:128:0,backward:bf16:128:0"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bash ci/images.sh", description="Build docker/Dockerfile here, run the images, check them.")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "images", help="folder for all this makes (default build/images)")
    parser.add_argument("--cuda", choices=("12", "13", "both"), default="both")
    parser.add_argument("--base", default="", help="an image to build and run on (default: a Debian made here, or debian:bookworm)")
    parser.add_argument("--runtime-base", default="", help="an image for the stages without a compiler (default: the one of --base)")
    parser.add_argument("--torch", default="2.13.0+cpu", help="torch in the images (default 2.13.0+cpu)")
    parser.add_argument(
        "--torch-index", default="", help="an index for torch beside the usual one (default: PyTorch's, for a CPU build, if it answers)"
    )
    parser.add_argument("--wheels", type=Path, default=Path("/opt/wheels"), help="folder of wheels for the base made here, when it exists")
    parser.add_argument("--variants", default=VARIANTS, help="kernels to compile; '' for all")
    parser.add_argument("--engine", choices=("", "docker", "podman"), default="", help="the first that works when not given")
    parser.add_argument("--dev", action="store_true", help="build the dev stage too")
    parser.add_argument("--keep", action="store_true", help="leave the images in an engine that was there before")
    parser.add_argument("--result", type=Path, help="where the record goes (default WORK/result.json)")
    options = parser.parse_args(arguments)
    if not options.torch_index and options.torch.endswith("+cpu") and answers(CPU_INDEX):
        options.torch_index = CPU_INDEX
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    record: dict[str, Any] = {"name": "images", "status": "passed", "reason": "", "base": options.base, "images": []}
    try:
        with engine(options.work, options.engine) as found:
            record["engine"] = found.must("version", "--format", "{{.Server.Version}}") if found.name == "docker" else found.name
            _run(found, options, record)
    except (BaseError, EngineError) as error:
        record |= {"status": "failed", "reason": str(error)}
    failed = [
        f"CUDA {image['cuda']}: {check['name']}: {check['text']}"
        for image in record["images"]
        for check in image["checks"]
        if not check["passed"]
    ]
    if failed:
        record |= {"status": "failed", "reason": "; ".join(failed)}
    record["seconds"] = round(time.monotonic() - start, 1)
    target = options.result or options.work / "result.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
    num_checks = sum(len(image["checks"]) for image in record["images"])
    print(f"{target}: {record['status']} {record['reason']}".rstrip())
    num_failed = max(len(failed), int(record["status"] != "passed"))
    print(f"{num_checks - len(failed)} passed, {num_failed} failed", flush=True)
    return int(record["status"] != "passed")


def _run(found: Engine, options: argparse.Namespace, record: dict[str, Any]) -> None:
    made: list[str] = []
    base = options.base
    context = options.work / "context"
    try:
        if not options.base:
            base = _make_base(found, options)
            made.append(base)
        record["base"] = base
        _make_context(context)
        for cuda in ("12", "13") if options.cuda == "both" else (options.cuda,):
            record["images"].append(_one_image(found, options, (cuda, base, context), made))
    finally:
        shutil.rmtree(context, ignore_errors=True)
        if made and not options.keep:
            found.call("image", "rm", "--force", *made)


def _make_base(found: Engine, options: argparse.Namespace) -> str:
    """A Debian: made here where that is possible, else of the engine's registry."""
    try:
        root = debian_root(options.work)
    except BaseError as reason:
        pulled = found.call("pull", PULLED_BASE, timeout_s=PULL_TIMEOUT_S)
        if pulled.code:
            raise BaseError(f"{reason}; and {PULLED_BASE} cannot be pulled: {pulled.last_line}") from None
        return PULLED_BASE
    give_packages(root, options.wheels if options.wheels.is_dir() else None)
    found.import_root(root, LOCAL_BASE)
    return LOCAL_BASE


def _make_context(context: Path) -> None:
    """A clone with what is committed: what a person who builds from a clone has."""
    shutil.rmtree(context, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", str(ROOT), str(context)], check=True)


def _one_image(found: Engine, options: argparse.Namespace, what: tuple[str, str, Path], made: list[str]) -> dict[str, Any]:
    cuda, base, context = what
    log = options.work / f"cuda{cuda}.log"
    log.unlink(missing_ok=True)
    arguments = {"BASE_IMAGE": base, "RUNTIME_IMAGE": options.runtime_base or base, "CUDA": cuda}
    arguments |= {"TORCH": options.torch, "TORCH_INDEX": options.torch_index, "VARIANTS": options.variants}
    facts: dict[str, Any] = {"cuda": cuda, "torch": options.torch, "build_s": {}, "bytes": {}, "ids": {}}
    for target in ("build", "wheel-test", "runtime", *(["dev"] if options.dev else [])):
        image = f"magi-attention-{target}:cu{cuda}"
        made.append(image)
        facts["build_s"][target] = round(found.build(context, target, image, arguments, log), 1)
        facts["bytes"][target] = found.size(image)
        facts["ids"][target] = found.must("image", "inspect", "--format", "{{.Id}}", image)
        print(f"CUDA {cuda}, {target}: {facts['build_s'][target]} s, {facts['bytes'][target]:,} bytes", flush=True)
    facts["checks"] = []
    for check in check_image(found, f"magi-attention-runtime:cu{cuda}", cuda, options.work):
        facts["checks"].append({"name": check.name, "passed": check.passed, "text": check.text})
        print(f"  {'ok  ' if check.passed else 'FAIL'} {check.name}: {check.text}", flush=True)
    return facts


if __name__ == "__main__":
    sys.exit(main())
