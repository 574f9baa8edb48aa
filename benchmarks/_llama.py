"""Llama decoder layers in plain PyTorch, given by their shape: the model of the benchmarks. No embedding, no head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer, as in the model's published configuration."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int

    @property
    def head(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "tiny": Shape(256, 4, 2, 512),
    "1b": Shape(2048, 32, 8, 8192),
    "8b": Shape(4096, 32, 8, 14336),
    "70b": Shape(8192, 64, 8, 28672),
}


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), in float32 as Llama does it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of (batch, heads, tokens, size)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    """Norm, grouped-query attention, norm, SwiGLU, each pair with its residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.kv_heads * shape.head
        self.norm1, self.norm2 = RMSNorm(shape.hidden), RMSNorm(shape.hidden)
        self.q, self.o = (nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(shape.hidden, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.hidden, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.feed(self.attend(x, cos, sin))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The first half, with its residual."""
        shape = self.shape
        y = self.norm1(x)
        q, k, v = (linear(y).unflatten(-1, (-1, shape.head)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return x + self.o(attended.transpose(1, 2).flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        """The second half, with its residual."""
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Stack(nn.Module):
    """Some layers, one after the other. ``call`` says how each is run (checkpointed, say)."""

    def __init__(self, shape: Shape, layers: int, tokens: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        angles = torch.outer(torch.arange(tokens), 500_000.0 ** (-torch.arange(0, shape.head, 2) / shape.head))
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.call = lambda layer, *args: layer(*args)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x, self.cos, self.sin)
        return x


def make_stack(name: str, layers: int, tokens: int, device: torch.device, dtype: torch.dtype) -> Stack:
    """A stack that is made on its device: building it on the CPU takes longer than the measurement."""
    torch.manual_seed(0)
    with device:
        stack = Stack(SHAPES[name], layers, tokens).to(dtype)
        for parameter in stack.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
    return stack
