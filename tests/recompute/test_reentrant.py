"""``use_reentrant=True``: Spillway has one mechanism, so what torch's reentrant mode gets wrong or refuses is right."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from recompute.regions import Call, HiddenList, Regions, gradients, one_place
from support import assert_nothing_left

pytestmark = one_place


@pytest.mark.parametrize("last", ["sin", "itself"])
def test_a_written_input_is_read_again_later(regions: Regions, last: str) -> None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "sin": lambda h: h.mul_(2).sin(),
        "itself": lambda h: h.mul_(2).add_(1),
    }

    def step(call: Call) -> Iterator[Tensor]:
        for _ in range(3):
            x = torch.randn(8, requires_grad=True)
            h = x * 1
            y = call(functions[last], h)
            (y.sum() + (h * 3).exp().sum()).backward()
            yield from (*gradients(x), h)

    regions(step, use_reentrant=True)


@pytest.mark.parametrize("where", ["argument", "list", "buffer"])
def test_a_history_that_a_function_writes_is_not_lost(regions: Regions, where: str) -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = [torch.zeros(8)]
            self.register_buffer("buffer", torch.zeros(8))

        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            if memory is None:
                memory = self.buffer if where == "buffer" else self.memory[0]
            return memory.add_(x.sin()) * 2

    def step(call: Call) -> Iterator[Tensor]:
        x, more = torch.randn(8, requires_grad=True), [torch.zeros(8)] if where == "argument" else []
        call(Remembers(), x, *more).sum().backward()
        yield from gradients(x)

    regions.right_or_refused(step, use_reentrant=True)


def test_parameters_and_buffers_as_outputs(regions: Regions) -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0, 1, 8))
            self.register_buffer("scale", torch.linspace(1, 2, 8))

        def forward(self, x: Tensor) -> Any:
            return x * self.weight, {"weight": self.weight, "scale": self.scale}

    def step(call: Call) -> Iterator[Tensor]:
        model = Gives()
        for _ in range(3):
            x = torch.randn(8, requires_grad=True)
            y, more = call(model, x)
            assert not more["scale"].requires_grad
            assert model.weight.is_leaf
            (y * more["scale"] + more["weight"].sin()).sum().backward()
            yield from gradients(x, model)

    regions(step, use_reentrant=True)


@pytest.mark.parametrize("how", ["grad", "inputs", "create_graph"])
def test_any_backward_goes_through_it(regions: Regions, how: str) -> None:
    x = torch.randn(8, requires_grad=True)
    y = spillway.recompute(torch.sin, x, session=regions.session, use_reentrant=True).sum()
    if how == "inputs":
        y.backward(inputs=[x])
    else:
        (x.grad,) = torch.autograd.grad(y, x, create_graph=how == "create_graph")
    assert torch.equal(x.grad, x.cos())


def test_a_function_without_an_input_that_requires_grad(regions: Regions) -> None:
    weight = nn.Parameter(torch.randn(8))
    y = spillway.recompute(lambda x: (x * weight).sin(), torch.ones(8), session=regions.session, use_reentrant=True)
    y.sum().backward()
    assert torch.equal(weight.grad, weight.cos())


def test_a_layer_that_takes_other_kernels_without_grad(regions: Regions) -> None:
    """A transformer layer in eval mode takes one fused kernel then."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()

    def step(call: Call) -> Iterator[Tensor]:
        layer.zero_grad()
        y = call(layer, torch.randn(2, 4, 16))
        y.sum().backward()
        yield from (y, *gradients(layer))

    regions(step, use_reentrant=True, verify="always")


@pytest.mark.parametrize("changed", ["shape", "number"])
def test_other_saved_tensors_are_refused_in_every_call(regions: Regions, changed: str) -> None:
    other = HiddenList([False])

    def function(x: Tensor) -> Any:
        if not other[0]:
            return x.sin(), x.exp()
        return {"shape": (x[:4].sin(), x[:4].exp()), "number": (x.sin(), x)}[changed]

    for _ in range(3):
        x = torch.randn(8, requires_grad=True)
        y, z = spillway.recompute(function, x * 1, session=regions.session, use_reentrant=True)
        (y + z).sum().backward(retain_graph=True)
    other[0] = True
    with pytest.raises(spillway.RecomputeError, match="than in its forward pass"):
        (y + z).sum().backward()
    torch.ones(1, requires_grad=True).sum().backward()


@pytest.mark.parametrize("reads", [False, True])
def test_a_history_that_is_left_in_an_attribute(regions: Regions, reads: bool) -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(8, 8)
            self.last = torch.zeros(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            y = x + self.last.view(8, 4).t() if reads else x * len(self.last)
            self.last = y.sin()
            return y

    def step(call: Call) -> Iterator[Tensor]:
        model = Leaves()
        (call(model, torch.randn(4, 8)) * call(model, torch.randn(4, 8))).sum().backward()
        yield from gradients(model)

    regions(step, use_reentrant=True)


def test_nothing_is_left_of_an_error_in_forward(regions: Regions) -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("deliberate")

    with pytest.raises(KeyError):
        spillway.recompute(fails, torch.randn(8, requires_grad=True) * 1, session=regions.session, use_reentrant=True)
    gc.collect()
    assert_nothing_left(regions.session)
