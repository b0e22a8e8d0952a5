"""Who computes attention in the benchmark: our kernels and every baseline that is installed. Times nothing, judges nothing.

A provider turns a problem into a function (q, k, v) -> (out, lse or None), everything that depends on the mask alone made before.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import magi_attention
from benchmarks.ffa_cells import Cell, Layout
from benchmarks.ffa_check import Problem
from magi_attention.api import flex_flash_attn_func, prepare_attention
from magi_attention.kernels.ops import single_device_attention
from magi_attention.kernels.select import choose, describe

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Provider:
    """One implementation.

    Attributes:
        version: of its library; raises ImportError with the reason when it is not installed.
        takes: whether it has this mask at all.
        prepare: (problem, op) -> Attend; raises what the library raises when it refuses.
        is_slow_to_start: compiles for every problem; runs after all others and at a few sizes only.
        most_error: error_ratio up to which a row counts as right. Ours must keep the rule; of a baseline the check only has to show
            that it computes the same thing (another mask is off by far more), its accuracy is its own and stands in the row.
    """

    name: str
    version: Callable[[], str]
    takes: Callable[[Layout], bool]
    prepare: Callable[[Problem, str], Attend]
    has_deterministic: bool = False
    is_slow_to_start: bool = False
    most_error: float = 2.0


def reason_not_installed(provider: Provider) -> str | None:
    try:
        provider.version()
    except Exception as error:  # also what a package raises that was built for another torch or driver
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


# ---- ours ----


def _ours(problem: Problem, op: str) -> Attend:
    # Raises with every reason, so that no other path is timed under this name.
    choose(describe(problem.q, problem.k, problem.v), "ffa", "forward" if op == "fwd" else "backward")
    plan, deterministic = prepare_attention(problem.mask), op == "bwd_det"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        out, meta = flex_flash_attn_func(q, k, v, plan=plan, deterministic=deterministic)
        return out, meta.lse

    return attend


def _blocked(problem: Problem, op: str) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        out, lse, _ = single_device_attention(q, k, v, problem.mask.slices, backend="blocked")
        return out, lse

    return attend


# ---- torch ----


def _is_plain(layout: Layout) -> bool:
    return layout.is_one_document and layout.window is None and layout.frame is None


def _sdpa(backend: SDPBackend) -> Callable[[Problem, str], Attend]:
    def prepare(problem: Problem, op: str) -> Attend:
        is_causal, is_grouped = problem.layout.is_causal, problem.cell.num_heads_q != problem.cell.num_heads_kv

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=is_grouped)
            return out[0].transpose(0, 1), None

        return attend

    return prepare


def _cudnn_version() -> str:
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if number is None:
        raise ImportError("this torch has no cuDNN")
    return f"cudnn {number}"


def mask_mod(layout: Layout, device: str | torch.device) -> MaskMod | None:
    """The mask as FlexAttention wants it; None when every query sees every key."""
    lengths = torch.tensor(layout.borders, dtype=torch.int32).diff()
    document = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths).to(device)
    frame, window = layout.frame, layout.window
    if frame is not None:
        return lambda b, h, i, j: i // frame >= j // frame
    if window is not None:
        return lambda b, h, i, j: (i >= j) & (i - j < window) & (document[i] == document[j])
    if layout.is_one_document:
        return (lambda b, h, i, j: i >= j) if layout.is_causal else None
    if layout.is_causal:
        return lambda b, h, i, j: (i >= j) & (document[i] == document[j])
    return lambda b, h, i, j: document[i] == document[j]


def _flex(problem: Problem, op: str) -> Attend:
    mod, total = mask_mod(problem.layout, problem.q.device), problem.layout.total
    block_mask = None if mod is None else create_block_mask(mod, None, None, total, total, device=problem.q.device, _compile=True)
    torch._dynamo.reset()  # past its limit of recompilations it would fall back to a dense path in silence
    torch._functorch.config.donated_buffer = False  # else a second backward of one graph, which the timing needs, is refused
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    is_grouped = problem.cell.num_heads_q != problem.cell.num_heads_kv

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = compiled(q, k, v, block_mask=block_mask, enable_gqa=is_grouped)
        return out[0].transpose(0, 1), None

    return attend


# ---- FlashAttention: version 3 and 4 share their arguments ----


def _has_no_frames(layout: Layout) -> bool:
    return layout.frame is None


def _flash(module_name: str) -> Callable[[Problem, str], Attend]:
    def prepare(problem: Problem, op: str) -> Attend:
        module, layout = importlib.import_module(module_name), problem.layout
        options: dict[str, object] = {"causal": layout.is_causal}
        if layout.window is not None:
            options["window_size"] = (layout.window - 1, 0)
        if layout.is_one_document:

            def attend_one(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
                return _first(module.flash_attn_func(q[None], k[None], v[None], **options))[0], None

            return attend_one
        borders = torch.tensor(layout.borders, dtype=torch.int32, device=problem.q.device)
        options |= {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": layout.longest, "max_seqlen_k": layout.longest}

        def attend_packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
            return _first(module.flash_attn_varlen_func(q, k, v, **options)), None

        return attend_packed

    return prepare


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _imported(module_name: str, distribution: str) -> Callable[[], str]:
    def version() -> str:
        importlib.import_module(module_name)
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            return distribution

    return version


def _torch_version() -> str:
    return f"torch {torch.__version__}"


def _always(layout: Layout) -> bool:
    return True


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("ours", lambda: f"magi_attention {magi_attention.__version__}", _always, _ours, has_deterministic=True, most_error=1.0),
        Provider("cudnn", _cudnn_version, _is_plain, _sdpa(SDPBackend.CUDNN_ATTENTION)),
        Provider("sdpa_flash", _torch_version, _is_plain, _sdpa(SDPBackend.FLASH_ATTENTION)),
        Provider("fa3", _imported("flash_attn_interface", "flash_attn_3"), _has_no_frames, _flash("flash_attn_interface")),
        Provider("fa4", _imported("flash_attn.cute", "flash-attn-4"), _has_no_frames, _flash("flash_attn.cute")),
        Provider("flex", _torch_version, _always, _flex, is_slow_to_start=True),
        Provider(
            "blocked", lambda: f"magi_attention {magi_attention.__version__}", _always, _blocked, has_deterministic=True, most_error=1.0
        ),
    )
}
DEFAULT_PROVIDERS = tuple(name for name in PROVIDERS if name != "blocked")  # the slow path is there to be asked for


def takes(provider: Provider, cell: Cell, layout: Layout, flex_sizes: tuple[int, ...]) -> bool:
    return provider.takes(layout) and not (provider.is_slow_to_start and cell.tokens not in flex_sizes)
