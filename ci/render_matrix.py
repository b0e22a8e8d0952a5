"""`python ci/render_matrix.py [--check]`: writes the tables of README.md and docs/install.md from ci/matrix.yaml and ci/results/.

With --check it writes nothing and fails when a table is not what it would write. Between two marks the text belongs to this program.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from matrix import results, tables
from matrix.cells import ROOT, Cell, Matrix, MatrixError, load

END = "<!-- end of {name} -->"
START = "<!-- {name}: written by python ci/render_matrix.py -->"


def parts(matrix: Matrix, folder: Path) -> dict[str, dict[str, str]]:
    """Page -> name of the part -> its text."""

    def read(cell: Cell) -> tables.Record | None:
        return results.read(cell, folder)

    return {
        "README.md": {"compatibility": tables.compatibility(matrix, read)},
        "docs/install.md": {
            "wheels by torch": tables.choices(matrix),
            "what was run": f"{tables.results(matrix, read)}\n\n{tables.machine(matrix, read)}",
            "compatibility": tables.compatibility(matrix, read),
            "refusals": tables.refused(matrix, read),
            "other machines": tables.described(matrix),
        },
    }


def rendered(text: str, written: dict[str, str], page: str) -> str:
    """The page with each part replaced. Raises MatrixError where a mark is missing."""
    for name, part in written.items():
        start, end = START.format(name=name), END.format(name=name)
        if text.count(start) != 1 or text.count(end) != 1:
            raise MatrixError(f"{page} must have the lines {start} and {end} once each")
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n\n{part}\n\n{end}{rest.partition(end)[2]}"
    return text


def main(arguments: list[str] | None = None, root: Path = ROOT, folder: Path = results.RESULTS) -> int:
    parser = argparse.ArgumentParser(
        prog="python ci/render_matrix.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 when a page would change")
    check = parser.parse_args(arguments).check
    try:
        matrix = load()
        strange = results.orphans(matrix.cells, folder)
        if strange:
            raise MatrixError(f"results of no cell: {', '.join(strange)}; remove them")
        pages = {
            page: rendered((root / page).read_text(encoding="utf-8"), written, page) for page, written in parts(matrix, folder).items()
        }
    except MatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    drifted = [page for page, text in pages.items() if (root / page).read_text(encoding="utf-8") != text]
    for page in drifted:
        if check:
            old, new = (root / page).read_text(encoding="utf-8").splitlines(), pages[page].splitlines()
            print("\n".join(difflib.unified_diff(old, new, page, "matrix and results", lineterm="", n=0)))
        else:
            (root / page).write_text(pages[page], encoding="utf-8")
            print(f"{page} written")
    if check and drifted:
        print(f"error: {', '.join(drifted)} no longer fits the matrix; run: python ci/render_matrix.py", file=sys.stderr)
    return int(check and bool(drifted))


if __name__ == "__main__":
    sys.exit(main())
