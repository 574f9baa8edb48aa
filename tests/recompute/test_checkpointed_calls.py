"""Calls that preserve nothing: forward without modes, and a replay of the function itself."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from recompute.regions import Call, HiddenAttribute, HiddenList, Regions, gradients, one_place
from spillway.checkpointing import learned
from spillway.saved_tensors.handles import in_replay
from support import assert_identical

pytestmark = one_place


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(functional.gelu(self.up(x)))
        return y


def test_forward_runs_without_modes_in_every_call(regions: Regions) -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        if not in_replay():
            seen.append((torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()))
        return x.sin().exp()

    for _ in range(4):
        spillway.recompute(function, torch.randn(4, requires_grad=True) * 1, session=regions.session).sum().backward()
    assert seen == [(0, 0)] * 4


def test_a_replay_ends_with_the_last_tensor_that_is_wanted(regions: Regions) -> None:
    ends = HiddenList()

    class Ends(nn.Module):
        ended = HiddenAttribute(0)

        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            ends.append("saved")
            y = y + 1
            ends.append("end")
            return y

    block = Ends()
    for expected in (["saved", "end"] * 2, ["saved", "end"], ["saved", "end"]):
        ends.clear()
        spillway.recompute(block, torch.randn(4, requires_grad=True) * 1, session=regions.session).sum().backward()
        # The first replay goes on to the end, to be compared.
        assert ends == expected


# What changes between forward and backward.


def _weight(block: Any) -> None:
    with torch.no_grad():
        block.up.weight.mul_(2)


def _data(block: Any) -> None:
    block.up.weight.data = block.up.weight.data * 2


def _layer(block: Any) -> None:
    block.up = nn.Linear(8, 16)


def _attribute(block: Any) -> None:
    block.factor = 3.0


def _buffer(block: Any) -> None:
    block.shift.add_(1)


def _rebound(block: Any) -> None:
    block.shift = torch.ones(8)


def _draws(block: Any) -> None:
    random.random()
    np.random.rand()
    torch.rand(3)


def _dtype(block: Any) -> None:
    torch.set_default_dtype(torch.float64)


def _forward(block: Any) -> None:
    type(block).activation = staticmethod(torch.tanh)


class Changing(nn.Module):
    activation: Callable[[Tensor], Tensor] = staticmethod(torch.sin)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.factor = nn.Linear(8, 16), 2.0
        self.register_buffer("shift", torch.zeros(8))
        self.shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(functional.dropout(x, 0.5) + self.shift)
        branch = torch.cos if random.random() < np.random.rand() else torch.exp
        return branch(type(self).activation(y)) * self.factor + torch.ones(16)


CHANGES = [_weight, _data, _layer, _attribute, _buffer, _rebound, _draws, _dtype, _forward]


@pytest.mark.parametrize("late", [0, 1, 2, 5], ids=["first", "second", "third", "later"])
@pytest.mark.parametrize("change", CHANGES, ids=[each.__name__.strip("_") for each in CHANGES])
def test_what_changes_before_backward_is_right_or_an_error(
    regions: Regions, change: Callable[[Any], None], late: int
) -> None:
    def run(call: Callable[..., Tensor]) -> Iterator[Any]:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        block = Changing()
        for number in range(late + 1):
            x = torch.randn(4, 8, requires_grad=True)
            loss = call(block, x * 1).square().sum()
            if number == late:
                change(block)
            try:
                loss.backward()
            except (spillway.SpillwayError, RuntimeError) as error:
                yield error
                return
            yield [x.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)]

    try:
        plain = list(run(lambda block, x: block(x)))
        torch.set_default_dtype(torch.float32)
        Changing.activation = staticmethod(torch.sin)
        ours = list(run(lambda block, x: spillway.recompute(block, x, session=regions.session)))
    finally:
        torch.set_default_dtype(torch.float32)
        Changing.activation = staticmethod(torch.sin)
    for mine, theirs in zip(ours, plain, strict=True):
        if isinstance(theirs, Exception):
            assert isinstance(mine, Exception)
        elif isinstance(mine, Exception):
            # What autograd has not saved, plain PyTorch does not miss; a replay would read it.
            assert isinstance(mine, (spillway.RecomputeError, spillway.InplaceError))
        else:
            assert_identical(mine, theirs)


def test_hidden_changes_are_told_in_each_call_or_in_a_sample(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden(nn.Module):
        flipped = HiddenAttribute(1.0)

        def forward(self, x: Tensor) -> Tensor:
            return (x.sin() * self.flipped).square().exp()

    def later(block: Hidden, **options: Any) -> None:
        y = spillway.recompute(block, torch.randn(8, requires_grad=True) * 1, session=regions.session, **options)
        block.flipped = -1.0
        try:
            y.sum().backward()
        finally:
            block.flipped = 1.0

    block = Hidden()
    with pytest.raises(spillway.RecomputeError, match="other values"):
        later(block)
    spillway.recompute(block, torch.randn(8, requires_grad=True) * 1, session=regions.session).sum().backward()
    with pytest.raises(spillway.RecomputeError, match="other values"):
        later(block, verify="always")
    monkeypatch.setattr(learned, "_EVERY", 4)
    told = 0
    for _ in range(4):
        try:
            later(block)
        except spillway.RecomputeError:
            told += 1
    assert told == 1


def test_an_unknown_word_for_verify_is_refused(regions: Regions) -> None:
    with pytest.raises(spillway.UsageError, match="verify: got 'often'"):
        spillway.recompute(torch.sin, torch.ones(1), verify="often")


class Reader(nn.Module):
    """Has a buffer, a tensor in an attribute, and a parameter, of which it reads one or none."""

    def __init__(self, reads: str, *, catches: bool = False) -> None:
        super().__init__()
        self.reads, self.catches = reads, catches
        self.register_buffer("buffer", torch.ones(8))
        self.parameter = nn.Parameter(torch.ones(8))
        self.attribute, self.items, self.fixed = torch.ones(8), [torch.ones(8)], (torch.ones(8),)

    def tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("buffer", "parameter", "attribute")}
        return {**named, "items": self.items[0], "fixed": self.fixed[0]}

    def forward(self, x: Tensor) -> Tensor:
        assert self.tensors()["buffer"].shape == (8,)
        if self.reads == "nothing":
            return x.sin()
        try:
            return (x * self.tensors()[self.reads].clone()).sin()
        except spillway.RecomputeError:
            if not self.catches:
                raise
            return x.sin()


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("name", ["buffer", "parameter", "attribute", "items", "fixed"])
def test_what_is_written_before_backward_is_refused_where_it_is_read(regions: Regions, name: str, late: int) -> None:
    for reads, catches in ((name, False), (name, True), ("nothing", False)):
        block = Reader(reads, catches=catches)
        for number in range(late + 1):
            x = torch.randn(4, 8, requires_grad=True)
            y = spillway.recompute(block, x * 1, session=regions.session)
            if number < late:
                y.sum().backward()
        with torch.no_grad():
            block.tensors()[name].mul_(2)
        if reads == "nothing":
            y.sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad, x.cos())
        else:
            with pytest.raises(spillway.RecomputeError, match="written in place"):
                y.sum().backward()
        assert all(type(each) in (Tensor, nn.Parameter) for each in block.tensors().values())


def test_an_operator_with_another_kernel_under_a_mode_is_refused_beside_a_written_tensor(regions: Regions) -> None:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unread = torch.ones(8)

        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * functional.max_pool1d(x.detach(), 1)

    block = Pools()
    y = spillway.recompute(block, torch.randn(1, 4, 8, requires_grad=True) * 1, session=regions.session)
    with torch.no_grad():
        block.unread.mul_(2)
    with pytest.raises(spillway.RecomputeError, match="takes another kernel"):
        y.sum().backward()


# What is written in place.


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norms_count_once(regions: Regions, momentum: float | None) -> None:
    """Their kernels write the statistics, and no version counter tells."""

    def step(call: Call) -> Iterator[Tensor]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4, momentum=momentum)
        for number in range(4):
            x = torch.randn(6, 4, requires_grad=True)
            # In the first step, the second pass finds the mean that it gives.
            for _ in range(2):
                loss = call(norm, x * 1).sin().sum()
            loss.backward()
            yield from (*gradients(x), *norm.buffers())
            assert number < 4

    regions(step)


def test_an_input_that_is_written_is_as_it_was_for_each_replay(regions: Regions) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.exp()
        x.add_(1)
        return (y * 2).sin()

    def step(call: Call) -> Iterator[Tensor]:
        for _ in range(3):
            x = torch.randn(8, requires_grad=True)
            y = call(function, x * 1)
            for retain in (True, False):
                y.sum().backward(retain_graph=retain)
            yield from gradients(x)

    regions(step)


def test_an_output_that_is_written_before_backward_is_an_error_in_every_call(regions: Regions) -> None:
    for _ in range(4):
        y = spillway.recompute(torch.tanh, torch.randn(8, requires_grad=True) * 1, session=regions.session)
        y.add_(1)
        with pytest.raises(spillway.InplaceError):
            y.sum().backward()
        z = spillway.recompute(torch.tanh, torch.randn(8, requires_grad=True) * 1, session=regions.session)
        z.sum().backward()


# What is held.


def test_nothing_is_held_but_the_inputs(regions: Regions) -> None:
    made: list[Any] = []

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        made.append(weakref.ref(y.untyped_storage()))
        return y.sin() + 1

    for _ in range(3):
        y = spillway.recompute(function, torch.randn(64, requires_grad=True) * 1, session=regions.session)
        assert made[-1]() is None
        y.sum().backward()
        assert all(each() is None for each in made)


def test_a_node_that_asks_for_what_it_saved_several_times_costs_one_replay(regions: Regions) -> None:
    runs = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx: Any, *gradient: Tensor) -> Tensor:
            return gradient[0] * ctx.saved_tensors[1] + 0 * ctx.saved_tensors[0]

    def function(x: Tensor) -> Tensor:
        runs.append(1)
        y: Tensor = Twice.apply(x.sin())
        return y

    x = torch.randn(8, requires_grad=True)
    spillway.recompute(function, x * 1, session=regions.session).sum().backward()
    assert len(runs) <= 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_dimensions_of_one_element_keep_their_strides(regions: Regions, reentrant: bool) -> None:
    weight = torch.randn(8, 8)

    def function(x: Tensor) -> Tensor:
        assert x.stride() == (96, 8, 1)
        return (x @ weight).tanh()

    def step(call: Call) -> Iterator[Tensor]:
        # Parts of one sequence, each (1, 4, 8).
        whole = torch.randn(1, 12, 8, requires_grad=True)
        with call.context():
            loss = sum(call(function, part, use_reentrant=reentrant).sum() for part in (whole * 1).split(4, 1))
        loss.backward()
        yield from gradients(whole)

    regions(step, passes=3)
