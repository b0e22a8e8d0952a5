"""`python -m release.changelog 0.2.0`: prints the notes of a version from CHANGELOG.md, or says why it is not ready. Changes nothing."""

from __future__ import annotations

import argparse
import datetime
import re
import sys

from release.tag import ROOT, ReleaseError

HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?$")


def sections(text: str) -> dict[str, tuple[str | None, str]]:
    """version -> (date, text below its heading), in the order of the file."""
    found: dict[str, tuple[str | None, list[str]]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        heading = HEADING.match(line)
        if heading:
            current = []
            found[heading["version"]] = (heading["date"], current)
        elif current is not None:
            current.append(line)
    return {version: (date, "\n".join(lines).strip()) for version, (date, lines) in found.items()}


def notes_of(version: str, text: str, today: datetime.date) -> str:
    """The notes of a version. A release candidate takes what is under Unreleased.

    Raises:
        ReleaseError: no section, an empty one, a date that is missing or in the future, or changes left under Unreleased.
    """
    known = sections(text)
    if "rc" in version:
        notes = known.get("Unreleased", (None, ""))[1]
        if not notes:
            raise ReleaseError(f"CHANGELOG.md has nothing under [Unreleased] for the candidate {version}")
        return notes
    if version not in known:
        raise ReleaseError(
            f"CHANGELOG.md has no section for {version}; rename [Unreleased] to [{version}] - {today} and open a new one above"
        )
    date, notes = known[version]
    if date is None or datetime.date.fromisoformat(date) > today:
        raise ReleaseError(f"the section of {version} in CHANGELOG.md has the date {date}; write ## [{version}] - {today}")
    if not re.search(r"^- ", notes, re.MULTILINE):
        raise ReleaseError(f"the section of {version} in CHANGELOG.md lists no change")
    if known.get("Unreleased", (None, ""))[1]:
        raise ReleaseError(f"CHANGELOG.md still lists changes under [Unreleased]; they are in {version}: move them there")
    return notes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m release.changelog", description="Print the notes of a version.")
    parser.add_argument("version")
    version = parser.parse_args(arguments).version
    try:
        print(notes_of(version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), datetime.date.today()))
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
