"""A small Llama-style decoder whose attention is magi_attention's calc_attn. Every layer is handed the key of its own mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from magi_attention.api import DistAttnKey, calc_attn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder. `window_layers` use the sliding-window key, the others the document-causal key."""

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 4
    num_heads_q: int = 4
    num_heads_kv: int = 2
    head_dim: int = 32
    ffn_dim: int = 384
    window_layers: tuple[int, ...] = (1,)


def rope_angles(positions: torch.Tensor, head_dim: int, base: float = 10_000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, head_dim / 2] of rotary embedding at the given global positions [T]."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs (x[i], x[i + head_dim / 2]) of x [T, H, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over this rank's rows; the key knows who holds the rest."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width_q = config.num_heads_q * config.head_dim
        width_kv = config.num_heads_kv * config.head_dim
        self.qkv = nn.Linear(config.dim, width_q + 2 * width_kv, bias=False)
        self.proj = nn.Linear(width_q, config.dim, bias=False)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], key: DistAttnKey) -> torch.Tensor:
        config = self.config
        num_heads = config.num_heads_q + 2 * config.num_heads_kv
        qkv = self.qkv(x).view(x.shape[0], num_heads, config.head_dim)
        q, k, v = qkv.split([config.num_heads_q, config.num_heads_kv, config.num_heads_kv], dim=1)
        out, _ = calc_attn(apply_rope(q, *rope), apply_rope(k, *rope), v, key)
        return self.proj(out.flatten(1))


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.norm_ffn = nn.RMSNorm(config.dim, eps=1e-5)
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], key: DistAttnKey) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x), rope, key)
        gate, up = self.gate_up(self.norm_ffn(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Byte-level language model; tokens and positions are this rank's rows only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, keys: Sequence[DistAttnKey]) -> torch.Tensor:
        """Logits [T_local, vocab]. `keys` has one key per layer."""
        rope = rope_angles(positions, self.config.head_dim)
        x = self.embedding(tokens)
        for layer, key in zip(self.layers, keys, strict=True):
            x = layer(x, rope, key)
        return self.head(self.norm(x))
