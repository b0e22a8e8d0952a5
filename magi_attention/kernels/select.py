"""Which kernel takes a problem, and every reason why one does not. Runs nothing and knows nothing of how kernels work.

describe(q, k, v, ...) -> AttentionDesc -> choose(desc, backend) -> name of the backend
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_attention import _ffa_library
from magi_attention.arguments import number, one_of
from magi_attention.config import KERNEL_BACKENDS
from magi_attention.env import logger
from magi_attention.errors import InputError, UnsupportedError
from magi_attention.kernels.ffa_device import capability
from magi_attention.kernels.ffa_tensors import padded_head_dim
from magi_attention.kernels.sink import check_sink
from magi_attention.kernels.tensors import require_tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ASKED_BY = "DistAttnConfig(kernel_backend='blocked') of a key, also with one rank (slow)"
_SOFTCAP_RULE = "must be 0 (off) or in [1e-6, 1e30]"
_FFA_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class AttentionDesc:
    """A problem as the choice sees it: no tensors, no masks. `capability` is (major, minor) of a CUDA device, None when unknown."""

    device_type: str
    dtype: torch.dtype
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    softcap: float = 0.0
    has_sink: bool = False
    capability: tuple[int, int] | None = None


def describe(
    q: Tensor, k: Tensor, v: Tensor, *, sink: Tensor | None = None, sink_layout: str = "sh", softcap: float = 0.0
) -> AttentionDesc:
    """Check the tensors against each other and reduce them to a desc.

    Args:
        q: [total_q, num_heads_q, head_dim]; k: [total_k, num_heads_kv, head_dim]; v: [total_k, num_heads_kv, head_dim_v].

    Raises:
        InputError: number of dimensions, devices, dtypes, lengths or head counts that do not fit together.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_layout(name, x)
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise InputError(f"{name}: on {x.device}, but q is on {q.device}; move them to one device")
        if x.dtype != q.dtype:
            raise InputError(f"{name}: dtype {x.dtype}, but q has {q.dtype}; cast all three to one dtype, e.g. {name}.to({q.dtype})")
    if q.device.type == "meta":
        raise InputError("q: on the meta device, where tensors have no numbers; move q, k and v to cpu or cuda")
    if k.shape[0] != v.shape[0]:
        raise InputError(f"v: {v.shape[0]} rows, but k has {k.shape[0]}; keys and values come in pairs, pass the same tokens in both")
    if k.shape[1] != v.shape[1]:
        raise InputError(f"v: {v.shape[1]} heads, but k has {k.shape[1]}; they must be equal")
    if k.shape[2] != q.shape[2]:
        raise InputError(f"k: head_dim {k.shape[2]}, but q has {q.shape[2]}; they must be equal (only v may differ)")
    check_heads(q.shape[1], k.shape[1])
    if min(q.shape[2], v.shape[2]) < 1:
        raise InputError(f"head_dim={q.shape[2]}, head_dim_v={v.shape[2]}: both must be at least 1")
    softcap = check_softcap(softcap)
    check_sink(sink, sink_layout, q.shape[0], q.shape[1])
    if sink is not None and sink.device != q.device:
        raise InputError(f"sink: on {sink.device}, but q is on {q.device}; move them to one device")
    sizes = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    # While a graph is traced nothing is looked up; the operation in it describes its tensors again when it runs.
    found = None if torch.compiler.is_compiling() else capability(q.device)
    return AttentionDesc(q.device.type, q.dtype, *sizes, softcap, sink is not None, found)


def _check_layout(name: str, x: Tensor) -> None:
    require_tensor(name, x, "[tokens, heads, head_dim]")
    if x.ndim == 4:
        raise InputError(
            f"{name}: shape {list(x.shape)} has 4 dimensions, must be [tokens, heads, head_dim]; "
            f"for [batch, tokens, heads, head_dim] call squash_batch_dim({name}) and infer_varlen_mask_from_batch(batch, tokens), "
            f"for [batch, heads, tokens, head_dim] transpose(1, 2) first"
        )
    if x.ndim != 3:
        raise InputError(f"{name}: shape {list(x.shape)} has {x.ndim} dimensions, must be [tokens, heads, head_dim]")
    if x.dtype not in DTYPES:
        raise InputError(f"{name}: dtype {x.dtype}, must be one of {', '.join(map(str, DTYPES))}; cast it")


def check_softcap(softcap: float) -> float:
    """Raises InputError unless softcap is 0 or a number that neither overflows nor vanishes in fp32 beside the scores."""
    cap = number("softcap", softcap, _SOFTCAP_RULE, low=0.0, high=1e30)
    if 0 < cap < 1e-6:
        raise InputError(f"softcap={cap} {_SOFTCAP_RULE}")
    return cap


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The factor on q.k, head_dim ** -0.5 when None. Raises InputError unless it is a number that fp32 can hold."""
    if softmax_scale is None:
        return float(head_dim**-0.5)
    return number("softmax_scale", softmax_scale, "must be a finite number, or None for head_dim ** -0.5", low=-1e30, high=1e30)


def check_heads(num_heads_q: int, num_heads_kv: int) -> None:
    """Raises InputError unless num_heads_q is a positive multiple of num_heads_kv."""
    if num_heads_kv < 1 or num_heads_q < 1 or num_heads_q % num_heads_kv:
        raise InputError(
            f"num_heads_q={num_heads_q}, num_heads_kv={num_heads_kv}: num_heads_q must be a positive multiple of num_heads_kv; "
            "repeat kv heads or pad query heads until it is"
        )


@dataclass(frozen=True)
class Build:
    """The compiled kernels to choose from: names like "forward:bf16:128:0", architectures like "sm_90a", and why there are none."""

    variants: tuple[str, ...]
    archs: tuple[str, ...]
    error: str = "no CUDA kernel is compiled into this build"


def this_build() -> Build:
    """What is installed."""
    return Build(_ffa_library.compiled_variants(), _ffa_library.compiled_archs(), _ffa_library.load_error())


def reasons_against_ffa(desc: AttentionDesc, direction: str = "forward", build: Build | None = None) -> list[str]:
    """Why the compiled CUDA kernels cannot take this problem; empty when they can.

    Args:
        direction: "forward" or "backward".
        build: None is the installed one.
    """
    build = build or this_build()
    reasons = _reasons_of_the_device(desc, build)
    if desc.dtype not in _FFA_DTYPES:
        reasons.append(f"q has dtype {desc.dtype}, the kernels take torch.bfloat16 and torch.float16")
    width = padded_head_dim(desc.head_dim, desc.head_dim_v)
    if width is None:
        reasons.append(f"head_dim={desc.head_dim}, head_dim_v={desc.head_dim_v}: the kernels take up to 128")
    compiled = build.variants
    if compiled and width is not None and desc.dtype in _FFA_DTYPES:
        variant = f"{direction}:{_FFA_DTYPES[desc.dtype]}:{width}:{int(desc.softcap > 0)}"
        if variant not in compiled:
            reasons.append(f"{variant} is not compiled (compiled: {', '.join(compiled)})")
    return reasons


def _reasons_of_the_device(desc: AttentionDesc, build: Build) -> list[str]:
    """Why no compiled kernel runs where the tensors are, whatever they hold."""
    reasons = []
    archs = build.archs
    if not build.variants:
        reasons.append(f"{build.error or 'the library of CUDA kernels has none'} (compiled: none)")
    if desc.device_type != "cuda":
        reasons.append(f"q is on {desc.device_type}, the kernels run on cuda")
    elif archs and (desc.capability is None or not any(_ffa_library.runs_on(arch, desc.capability) for arch in archs)):
        here = "is not known" if desc.capability is None else f"is {desc.capability[0]}.{desc.capability[1]}"
        reasons.append(f"the compute capability of the GPU {here} (compiled: {', '.join(archs)})")
    return reasons


def reasons_against_blocked(desc: AttentionDesc, *, is_asked_for: bool, build: Build | None = None) -> list[str]:
    """Why the blocked torch path cannot take this problem; empty when it can.

    On a GPU "auto" takes it for fp64, and for heads too wide for the kernels that run there: nobody waits for it unknowingly else.
    """
    if desc.device_type == "cpu" or is_asked_for:
        return []
    if desc.dtype == torch.float32:
        return [
            f"q has dtype torch.float32 on {desc.device_type}: cast q, k and v to torch.bfloat16, or ask for the blocked path: {_ASKED_BY}"
        ]
    is_for_kernels = padded_head_dim(desc.head_dim, desc.head_dim_v) is not None or _reasons_of_the_device(desc, build or this_build())
    if desc.dtype in _FFA_DTYPES and is_for_kernels:
        return [f"{desc.dtype} on {desc.device_type} is for compiled kernels; the blocked path runs with {_ASKED_BY}"]
    return []


def choose(desc: AttentionDesc, backend: str = "auto", direction: str = "forward", build: Build | None = None) -> str:
    """The backend that runs a problem: "ffa" (compiled CUDA) or "blocked" (torch matmuls over blocks, any device, O(T) memory).

    "auto" takes ffa where it can and blocked for CPU tensors; what else it takes on a GPU is logged once.

    Raises:
        InputError: an unknown name.
        UnsupportedError: nothing takes the problem; the text has every reason of every backend that was asked.
    """
    one_of("backend", backend, KERNEL_BACKENDS)
    against: dict[str, list[str]] = {}
    if backend in ("auto", "ffa"):
        against["ffa"] = reasons_against_ffa(desc, direction, build)
        if not against["ffa"]:
            return "ffa"
    if backend in ("auto", "blocked"):
        against["blocked"] = reasons_against_blocked(desc, is_asked_for=backend == "blocked", build=build)
        if not against["blocked"]:
            if desc.device_type != "cpu" and backend == "auto":
                _warn_once(desc.device_type, "; ".join(against["ffa"]))
            return "blocked"
    told = " | ".join(f"{name}: {'; '.join(reasons)}" for name, reasons in against.items())
    raise UnsupportedError(f"backend={backend!r}: no kernel takes {desc}. {told}")


def resolve(device_type: str) -> tuple[str, tuple[str, ...]]:
    """The backend "auto" takes for bf16 and head_dim 128 on the first device of a type, or "none"; and the reasons against ffa."""
    desc = AttentionDesc(device_type, torch.bfloat16, 8, 8, 128, 128, capability=capability(torch.device(device_type)))
    try:
        chosen = choose(desc)
    except UnsupportedError:
        chosen = "none"
    return chosen, tuple(reasons_against_ffa(desc))


@functools.cache
def _warn_once(device_type: str, reasons: str) -> None:
    logger.warning("attention on %s runs the blocked torch path, which is slow: %s", device_type, reasons)
