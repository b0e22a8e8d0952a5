"""Loads the library of compiled CUDA kernels that fits this torch's CUDA and says what is in it.

Needs no GPU, imports no torch (its version file says enough) and knows no kernel's arguments.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

from magi_attention._build_record import Refusal, TorchHere, refusal_of_cuda, refusal_of_loading, torch_here
from magi_attention._whole_file import reason_cut_off

LIBRARY_NAME = "_ffa.so"


@dataclass(frozen=True)
class LoadedLibrary:
    """What an attempt to load gave.

    Attributes:
        handle: the library, None when there is none to use.
        error: why there is none; empty otherwise.
        is_damaged: a file is there, but cannot be used.
        path: the file that was loaded.
        refusal: the files are whole, but not for what is here; `error` is its sentence.
    """

    handle: ctypes.CDLL | None
    error: str = ""
    is_damaged: bool = False
    path: Path | None = None
    refusal: Refusal | None = None


def load(path: Path) -> LoadedLibrary:
    """Load one library file, whatever CUDA torch has. Never raises: without kernels the package works on."""
    if not path.is_file():
        return LoadedLibrary(
            None,
            f"no CUDA kernel is compiled into this build ({path} is not there); install again where nvcc 12.9 or newer is found "
            "(MAGI_BUILD_KERNELS=1 pip install . makes its absence an error)",
        )
    fix = "install the package again, or in a source tree: make kernels ARGS=--inplace"
    try:
        if reason := reason_cut_off(path):
            return LoadedLibrary(None, f"{reason}; {fix}", is_damaged=True)
        handle = ctypes.CDLL(str(path))
        for name in ("magi_ffa_variants", "magi_ffa_build_info", "magi_ffa_error"):
            function = getattr(handle, name)
            function.restype, function.argtypes = ctypes.c_char_p, []
    except OSError as error:
        if (refusal := refusal_of_loading(error, path)) is not None:
            return _refused(refusal)
        return LoadedLibrary(None, f"{path} does not load: {error}; {fix}", is_damaged=True)
    except AttributeError as error:
        return LoadedLibrary(None, f"{path} is of another version of this package: {error}; {fix}", is_damaged=True)
    return LoadedLibrary(handle, path=path)


def find(folder: Path, torch: TorchHere | None) -> LoadedLibrary:
    """The library of a package folder for this torch.

    A build on this machine leaves one `_ffa.so`. A wheel has one file per CUDA major, `_cu12/_ffa.so` and `_cu13/_ffa.so`; of these
    the one of torch's CUDA is taken, and the newest under a torch without CUDA, which can list it and not run it.
    """
    plain = folder / LIBRARY_NAME
    by_major = {int(path.parent.name[3:]): path for path in folder.glob(f"_cu[0-9]*/{LIBRARY_NAME}")}
    if plain.is_file() or not by_major:
        found = load(plain)
        nvcc = _told_by(found.handle).get("nvcc", "") if found.handle is not None else ""
        refusal = refusal_of_cuda((nvcc,), torch) if nvcc else None
    else:
        majors = sorted(by_major)
        refusal = refusal_of_cuda(tuple(map(str, majors)), torch)
        wanted = int(torch.cuda.split(".")[0]) if torch is not None and torch.cuda else majors[-1]
        found = _refused(refusal) if refusal is not None else load(by_major[wanted])
    return _refused(refusal) if refusal is not None else found


def _refused(refusal: Refusal) -> LoadedLibrary:
    return LoadedLibrary(None, str(refusal), refusal=refusal)


def _told_by(handle: ctypes.CDLL) -> dict[str, str]:
    return dict(part.split("=", 1) for part in handle.magi_ffa_build_info().decode().split())


@functools.cache
def _loaded() -> LoadedLibrary:
    return find(Path(__file__).parent, torch_here())


def library() -> ctypes.CDLL | None:
    """The loaded library; None when this build has no kernels (`load_error` says why)."""
    return _loaded().handle


def load_error() -> str:
    """Why `library()` is None and what to do; empty when it is not."""
    return _loaded().error


def refusal() -> Refusal | None:
    """Why kernels that are there are not for this torch or machine; None when they are, or when there are none."""
    return _loaded().refusal


def file_in_use() -> str | None:
    """The file of `library()`."""
    path = _loaded().path
    return None if path is None else str(path)


def is_damaged() -> bool:
    """A library file is there, but cannot be used."""
    return _loaded().is_damaged


def compiled_variants() -> tuple[str, ...]:
    """Names like "forward:bf16:128:0" (direction, dtype, head_dim, softcap); empty without a library."""
    handle = library()
    if handle is None:
        return ()
    return tuple(filter(None, handle.magi_ffa_variants().decode().split(",")))


def build_info() -> dict[str, str]:
    """How the library was compiled: "arch" like "sm_90a", "nvcc" like "13.0.88"; empty without a library."""
    handle = library()
    return {} if handle is None else _told_by(handle)


def compiled_archs() -> tuple[str, ...]:
    """Architectures the kernels run on, like ("sm_90a",); empty without a library."""
    return tuple(filter(None, build_info().get("arch", "").split(",")))


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch` runs on a GPU: "sm_90a" on 9.0 alone, "sm_80" on 8.0 and later minors of 8."""
    digits = arch.rsplit("_", 1)[1]
    number = digits.rstrip("af")
    major, minor = int(number[:-1]), int(number[-1])
    if digits.endswith("a"):
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor
