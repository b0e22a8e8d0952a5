"""A small wheel for all torches, with libraries that hold no kernel, for tests of what is done to wheels."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from packaging.version import Version
from wheel_archive import Wheel

METADATA = """\
Metadata-Version: 2.4
Name: magi-attention
Version: 1.2.0
Requires-Python: >=3.10
Requires-Dist: numpy>=1.24
Requires-Dist: torch>=2.10
Requires-Dist: matplotlib>=3.7; extra == "plot"

Version: of the text below the headers stays as it is.
"""


def library(folder: Path, source: str = 'extern "C" int magi_one() { return 1; }', *flags: str) -> bytes:
    target = folder / "made.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-x", "none", "-o", str(target), *flags]
    subprocess.run(command, input=source, text=True, check=True)
    return target.read_bytes()


def record(**changes: Any) -> dict[str, Any]:
    kernels = {"archs": ["sm_90a"], "variants": [], "glibc": "2.2.5", "glibcxx": "3.4"}
    libraries = {
        "_solver.so": {"compiler": "g++", "glibc": "2.2.5", "glibcxx": "3.4"},
        "_cu12/_ffa.so": {"cuda": "12.5.40", **kernels},
        "_cu13/_ffa.so": {"cuda": "13.0.88", **kernels},
    }
    return {"schema": 1, "version": "1.2.0", "revision": "abc", "origin": "release", "torch": None, "libraries": libraries, **changes}


def fat_wheel(content: bytes = b"not a library", **changes: Any) -> Wheel:
    info = "magi_attention-1.2.0.dist-info"
    members = {
        "magi_attention/__init__.py": b"",
        "magi_attention/_version.py": b'"""Written by the build."""\n__version__ = "1.2.0"\n',
        "magi_attention/_build.json": json.dumps(record(**changes)).encode(),
        "magi_attention/_solver.so": content,
        "magi_attention/_cu12/_ffa.so": content + b"12",
        "magi_attention/_cu13/_ffa.so": content + b"13",
        f"{info}/METADATA": METADATA.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-manylinux_2_28_x86_64\n",
        f"{info}/licenses/LICENSE": b"Apache",
    }
    modes = {name: (text, 0o755 if name.endswith(".so") else 0o644) for name, text in members.items()}
    return Wheel("magi_attention", Version("1.2.0"), "py3-none-manylinux_2_28_x86_64", modes)
