"""What this package was built for, what is here, and the sentence to say when the two do not fit.

Reads files and the C library's version: it imports no torch, loads no library and looks at no GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD_FILE = "_build.json"
PACKAGE = Path(__file__).parent

# Tags of the builds that PyTorch publishes, and of one that somebody compiled from its git. Any other tag is a vendor's own torch.
KNOWN_TORCH_TAG = re.compile(r"(cpu|cu\d|rocm\d|xpu|git)", re.IGNORECASE)
FROM_SOURCE = "python -m pip install --force-reinstall --no-deps ."


@dataclass(frozen=True)
class Refusal:
    """Why a build does not fit, and the next step; str() is the one sentence a user reads."""

    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}; {self.fix}"


@dataclass(frozen=True)
class TorchHere:
    """The torch an import would give. `cuda` is like "13.0", None for a build without CUDA."""

    version: str
    cuda: str | None

    @property
    def series(self) -> str:
        """ "2.11" of "2.11.0a0+nv26.02"."""
        return ".".join(self.version.split("+")[0].split(".")[:2])

    @property
    def tag(self) -> str:
        return self.version.partition("+")[2]

    def __str__(self) -> str:
        return f"torch {self.version}" + (f" with CUDA {self.cuda}" if self.cuda else "")


def read_record(folder: Path = PACKAGE) -> dict[str, Any]:
    """What the build wrote; empty in a tree that was never built, or whose file is damaged."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def torch_here() -> TorchHere | None:
    """The imported torch, or the one that an import would find; None without one.

    A torch that is not imported yet is read from its version file: importing it takes seconds, and a broken one must not keep
    planning and the doctor from running.
    """
    loaded = sys.modules.get("torch")
    if loaded is not None and hasattr(loaded, "version"):
        return TorchHere(str(loaded.__version__), loaded.version.cuda)
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # a stand-in module without a spec
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"^__version__\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return TorchHere(version[1], cuda[1] if cuda else None) if version else None


def glibc_here() -> str | None:
    """Like "2.36"; None on a system with another C library."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return None
    return name.removeprefix("glibc ") if name.startswith("glibc ") else None


def refusal_of_torch(record: dict[str, Any], torch: TorchHere | None) -> Refusal | None:
    """Why a published wheel may not run with this torch; None for a fitting one, no torch, or a package built on this machine."""
    if torch is None or record.get("origin") != "release":
        return None
    pin, version = record.get("torch"), record.get("version", "?")
    if pin == torch.version or (pin == torch.series and not _is_vendor(torch)):
        return None
    here = f"and {torch} is here"
    if _is_vendor(torch):
        built = f"{_built_for(record)} as PyTorch publishes it"
        text = f"this wheel of magi_attention {version} was built for {built}, {here}, a vendor's own build"
        return Refusal(
            text,
            f"build it there, in a clone: {FROM_SOURCE}, or use the image that docker/README.md names for that base",
        )
    if pin is None:
        return None
    text = f"this wheel of magi_attention {version} was built for {_built_for(record)}, {here}"
    index = record.get("index")
    if index and torch.cuda:
        folder = f"cu{torch.cuda.replace('.', '')}-torch{torch.series}"
        return Refusal(text, f"python -m pip install --force-reinstall --no-deps --index-url {index}/{folder} magi-attention")
    return Refusal(text, f"python -m pip install {requirement_of(pin)}, or install the wheel that was built for torch {torch.series}")


def requirement_of(pin: str | None) -> str:
    """What pip is asked for, as a word of a shell command."""
    if pin is None:
        return "torch"
    return f"'torch=={pin}'" if "+" in pin else f"'torch=={pin}.*'"


def _is_vendor(torch: TorchHere) -> bool:
    return bool(torch.tag) and not KNOWN_TORCH_TAG.match(torch.tag)


def _built_for(record: dict[str, Any]) -> str:
    cuda = sorted({str(entry["cuda"]).split(".")[0] for entry in record.get("libraries", {}).values() if "cuda" in entry})
    kernels = f" and CUDA {' or '.join(cuda)}" if cuda else ""
    return f"torch {record['torch']}{kernels}" if record.get("torch") else f"torch{kernels}"


def refusal_of_cuda(built: tuple[str, ...], torch: TorchHere | None) -> Refusal | None:
    """Why kernels compiled with these CUDA versions are not used under this torch; None when one of them fits or torch has no CUDA."""
    if torch is None or torch.cuda is None:
        return None
    majors = [version.split(".")[0] for version in built]
    wanted = torch.cuda.split(".")[0]
    if wanted in majors:
        return None
    return Refusal(
        f"the CUDA kernels of this build are compiled for CUDA {' and '.join(majors)}, and {torch} is here",
        f"install the wheel of magi-attention for CUDA {wanted}, or build it with nvcc {wanted}, in a clone: "
        f"CUDA_HOME=/usr/local/cuda-{torch.cuda} {FROM_SOURCE}",
    )


def refusal_of_loading(error: OSError, path: Path) -> Refusal | None:
    """What the dynamic loader's words about the library at `path` mean; None when they are not about this machine."""
    told, glibc, rebuild = str(error), glibc_here(), f"build it here, in a clone: {FROM_SOURCE}"
    wanted = [tuple(map(int, found.split("."))) for found in re.findall(r"`GLIBC_([\d.]+)' not found", told)]
    if wanted:
        text = f"{path} was built for glibc {'.'.join(map(str, max(wanted)))} or newer, and glibc {glibc} is here"
        return Refusal(text, f"install a wheel with an older manylinux tag, or {rebuild}")
    if re.search(r"`(GLIBCXX|CXXABI|GCC)_[\d.]+' not found", told):
        return Refusal(f"{path} was built with a newer g++ than the libstdc++ of this process", rebuild)
    # glibc says of a file for another processor that it is not there.
    is_of_another_machine = "wrong ELF class" in told or (told.startswith(f"{path}: cannot open") and path.is_file())
    if is_of_another_machine or (glibc is None and path.is_file()):
        library = f"glibc {glibc}" if glibc else "a C library other than glibc"
        return Refusal(f"{path} was built for another machine than this one ({platform.machine()}, {library})", rebuild)
    return None


def here() -> dict[str, Any]:
    """What this process would run with, for `build_info()`."""
    torch = torch_here()
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "glibc": glibc_here(),
        "torch": torch.version if torch else None,
        "torch_cuda": torch.cuda if torch else None,
    }
