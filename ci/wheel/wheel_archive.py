"""Reads a wheel into memory and writes one again, with a RECORD that fits. Knows the wheel format and nothing of what is inside."""

from __future__ import annotations

import base64
import hashlib
import re
import stat
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import Version

EARLIEST = (1980, 1, 1, 0, 0, 0)  # of a zip; one time for all members makes the same content the same file


class WheelError(Exception):
    """A wheel that is not what it must be; the text is one sentence."""


@dataclass(frozen=True)
class Wheel:
    """A wheel's members and what its file name says.

    Attributes:
        name: the distribution as the file name spells it, "magi_attention".
        tags: the compressed tags of the file name, "py3-none-manylinux_2_28_x86_64".
        members: path -> (content, permission bits), without RECORD.
    """

    name: str
    version: Version
    tags: str
    members: dict[str, tuple[bytes, int]]

    @property
    def dist_info(self) -> str:
        (folder,) = {path.split("/")[0] for path in self.members if re.match(r"[^/]+\.dist-info/METADATA$", path)}
        return folder

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}-{self.tags}.whl"

    def text(self, path: str) -> str:
        if path not in self.members:
            raise WheelError(f"{self.file_name} has no {path}")
        return self.members[path][0].decode("utf-8")

    def requirements(self) -> list[str]:
        return HeaderParser().parsestr(self.text(f"{self.dist_info}/METADATA")).get_all("Requires-Dist") or []


def read_wheel(path: Path) -> Wheel:
    _, version, build, _ = parse_wheel_filename(path.name)
    if build:
        raise WheelError(f"{path.name} has a build number, which nothing here makes")
    parts = path.stem.split("-")
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
        if bad is not None:
            raise WheelError(f"{path.name}: {bad} is damaged")
        members = {
            item.filename: (archive.read(item), (item.external_attr >> 16) & 0o777 or 0o644)
            for item in archive.infolist()
            if not item.is_dir() and not item.filename.endswith(".dist-info/RECORD")
        }
    return Wheel(parts[0], version, "-".join(parts[2:]), members)


def write_wheel(wheel: Wheel, folder: Path) -> Path:
    """The same members give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / wheel.file_name
    part = path.with_suffix(".part")
    record = f"{wheel.dist_info}/RECORD"
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, (content, mode) in [*wheel.members.items(), (record, (record_of(wheel.members, record).encode(), 0o644))]:
            item = zipfile.ZipInfo(name, EARLIEST)
            item.compress_type, item.external_attr = zipfile.ZIP_DEFLATED, (stat.S_IFREG | mode) << 16
            archive.writestr(item, content)
    part.replace(path)
    return path


def record_of(members: dict[str, tuple[bytes, int]], record: str) -> str:
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, (content, _) in members.items()]
    return "\n".join([*lines, f"{record},,", ""])


def wrong_hashes(path: Path) -> list[str]:
    """Members whose RECORD line is missing or wrong; pip does not look."""
    wheel = read_wheel(path)
    with zipfile.ZipFile(path) as archive:
        told = set(archive.read(f"{wheel.dist_info}/RECORD").decode().splitlines())
    return [name for name in wheel.members if not _lines_of(name, wheel) & told]


def _lines_of(name: str, wheel: Wheel) -> set[str]:
    content = wheel.members[name][0]
    return {f"{name},sha256={_digest(content)},{len(content)}"}


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def with_header(text: str, name: str, values: Iterable[str]) -> str:
    """A metadata file with all headers `name` replaced by these, at the place of the first one."""
    head, blank, body = text.partition("\n\n")
    lines = head.split("\n")
    # A folded header goes on in lines that begin with a space.
    starts = [i for i, line in enumerate(lines) if line.lower().startswith(f"{name.lower()}:")]
    kept = [line for i, line in enumerate(lines) if i not in starts]
    at = starts[0] if starts else len(kept)
    kept[at:at] = [f"{name}: {value}" for value in values]
    return "\n".join(kept) + blank + body
