"""Training within a memory budget: Spillway decides which activations to keep, offload and recompute.

    python examples/tutorial/budget.py

A small residual network is trained plainly, and then within a budget: half-way between the peak of a plan that keeps
everything and the smallest peak of any plan. ``spillway.profile`` and ``spillway.plan`` predict both. Losses and
weights are compared bit for bit.

On a GPU, ``spillway.attach`` gets only the budget: it measures, plans and validates in the first steps. On the CPU a
budget counts the process's resident bytes, and this small model is the lesser part of them. So the plan is made
beforehand.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

import spillway

STEPS, BLOCKS, WIDTH, ROWS = 6, 4, 256, 8192
ANY, NOTHING = "1TiB", 1


class Block(nn.Module):
    """Adds the output of a small network to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU())
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.out(self.inner(x))
        return out


def make_model(device: torch.device) -> nn.Sequential:
    """Always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1)).to(device)


def train(model: nn.Module, batches: list[Tensor]) -> list[float]:
    """A plain training loop. It does not know whether there is a budget."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        loss = (model(batch) - batch.mean(-1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def find_budget(profile: spillway.Profile) -> int:
    """Bytes half-way between the plan that keeps all and the one that keeps least."""
    most = spillway.plan(profile, budget=ANY, allow={"keep"}).predicted_peak
    try:
        spillway.plan(profile, budget=NOTHING)
    except spillway.BudgetError as error:
        return (most + error.least) // 2
    raise AssertionError("a plan fits a single byte")


def main() -> None:
    """Train both ways and compare."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = device or torch.device("cpu")
    if device.type != "cpu":
        # On a GPU, some backward kernels add in any order, so two plain runs would differ.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    batches = [torch.randn(ROWS, WIDTH, device=device) for _ in range(STEPS)]

    plain = make_model(device)
    expected = train(plain, batches)

    model = make_model(device)
    profile = spillway.profile(model, batches[0])
    budget = find_budget(profile)
    how: dict[str, Any] = (
        {"plan": spillway.plan(profile, budget=budget)} if device.type == "cpu" else {"budget": budget}
    )
    attached = spillway.attach(model, **how)
    losses = train(model, batches)
    print(attached.explain())
    print(f"stage: {attached.stage}")
    attached.remove()

    assert losses == expected, "the losses differ"
    assert all(map(torch.equal, model.parameters(), plain.parameters())), "the weights differ"
    print(f"all {STEPS} losses and all weights are equal")


if __name__ == "__main__":
    main()
