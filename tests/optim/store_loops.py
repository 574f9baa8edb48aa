"""What the tests of state stores share: a small model, a plain loop, and the same loop with streamed state."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import spillway
from spillway.optim import state_store
from spillway.testing import AdversaryBackend

FUSED = (Adam, AdamW, SGD, Adagrad)
ROWS = 8
WIDTH = 33


@dataclass(frozen=True)
class Way:
    """Where masters and states lie."""

    name: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    def plain(self, optimizer_class: type[Optimizer], settings: dict[str, Any]) -> dict[str, Any]:
        """The settings of the plain class that steps to the same bits."""
        if self.name == "device":
            return settings
        flags = {"fused": True} if optimizer_class in FUSED else {"foreach": False}
        return {**settings, **flags} if optimizer_class is not torch.optim.Muon else settings


DEVICE = Way("device", {"step_on": "gpu"})
DISK = Way("disk", {"tier": "disk"})
HOST = Way("host", {})
SPLIT = Way("split", {"step_on": "auto", "cpu_share": 0.5})
WAYS = [DEVICE, DISK]


def small_pieces(patch: Any, elements: int = 256) -> None:
    """Let chunks have so few elements."""
    patch.setattr(state_store, "_LEAST", elements)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Large and small parameters, none a multiple of a cache line."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 65), nn.GELU(), nn.Linear(65, 17), nn.LayerNorm(17))
    return model.to(dtype)


def matrices(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two dimensions each."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 65, bias=False), nn.GELU(), nn.Linear(65, 17, bias=False)).to(dtype)


def model_for(optimizer_class: type[Optimizer], dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """One that the class takes."""
    return matrices(dtype) if optimizer_class is torch.optim.Muon else net(dtype)


def batches(steps: int, micro: int, dtype: torch.dtype, seed: int = 1) -> Iterator[list[torch.Tensor]]:
    """The inputs of each step's micro-batches."""
    torch.manual_seed(seed)
    for _ in range(steps):
        yield [torch.randn(ROWS, WIDTH, dtype=dtype) for _ in range(micro)]


@dataclass
class Loop:
    """How a model is trained."""

    steps: int = 4
    micro: int = 1
    clip: float | None = None
    scale: float = 1.0
    infinite: tuple[int, ...] = ()
    """Steps whose loss is infinite."""
    seed: int = 1
    dtype: torch.dtype = torch.float32
    each: Callable[[int, nn.Module, Optimizer], None] | None = None
    """Called before each step's first micro-batch."""
    norms: list[torch.Tensor] = field(default_factory=list)

    def loss(self, model: nn.Module, batch: torch.Tensor, step: int) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss * float("inf") if step in self.infinite else loss

    def run(self, model: nn.Module, optimizer: Optimizer) -> None:
        """As anybody would write it."""
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, enabled=self.scale != 1.0, growth_interval=10**6)
        for step, micro in enumerate(batches(self.steps, self.micro, self.dtype, self.seed)):
            if self.each is not None:
                self.each(step, model, optimizer)
            for batch in micro:
                scaler.scale(self.loss(model, batch, step)).backward()
            scaler.unscale_(optimizer)
            if self.clip is not None:
                self.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    def run_in_float(self, model: nn.Module, optimizer_class: type[Optimizer], settings: Any) -> Optimizer:
        """The same with masters and sums of gradients in ``float32``, written out. Gives the masters' optimizer."""
        parameters = list(model.parameters())
        masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
        optimizer = optimizer_class(masters, **settings)
        scale = self.scale
        for step, micro in enumerate(batches(self.steps, self.micro, self.dtype, self.seed)):
            sums: list[torch.Tensor | None] = [None] * len(parameters)
            for batch in micro:
                (self.loss(model, batch, step) * scale).backward()
                for index, parameter in enumerate(parameters):
                    gradient = parameter.grad.float()  # type: ignore[union-attr]
                    known = sums[index]
                    sums[index] = gradient if known is None else known + gradient
                    parameter.grad = None
            if not all(one.isfinite().all() for one in sums):  # type: ignore[union-attr]
                scale *= 0.5
                continue
            for master, found in zip(masters, sums, strict=True):
                master.grad = found if self.scale == 1.0 else found * (1.0 / scale)  # type: ignore[operator]
            if self.clip is not None:
                self.norms.append(torch.nn.utils.clip_grad_norm_(masters, self.clip))
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.copy_(master)
        return optimizer


def session(tmp_path: Path, *, adversary: AdversaryBackend | None = None, **options: Any) -> spillway.Session:
    """One of a test's own."""
    return spillway.Session(
        backend=None if adversary is None else adversary.serve,
        spill_directory=tmp_path,
        allow_memory_filesystem=True,
        **options,
    )


def saved(value: Any) -> Any:
    """Through a file."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same parameters, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def assert_same_state(got: dict[str, Any], expected: dict[str, Any], *, masters: list[torch.Tensor] | None) -> None:
    """The ``"state"`` of two state dicts; masters are an entry of their own in the first."""
    assert got.keys() == (expected.keys() if masters is None else set(range(len(masters))))
    for index, theirs in got.items():
        mine, state = dict(theirs), expected.get(index, {})
        if masters is not None:
            assert torch.equal(mine.pop("master"), masters[index])
        assert mine.keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(mine[name], value) if isinstance(value, torch.Tensor) else mine[name] == value, name
