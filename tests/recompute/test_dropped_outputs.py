"""Outputs that are dropped, of calls that run without modes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from recompute.regions import Call, HiddenList, Regions, gradients, leaf, one_place

pytestmark = one_place


@pytest.mark.parametrize("verify", ["sampled", "always"])
def test_every_call_and_a_second_backward(regions: Regions, verify: str) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        first, second, third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        for _ in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            for each in (first, second, third):
                each.zero_grad()
            with call.context():
                hidden = call(lambda x: torch.nn.functional.dropout(first(x).tanh(), 0.2) * 2, x * 1)
                hidden = call(lambda x: second(x).sin().exp(), hidden)
                loss = third(hidden).square().sum()
                del hidden
            loss.backward(retain_graph=True)
            loss.backward()
            yield from gradients(x, first, second, third)

    regions(step, drop_output=True, verify=verify)


@pytest.mark.parametrize("alive", [False, True])
def test_an_output_that_is_alive_is_not_computed_again(regions: Regions, alive: bool) -> None:
    """Then the replay ends with what autograd saved, before the function's last operator."""
    ran = HiddenList()

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp()
        z = y * 2
        ran.append(1)
        return z

    linear = nn.Linear(8, 8)
    for number in range(3):
        ran.clear()
        context = regions.offload()
        with context:
            x = torch.randn(4, 8, requires_grad=True)
            hidden = spillway.recompute(function, x, session=regions.session, drop_output=True)
            loss = linear(hidden).sum()
        if not alive:
            del hidden
        loss.backward()
        if number:
            # The first call is compared, to the end.
            assert len(ran) == (1 if alive else 2)
            assert context.stats().recomputed_bytes == x.nbytes * (1 if alive else 2)


def test_nothing_of_the_function_is_held_after_backward(regions: Regions, no_collector: None) -> None:
    linear = nn.Linear(8, 8)
    with regions.offload():
        x = torch.randn(4, 8, requires_grad=True) * 1
        held = weakref.ref(x.untyped_storage())
        loss = linear(spillway.recompute(lambda x: x.sin() * 2, x, session=regions.session, drop_output=True)).sum()
        del x
    loss.backward()
    assert held() is None


def test_what_the_function_did_not_make_is_not_dropped(regions: Regions) -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.linspace(1, 2, 8))

        def forward(self, x: Tensor) -> Any:
            return x, self.scale, x.sin() * self.scale

    def step(call: Call) -> Iterator[Tensor]:
        model = Gives()
        for _ in range(3):
            leaf = torch.randn(4, 8, requires_grad=True)
            with call.context():
                x, scale, y = call(model, leaf * 1)
                loss = (x.exp() * scale * y.cos()).sum()
                del x, y
            loss.backward()
            yield from gradients(leaf)

    regions(step, drop_output=True)


def test_another_output_in_the_replay_is_refused(regions: Regions) -> None:
    other = HiddenList([False])
    linear = nn.Linear(8, 8)
    for number in range(3):
        with regions.offload():
            x = torch.randn(4, 8, requires_grad=True)
            hidden = spillway.recompute(
                lambda x: [] if other[0] else [x.sin() * 2], x, session=regions.session, drop_output=True
            )
            loss = linear(hidden.pop()).sum()
        other[0] = number == 2
        if other[0]:
            with pytest.raises(spillway.RecomputeError, match="it gave 0 tensors"):
                loss.backward()
            torch.ones(1, requires_grad=True).sum().backward()
        else:
            loss.backward()


def _adds(x: Tensor) -> tuple[Tensor, Tensor]:
    """The second output is left out of a replay that has what the first exponential gave."""
    y = x.sin().exp()
    t = y.cos().square()
    return t.exp(), t @ x.mT


def _writes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The second output is written when it was read, which nothing else needs."""
    y = x.sin().exp()
    t = y.cos() + 1
    u = (t * 2).sin()
    t.mul_(3)
    return u, t


def _views(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin().exp()
    t = y.cos()
    return t.sin(), (t @ x.mT).view(-1)


def _is_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin().exp()
    return y.cos().sin(), y


@pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("verify", ["sampled", "always"])
@pytest.mark.parametrize(
    "how", [{}, {"save": "aten::exp"}, {"offload": "aten::exp"}, {"save": "pointwise"}, {"offload": "matmul"}], ids=str
)
@pytest.mark.parametrize("function", [_adds, _writes, _views, _is_kept], ids=lambda each: each.__name__.strip("_"))
def test_what_is_dropped_beside_what_is_preserved(
    regions: Regions, function: Any, how: dict[str, Any], verify: str, early_stop: bool
) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        for _ in range(5):
            x = leaf(8, 8)
            with call.context():
                u, t = call(function, x * 1)
                loss = u.sum() + t.square().sum()
                del u, t
            loss.backward()
            yield from gradients(x)

    regions(step, drop_output=True, verify=verify, early_stop=early_stop, **how)
