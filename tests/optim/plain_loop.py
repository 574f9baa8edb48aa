"""A plainly written training loop with ``float32`` copies of narrow parameters, and an optimizer to compare with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import spillway
from optim.support import assert_same_values, batches, implementation, loss_of, same_bits, wide
from spillway import OffloadedOptimizer

NARROW_KINDS = [("cpu", torch.bfloat16), ("adversary", torch.float16)]
NARROW = pytest.mark.parametrize(
    ("session", "dtype"), NARROW_KINDS, indirect=["session"], ids=["bfloat16", "float16-adversary"]
)
"""Both narrow types, one of them under the adversary."""

Scale = Callable[[Tensor], Tensor]


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


@dataclass
class PlainLoop:
    """Parameters in a narrow type, and a ``float32`` copy of each that the optimizer steps."""

    model: torch.nn.Module
    make: Callable[[list[torch.nn.Parameter]], Optimizer]
    work_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.masters = [torch.nn.Parameter(one.detach().to(self.work_dtype)) for one in self.model.parameters()]
        self.optimizer = self.make(self.masters)

    def backward(self, loss: Tensor) -> None:
        """Add a micro-batch's gradients, in the copies' type."""
        loss.backward()  # type: ignore[no-untyped-call]
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            if parameter.grad is not None:
                came = parameter.grad.to(self.work_dtype)
                master.grad = came if master.grad is None else master.grad + came
                parameter.grad = None

    def step(self) -> None:
        self.optimizer.step()
        self.write_back()

    def write_back(self) -> None:
        """Parameters are what the copies say."""
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@dataclass
class Pair:
    """The plain loop, and a model whose optimizer keeps the copies."""

    plain: PlainLoop
    model: torch.nn.Module
    optimizer: OffloadedOptimizer

    def gradients(self) -> Iterator[Tensor]:
        """Ours, and those of the plain loop's copies."""
        for parameter in (*self.model.parameters(), *self.plain.masters):
            assert parameter.grad is not None
            yield parameter.grad

    def backward(self, batch: Tensor, scaled: tuple[Scale, Scale] = (_as_it_is, _as_it_is)) -> None:
        """Both, with each one's loss scaled; ours first."""
        scaled[0](loss_of(self.model, batch)).backward()  # type: ignore[no-untyped-call]
        self.plain.backward(scaled[1](loss_of(self.plain.model, batch)))

    def assert_same_norm(self, most: float, **options: Any) -> None:
        """Clip both."""
        ours = torch.nn.utils.clip_grad_norm_(self.model.parameters(), most, **options)
        plain = torch.nn.utils.clip_grad_norm_(self.plain.masters, most, **options)
        assert same_bits(ours, plain), (ours, plain)

    def step(self) -> None:
        self.plain.step()
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.plain.zero_grad()
        self.optimizer.zero_grad()

    def assert_same(self) -> None:
        """Parameters, masters and state."""
        assert_same_values(self.model, self.plain.model)
        for parameter, master in zip(self.model.parameters(), self.plain.masters, strict=True):
            state, expected = dict(self.optimizer.state[parameter]), self.plain.optimizer.state[master]
            if state or expected:
                # Where there is none, the parameter is its own.
                assert same_bits(state.pop("master", parameter), master)
            assert state.keys() == expected.keys()
            assert all(same_bits(state[name], expected[name]) for name in state)


def pair(
    dtype: torch.dtype,
    session: spillway.Session,
    optimizer_class: type[Optimizer] = torch.optim.AdamW,
    options: dict[str, Any] | None = None,
    **defaults: Any,
) -> Pair:
    """Two equal models.

    Args:
        dtype: of the parameters.
        session: of ours.
        optimizer_class: of both.
        options: what only ours is given.
        defaults: what both are given.
    """
    options = options or {}
    how, work = implementation(optimizer_class), options.get("master_dtype", torch.float32)
    plain = PlainLoop(wide(dtype), lambda masters: optimizer_class(masters, **how, **defaults), work)
    model = wide(dtype)
    optimizer = OffloadedOptimizer(model.parameters(), optimizer_class, session=session, **options, **defaults)
    return Pair(plain, model, optimizer)


def windows(dtype: torch.dtype, sizes: Sequence[int]) -> list[list[Tensor]]:
    data = iter(batches(sum(sizes), dtype))
    return [list(itertools.islice(data, size)) for size in sizes]
