"""The public names and signatures, frozen: a change to them is a change to tests/rules/api_snapshot.txt in the same commit."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import inspect
import sys
from pathlib import Path
from types import ModuleType

from magi_attention import api, common, config, errors, functional

SNAPSHOT = Path(__file__).with_name("api_snapshot.txt")
MODULES: tuple[ModuleType, ...] = (api, common, config, errors, functional)


def _signature(value: object) -> str:
    """Parameters with their defaults; annotations are not part of the promise (they may widen)."""
    assert callable(value)
    if inspect.isclass(value) and issubclass(value, (BaseException, enum.Enum)):
        return ""  # Python's own, and not the same in every version of it
    parameters = inspect.signature(value).parameters.values()
    shown = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    text = str(inspect.Signature(shown)).replace("<factory>", "...")
    return text.replace(repr(config.DistAttnConfig()), "DistAttnConfig()")


def _lines_of(name: str, value: object) -> list[str]:
    if inspect.isfunction(value):
        return [f"def {name}{_signature(value)}"]
    assert inspect.isclass(value), f"{name} is neither a function nor a class"
    lines = [f"class {name}{_signature(value)}"]
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    own = {member for base in value.__mro__ if base.__module__.startswith("magi_attention") for member in vars(base)}
    for member in sorted(own - fields):
        if member.startswith("_"):
            continue
        found = inspect.getattr_static(value, member)
        if isinstance(found, (classmethod, staticmethod)):
            lines.append(f"    {name}.{member}{_signature(found.__func__)}")
        elif inspect.isfunction(found):
            lines.append(f"    {name}.{member}{_signature(found)}")
        else:
            lines.append(f"    {name}.{member}")
    return lines


def current() -> str:
    """The snapshot of the tree as it is."""
    lines = []
    for module in MODULES:
        lines.append(f"# {module.__name__}")
        public = getattr(module, "__all__", None) or [n for n, v in vars(module).items() if not n.startswith("_") and inspect.isclass(v)]
        for name in sorted(public):
            value = getattr(module, name)
            home = getattr(value, "__module__", "")
            if module is not api and value is getattr(api, name, None):
                lines.append(f"{name} (as in magi_attention.api)")
            elif home.split(".")[0] == "magi_attention":
                lines += _lines_of(name, value)
    return "\n".join(lines) + "\n"


def test_public_names_and_signatures_are_frozen() -> None:
    frozen, now = SNAPSHOT.read_text().splitlines(), current().splitlines()
    difference = "\n".join(difflib.unified_diff(frozen, now, "tests/rules/api_snapshot.txt", "the tree", lineterm="", n=0))
    assert not difference, f"{difference}\nif this is meant: python -m tests.rules.test_api_snapshot > tests/rules/api_snapshot.txt"


def test_every_public_function_says_what_it_does() -> None:
    silent = [name for name in api.__all__ if not (inspect.getdoc(getattr(api, name)) or "").strip()]
    assert not silent


if __name__ == "__main__":
    sys.stdout.write(current())
