"""The list of kernel variants and the filter a developer narrows it with. Knows no compiler."""

from __future__ import annotations

import fnmatch
import itertools
from dataclasses import dataclass

DIRECTIONS = ("forward", "backward")
DTYPES = ("bf16", "fp16")
HEAD_DIMS = ("64", "128")
SOFTCAPS = ("0", "1")
COLUMNS = {"direction": DIRECTIONS, "dtype": DTYPES, "head_dim": HEAD_DIMS, "softcap": SOFTCAPS}


class BuildError(Exception):
    """The build cannot go on; the text says what to do. Shown without a traceback."""


@dataclass(frozen=True, order=True)
class Variant:
    """One compiled kernel. str() gives the name users, filters and the library itself use: "forward:bf16:128:0"."""

    direction: str
    dtype: str
    head_dim: int
    softcap: int

    def __str__(self) -> str:
        return f"{self.direction}:{self.dtype}:{self.head_dim}:{self.softcap}"

    @property
    def file_name(self) -> str:
        return f"{self.direction}_{self.dtype}_d{self.head_dim}_cap{self.softcap}"

    @property
    def defines(self) -> tuple[str, ...]:
        return (
            f"-DMAGI_VARIANT_DTYPE={self.dtype}",
            f"-DMAGI_VARIANT_HEAD_DIM={self.head_dim}",
            f"-DMAGI_VARIANT_SOFTCAP={self.softcap}",
        )


def parse_list(text: str, name: str = "variants.txt") -> tuple[Variant, ...]:
    """Variants of the list file, in its order. Raises BuildError with the line that is wrong."""
    found: list[Variant] = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = line.split("#")[0].split()
        if not cells:
            continue
        if len(cells) != len(COLUMNS):
            raise BuildError(f"{name}:{number}: {len(cells)} columns, must be {len(COLUMNS)}: {' '.join(COLUMNS)}")
        values = [cell.split(",") for cell in cells]
        for (column, known), given in zip(COLUMNS.items(), values, strict=True):
            for value in given:
                if value not in known:
                    raise BuildError(f"{name}:{number}: {column} {value!r}, must be one of {', '.join(known)}")
        made = [Variant(direction, dtype, int(dim), int(cap)) for direction, dtype, dim, cap in itertools.product(*values)]
        for variant in made:
            if variant in found:
                raise BuildError(f"{name}:{number}: {variant} is listed twice")
            found.append(variant)
    return tuple(found)


def select(variants: tuple[Variant, ...], patterns: str) -> tuple[Variant, ...]:
    """Variants that match one of the comma-separated patterns; all for an empty text.

    A pattern has up to four parts like a variant's name, each a glob; parts left out match everything:
    "forward:bf16:128:0", "*:bf16:128", "backward".

    Raises:
        BuildError: a pattern that is malformed or matches nothing.
    """
    chosen: set[Variant] = set()
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        parts = pattern.split(":")
        if len(parts) > len(COLUMNS) or "" in parts:
            raise BuildError(f"variant filter {pattern!r}: must be up to {len(COLUMNS)} globs {':'.join(COLUMNS)}, like *:bf16:128:0")
        matching = {variant for variant in variants if _matches(variant, parts)}
        if not matching:
            raise BuildError(f"variant filter {pattern!r} matches none of {', '.join(map(str, variants)) or 'an empty list'}")
        chosen |= matching
    return tuple(variant for variant in variants if variant in chosen) if chosen else variants


def _matches(variant: Variant, parts: list[str]) -> bool:
    return all(fnmatch.fnmatchcase(value, part) for value, part in zip(str(variant).split(":"), parts, strict=False))
