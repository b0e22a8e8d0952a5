"""`python -m conda`: stand-ins, packages, channel, installations, one record of it all. Run by ci/conda.sh, which brings the programs.

Every step is a process of its own (channel.py says why), so a step that fails, or that crashes, is a line in the record.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conda.plan import PLATFORMS, ROOT, PlanError, minor_number, missing_torch_lines, places, recipe_variants, write_torch_lines

STEPS = ("prepare", "render", "build", "install")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bash ci/conda.sh", description="Build the conda packages here, install and test them.")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "conda", help="folder for everything this makes (default build/conda)"
    )
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "build" / "matrix", help="environments with torch, shared with ci/run_matrix.py"
    )
    parser.add_argument("--wheel-variants", default="forward:bf16:128:0,backward:bf16:128:0", help="kernels to compile; '' for all")
    parser.add_argument("--cuda12-home", type=Path, help="a CUDA 12 toolkit (default: CUDA12_HOME, /usr/local/cuda-12*, else ci/cuda12.sh)")
    parser.add_argument("--cuda13-home", type=Path, help="a CUDA 13 toolkit (default: CUDA13_HOME, /usr/local/cuda-13*, /usr/local/cuda)")
    parser.add_argument("--pythons", type=lambda text: text.split(","), default=[], help="only these, like 3.10,3.12")
    parser.add_argument("--all", action="store_true", help="every torch of ci/matrix.yaml on each of its Pythons")
    parser.add_argument("--result", type=Path, help="where the record goes (default WORK/result.json)")
    parser.add_argument(
        "--write-torch-lines", action="store_true", help="give recipe/conda_build_config.yaml the torch of ci/matrix.yaml; nothing else"
    )
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.write_torch_lines:
        print("recipe/conda_build_config.yaml", "changed" if write_torch_lines() else "already has the torch lines of ci/matrix.yaml")
        return 0
    options.work, options.cache = options.work.resolve(), options.cache.resolve()
    if options.step:
        return _run_step(options)
    return _run_all(options, list(sys.argv[1:] if arguments is None else arguments))


def _run_all(options: argparse.Namespace, arguments: list[str]) -> int:
    options.work.mkdir(parents=True, exist_ok=True)
    start, record, status = time.monotonic(), {}, "passed"
    reason = ""
    for step in STEPS:
        print(f"== {step}", flush=True)
        answer = options.work / f"{step}.json"
        answer.unlink(missing_ok=True)
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", "conda", *arguments, "--step", step], check=False).returncode
        known = json.loads(answer.read_text()) if answer.is_file() else {}
        record[step] = {**known, "seconds": round(time.monotonic() - began, 1)}
        # A crash after a step's answer is the engine's at exit; the answer is complete by then.
        if "error" in known or not known:
            status, reason = "failed", f"{step}: {known.get('error', f'exit code {code}')}"
            break
    result = {"name": "conda-linux-64", "status": status, "reason": reason, "seconds": round(time.monotonic() - start, 1), "steps": record}
    target = options.result or options.work / "result.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    passed = sum("error" not in step for step in record.values())
    print(f"{target}: {status} {reason}".rstrip())
    print(f"{passed} passed, {len(record) - passed} failed", flush=True)
    return int(status != "passed")


def _run_step(options: argparse.Namespace) -> int:
    # Nothing of a person's caches: a package that is built again has the old one's name.
    os.environ["RATTLER_CACHE_DIR"] = str(options.work / "cache")
    steps: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "prepare": _prepare,
        "render": _render,
        "build": _build,
        "install": _install,
    }
    try:
        answer = steps[options.step](options)
    except Exception as error:  # the record and the last line say it; the engine's exceptions share no base class
        print(f"error: {error}", file=sys.stderr)
        answer = {"error": f"{type(error).__name__}: {error}"}
    (options.work / f"{options.step}.json").write_text(json.dumps(answer, indent=1) + "\n")
    return int("error" in answer)


def _prepare(options: argparse.Namespace) -> dict[str, Any]:
    from conda import channel, machine

    drift = missing_torch_lines()
    if drift:
        names = ", ".join(drift)
        raise PlanError(
            f"recipe/conda_build_config.yaml and ci/matrix.yaml differ in torch {names}; run: bash ci/conda.sh --write-torch-lines"
        )
    for name in ("cache", "repodata", "packages", "environments"):
        shutil.rmtree(options.work / name, ignore_errors=True)
    folder = options.work / "channel"
    channel.prepare(folder)
    recipes = machine.stand_ins(places(options.all, options.pythons), machine.Toolkits.find(options, ROOT), options)
    return {"stand_ins": channel.build_stand_ins(folder, recipes)}


def _render(options: argparse.Namespace) -> dict[str, Any]:
    from conda import channel

    answer = {}
    for platform in PLATFORMS:
        outputs = channel.render(None, platform)
        answer[platform] = [f"{channel.name_of(output)} {channel.build_of(output)}" for output in outputs]
        print(f"{platform}: {len(outputs)} outputs", *answer[platform], sep="\n  ", flush=True)
        for cuda in recipe_variants()["cuda_compiler_version"]:
            wanted = {f"cuda{cuda}_torch{torch}".replace(".", "") for torch in recipe_variants()["pytorch"]}
            absent = [name for name in wanted if not any(f" {name}_" in line for line in answer[platform])]
            if absent:
                raise PlanError(f"recipe.yaml renders no {', '.join(absent)} for {platform}")
    return answer


def _build(options: argparse.Namespace) -> dict[str, Any]:
    from conda import channel, machine

    wanted = places(options.all, options.pythons)
    os.environ["MAGI_VERSION"] = machine.version(ROOT)
    os.environ["MAGI_BUILD_VARIANTS"] = options.wheel_variants
    folder, built = options.work / "channel", []
    oldest = min((place.python for place in wanted), key=minor_number)
    for cuda in dict.fromkeys(place.cuda for place in wanted):
        here = [place for place in wanted if place.cuda == cuda]
        config = {name: values for name, values in recipe_variants().items() if name in ("c_stdlib_version", "cxx_compiler_version")}
        chosen = recipe_variants()["cuda_compiler_version"].index(cuda)
        config = {name: [values[chosen]] for name, values in config.items()}
        config |= {"cuda_compiler_version": [cuda], "python_min": [oldest]}
        config["pytorch"] = list(dict.fromkeys(place.torch.minor for place in here))
        built += channel.build(folder, channel.render(config, "linux-64"), driver=cuda)
    channel.finish(folder)
    for package in built:
        print(f"{package['file']}: {package['bytes']:,} bytes, {package['seconds']} s", flush=True)
    return {"version": os.environ["MAGI_VERSION"], "variants": options.wheel_variants, "packages": built}


def _install(options: argparse.Namespace) -> dict[str, Any]:
    from conda import install

    wanted = places(options.all, options.pythons)
    installer = install.Installer(options.work / "channel", options.work)
    answer: dict[str, Any] = {"places": []}
    for place in wanted:
        facts = install.check_place(installer, place)
        answer["places"].append(facts)
        print(f"{place} -> {facts['chosen']}\n  installed in {facts['install_s']} s; {facts['selftest']}", flush=True)
    answer["by_driver"] = {cuda: install.check_choice_by_driver(installer, cuda) for cuda in dict.fromkeys(place.cuda for place in wanted)}
    for cuda, chosen in answer["by_driver"].items():
        print(f"driver {cuda}, nothing else asked for -> {chosen}")
    answer["pinned_torch"] = install.check_choice_by_torch(installer, wanted[0], wanted[-1])
    print(f"driver {wanted[-1].cuda}, pytorch {wanted[0].torch.minor} pinned -> {answer['pinned_torch']}")
    answer["refusal"] = install.check_refusal(installer)
    print(f"driver {install.TOO_OLD_DRIVER} -> refused:\n{answer['refusal']}", flush=True)
    return answer


if __name__ == "__main__":
    sys.exit(main())
