"""A training within a budget of bytes: nothing is said of what stays, what leaves and what is computed again.

    python examples/tutorial/budget.py

A small residual network is trained plainly, and then within a budget that lies half-way between what it needs when it
keeps all and the least that it can do with. ``spillway.profile`` and ``spillway.plan`` say what these are. Losses and
weights are compared bit for bit.

On an accelerator the budget is all that ``spillway.attach`` is told: it measures, plans and checks in the first steps.
On the CPU a budget is of the process's resident bytes, of which this small model has the lesser part. So there the plan
is made beforehand, and given.
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
    """Adds to its input what a small network makes of it."""

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
    """A loop as ever. It does not know whether there is a budget."""
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
        # There, some backward kernels add in any order, and two plain runs would not agree with each other.
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
