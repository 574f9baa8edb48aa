"""Mixed-precision training with AdamW on the GPU, on the CPU by hand, and by ``spillway.OffloadedOptimizer``.

    python examples/tutorial/optimizer_offload.py

A small network in bfloat16 learns to predict the next byte of this file. AdamW steps fp32 master weights of its
parameters; gradients are added up in fp32 over two micro-batches, and clipped. There are four ways to do that:

* by hand, with master weights and state on the GPU,
* by hand, with master weights and state on the CPU: each copy blocks,
* ``spillway.OffloadedOptimizer``, which computes the same numbers as the second way, and stalls less,
* the same, with half of the parameters on the GPU.

``docs/optimizer.md`` explains it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway

STEPS, MICRO_BATCHES = 20, 2
BATCH, CONTEXT, WIDTH, BYTES = 32, 8, 128, 256
MAX_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
TEXT = Path(__file__).read_bytes()


def make_model(device: torch.device) -> nn.Sequential:
    """Predicts the byte after ``CONTEXT`` bytes; always with the same weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(BYTES, WIDTH // CONTEXT),
        nn.Flatten(),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, BYTES),
    )
    return model.to(device, torch.bfloat16)


class WrittenOut:
    """fp32 master weights on the GPU or on the CPU, and torch's own AdamW, which steps them there."""

    def __init__(self, model: nn.Module, *, on_host: bool) -> None:
        self.on_host = on_host
        self.parameters = list(model.parameters())
        where = torch.device("cpu") if on_host else self.parameters[0].device
        self.masters = [nn.Parameter(each.detach().to(where, torch.float32, copy=True)) for each in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, **ADAMW)

    def after_backward(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            gradient = parameter.grad.to(master.device, torch.float32)
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None

    def after_micro_batches(self) -> None:
        nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)

    def bytes_on_device(self) -> int:
        if self.on_host:
            return 0
        return sum(master.nbytes + nbytes_of(self.optimizer.state[master]) for master in self.masters)


class Offloaded:
    """The same by Spillway. Backward offloads gradients and adds them up."""

    def __init__(self, model: nn.Module, *, fraction: float) -> None:
        self.parameters = list(model.parameters())
        self.optimizer = spillway.OffloadedOptimizer(self.parameters, torch.optim.AdamW, fraction=fraction, **ADAMW)

    def after_backward(self) -> None:
        pass

    def after_micro_batches(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bytes_on_device(self) -> int:
        # Master weights are an entry of a parameter's state.
        states = self.optimizer.state
        return sum(nbytes_of(states[each]) for each in self.parameters if not self.optimizer.holds(each))


WAYS: dict[str, Callable[[nn.Module], WrittenOut | Offloaded]] = {
    "on the device": lambda model: WrittenOut(model, on_host=False),
    "on the host, by hand": lambda model: WrittenOut(model, on_host=True),
    "OffloadedOptimizer": lambda model: Offloaded(model, fraction=1.0),
    "half of it": lambda model: Offloaded(model, fraction=0.5),
}


def nbytes_of(state: dict[str, Tensor]) -> int:
    """Bytes of master weights and state for each element of a parameter."""
    return sum(value.nbytes for value in state.values() if value.ndim > 0)


def train(model: nn.Module, way: WrittenOut | Offloaded, first: int = 0, last: int = STEPS) -> list[float]:
    """The losses of some steps, each of which always has the same batch."""
    device = next(model.parameters()).device
    text = torch.tensor(list(TEXT), device=device)
    losses = []
    for step in range(first, last):
        torch.manual_seed(step)
        total = torch.zeros((), device=device)
        for _ in range(MICRO_BATCHES):
            starts = torch.randint(len(text) - CONTEXT, (BATCH, 1)).to(device)
            batch = text[starts + torch.arange(CONTEXT + 1, device=device)]
            loss = functional.cross_entropy(model(batch[:, :-1]).float(), batch[:, -1]) / MICRO_BATCHES
            loss.backward()
            way.after_backward()
            total += loss.detach()
        way.after_micro_batches()
        losses.append(total.item())
    return losses


def interrupted(device: torch.device) -> list[float]:
    """The losses of a training that is saved half-way and resumed elsewhere."""
    half = STEPS // 2
    model = make_model(device)
    before = Offloaded(model, fraction=1.0)
    losses = train(model, before, 0, half)
    file = io.BytesIO()
    torch.save((model.state_dict(), before.optimizer.state_dict()), file)

    file.seek(0)
    weights, state = torch.load(file, map_location="cpu")
    model = make_model(device)
    after = Offloaded(model, fraction=1.0)
    model.load_state_dict(weights)
    after.optimizer.load_state_dict(state)
    return losses + train(model, after, half, STEPS)


def main() -> None:
    """Train in all four ways and compare."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = device or torch.device("cpu")
    count = sum(parameter.numel() for parameter in make_model(device).parameters())
    print(f"{count} parameters in bfloat16, {STEPS} steps of {MICRO_BATCHES} micro-batches, {device}")
    print(f"{'master weights and state':24}{'bytes on the device':>20}{'first loss':>14}{'last loss':>14}")
    losses = {}
    for name, make in WAYS.items():
        model = make_model(device)
        way = make(model)
        losses[name] = train(model, way)
        print(f"{name:24}{way.bytes_on_device():20}{losses[name][0]:14.6f}{losses[name][-1]:14.6f}")

    def compared(one: list[float], other: list[float]) -> str:
        return f"all {STEPS} losses are equal" if one == other else "not all losses are equal"

    ours = losses["OffloadedOptimizer"]
    print(f"OffloadedOptimizer and by hand: {compared(ours, losses['on the host, by hand'])}")
    print(f"saved half-way and loaded: {compared(ours, interrupted(device))}")


if __name__ == "__main__":
    main()
