"""Blocks whose weights are mostly frozen, as those of a model with adapters, and one whose weights are trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Adapted(nn.Module):
    """A frozen layer with a trainable one of low rank beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


class Block(nn.Module):
    """A feed-forward layer with dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.first, self.second = Adapted(width, 4 * width), Adapted(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.dropout(functional.gelu(self.first(self.norm(x))), 0.2, self.training))


class FeedForward(nn.Module):
    """A feed-forward layer with dropout, all of whose weights are trained."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.dropout(functional.gelu(self.first(self.norm(x))), 0.2, self.training))


class Scaled(nn.Module):
    """Autograd saves its frozen parameters themselves, and no views of them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5, requires_grad=False)
        self.bias, self.scale = (nn.Parameter(torch.randn(width), requires_grad=False) for _ in range(2))
        self.own = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, self.norm(x).flatten(0, -2), self.weight).view_as(x)
        return x + self.own(torch.tanh(y) * self.scale)
