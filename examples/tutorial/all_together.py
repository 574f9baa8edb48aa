"""Offloaded activations, optimizer state and gradients at once, in a loop that is as long as before.

    python examples/tutorial/all_together.py

A small language model over bytes is trained three times on the same ragged lines, four micro-batches a step:

* plainly: all saved tensors and AdamW's state on the GPU, with hand-written accumulation,
* with the saved tensors of each block in CPU memory (on a CPU: on disk),
* also with recomputed blocks whose attention is offloaded, and AdamW on the CPU.

Losses and weights of all three are compared bit for bit. On a GPU the peaks are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway

BLOCKS, WIDTH, HEADS, ROWS, LENGTH, PADDING = 4, 64, 4, 4, 96, -100
STEPS, WINDOWS, MAX_NORM = 4, 6, 1.0
ADAMW: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "fused": True}
LINES = [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line]


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def loss_sum(model: nn.Module, text: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses of all bytes but the padding, and how many bytes that are."""
    logits = model(text[:, :-1].clamp(min=0))
    following = text[:, 1:]
    loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=PADDING, reduction="sum")
    return loss, (following != PADDING).sum()


def micro_batches(device: torch.device) -> list[Tensor]:
    """The lines in order, padded to one length, a few rows each."""
    rows = torch.full((STEPS * ROWS * WINDOWS, LENGTH), PADDING)
    for index, row in enumerate(rows):
        text = torch.tensor(list(LINES[index % len(LINES)].encode()))[:LENGTH]
        row[: len(text)] = text
    return list(rows.to(device).split(ROWS))


def plainly(model: nn.Module, loader: list[Tensor]) -> list[float]:
    """The hand-written loop."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for first in range(0, len(loader), STEPS):
        found = []
        for text in loader[first : first + STEPS]:
            loss, count = loss_sum(model, text)
            loss.backward()
            found.append((loss.detach(), count))
        total = torch.stack([count for _, count in found]).sum()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 / total)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack([loss for loss, _ in found]).double().sum() / total))
    return losses


def by_spillway(
    model: nn.Module, loader: list[Tensor], optimizer: torch.optim.Optimizer, around: Callable[[], Any] = nullcontext
) -> list[float]:
    """The same accumulation step, for any optimizer and any place of saved tensors."""
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=MAX_NORM)
    losses = []
    for text in window(loader):
        context: AbstractContextManager[Any] = around()
        with context:
            loss, count = loss_sum(model, text)
        window.backward(loss, weight=count)
        if window.stepped and window.last is not None:
            losses.append(float(window.last.loss))
    window.close()
    return losses


def away(model: nn.Module, loader: list[Tensor]) -> list[float]:
    """Saved tensors are offloaded."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return by_spillway(model, loader, optimizer, lambda: spillway.offload(min_bytes=0))


def all_together(model: nn.Module, loader: list[Tensor]) -> list[float]:
    """Blocks are recomputed, but attention's output and inputs are offloaded; the optimizer is on the CPU."""
    optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    policy = spillway.Recompute(offload=("inputs", spillway.saved_by("attention")))
    attached = spillway.attach(model, blocks=Block, policy=policy, min_bytes=0)
    losses = by_spillway(model, loader, optimizer)
    attached.remove()
    optimizer.close()
    return losses


WAYS: dict[str, Callable[[nn.Module, list[Tensor]], list[float]]] = {
    "plain": plainly,
    "saved tensors away": away,
    "all together": all_together,
}


def main() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else accelerator
    found: dict[str, tuple[list[float], list[Tensor]]] = {}
    for name, train in WAYS.items():
        torch.manual_seed(0)
        model = Model().to(device)
        if accelerator is not None:
            torch.accelerator.reset_peak_memory_stats()
        losses = train(model, micro_batches(device))
        found[name] = losses, [parameter.detach() for parameter in model.parameters()]
        peak = "" if accelerator is None else f"  peak {torch.accelerator.max_memory_allocated() / 2**20:.1f} MiB"
        print(f"{name:20} loss {losses[0]:.4f} to {losses[-1]:.4f}{peak}")
    losses, weights = found["plain"]
    for name, (other, parameters) in found.items():
        same = other == losses and all(torch.equal(a, b) for a, b in zip(parameters, weights, strict=True))
        if accelerator is not None and name == "all together":
            # AdamW's arithmetic on a GPU and on the CPU differ in the last bits.
            same = max(abs(a - b) for a, b in zip(other, losses, strict=True)) < 1e-3
        assert same, f"{name}: losses or weights differ"
    print("all losses and weights are equal")


if __name__ == "__main__":
    main()
