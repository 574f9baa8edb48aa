"""The reentrant mode: a forward without grad, and one node whose backward runs the function again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from recompute.regions import Call, HiddenList, Regions, gradients, one_place
from support import assert_nothing_left

pytestmark = one_place


def test_a_written_input_is_read_again_later(regions: Regions) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        for _ in range(3):
            x = torch.randn(8, requires_grad=True)
            h = x * 1
            y = call(lambda h: h.mul_(2).sin(), h)
            (y.sum() + (h * 3).exp().sum()).backward()
            yield from (*gradients(x), h)

    regions(step, use_reentrant=True)


def test_a_written_input_is_the_output(regions: Regions) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        for _ in range(3):
            x = torch.randn(8, requires_grad=True)
            h = x * 1
            y = call(lambda h: h.mul_(2).add_(1), h)
            assert y is h
            (y.sin() * h).sum().backward()
            yield from gradients(x)

    regions(step, use_reentrant=True)


def test_a_written_view_is_refused(regions: Regions) -> None:
    h = torch.randn(4, 8, requires_grad=True) * 1
    with pytest.raises(spillway.UnsupportedError, match="view of another"):
        spillway.recompute(lambda row: row.mul_(2).sin(), h[0], session=regions.session, use_reentrant=True)


@pytest.mark.parametrize("where", ["argument", "list", "buffer"])
def test_a_history_that_forward_loses_in_what_it_writes_is_refused(regions: Regions, where: str) -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = [torch.zeros(8)]
            self.register_buffer("buffer", torch.zeros(8))

        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            if memory is None:
                memory = self.buffer if where == "buffer" else self.memory[0]
            return memory.add_(x.sin()) * 2

    x, more = torch.randn(8, requires_grad=True), [torch.zeros(8)] if where == "argument" else []
    model = Remembers()
    y = spillway.recompute(model, x, *more, session=regions.session, use_reentrant=True)
    with pytest.raises(spillway.RecomputeError, match="use_reentrant=False"):
        y.sum().backward()
    torch.ones(1, requires_grad=True).sum().backward()
    assert not any(each.requires_grad for each in (*model.memory, model.buffer, *more))


def test_parameters_and_buffers_as_outputs_get_no_history(regions: Regions) -> None:
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
def test_other_backwards_are_refused(regions: Regions, how: str) -> None:
    x = torch.randn(8, requires_grad=True)
    y = spillway.recompute(torch.sin, x, session=regions.session, use_reentrant=True).sum()
    backwards = {
        "grad": lambda: torch.autograd.grad(y, x),
        "inputs": lambda: y.backward(inputs=[x]),
        "create_graph": lambda: y.backward(create_graph=True),
    }
    with pytest.raises(spillway.UnsupportedError, match="use_reentrant=False"):
        backwards[how]()


def test_the_graph_goes_with_its_backward(regions: Regions, no_collector: None) -> None:
    held = torch.randn(8, requires_grad=True) * 1
    alive = weakref.ref(held.untyped_storage())
    y = spillway.recompute(lambda h: h.sin().exp(), held, session=regions.session, use_reentrant=True).sum()
    del held
    y.backward(retain_graph=True)
    assert alive() is not None
    y.backward()
    assert alive() is None
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


def test_a_function_that_gives_other_bits_without_grad(regions: Regions) -> None:
    """A transformer layer in eval mode takes one fused kernel then."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    notes: list[str] = []
    for _ in range(3):
        layer.zero_grad()
        with regions.offload() as context:
            y = spillway.recompute(
                layer, torch.randn(2, 4, 16), session=regions.session, use_reentrant=True, verify="always"
            )
        y.sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())
        notes += context.stats().notes
    if not torch.equal(layer(x := torch.randn(2, 4, 16)).detach(), _without_grad(layer, x)):
        assert any("without grad" in note for note in notes)


def _without_grad(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = layer(x)
        return result


@pytest.mark.parametrize("changed", ["shape", "number", "kind"])
def test_other_outputs_are_refused_in_every_call(regions: Regions, changed: str) -> None:
    other = HiddenList([False])

    def function(x: Tensor) -> Any:
        if not other[0]:
            return x.sin(), x.exp()
        return {"shape": (x.sin()[:4], x.exp()), "number": (x.sin(),), "kind": (x.sin(), 3.0)}[changed]

    for _ in range(3):
        x = torch.randn(8, requires_grad=True)
        y, z = spillway.recompute(function, x, session=regions.session, use_reentrant=True)
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
            self.linear = nn.Linear(8, 8)
            self.last = torch.zeros(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            y = x + self.last.view(8, 4).t() if reads else x * len(self.last)
            self.last = y.sin()
            return y

    model, twin = Leaves(), Leaves()
    twin.load_state_dict(model.state_dict())
    for _ in range(3):
        x = torch.randn(4, 8)
        for each in (model, twin):
            each.zero_grad()
        y = spillway.recompute(model, x, session=regions.session, use_reentrant=True).sum()
        if reads:
            with pytest.raises(spillway.RecomputeError, match="last"):
                y.backward()
            torch.ones(1, requires_grad=True).sum().backward()
            return
        y.backward()
        twin(x).sum().backward()
        assert torch.equal(model.linear.weight.grad, twin.linear.weight.grad)


def test_what_a_replay_makes_is_counted(regions: Regions) -> None:
    x = torch.randn(64, requires_grad=True)
    context = regions.offload()
    with context:
        y = spillway.recompute(lambda x: x.sin().exp(), x * 1, session=regions.session, use_reentrant=True)
    y.sum().backward()
    assert context.stats().recomputed_bytes == 2 * x.nbytes - x.nbytes


def test_nothing_is_left_of_an_error_in_forward(regions: Regions) -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("deliberate")

    with pytest.raises(KeyError):
        spillway.recompute(fails, torch.randn(8, requires_grad=True) * 1, session=regions.session, use_reentrant=True)
    gc.collect()
    assert_nothing_left(regions.session)
