"""Loads the library of compiled CUDA kernels and says what is in it. Needs no GPU; knows no torch and no kernel's arguments."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

LIBRARY_NAME = "_ffa.so"


@dataclass(frozen=True)
class LoadedLibrary:
    """What an attempt to load gave.

    Attributes:
        handle: the library, None when there is none to use.
        error: why there is none; empty otherwise.
        is_damaged: a file is there, but cannot be used.
    """

    handle: ctypes.CDLL | None
    error: str = ""
    is_damaged: bool = False


def load(path: Path) -> LoadedLibrary:
    """Load one library file. Never raises: without kernels the package works on."""
    if not path.is_file():
        return LoadedLibrary(
            None,
            f"no CUDA kernel is compiled into this build ({path} is not there); install again where nvcc 12.3 or newer is found "
            "(MAGI_BUILD_KERNELS=1 pip install . makes its absence an error)",
        )
    fix = "install the package again, or in a source tree: make kernels ARGS=--inplace"
    try:
        handle = ctypes.CDLL(str(path))
        for name in ("magi_ffa_variants", "magi_ffa_build_info", "magi_ffa_error"):
            function = getattr(handle, name)
            function.restype, function.argtypes = ctypes.c_char_p, []
    except OSError as error:
        return LoadedLibrary(None, f"{path} does not load: {error}; {fix}", is_damaged=True)
    except AttributeError as error:
        return LoadedLibrary(None, f"{path} is of another version of this package: {error}; {fix}", is_damaged=True)
    return LoadedLibrary(handle)


@functools.cache
def _loaded() -> LoadedLibrary:
    return load(Path(__file__).parent / LIBRARY_NAME)


def library() -> ctypes.CDLL | None:
    """The loaded library; None when this build has no kernels (`load_error` says why)."""
    return _loaded().handle


def load_error() -> str:
    """Why `library()` is None and what to do; empty when it is not."""
    return _loaded().error


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
    if handle is None:
        return {}
    return dict(part.split("=", 1) for part in handle.magi_ffa_build_info().decode().split())


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
