"""What a replay reads on an accelerator: conditions, settings of its kernels, Python state, generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from support import assert_identical

pytestmark = pytest.mark.gpu

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
HOWS: list[dict[str, Any]] = [{}, {}, {"save": "matmul"}, {"offload": "matmul"}, {"use_reentrant": True}]
hows = pytest.mark.parametrize("how", HOWS, ids=str)
Run = Callable[..., Tensor]


def plainly(function: Callable[..., Tensor], *args: Any, **how: Any) -> Tensor:
    return function(*args)


def compare(step: Callable[[Run], Iterator[Tensor]], how: dict[str, Any]) -> None:
    results = []
    for run in (plainly, lambda function, *args: spillway.recompute(function, *args, **how)):
        torch.manual_seed(0)
        random.seed(0)
        results.append([tensor.detach().clone() for tensor in step(run)])
    assert_identical(*results)


@contextmanager
def tf32() -> Iterator[None]:
    # Torch's own test suite forbids the flags of cuDNN outside of this context.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False


@hows
def test_settings_of_kernels_around_forward_alone(how: dict[str, Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 64, 3, padding=1), nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.b(torch.tanh(self.a(x)).flatten(2)[..., :256]))

    def step(run: Run) -> Iterator[Tensor]:
        net = Net().to(DEVICE)
        for _ in range(5):
            x = torch.randn(4, 8, 32, 32, device=DEVICE, requires_grad=True)
            net.zero_grad()
            with tf32():
                loss = run(net, x * 1).square().mean()
            loss.backward()
            yield from (loss, x.grad, net.b.weight.grad)  # type: ignore[misc]

    compare(step, how)


@pytest.mark.parametrize("how", [each for each in HOWS if "use_reentrant" not in each], ids=str)
def test_a_condition_that_was_replaced_and_a_state_that_is_carried(how: dict[str, Any]) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
            self.condition: Tensor | None = None
            self.h = torch.zeros(16, 64)
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            self.h = torch.tanh(self.up(x + self.h) + self.condition) * (random.random() + self.steps)
            return self.out(self.h)

    def step(run: Run) -> Iterator[Tensor]:
        cell, embed = Cell().to(DEVICE), nn.Linear(4, 64).to(DEVICE)
        for _ in range(5):
            cell.h, losses = torch.zeros(16, 64, device=DEVICE), []
            x = torch.randn(16, 64, device=DEVICE, requires_grad=True)
            for n in range(1, 4):
                cell.condition = embed(torch.randn(16, 4, device=DEVICE))
                losses.append(run(cell, x * n).square().mean())
            cell.zero_grad()
            embed.zero_grad()
            sum(losses).backward()  # type: ignore[union-attr]
            yield from (x.grad, cell.up.weight.grad, embed.weight.grad, torch.tensor(cell.steps))  # type: ignore[misc]
            yield torch.tensor(random.getstate()[1])

    compare(step, how)


@hows
def test_a_generator_of_the_blocks_own_on_the_device(how: dict[str, Any]) -> None:
    def step(run: Run) -> Iterator[Tensor]:
        own, linear = torch.Generator(DEVICE).manual_seed(3), nn.Linear(64, 64).to(DEVICE)

        def block(x: Tensor) -> Tensor:
            return torch.tanh(linear(x)) * torch.rand(64, device=DEVICE, generator=own)

        for _ in range(5):
            x = torch.randn(16, 64, device=DEVICE, requires_grad=True)
            run(block, x * 1).square().sum().backward()
            yield from (x.grad, own.get_state())  # type: ignore[misc]

    compare(step, how)
