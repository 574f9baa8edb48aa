"""How a step is run, way by way. A way that is added to :data:`WAYS` is in the command, the table and the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

import spillway
from spillway.demo.model import GPT
from spillway.demo.records import Settings
from spillway.errors import UsageError


class Way:
    """Plain training: everything that autograd saves stays. Other ways override what they do otherwise.

    Args:
        settings: of the training.
        model: to be trained, on its device.
    """

    name: ClassVar[str] = "keep"
    summary: ClassVar[str] = "everything stays on the device"
    cost: ClassVar[float] = 1.0
    """Expected step time in that of ``keep``; divides a limit of time among the ways."""
    on_cpu: ClassVar[bool] = True
    """Whether it runs on the CPU unasked."""
    not_compared: ClassVar[str] = ""
    """Why its losses on an accelerator are not compared with those of ``keep``; empty where they are."""

    def __init__(self, settings: Settings, model: GPT) -> None:
        self.settings = settings
        self.model = model
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which has no state before its first step."""
        return torch.optim.AdamW(self.model.parameters(), **self.options())

    def options(self) -> dict[str, Any]:
        """Of the optimizer."""
        return {"lr": self.settings.learning_rate, "betas": (0.9, 0.95)}

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward and update; the gradients stay to be looked at. Returns the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss, with its graph."""
        device = tokens.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
            loss: Tensor = self.model(tokens, targets)
            return loss

    def gradients(self) -> Iterator[Tensor]:
        """All gradients, one after the other."""
        return (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)

    def moved_bytes(self) -> int:
        """Bytes that left the device in the last step."""
        return 0


class Checkpoint(Way):
    """``torch.utils.checkpoint`` around every block, non-reentrant: computed again in backward."""

    name = "checkpoint"
    summary = "torch.utils.checkpoint: every block is computed again in backward"
    cost = 1.35

    def __init__(self, settings: Settings, model: GPT) -> None:
        super().__init__(settings, model)
        model.checkpoint_blocks = True


class Offload(Way):
    """``spillway.offload()`` around the forward: it all leaves, and is back in time for backward."""

    name = "offload"
    summary = "spillway.offload: what is saved leaves for host memory or disk"
    cost = 1.2

    def __init__(self, settings: Settings, model: GPT) -> None:
        super().__init__(settings, model)
        self._offload = spillway.offload(window=settings.window)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss, with a graph whose tensors leave."""
        with self._offload:
            return super().forward(tokens, targets)

    def moved_bytes(self) -> int:
        """Bytes that left in the last step."""
        return self._offload.stats().offloaded_bytes


class HostOptimizer(Way):
    """``spillway.OffloadedOptimizer``: its state is on the host and it steps there, and gradients leave in backward."""

    name = "optimizer"
    summary = "spillway.OffloadedOptimizer: state and step are on the host"
    cost = 1.4
    # There is no other memory to move the state to, and every gradient is copied.
    on_cpu = False
    not_compared = "the host's kernels round otherwise than the device's, so its losses are close to those of keep only"

    optimizer: spillway.OffloadedOptimizer

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the other ways, over parameters that it holds on the host."""
        return spillway.OffloadedOptimizer(self.model.parameters(), torch.optim.AdamW, **self.options())

    def options(self) -> dict[str, Any]:
        """Of the optimizer. On the CPU it takes the loop that is keep's there, so that the two are comparable."""
        options = super().options()
        return {**options, "fused": False} if self.settings.device == "cpu" else options

    def gradients(self) -> Iterator[Tensor]:
        """All gradients, brought back one after the other."""
        return (gradient.clone() for gradient in super().gradients())

    def moved_bytes(self) -> int:
        """Bytes of gradients that left in the last step."""
        return self.optimizer.stats().sent_bytes


WAYS: dict[str, type[Way]] = {way.name: way for way in (Way, Checkpoint, Offload, HostOptimizer)}
"""By name, in the order in which they run: ``keep`` first, since the others are compared with it."""


def ways_for(device: torch.device) -> list[str]:
    """The names of the ways that run unasked."""
    return [name for name, way in WAYS.items() if way.on_cpu or device.type != "cpu"]


def parse_ways(names: Iterable[str]) -> list[str]:
    """Names of ways, each once and in the order of :data:`WAYS`.

    Raises:
        UsageError: at a name that is none, or if there is no name.
    """
    wanted = set(names)
    if not wanted or wanted - WAYS.keys():
        got = ", ".join(sorted(wanted - WAYS.keys())) or "none"
        raise UsageError(f"ways: got {got}, expected some of {', '.join(WAYS)}; write them like --ways keep,offload")
    return [name for name in WAYS if name in wanted]
