"""Builds a wheel with cibuildwheel in the image of docker/manylinux. Knows no step before or after the build."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from wheel_archive import WheelError

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = f"manylinux_2_28_{platform.machine()}"
LOCAL_IMAGE = f"localhost/magi-manylinux_{platform.machine()}:local"
# Certificates of a machine whose package index has its own; the container gets the same ones.
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# No torch: it is large, and the libraries know none. A plan for 8 ranks runs the solver; listing the variants loads the kernels, also those
# for the CUDA that nobody asked for.
TRY = """
{python} -m venv /tmp/try
PATH=/tmp/try/bin
pip install -q --progress-bar off numpy
pip install -q --no-deps "/wheels/{wheel}"
python - <<'LOAD'
import pathlib, magi_attention
from magi_attention._ffa_library import load
print(magi_attention.__version__, magi_attention.build_info()["here"])
for path in sorted(pathlib.Path(magi_attention.__file__).parent.rglob("_ffa.so")):
    found = load(path)
    assert found.handle is not None and found.handle.magi_ffa_variants(), found.error
    print(path, found.handle.magi_ffa_build_info().decode())
LOAD
python -m magi_attention.plan --cu-seqlens 0,137,2178,2267 --ranks 8 --heads 64:8 --head-dim 128
"""
BUILT_WITH = "cp311"  # any Python would do: the wheel is py3-none


def engine() -> str:
    """podman or docker. Raises WheelError with the other way."""
    for name in (os.environ.get("CONTAINER_ENGINE", ""), "podman", "docker"):
        if (
            name
            and shutil.which(name)
            and subprocess.run([name, "info"], capture_output=True, env=_environment(), check=False).returncode == 0
        ):
            return name
    raise WheelError("neither podman nor docker answers; start one (docker/manylinux/README.md), or build without: --no-container")


def image(program: str) -> str:
    """MAGI_MANYLINUX_IMAGE, or the local one, which is made when it is missing (minutes, once)."""
    named = os.environ.get("MAGI_MANYLINUX_IMAGE")
    if named:
        return named
    if subprocess.run([program, "image", "inspect", LOCAL_IMAGE], capture_output=True, env=_environment(), check=False).returncode:
        made = subprocess.run(["bash", str(ROOT / "docker" / "manylinux" / "make_image.sh"), LOCAL_IMAGE], env=_environment(), check=False)
        if made.returncode:
            raise WheelError("the build image could not be made, see above; docker/manylinux/README.md names other images")
    return LOCAL_IMAGE


def build_in_container(archive: Path, homes: list[Path], variants: str, folder: Path) -> Path:
    """From the source distribution, with the toolkits of this machine mounted read-only. Gives the repaired wheel."""
    program = engine()
    objects = ROOT / "build" / "kernels"
    objects.mkdir(parents=True, exist_ok=True)
    mounts = {home: f"/opt/cuda{i}:ro" for i, home in enumerate(homes)} | {objects: "/opt/objects"}
    if CERTIFICATES.is_file():
        mounts[CERTIFICATES] = f"{CERTIFICATES}:ro"
    settings = {
        "MAGI_BUILD_KERNELS": "1",
        "MAGI_BUILD_CUDA": ":".join(f"/opt/cuda{i}" for i in range(len(homes))),
        "MAGI_BUILD_VARIANTS": variants,
        "MAGI_BUILD_OBJECTS": "/opt/objects",
        **({name: str(CERTIFICATES) for name in ("PIP_CERT", "SSL_CERT_FILE")} if CERTIFICATES.is_file() else {}),
    }
    create = ["--network=host", *(f"--volume={place}:{target}" for place, target in mounts.items())]
    cibw = {
        "CIBW_BUILD": f"{BUILT_WITH}-manylinux_{platform.machine()}",
        "CIBW_ARCHS": platform.machine(),
        f"CIBW_MANYLINUX_{platform.machine().upper()}_IMAGE": image(program),
        "CIBW_CONTAINER_ENGINE": f"{program}; create_args: {' '.join(create)}",
        "CIBW_BUILD_FRONTEND": "build[uv]",
        "CIBW_ENVIRONMENT": " ".join(f'{name}="{value}"' for name, value in settings.items()),
        "CIBW_REPAIR_WHEEL_COMMAND": f"auditwheel repair --plat {PLATFORM} --only-plat -w {{dest_dir}} {{wheel}}",
        # The wheel is looked into and tested by the steps after this one.
        "CIBW_AUDIT_COMMAND": "",
        "CIBW_TEST_COMMAND": "",
        "CIBW_BUILD_VERBOSITY": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--output-dir", str(folder / "repaired"), str(archive)],
        env={**_environment(), **cibw},
        cwd=folder,
        check=False,
    )
    if done.returncode:
        raise WheelError(f"cibuildwheel failed with exit code {done.returncode}, see above")
    (wheel,) = (folder / "repaired").glob("*.whl")
    return wheel


def try_in_container(wheel: Path) -> None:
    """Installs the wheel in the image it was built in and plans there: an old system without compiler's help, git, GPU and torch."""
    program = engine()
    certificates = [f"--volume={CERTIFICATES}:{CERTIFICATES}:ro", f"--env=PIP_CERT={CERTIFICATES}"] if CERTIFICATES.is_file() else []
    command = [program, "run", "--rm", "--network=host", f"--volume={wheel.parent}:/wheels:ro", *certificates, image(program)]
    script = TRY.format(python=f"/opt/python/{BUILT_WITH}-{BUILT_WITH}/bin/python", wheel=wheel.name)
    done = subprocess.run([*command, "sh", "-euc", script], env=_environment(), check=False)
    if done.returncode:
        raise WheelError(f"{wheel.name} does not work in the image it was built in, see above")


def _environment() -> dict[str, str]:
    return {**os.environ, "CONTAINERS_CONF": os.environ.get("CONTAINERS_CONF", str(ROOT / "docker" / "manylinux" / "containers.conf"))}
