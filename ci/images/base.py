"""The base image of a machine that can pull none: Debian from its mirror, with its way to packages. Knows no option of an engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

SUITE = "bookworm"
# Where a mirror is a copy of some day, lists of a suite that changes daily have expired; signatures are checked all the same.
APT_SETTINGS = ("Acquire::Check-Valid-Until ", "Acquire::Check-Date ")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class BaseError(Exception):
    """No base can be made; the text is for a person."""


def debian_mirror(apt: Path = Path("/etc/apt")) -> str:
    """The first Debian archive of this machine's apt."""
    lists = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    for path in lists:
        text = path.read_text(errors="replace") if path.suffix in (".list", ".sources") and path.is_file() else ""
        found = re.search(r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(https?://\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
        if found:
            return found[1]
    raise BaseError("apt of this machine names no Debian archive; give a base image with --base")


def debian_root(work: Path) -> Path:
    """A minimal Debian in work/root, made once."""
    root, ready = work / "root", work / "root.ready"
    if ready.is_file():
        return root
    if not shutil.which("debootstrap") or os.geteuid() != 0:
        raise BaseError("a base image is made by debootstrap, as root: apt-get install debootstrap; or give one with --base")
    shutil.rmtree(root, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, str(root), debian_mirror()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BaseError(f"debootstrap: {(done.stdout + done.stderr).strip()[-1000:]}")
    for downloaded in (*root.glob("var/cache/apt/archives/*.deb"), *root.glob("var/lib/apt/lists/*")):
        if downloaded.is_file():
            downloaded.unlink()
    ready.touch()
    return root


def give_packages(root: Path, wheels: Path | None) -> None:
    """How the image reaches packages: this machine's certificates and its patience with an old mirror, and a folder of wheels."""
    if CERTIFICATES.is_file():
        shutil.copy2(CERTIFICATES, root / str(CERTIFICATES).lstrip("/"))
    dumped = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=False).stdout
    kept = [line for line in dumped.splitlines() if line.startswith(APT_SETTINGS)]
    (root / "etc" / "apt" / "apt.conf.d" / "90-of-the-machine").write_text("".join(f"{line}\n" for line in kept))
    lines = ["[global]", f"cert = {CERTIFICATES}"]
    folder = root / "opt" / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    if wheels is not None:
        folder.mkdir(parents=True)
        for wheel in wheels.glob("*.whl"):
            shutil.copy2(wheel, folder)
        lines.append("find-links = /opt/wheels")
    (root / "etc" / "pip.conf").write_text("\n".join(lines) + "\n")
