"""`python -m release.tag v0.2.0`: is this tag one that a release can be made of? Knows the version scheme; changes nothing.

The version of every file comes from the tag through versioningit, so a tag that is not on a clean commit would name files wrongly.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TAG = re.compile(r"v(\d+\.\d+\.\d+)(rc\d+)?")


class ReleaseError(Exception):
    """The release cannot be made; the text is one sentence with the next step."""


def version_of(tag: str) -> str:
    """ "0.2.0" of v0.2.0, "0.2.0rc1" of v0.2.0rc1."""
    found = TAG.fullmatch(tag)
    if not found:
        raise ReleaseError(f"tag {tag!r} is no release: it must be vMAJOR.MINOR.PATCH, or that with rcN, like v0.2.0 or v0.2.0rc1")
    return found[1] + (found[2] or "")


def check_tag(tag: str, root: Path = ROOT) -> str:
    """The version. Raises ReleaseError unless the tag is annotated, on HEAD, on a clean tree, and what versioningit makes of it."""
    version = version_of(tag)
    if _git(root, "cat-file", "-t", tag) != "tag":
        raise ReleaseError(f"{tag} is not an annotated tag; make it with: git tag -a {tag} -m 'magi_attention {version}'")
    if _git(root, "rev-list", "-n", "1", tag) != _git(root, "rev-parse", "HEAD"):
        raise ReleaseError(f"{tag} is not on the commit that is checked out; git checkout {tag}")
    if _git(root, "status", "--porcelain", "--untracked-files=no"):
        raise ReleaseError(f"files differ from {tag}; a release is built from a clean checkout")
    done = subprocess.run([sys.executable, "-m", "versioningit", str(root)], capture_output=True, text=True, check=False)
    if done.returncode or done.stdout.strip() != version:
        named = done.stdout.strip() or (done.stderr.strip().splitlines() or ["no version"])[-1]
        raise ReleaseError(f"versioningit names this tree {named!r}, must be {version!r}; is another tag on this commit?")
    return version


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m release.tag", description="Check a release tag and print its version.")
    parser.add_argument("tag")
    try:
        print(check_tag(parser.parse_args(arguments).tag))
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
