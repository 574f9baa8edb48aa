"""Functions that do something else in a later call than in the first one, from which Spillway learned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from recompute.regions import Call, Regions, gradients, one_place

pytestmark = one_place

CALLS = 5


class Act:
    """Functions of one class: nothing tells them apart."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


def _noisy(x: Tensor, is_late: bool) -> Tensor:
    """The noise is saved before the kernel draws it."""
    return functional.rrelu(x * 2, training=True) if is_late else functional.leaky_relu(x * 2)


_leaky, _random = Act(lambda x: functional.leaky_relu(x * 2)), Act(lambda x: functional.rrelu(x * 2, training=True))


class Statistics(nn.Module):
    """The kernel writes the statistics, and no version counter tells."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.is_late = False

    def forward(self, x: Tensor) -> Tensor:
        mean, var = (self.mean, self.var) if self.is_late else (None, None)
        return functional.batch_norm(x * 2, mean, var, training=True).sin()


class Average(nn.Module):
    """Writes a buffer, which it reads, now and then."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(size))
        self.average: Tensor
        self.is_late = False

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.average[:8].clone()).sin()
        if self.is_late:
            self.average.mul_(0.5)
        return y


class Shifting(nn.Module):
    """What it reaches is not the same in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(600_000))
        self.history: Tensor
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(8)
        y = (x * self.mask + self.history[:8].clone()).sin()
        self.history.add_(1)
        return y


class Moves(nn.Module):
    """Items move from one container to another."""

    def __init__(self) -> None:
        super().__init__()
        self.todo, self.done, self.is_late = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0], False

    def forward(self, x: Tensor) -> Tensor:
        factor = self.todo[-1]
        if self.is_late:
            self.todo.pop()
            self.done.insert(0, factor)
        return (x * factor).sin()


class Normal(nn.Module):
    """Draws one of a pair of normal numbers."""

    is_late = False

    def forward(self, x: Tensor) -> Tensor:
        return (x * (float(np.random.randn()) if self.is_late else 1.0)).sin()


class Limited(nn.Module):
    """Its forward writes its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 8, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return (self.rows(torch.arange(4)) * x).sin()


MODULES: dict[str, Callable[[], Any]] = {
    "statistics": Statistics,
    "an average": Average,
    "what is reached": Shifting,
    "containers": Moves,
    "normal numbers": Normal,
    "a limited embedding": Limited,
}


@pytest.mark.parametrize("late", [1, 3])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_does_something_else_in_a_later_call(regions: Regions, name: str, late: int) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        torch.manual_seed(0)
        np.random.seed(0)
        block = MODULES[name]()
        for number in range(CALLS):
            block.is_late = number >= late
            x = torch.randn(4, 8, requires_grad=True)
            call(block, x * 1).sum().backward()
            yield from gradients(x)
            yield from (buffer.clone() for buffer in block.buffers())
            yield torch.tensor(np.random.random())

    regions(step)


def test_functions_that_share_their_code(regions: Regions) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        torch.manual_seed(0)
        for function in (_leaky, _leaky, _random, _random):
            x = torch.randn(4, 8, requires_grad=True)
            call(function, x * 1).sum().backward()
            yield from gradients(x)

    regions(step)


@pytest.mark.parametrize("kind", [bool, int, str])
def test_a_flag_among_the_arguments(regions: Regions, kind: Callable[[bool], Any]) -> None:
    def function(x: Tensor, flag: Any) -> Tensor:
        return _noisy(x, flag == kind(True))

    def step(call: Call) -> Iterator[Tensor]:
        torch.manual_seed(0)
        for number in range(CALLS):
            x = torch.randn(4, 8, requires_grad=True)
            call(function, x * 1, kind(number > 1)).sum().backward()
            yield from gradients(x)

    regions(step)


def test_a_number_that_counts_calls_does_not_make_each_call_a_kind_of_its_own(regions: Regions) -> None:
    ends = []

    def function(x: Tensor, number: int) -> Tensor:
        y = x.sin().exp() + number
        if torch.is_grad_enabled():
            ends.append(number)
        return y

    for number in range(40):
        x = torch.randn(4, requires_grad=True)
        spillway.recompute(function, x * 1, number, session=regions.session).sum().backward()
    assert ends.count(39) == 1


@pytest.mark.parametrize("late", [0, 2])
def test_inputs_that_overlap(regions: Regions, late: int) -> None:
    """A function writes one of them: copies apart from each other would not do."""
    weight = torch.eye(8)

    def function(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return (a @ weight).sin() * b.cos()

    def step(call: Call) -> Iterator[Tensor]:
        torch.manual_seed(0)
        for number in range(CALLS):
            x = torch.randn(4, 8, requires_grad=True)
            h = x * 1
            call(function, h[:2], h[1:3] if number >= late else h[2:]).sum().backward()
            yield from gradients(x)

    if late:
        regions(step)
    else:
        # In the first call nothing is known yet. It is compared.
        regions.right_or_refused(step)


@pytest.mark.parametrize(
    "buffer",
    [
        lambda: torch.arange(4.0).unsqueeze(1).expand(4, 8),
        lambda: torch.randn(8, dtype=torch.complex64).conj(),
        lambda: torch.randn(8, 4).t(),
        lambda: torch.randn(2, 8)[:, ::2].repeat_interleave(2, 1)[0].to_sparse(),
    ],
    ids=["expanded", "conjugate", "transposed", "sparse"],
)
def test_odd_buffers_beside_one_that_is_written(regions: Regions, buffer: Callable[[], Tensor]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("odd", buffer())
            self.register_buffer("count", torch.zeros(1))
            self.odd: Tensor
            self.count: Tensor

        def forward(self, x: Tensor) -> Tensor:
            odd = self.odd.to_dense() if self.odd.is_sparse else self.odd
            y = (x + (odd if odd.shape[-1] == 8 else 0)).abs().sin()
            self.count.add_(1)
            return y

    def step(call: Call) -> Iterator[Tensor]:
        torch.manual_seed(0)
        block = Block()
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            call(block, x * 1).sum().backward()
            yield from (*gradients(x), block.count.clone())

    regions(step)


def test_a_sparse_input(regions: Regions) -> None:
    weight = torch.randn(8, 8)

    def function(x: Tensor, graph: Tensor) -> Tensor:
        return torch.sparse.mm(graph, x @ weight).sin()

    def step(call: Call) -> Iterator[Tensor]:
        torch.manual_seed(0)
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            call(function, x * 1, torch.eye(4).to_sparse()).sum().backward()
            yield from gradients(x)

    regions(step)


def test_a_large_buffer_that_is_written(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is large there is no copy in the first call, which is compared; later ones copy it."""
    monkeypatch.setattr("spillway.checkpointing.reached._MOST_OBSERVED", 64)
    monkeypatch.setattr("spillway.checkpointing.reached._MOST_COPIED", 64)

    class After(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(64))
            self.queue: Tensor

        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            self.queue[:8].add_(1)
            return y

    class Before(After):
        def forward(self, x: Tensor) -> Tensor:
            self.queue[:8].add_(1)
            return (x + self.queue[:8].clone()).sin()

    def step(kind: type[After], call: Call) -> Iterator[Tensor]:
        torch.manual_seed(0)
        block = kind()
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            call(block, x * 1).sum().backward()
            yield from (*gradients(x), block.queue.clone())

    regions(functools.partial(step, After))
    regions.right_or_refused(functools.partial(step, Before))


class HiddenFlag:
    """A flag whose calls are of one kind: a number among the arguments would tell them apart."""

    def __init__(self, is_set: bool) -> None:
        self.is_set = is_set

    def __bool__(self) -> bool:
        return self.is_set


def test_a_large_buffer_that_a_later_call_writes_first(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of it was made, and that call is not compared: its replay must not read what forward left."""
    monkeypatch.setattr("spillway.checkpointing.reached._MOST_COPIED", 64)

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(64))
            self.queue: Tensor

        def forward(self, x: Tensor, writes: HiddenFlag) -> Tensor:
            y = (x + self.queue[:8].clone()).sin()
            if writes:
                self.queue[:8].add_(1)
            return y

    def step(call: Call) -> Iterator[Tensor]:
        torch.manual_seed(0)
        block = Late()
        for number in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            call(block, x * 1, HiddenFlag(number > 1)).sum().backward()
            yield from (*gradients(x), block.queue.clone())

    regions.right_or_refused(step)


def test_statistics_that_are_first_written_in_a_sampled_call(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spillway.checkpointing.learned._EVERY", 1)

    def step(call: Call) -> Iterator[Tensor]:
        torch.manual_seed(0)
        block = Statistics()
        for number in range(3):
            block.is_late = number > 0
            x = torch.randn(4, 8, requires_grad=True)
            call(block, x * 1).sum().backward()
            yield from (*gradients(x), *(buffer.clone() for buffer in block.buffers()))

    regions(step)
