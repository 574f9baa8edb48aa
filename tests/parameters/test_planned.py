"""Plans of models whose parameters are streamed: their predictions, their bits, and what they leave behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from adapted import Block, FeedForward
from allocations import count_exactly
from runtime.scenarios import adversary_session
from spillway import BudgetError, Hardware
from spillway.attaching import search as searching
from spillway.attaching.timer import PlanTimer
from spillway.parameters.streamed import StreamedModel
from spillway.planner.plan import program_of
from spillway.planner.planner import rates_of
from spillway.planner.timeline import simulate_program
from spillway.profiler import compile as compiling
from spillway.saved_tensors.identity import is_streamed
from support import assert_nothing_left

BLOCKS = 6
STATIC = 16 << 20
HARDWARE = Hardware.named("h200")


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    count_exactly(monkeypatch, lambda: STATIC)


class Model(nn.Module):
    """A block's parameters are as large as its activations, or larger."""

    def __init__(self, block: Callable[[int], nn.Module], width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inputs = nn.Linear(4, width)
        self.layers = nn.ModuleList(block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


class Training:
    """A model and its optimizer: frozen parameters and adapters, or all of them trained."""

    def __init__(
        self, session: spillway.Session, *, is_trained: bool, width: int = 64, rows: int = 256, **options: Any
    ) -> None:
        self.model = Model(FeedForward if is_trained else Block, width)
        self._rows = rows
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
        if is_trained:
            self.optimizer = spillway.OffloadedOptimizer(trained, torch.optim.AdamW, lr=1e-2, session=session, **options)
        self._options = {"optimizer": self.optimizer} if is_trained else {}
        self._session = session
        self.steps = 0

    def attach(self, *, stream: Any = "layers.*", **options: Any) -> spillway.Attached:
        more = {"allow": {"keep", "recompute"}, "hardware": HARDWARE, "min_bytes": 0, **self._options, **options}
        attached = spillway.attach(self.model, session=self._session, stream=stream, **more)
        assert attached.streamed == tuple(f"layers.{number}" for number in range(BLOCKS))
        return attached

    def step(self, rows: int | None = None, *, reads: bool = False) -> list[Tensor]:
        """The loss and, if all is read, the gradients and the parameters: these copies are a part of the step."""
        torch.manual_seed(self.steps)
        self.steps += 1
        loss = self.model(torch.randn(self._rows if rows is None else rows, 4)).square().mean()
        loss.backward()
        parameters = list(self.model.parameters()) if reads else []
        found = [loss.detach(), *(each.grad.clone() for each in parameters if each.grad is not None)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [*found, *(each.detach().clone() for each in parameters)]

    def search(self, attached: spillway.Attached) -> None:
        for _ in range(20):
            self.step()
            if attached.stage == "active":
                return
        raise AssertionError(attached.explain())

    def end(self) -> None:
        if isinstance(self.optimizer, spillway.OffloadedOptimizer):
            self.optimizer.close()


@contextmanager
def training(*, window: Any = "64KiB", **options: Any) -> Iterator[Training]:
    with spillway.Session(window=window) as session:
        found = Training(session, **options)
        yield found
        found.end()


def measured(budget: int, **options: Any) -> tuple[int, int]:
    """The predicted and the measured peak of a plan within a budget, beyond the static bytes."""
    limits = {name: options.pop(name) for name in ("allow",) if name in options}
    with training(**options) as loop, loop.attach(budget=budget, **limits) as attached:
        loop.search(attached)
        assert attached.plan is not None and attached.measured is not None
        assert attached.measured.peak_bytes <= budget
        return attached.plan.predicted_peak - STATIC, attached.measured.peak_bytes - STATIC


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(
    ("width", "rows", "window", "allow"),
    [
        (64, 512, "64KiB", {"keep", "recompute"}),
        (256, 128, "3MiB", {"keep", "recompute"}),
        (256, 128, "1MiB", {"keep", "host", "recompute"}),
        (256, 128, "1MiB", {"host", "recompute"}),
    ],
    ids=["small weights", "large weights", "offloaded", "nothing kept"],
)
def test_predicted_peaks_are_within_two_percent(
    width: int, rows: int, window: str, allow: set[str], is_trained: bool
) -> None:
    options = {"width": width, "rows": rows, "window": window, "is_trained": is_trained, "allow": allow}
    most = 0
    for share in (None, 0.85, 0.7):
        budget = 1 << 30 if share is None else STATIC + int(share * most)
        predicted, found = measured(budget, **options)
        most = most or found
        assert abs(predicted / found - 1) < 0.02, (share, predicted, found)
