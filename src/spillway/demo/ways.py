"""How a step is run, way by way. A way that is added to :data:`WAYS` is in the command, the table and the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

import spillway
from spillway.demo.model import GPT
from spillway.demo.records import Settings
from spillway.errors import BudgetError, UsageError
from spillway.units import format_bytes, parse_bytes


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
    fewest_steps: ClassVar[int] = 3
    """Fewer say nothing of it: one to warm up, two to measure."""
    fewest_settled: ClassVar[int] = 2
    """Before the last one, steps that are done as all later ones are."""
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

    def is_settled(self) -> bool:
        """Whether the last step was done as all that follow will be."""
        return True

    def checked_peak(self) -> int:
        """The peak, in bytes, that it has measured itself, for whoever it took the allocator's from."""
        return 0

    def budget_bytes(self) -> int | None:
        """The budget; ``None``: it has none."""
        return None

    def note(self) -> str:
        """A sentence for below the table; empty: there is nothing to say."""
        return ""


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


class Planned(Way):
    """``spillway.attach(model, budget=...)``: what stays, leaves and is computed again is planned from the first steps.

    NOTE [ A budget for the demo ]

    If none is given, the budget is the middle between the peaks of the plan that keeps all and of the one that keeps
    least. Both are planned from a profile, so no other way has to run before. The optimizer has no state then: AdamW's
    is added. On the CPU resident bytes count what measuring and planning hold, too: so much is left above the least.
    """

    name = "planned"
    summary = "spillway.attach(budget=...): what stays, leaves and is computed again is planned"
    cost = 1.3
    # Five find the plan as a rule, one takes leave of what watched them, five are measured.
    fewest_steps = 11
    fewest_settled = 6

    budget: int
    """Bytes."""

    def __init__(self, settings: Settings, model: GPT) -> None:
        super().__init__(settings, model)
        self.budget = self._middle() if settings.budget is None else parse_bytes(settings.budget, what="budget")
        self._attached = spillway.attach(model, budget=self.budget)
        self._steps = 0
        self._searched = 0

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As ever; the model finds its plan meanwhile."""
        loss = super().step(tokens, targets)
        self._steps += 1
        if not self.is_settled():
            self._searched = self._steps
        return loss

    def moved_bytes(self) -> int:
        """Bytes that left in the last step."""
        return self._attached.stats().offloaded_bytes

    def is_settled(self) -> bool:
        """Whether a plan holds."""
        return self._attached.stage == "holding"

    def checked_peak(self) -> int:
        """That of the step in which the plan was checked, whose watch has set the allocator's back."""
        measured = self._attached.measured
        return 0 if measured is None or self.is_settled() else measured.peak_bytes

    def budget_bytes(self) -> int | None:
        """The budget."""
        return self.budget

    def note(self) -> str:
        """The budget, and what the plan does."""
        told = f"{self.name}: a budget of {format_bytes(self.budget)}"
        plan = self._attached.plan
        if plan is None or not self.is_settled():
            return f"{told}, for which {self._steps} steps found no plan that holds; give more --steps."
        plain = sum(block.plain for block in plan.blocks)
        return (
            f"{told}; {self._searched} steps found the plan. It leaves {plain} of {len(plan.blocks)} blocks alone, "
            f"sends {format_bytes(plan.sent_bytes)} away, and predicts a peak of {format_bytes(plan.predicted_peak)}."
        )

    def _middle(self) -> int:
        """See NOTE [ A budget for the demo ]."""
        device = torch.device(self.settings.device)
        batch = torch.zeros(self.settings.batch, self.settings.sequence, dtype=torch.int64, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type != "cpu"):
            profile = spillway.profile(self.model, (batch, batch))
        most = spillway.plan(profile, budget=_ANY, allow={"keep"}).predicted_peak
        try:
            least = spillway.plan(profile, budget=1).predicted_peak
        except BudgetError as error:
            least = error.least
        state = 2 * sum(parameter.nbytes for parameter in self.model.parameters())
        return state + max((most + least) // 2, least + (_UNSTEADY if device.type == "cpu" else 0))


_ANY = 1 << 60
"""A budget that everything is within."""

_UNSTEADY = 64 << 20
"""Bytes. See NOTE [ A budget for the demo ]."""


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


WAYS: dict[str, type[Way]] = {way.name: way for way in (Way, Checkpoint, Offload, Planned, HostOptimizer)}
"""By name, in the order in which they run: ``keep`` first, since the others are compared with it."""


def ways_for(device: torch.device, steps: int) -> list[str]:
    """The names of the ways that run unasked: those of which so many steps, or as many as any way needs, say much."""
    enough = max(steps, Way.fewest_steps)
    return [name for name, way in WAYS.items() if (way.on_cpu or device.type != "cpu") and way.fewest_steps <= enough]


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
