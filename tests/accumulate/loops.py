"""A small model of ragged sequences, and training loops written out plainly: what windows must equal bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, LENGTH = 13, 8, 6
PADDING = -100

Batch = tuple[Tensor, Tensor]
"""Words, and what they are to be followed by, or PADDING."""
Loss = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
"""The loss of a micro-batch, and what it weighs."""


class Model(nn.Module):
    """The word itself says what follows: rows do not see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(functional.gelu(self.hidden(self.words(words))))
        return out


def fresh(*, dtype: torch.dtype = torch.float32) -> Model:
    """The same weights each time."""
    torch.manual_seed(0)
    return Model().to(dtype)


def batches(count: int, *, rows: int = 2, seed: int = 1) -> list[Batch]:
    """Micro-batches of ragged sequences, none of which is as long as another."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for place in range(count):
        words = torch.randint(WORDS, (rows, LENGTH), generator=generator)
        following = torch.randint(WORDS, (rows, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=generator)
        lengths[0] = 1 + place % LENGTH
        made.append((words, following.masked_fill(torch.arange(LENGTH) >= lengths, PADDING)))
    return made


def summed(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sum of all words' losses, and how many there are."""
    words, following = batch
    loss = functional.cross_entropy(model(words).flatten(0, 1).float(), following.flatten(), reduction="sum")
    return loss, (following != PADDING).sum()


def averaged(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean instead."""
    loss, words = summed(model, batch)
    return loss / words, words


@dataclass
class Trace:
    """What a training did: after each window, weights, and what was reported."""

    weights: list[list[Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)

    def note(self, model: nn.Module) -> None:
        self.weights.append([local(parameter).detach().clone() for parameter in model.parameters()])


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def assert_same(ours: Trace, plain: Trace) -> None:
    """Bit for bit."""
    assert len(ours.weights) == len(plain.weights) > 0
    for window, (one, other) in enumerate(zip(ours.weights, plain.weights, strict=True)):
        assert all(map(torch.equal, one, other)), f"weights differ after window {window}"
    for name in ("losses", "norms", "rates", "skipped", "totals"):
        if getattr(plain, name):
            assert getattr(ours, name) == getattr(plain, name), name


Autocast = Callable[[], AbstractContextManager[Any]]


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: Iterable[Sequence[Batch]],
    *,
    loss: Loss = summed,
    max_norm: float | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    autocast: Autocast = contextlib.nullcontext,
) -> Trace:
    """What somebody would write who normalises by tokens at the end of each window."""
    trace = Trace()
    for window in windows:
        total, losses = 0, 0.0
        for batch in window:
            with autocast():
                value, words = loss(model, batch)
            total += int(words)
            losses += value.item()
            (value if scaler is None else scaler.scale(value)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / total)
        if max_norm is not None:
            trace.norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        end(trace, model, optimizer, scaler, scheduler)
        trace.losses.append(losses / total)
        trace.totals.append(total)
    return trace


def plain_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: Iterable[Sequence[Batch]],
    *,
    max_norm: float | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    autocast: Autocast = contextlib.nullcontext,
) -> Trace:
    """The loop that is in every tutorial: ``loss / steps``."""
    trace = Trace()
    for window in windows:
        losses = 0.0
        for batch in window:
            with autocast():
                value, _ = averaged(model, batch)
                value = value / len(window)
            losses += value.item()
            (value if scaler is None else scaler.scale(value)).backward()
        if max_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            trace.norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        end(trace, model, optimizer, scaler, scheduler)
    return trace


def end(trace: Trace, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, scheduler: Any) -> None:
    """Step, as the documentation of ``GradScaler`` has it."""
    trace.rates.append(optimizer.param_groups[0]["lr"])
    skipped = False
    if scaler is None:
        optimizer.step()
    else:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < before
    if scheduler is not None and not skipped:
        scheduler.step()
    optimizer.zero_grad()
    trace.skipped.append(skipped)
    trace.note(model)


def windowed(
    model: nn.Module,
    window: Any,
    loader: Iterable[Batch],
    *,
    loss: Loss = summed,
    autocast: Autocast = contextlib.nullcontext,
    weigh: Callable[[Tensor], Any] | None = lambda words: words,
) -> Trace:
    """The same by an accumulator, in a loop."""
    trace = Trace()
    for batch in window(loader):
        with autocast():
            value, words = loss(model, batch)
        if weigh is None:
            window.backward(value)
        else:
            window.backward(value, weight=weigh(words))
        if window.stepped:
            note(trace, model, window.last)
    return trace


def by_hand(model: nn.Module, window: Any, windows: Iterable[Sequence[Batch]], *, loss: Loss = summed) -> Trace:
    """The same by an accumulator whose weights are known first."""
    trace = Trace()
    for each in windows:
        for place, batch in enumerate(each, 1):
            with window.micro(weight=int((batch[1] != PADDING).sum()), last=place == len(each)):
                window.backward(loss(model, batch)[0])
        note(trace, model, window.step())
    return trace


def note(trace: Trace, model: nn.Module, record: Any) -> None:
    """What a record says."""
    trace.note(model)
    trace.losses.append(float(record.loss))
    trace.totals.append(float(record.weight))
    trace.skipped.append(bool(record.skipped))
    trace.rates.append(float(record.learning_rates[0]))
    if record.gradient_norm is not None:
        trace.norms.append(float(record.gradient_norm))
