"""Functions that look as in earlier calls, and are not. Each was once wrong, or failed where plain PyTorch does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import spillway
from recompute.regions import Regions, one_place
from spillway.errors import InplaceError
from support import assert_identical, grads

pytestmark = one_place

Caller = Callable[..., Tensor]
Step = Callable[[Caller, int], list[Tensor]]
Make = Callable[[], Step]
LATE = 4
"""From this step on, something is otherwise. By then it is known what the function did before."""
STEPS = 6


def leaf(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (3, 4)), requires_grad=True)


def backward(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    for each in leaves:
        each.grad = None
    loss.sum().backward()
    return [loss.detach().clone(), *(each.clone() for each in grads(*leaves))]


def moved_parameters() -> Step:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3), nn.Sigmoid())

    def step(call: Caller, number: int) -> list[Tensor]:
        x = leaf(2, 3, 8, 8)
        y = call(model, x)
        if number == LATE:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return backward(y, x, *model.parameters())

    return step


def parameters_in_a_bucket() -> Step:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())

    def step(call: Caller, number: int) -> list[Tensor]:
        x = leaf()
        y = call(model, x)
        if number == LATE:
            for each in model.parameters():
                each.data = torch.cat([torch.zeros(3), each.detach().flatten()])[3:].view_as(each)
        return backward(y, x, *model.parameters())

    return step


def settings_of_kernels() -> Step:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Tanh(), nn.Conv2d(16, 4, 3))
    enabled = True

    def function(x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=enabled):  # type: ignore[no-untyped-call]
            y: Tensor = model(x)
            return y

    def step(call: Caller, number: int) -> list[Tensor]:
        nonlocal enabled
        enabled = number < LATE
        x = leaf(2, 8, 16, 16)
        return backward(call(function, x).sin(), x, *model.parameters())

    return step


def a_write_that_nobody_sees_and_that_does_nothing_at_first() -> Step:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        array = y.detach().numpy()
        np.clip(array, -3, 3, out=array)
        return y.sin().exp()

    def step(call: Caller, number: int) -> list[Tensor]:
        x = torch.full((3, 4), 1.0 if number < LATE else 5.0, requires_grad=True)
        return backward(call(function, x), x)

    return step


def a_function_that_catches_everything() -> Step:
    fast = True

    def function(x: Tensor) -> Tensor:
        nonlocal fast
        x = torch.tanh(x)
        if fast:
            try:
                y = torch.view_as_complex(torch.stack([x, x.cos()], -1))
                x = torch.view_as_real(y * y)[..., 0]
            except Exception:  # noqa: BLE001  (as people do)
                fast = False
        if not fast:
            x = x * x - x.cos().square() + 1e-3
        return (x * 2).sin().exp().cos().sin()

    def step(call: Caller, number: int) -> list[Tensor]:
        x = leaf()
        return backward(call(function, x), x)

    return step


def a_constant_that_is_written_now_and_then() -> Step:
    average = torch.zeros(4)
    writes = False

    def function(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        z = (y + average).sin().exp()
        if writes:
            average.lerp_(y.detach().mean(0), 0.1)
        return z

    def step(call: Caller, number: int) -> list[Tensor]:
        nonlocal writes
        writes = number == LATE
        x = leaf()
        return [*backward(call(function, x), x), average.clone()]

    return step


def an_input_that_is_written_now_and_then() -> Step:
    writes = False

    def function(x: Tensor) -> Tensor:
        y = (x + 1).sin()
        if writes:
            x.add_(1)
        return y.cos()

    def step(call: Caller, number: int) -> list[Tensor]:
        nonlocal writes
        writes = number == LATE
        x = leaf()
        return backward(call(function, x * 1), x)

    return step


def a_part_of_the_graph_that_escapes() -> Step:
    weight = torch.ones(4)
    escaped: list[Tensor] = []
    fails = False

    def function(x: Tensor) -> Tensor:
        y = torch.tanh(x + weight).sin().cos()
        if fails:
            escaped.append(y)
            raise ValueError
        return y.exp()

    def step(call: Caller, number: int) -> list[Tensor]:
        nonlocal fails
        fails = number == LATE
        x = leaf()
        try:
            y = call(function, x)
        except ValueError:
            y = escaped.pop()
        return backward(y, x)

    return step


def a_constant_that_is_quantized() -> Step:
    constant = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)

    def function(x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x) @ constant.dequantize()).sin()

    def step(call: Caller, number: int) -> list[Tensor]:
        x = leaf()
        return backward(call(function, x), x)

    return step


def a_constant_that_becomes_sparse() -> Step:
    constant = torch.eye(3) * 2

    def function(x: Tensor) -> Tensor:
        return torch.mm(constant, torch.tanh(x)).sin()

    def step(call: Caller, number: int) -> list[Tensor]:
        nonlocal constant
        if number == LATE:
            constant = constant.to_sparse()
        x = leaf()
        return backward(call(function, x), x)

    return step


class _Scale:
    """What operators read, and nobody gives them."""

    now = 1.0


@torch.library.custom_op("spillway_tests::scale", mutates_args=())
def scale(x: Tensor) -> Tensor:
    return x * _Scale.now


scale.register_autograd(
    lambda ctx, gradient: gradient * ctx.scale,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", _Scale.now),
)


def operators_that_know_more_than_they_are_given() -> Step:
    class Layer(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            _Scale.now = self.scale
            return scale(torch.tanh(x)).sin()

    first, second = Layer(2.0), Layer(3.0)

    def step(call: Caller, number: int) -> list[Tensor]:
        x = leaf()
        return backward(call(second, call(first, x)), x)

    return step


MAKES = (
    *(moved_parameters, parameters_in_a_bucket, settings_of_kernels, a_function_that_catches_everything),
    *(a_write_that_nobody_sees_and_that_does_nothing_at_first, a_constant_that_is_written_now_and_then),
    *(an_input_that_is_written_now_and_then, a_part_of_the_graph_that_escapes, a_constant_that_is_quantized),
    *(a_constant_that_becomes_sparse, operators_that_know_more_than_they_are_given),
)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TF32 acceleration")
@pytest.mark.parametrize("how", [{}, {"offload": "inputs"}, {"save": "matmul"}], ids=["nothing", "inputs", "matmul"])
@pytest.mark.parametrize("make", MAKES, ids=[make.__name__ for make in MAKES])
def test_it_is_as_without_regions(regions: Regions, make: Make, how: dict[str, Any]) -> None:
    def plain(function: Callable[..., Tensor], *args: Any) -> Tensor:
        return function(*args)

    def ours(function: Callable[..., Tensor], *args: Any) -> Tensor:
        with regions.offload():
            result: Tensor = spillway.recompute(function, *args, session=regions.session, **how)
        return result

    def steps(call: Caller) -> Iterator[list[Tensor]]:
        torch.manual_seed(0)
        step = make()
        for number in range(STEPS):
            yield step(call, number)

    expected = list(steps(plain))
    try:
        got = list(steps(ours))
    except InplaceError:
        # Inputs are copied where earlier calls wrote them.
        assert make is an_input_that_is_written_now_and_then
        return
    for mine, theirs in zip(got, expected, strict=True):
        assert_identical(mine, theirs)


@pytest.mark.parametrize("part", [0, 3])
def test_a_part_of_a_storage_that_left_and_all_of_it_is_read(regions: Regions, part: int) -> None:
    """What comes back is the part: no tensor may be laid over what is not there."""

    def first(call: Caller, base: Tensor) -> Tensor:
        whole = base * 1
        return call(lambda x: (torch.tanh(x) * whole.detach().cos().mean()).sin().exp(), whole.chunk(8)[part]).sin()

    def step(call: Caller, base: Tensor, other: Tensor) -> list[Tensor]:
        with regions.offload(policy=None, tier="host"):
            y = first(call, base)
            for _ in range(12):
                other = other.sin()
        time.sleep(0.02)
        return backward(y.sum() + other.sum(), base)

    def ours(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        result: Tensor = spillway.recompute(function, x, session=regions.session)
        return result

    for number in range(4):
        torch.manual_seed(number)
        base, other = leaf(1 << 14), leaf(1 << 14)
        assert_identical(step(ours, base, other), step(lambda function, x: function(x), base, other))


def test_other_sequences_than_in_earlier_calls(regions: Regions) -> None:
    others: list[Tensor] | None = [torch.ones(3, 4)]

    def function(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        parts = [y, y] if others is None else [y, *others]
        return (torch.cat(parts).sin() * torch.stack(parts).sum()).exp().tanh()

    for number in range(STEPS):
        others = [torch.ones(3, 4)] * (1 + (number >= LATE))
        x = leaf()
        with regions.offload():
            y = spillway.recompute(function, x, session=regions.session)
        got = backward(y, x)
        assert_identical(got, backward(function(x), x))
