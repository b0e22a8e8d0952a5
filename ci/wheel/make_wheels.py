"""The steps of ci/wheels.sh: source distribution, one wheel with the kernels of each CUDA major, repair, labels, index, checks.

Knows how the parts are called; what a wheel must be is in inspect_wheel.py, what a label changes in label.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import inspect_wheel
import yaml
from cibw import build_in_container, try_in_container
from index import write_index
from label import BUILD_RECORD, Label, labelled, parse_label
from wheel_archive import Wheel, WheelError, read_wheel, write_wheel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))

from kernel_build.toolchain import candidates, find_toolchain  # noqa: E402

PLATFORM = f"manylinux_2_28_{platform.machine()}"


@dataclass(frozen=True)
class Request:
    """What is to be made.

    Attributes:
        majors: CUDA majors whose kernels go into the wheel.
        labels: the torches that get a wheel of their own.
        index: where the index will be published, None when nobody knows yet.
    """

    out: Path
    majors: tuple[str, ...]
    labels: tuple[Label, ...]
    variants: str
    index: str | None
    in_container: bool


def labels_of(matrix: Path, majors: tuple[str, ...], torches: list[str]) -> tuple[Label, ...]:
    """Of ci/matrix.yaml, those with these CUDA majors; of them the named torches ("2.11"), or whole labels that it need not know."""
    lines = yaml.safe_load(matrix.read_text())["torch"]
    known = tuple(dict.fromkeys(parse_label(line["label"]) for line in lines if line.get("label")))
    chosen = []
    for torch in torches:
        found = [label for label in known if label.torch == torch] or ([parse_label(torch)] if "-torch" in torch else [])
        if not found:
            raise WheelError(f"--torch {torch}: ci/matrix.yaml has {', '.join(label.torch for label in known)}")
        chosen += found
    return tuple(label for label in (chosen or known) if label.major in majors)


def cuda_home(major: str) -> Path:
    """CUDA12_HOME or CUDA13_HOME, else the first toolkit of that major that is fit; CUDA 12 is assembled where there is none."""
    named = os.environ.get(f"CUDA{major}_HOME")
    places = [Path(named)] if named else [*sorted(Path("/usr/local").glob(f"cuda-{major}*"), reverse=True), *_toolkits()]
    refused = []
    for place in places:
        toolchain, why = find_toolchain([place / "bin" / "nvcc"])
        if toolchain is not None and str(toolchain.major) == major:
            return place.resolve()
        refused.append(why or f"{place} is of CUDA {toolchain.major if toolchain else '?'}")
    if major == "12" and not named:
        home = ROOT / "build" / "cuda12"
        run("bash", str(ROOT / "ci" / "cuda12.sh"), str(home))
        return home
    raise WheelError(f"no CUDA {major} toolkit: {'; '.join(refused) or 'none found'}; install one or set CUDA{major}_HOME")


def _toolkits() -> list[Path]:
    # Folders of a program only: a wrapper in a bin/ of its own has no toolkit around it.
    homes = (path.parent.parent for path in candidates())
    return [home for home in homes if (home / "include").is_dir() and (home / "bin" / "nvcc").is_file()]


def run(*command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    done = subprocess.run(command, env={**os.environ, **(env or {})}, cwd=cwd, check=False)
    if done.returncode:
        raise WheelError(f"exit code {done.returncode}: {' '.join(command)}")


def source_distribution(folder: Path) -> Path:
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (archive,) = folder.glob("*.tar.gz")
    return archive


def build_here(archive: Path, homes: list[Path], variants: str, folder: Path) -> Path:
    """From the unpacked source distribution, outside of git, in a folder with a space in its name."""
    sysroot = ROOT / "build" / "sysroot"
    run("bash", str(ROOT / "ci" / "wheel" / "sysroot.sh"), str(sysroot))
    source = folder / "unpacked source"
    shutil.unpack_archive(archive, source)
    (tree,) = source.iterdir()
    compiler = str(sysroot / "bin" / "g++")
    settings = {
        "CC": compiler,
        "CXX": compiler,
        "NVCC_CCBIN": compiler,
        "MAGI_BUILD_KERNELS": "1",
        "MAGI_BUILD_CUDA": os.pathsep.join(map(str, homes)),
        "MAGI_BUILD_VARIANTS": variants,
        "MAGI_BUILD_OBJECTS": str(ROOT / "build" / "kernels"),
    }
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "built"), str(tree), env=settings, cwd=folder)
    (wheel,) = (folder / "built").glob("*.whl")
    run("auditwheel", "repair", "--plat", PLATFORM, "--only-plat", "--wheel-dir", str(folder / "repaired"), str(wheel))
    (repaired,) = (folder / "repaired").glob("*.whl")
    return repaired


def published(wheel: Wheel, index: str | None) -> Wheel:
    """Marked as one that refuses torches it was not made for; a build on the user's own machine takes any."""
    build = {**json.loads(wheel.text(BUILD_RECORD)), "origin": "release", "index": index}
    return replace(wheel, members={**wheel.members, BUILD_RECORD: (json.dumps(build, indent=1).encode() + b"\n", 0o644)})


def make(request: Request) -> list[Path]:
    homes = [cuda_home(major) for major in request.majors]
    request.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="magi-wheels-") as name:
        folder = Path(name)
        archive = source_distribution(folder / "sdist")
        build = build_in_container if request.in_container else build_here
        fat = published(read_wheel(build(archive, homes, request.variants, folder)), request.index)
        made = [write_wheel(fat, request.out)]
    if request.in_container:
        try_in_container(made[0])
    for label in request.labels:
        made.append(write_wheel(labelled(fat, label, request.index), request.out / "whl" / label.name))
        write_index(request.out / "whl" / label.name)
    return made


def parse(arguments: list[str] | None) -> Request:
    parser = argparse.ArgumentParser(prog="ci/wheels.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--cuda", choices=("12", "13", "both"), default="both", help="majors whose kernels go into the wheel")
    parser.add_argument("--torch", nargs="+", default=[], help="2.11 of ci/matrix.yaml, or a label like cu130-torch2.11.0a0+nv26.02")
    parser.add_argument("--variants", default=os.environ.get("MAGI_BUILD_VARIANTS", ""), help="filter, like '*:bf16:128:0'")
    parser.add_argument("--index", help="address of the folder whl/ once it is published")
    parser.add_argument("--no-container", action="store_true", help="this machine's g++ with old libraries, instead of cibuildwheel")
    args = parser.parse_args(arguments)
    majors = ("12", "13") if args.cuda == "both" else (args.cuda,)
    labels = labels_of(ROOT / "ci" / "matrix.yaml", majors, args.torch)
    return Request(args.out.resolve(), majors, labels, args.variants, args.index, not args.no_container)


def main(arguments: list[str] | None = None) -> int:
    start = time.monotonic()
    try:
        request = parse(arguments)
        made = make(request)
    except WheelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(made)} wheels in {time.monotonic() - start:.0f} s")
    return inspect_wheel.main([*map(str, made), f"--variants={request.variants}"])


if __name__ == "__main__":
    sys.exit(main())
