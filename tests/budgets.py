"""Models of several kinds and their training with and without a budget, for tests of budgets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from spillway import Attached, BudgetError, Hardware, Profile, Session
from steps import Block, Residual

WIDTH = 64
STAGES = ["profiling operators", "profiling memory", "profiling time", "warming up", "validating", "active"]


class Norm(nn.Module):
    """An RMS norm that writes nothing in place, as torch's own does on a CPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """A block as in a Llama: attention and a gated feed-forward layer, each normalised before."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = Norm(width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A block that sends each row to one of four experts."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.register_buffer("rows", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(1)
        self.rows += torch.bincount(chosen.flatten(), minlength=4)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen[:, 0] == number).nonzero()[:, 0]
            out = out.index_add(0, mine, torch.tanh(expert(x[mine])) * weight[mine])
        return x + out


class Dropping(nn.Module):
    """A block that draws random numbers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.down(functional.gelu(self.up(x))), 0.1, self.training)


def stack(block: Callable[[], nn.Module], layers: int, stem: nn.Module, *head: nn.Module) -> nn.Sequential:
    """Blocks between a stem and a head, with the same weights each time."""
    return nn.Sequential(stem, *(block() for _ in range(layers)), *head)


@dataclass(frozen=True)
class Kind:
    """A kind of model."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]

    def model(self) -> nn.Module:
        """The same weights each time."""
        torch.manual_seed(0)
        return self.build()


def _rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH)


KINDS = [
    Kind(
        "mlp",
        lambda: stack(lambda: Block(WIDTH), 4, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)),
        lambda: _rows(2048),
    ),
    Kind(
        "attention",
        lambda: stack(Attention, 3, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)),
        lambda: torch.randn(16, 128, WIDTH),
    ),
    Kind(
        "convolution",
        lambda: stack(
            lambda: Residual(16),
            3,
            nn.Conv2d(3, 16, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 5),
        ),
        lambda: torch.randn(16, 3, 24, 24),
    ),
    Kind("experts", lambda: stack(Experts, 3, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)), lambda: _rows(2048)),
    Kind("dropout", lambda: stack(Dropping, 4, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)), lambda: _rows(2048)),
]
NAMED = {kind.name: kind for kind in KINDS}


@functools.cache
def hardware() -> Hardware:
    """What some machine can do, so that none is measured."""
    return Hardware.named("h200")


def attached_to(model: nn.Module, budget: int | str, session: Session, **options: Any) -> Attached:
    """With a budget, on that machine."""
    return spillway.attach(model, budget=budget, hardware=hardware(), min_bytes="64KiB", session=session, **options)


def one_step(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """A loss and all gradients, which are then set to nothing."""
    loss = model(batch).square().mean()
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def train(
    model: nn.Module, batch: Tensor, steps: int, after: Callable[[], object] = lambda: None
) -> list[list[Tensor]]:
    """Steps of two micro-batches and two optimizers, each followed by an evaluation; gives what each came to.

    Args:
        model: is trained.
        batch: is cut in two.
        steps: how many.
        after: is called after each.
    """
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[::2], 0.01, momentum=0.9), torch.optim.AdamW(parameters[1::2], 0.001)]
    course = []
    for number in range(steps):
        torch.manual_seed(number)
        losses = []
        for part in batch.chunk(2):
            loss = model(part).square().mean()
            loss.backward()
            losses.append(loss.detach())
        gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(model(batch[:2]).sum())
        model.train()
        course.append([*losses, *gradients, *(tensor.clone() for tensor in model.state_dict().values())])
        after()
    return course


def search(model: nn.Module, batch: Tensor, attached: Attached, most: int = 10) -> list[str]:
    """Steps until the plan is held; gives the stages that they were in."""
    stages = []
    while attached.stage != "active":
        assert len(stages) < most, (stages, attached.explain())
        one_step(model, batch)
        stages.append(str(attached.stage))
    return stages


def budget_of(measured: Profile, share: float) -> int:
    """A budget between the least one, and all that there is if everything stays."""
    least, most = _least_and_most(measured)
    return int(least + share * (most - least))


@functools.lru_cache(maxsize=4)
def _least_and_most(measured: Profile) -> tuple[int, int]:
    """Plans of recomputation come to as little as those that offload, and are found in a tenth of the time."""
    try:
        spillway.plan(measured, budget=1, hardware=hardware(), allow={"keep", "recompute"})
    except BudgetError as error:
        least = error.least
    else:
        raise AssertionError
    most = spillway.plan(measured, budget="1TiB", hardware=hardware(), allow={"keep"}).predicted_peak
    return least, most
