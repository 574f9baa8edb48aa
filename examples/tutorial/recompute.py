"""A decoder layer in plain PyTorch, trained three ways: the losses of all 100 steps are the same numbers.

    python examples/tutorial/recompute.py

The model is a small language model over bytes, and its text is this file. It is trained

* plainly: autograd keeps all that it saves,
* with ``spillway.recompute`` around every layer, which offloads attention's saved tensors and recomputes the rest,
* with the outputs of matrix products kept, and the rest recomputed.

``docs/tutorial.md`` explains it. Nothing in the model knows of Spillway: only ``Way.layer`` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway

STEPS = 100
LAYERS, WIDTH, HEADS, HIDDEN = 3, 64, 4, 176
BATCH, SEQUENCE, BYTES = 4, 64, 256
TEXT = Path(__file__).read_bytes()

Layer = Callable[[nn.Module, Tensor], Tensor]
"""Calls a layer with its input, one way or another."""


# The model.


class RMSNorm(nn.Module):
    """Scales every vector to a root mean square of 1 (Zhang and Sennrich 2019), and by a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Attention(nn.Module):
    """Every position looks at itself and at those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """A feed-forward network with a gate (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class DecoderLayer(nn.Module):
    """Norm, attention, norm, SwiGLU. Dropout shows that a recomputed layer draws the same random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(WIDTH), Attention(WIDTH, HEADS)
        self.norm2, self.mlp = RMSNorm(WIDTH), SwiGLU(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + functional.dropout(self.attention(self.norm1(x)), 0.1, self.training)
        return x + functional.dropout(self.mlp(self.norm2(x)), 0.1, self.training)


class Decoder(nn.Module):
    """Predicts the next byte. ``call`` says how each layer is called."""

    def __init__(self, call: Layer) -> None:
        super().__init__()
        self.call = call
        self.tokens = nn.Embedding(BYTES, WIDTH)
        self.places = nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each byte of (batch, sequence + 1) from those before it."""
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        for layer in self.layers:
            x = self.call(layer, x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


# The three ways.


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    """Autograd keeps all saved tensors."""
    out: Tensor = layer(x)
    return out


# Attention's saved tensors are offloaded: queries, keys, values, its output, its statistics. The rest is recomputed,
# attention itself is not.
attention_away = spillway.Recompute(offload=[spillway.saved_by("attention")])

# Matrix products are kept, and not recomputed.
products_kept = spillway.Recompute(save=["matmul"])

WAYS: dict[str, Layer] = {
    "plain": plain,
    "attention away": attention_away,
    "products kept": products_kept,
}


@dataclass(frozen=True)
class Outcome:
    """The result of a training."""

    losses: list[float]
    stats: spillway.StepStats
    """The last step's."""


def train(call: Layer, device: torch.device, steps: int = STEPS) -> Outcome:
    """Train from the same seed on the same batches, calling every layer with ``call``."""
    torch.manual_seed(0)
    text = torch.tensor(list(TEXT), device=device)
    model = Decoder(call).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The context keeps all tensors outside of the layers, and counts. It also offloads small tensors, and at
    # once: by default, those below 1 MiB and the last 64 MiB of a forward (on a CPU) are kept.
    counted = spillway.offload(policy=spillway.policies.Keep(), min_bytes=0, window=0)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH, 1), device=device)
        batch = text[starts + torch.arange(SEQUENCE + 1, device=device)]
        with counted:
            loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome(losses, counted.stats())


def main() -> None:
    """Train all three ways and compare."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = device or torch.device("cpu")
    if device.type != "cpu":
        # On a GPU, some backward kernels add in any order, so two plain runs would differ.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    print(f"{LAYERS} layers, {STEPS} steps, {device}")
    print(f"{'saved for backward, in one step':32}{'kept':>12}{'away':>12}{'first loss':>14}{'last loss':>14}")
    expected: list[float] | None = None
    for name, call in WAYS.items():
        outcome = train(call, device)
        kept, away = outcome.stats.kept_bytes, outcome.stats.offloaded_bytes
        first, last = outcome.losses[0], outcome.losses[-1]
        print(f"{name:32}{kept / 1e6:9.2f} MB{away / 1e6:9.2f} MB{first:14.6f}{last:14.6f}")
        expected = outcome.losses if expected is None else expected
        assert outcome.losses == expected, f"{name}: the losses differ"
    print(f"all {STEPS} losses are equal")


if __name__ == "__main__":
    main()
