"""Makes the wheel of one torch from the wheel for all: python ci/wheel/label.py FAT.whl --label cu130-torch2.11 --out DIR

The libraries stay byte for byte what was tested. What changes is the version (+cu130torch2.11), `Requires-Dist: torch==2.11.*`, the pin in
_build.json, and the library of the other CUDA major, which a torch of this label cannot use, is left out. Compiles nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from wheel_archive import Wheel, WheelError, read_wheel, with_header, write_wheel

BUILD_RECORD = "magi_attention/_build.json"


@dataclass(frozen=True)
class Label:
    """One torch: `cuda` is how PyTorch writes it ("130"), `torch` the series ("2.11") or a vendor's whole version ("2.11.0a0+nv26.02")."""

    cuda: str
    torch: str

    @property
    def name(self) -> str:
        """The index folder."""
        return f"cu{self.cuda}-torch{self.torch}"

    @property
    def local_version(self) -> str:
        """What goes behind the + of the version: letters, digits and dots."""
        return f"cu{self.cuda}torch{self.torch.replace('+', '.')}"

    @property
    def major(self) -> str:
        return self.cuda[:-1]

    @property
    def requirement(self) -> str:
        return f"torch=={self.torch}" if "+" in self.torch else f"torch=={self.torch}.*"


def parse_label(text: str) -> Label:
    found = re.fullmatch(r"cu(\d{3})-torch(\d+\.\d+|\d+(?:\.\w+)+\+[\w.]+)", text)
    if found is None:
        raise WheelError(f"label {text!r}: must be like cu130-torch2.11, or cu130-torch2.11.0a0+nv26.02 for a vendor's torch")
    label = Label(found[1], found[2])
    try:
        Requirement(label.requirement)
    except InvalidRequirement as error:
        raise WheelError(f"label {text!r}: {error}") from None
    return label


def labelled(fat: Wheel, label: Label, index: str | None = None) -> Wheel:
    """The wheel of one torch. Raises WheelError when the fat wheel has no kernels for its CUDA."""
    build = json.loads(fat.text(BUILD_RECORD))
    if build.get("torch"):
        raise WheelError(f"{fat.file_name} is for torch {build['torch']} already; label the wheel for all")
    kept = {path: content for path, content in fat.members.items() if not _is_for_another_cuda(path, label)}
    if not any(path.startswith(f"magi_attention/_cu{label.major}/") for path in kept):
        raise WheelError(f"{fat.file_name} has no kernels for CUDA {label.major}, which {label.name} needs")
    libraries = {name: entry for name, entry in build["libraries"].items() if f"magi_attention/{name}" in kept}
    local = ".".join(part for part in (fat.version.local, label.local_version) if part)
    version = Version(f"{fat.version.public}+{local}")
    build |= {"version": str(version), "torch": label.torch, "index": index, "libraries": libraries}
    kept[BUILD_RECORD] = (json.dumps(build, indent=1).encode() + b"\n", 0o644)

    others = [text for text in fat.requirements() if canonicalize_name(Requirement(text).name) != "torch"]
    metadata = f"{fat.dist_info}/METADATA"
    text = with_header(with_header(fat.text(metadata), "Version", [str(version)]), "Requires-Dist", [label.requirement, *others])
    kept[metadata] = (text.encode(), 0o644)
    version_file = "magi_attention/_version.py"
    kept[version_file] = (_with_version(fat.text(version_file), version).encode(), 0o644)
    return replace(fat, version=version, members={_moved(path, fat, version): content for path, content in kept.items()})


def _is_for_another_cuda(path: str, label: Label) -> bool:
    found = re.match(r"magi_attention/_cu(\d+)/", path)
    return found is not None and found[1] != label.major


def _moved(path: str, fat: Wheel, version: Version) -> str:
    folder, _, rest = path.partition("/")
    return f"{fat.name}-{version}.dist-info/{rest}" if folder == fat.dist_info else path


def _with_version(text: str, version: Version) -> str:
    changed, count = re.subn(r'^__version__ = ".*"$', f'__version__ = "{version}"', text, flags=re.MULTILINE)
    if count != 1:
        raise WheelError("magi_attention/_version.py has no line __version__ = ...")
    return changed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--label", required=True, action="append", help="like cu130-torch2.11; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("dist/whl"), help="the index; each label is a folder in it")
    parser.add_argument("--index", help="address the index will have, for the sentence that refuses another torch")
    args = parser.parse_args(arguments)
    try:
        fat = read_wheel(args.wheel)
        for label in map(parse_label, args.label):
            print(write_wheel(labelled(fat, label, args.index), args.out / label.name))
    except WheelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
