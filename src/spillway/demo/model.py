"""A byte-level GPT in plain PyTorch, as anyone would write it. Nothing in this file knows of Spillway."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BYTES = 256
"""The vocabulary: every byte is a token."""


class Attention(nn.Module):
    """Causal self-attention: ``(batch, sequence, width)`` to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Every position attends to itself and to those before it."""
        batch, sequence, width = x.shape
        shape = (batch, sequence, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.project_in(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.project_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return projected


class Block(nn.Module):
    """One layer: attention and a feed-forward network, each normalised first and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, sequence, width)`` to the same."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.forward_norm(x))
        return out


class GPT(nn.Module):
    """Predicts the next byte.

    Args:
        layers: number of blocks.
        width: size of a token's vector.
        heads: attention heads, each of ``width / heads``.
        sequence: the longest input.

    ``checkpoint_blocks`` makes it drop what each block computes and compute it again in backward, as most training
    code offers.
    """

    def __init__(self, *, layers: int, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.checkpoint_blocks = False
        self.tokens = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of ``targets`` after ``tokens``, both ``(batch, sequence)`` of byte values."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint_blocks else block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
