"""Writes the pages that `pip install --index-url` reads (PEP 503) beside wheels: python ci/wheel/index.py DIR/whl

One folder per torch, since of several in one index pip takes the highest label and changes torch for it. Knows no wheel's content.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import sys
from pathlib import Path
from urllib.parse import quote

from packaging.utils import parse_wheel_filename
from wheel_archive import read_wheel

PAGE = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><meta name="pypi:repository-version" content="1.0"><title>{title}</title></head>
<body>
"""


def write_index(folder: Path) -> list[str]:
    """Pages for one index folder; gives the projects that are in it."""
    by_project: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.whl")):
        by_project.setdefault(str(parse_wheel_filename(path.name)[0]), []).append(path)
    for project, wheels in by_project.items():
        links = "".join(_link(path) for path in wheels)
        (folder / project).mkdir(exist_ok=True)
        (folder / project / "index.html").write_text(f"{PAGE.format(title=project)}{links}</body></html>\n")
    names = "".join(f'<a href="{project}/">{project}</a><br>\n' for project in by_project)
    (folder / "index.html").write_text(f"{PAGE.format(title=folder.name)}{names}</body></html>\n")
    return list(by_project)


def _link(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    python = next((line.split(":", 1)[1].strip() for line in _metadata(path) if line.startswith("Requires-Python:")), "")
    # The + of a local version must not be read as a space.
    return f'<a href="../{quote(path.name)}#sha256={digest}" data-requires-python="{html.escape(python)}">{path.name}</a><br>\n'


def _metadata(path: Path) -> list[str]:
    wheel = read_wheel(path)
    return wheel.text(f"{wheel.dist_info}/METADATA").partition("\n\n")[0].splitlines()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds one folder per torch")
    folder = parser.parse_args(arguments).folder
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    for path in folders:
        print(f"{path}: {', '.join(write_index(path)) or 'no wheel'}")
    return 0 if folders else 1


if __name__ == "__main__":
    sys.exit(main())
