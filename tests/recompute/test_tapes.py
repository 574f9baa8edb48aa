"""A function that does what it did before is not run again: its operators are. And where it does something else, that
is seen. See NOTE [ Tapes ] in ``regions/tape.py``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from recompute.regions import CHOICES, Call, HiddenAttribute, HiddenList, Regions, one_place
from support import assert_identical, grads

pytestmark = one_place

HOWS = pytest.mark.parametrize("how", [how for how in CHOICES.values() if "watch" not in how])


@pytest.fixture(autouse=True)
def _by_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that preserve nothing go by tapes here, as calls do that keep or offload what operators give."""
    monkeypatch.setattr("spillway.recomputing._is_plain", lambda *_: False)


class Block(nn.Module):
    """Attention and an MLP with something random, which count their calls. (Dropout writes in place on a CPU.)"""

    calls = HiddenAttribute(0)

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = dropout
        self.scale = 1.0
        self.register_buffer("bias", torch.linspace(0, 1, 16))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(-2)) * self.scale + self.bias
        kept = torch.bernoulli(torch.full_like(x, 1 - self.dropout))
        return x + self.down(functional.gelu(self.up(x * kept)))


def leaf(*sizes: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(sizes or (2, 5, 16)), generator=generator, requires_grad=True)


def gradients_of(
    regions: Regions | None, function: Callable[..., Tensor], *args: Any, seed: int = 0, **how: Any
) -> Any:
    """Loss and gradients of one call, and of what it closes over if it is a module."""
    call = Call(regions, **how)
    torch.manual_seed(seed)
    x = leaf()
    with call.context():
        loss = call(function, x * 1, *args).square().mean()
    loss.backward()
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    found = [loss.detach(), *grads(x, *(each for each in parameters if each.grad is not None))]
    for parameter in parameters:
        parameter.grad = None
    return found


@pytest.mark.parametrize("watch", [True, False])
def test_a_session_holds_nothing_of_a_module_that_is_gone(regions: Regions, watch: bool) -> None:
    gone = []
    for size in (4, 5, 6):
        block = Block(0.0)
        for _ in range(4):
            x = leaf(2, size, 16)
            with regions.offload() as _:
                spillway.recompute(block, x * 1, session=regions.session).sum().backward()
        gone += [weakref.ref(block), weakref.ref(block.bias)]
        del block
        gc.collect()
        assert len(regions.session._proofs) == 1
    assert all(each() is None for each in gone)


class Odd(nn.Module):
    """Does one of several things, and says so by nothing but its operators or what they read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(16, 16)) for _ in range(2)])
        self.register_buffer("fixed", torch.randn(16))
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        way = self.way
        first, second = self.weights if way != "other weight" else reversed(list(self.weights))
        if way == "one weight":
            second = first
        whole = torch.cat([x.sin(), x.cos()], 1) @ first
        y, z = whole.chunk(2, 1) if way != "swapped" else reversed(whole.chunk(2, 1))
        y = (y.exp() * z).tanh() if way != "not the other" else (y.exp() * y).tanh()
        if way == "less":
            return y
        # In either case all of these are there.
        square, other = first @ second, second @ first
        turned = square.t()
        y = y @ (square if way not in ("turned", "other value") else turned if way == "turned" else other)
        zero = 0.0 if way != "sign" else -0.0
        y = y.cos() * (3.0 if way != "number" else 4.0) * (1 / (y.detach().abs() * zero)).atan() + y
        fixed = self.fixed if way != "other constant" else self.fixed * 2
        y = (y.sigmoid() if way != "operator" else y.tanh()) @ second + fixed
        if way == "more":
            y = y.sin().sin()
        if way == "view":
            return (y.view(-1, 16).exp() * y.view(-1, 16)).view(y.shape).sin()
        if way == "in place":
            y = y * 2
            y.mul_(3)
        return (y.view(-1, 2, 8).exp() * y.view(-1, 2, 8)).view(y.shape).sin()


WAYS = [
    *("other weight", "one weight", "swapped", "not the other", "less", "other constant", "number", "sign", "operator"),
    *("more", "view", "in place", "turned", "other value"),
]


def test_what_is_saved_and_written_is_refused(regions: Regions) -> None:
    kept = HiddenList()

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        kept[:] = [y]
        return y.cos().exp()

    for _ in range(2):
        gradients_of(regions, function)
    with regions.offload():
        loss = spillway.recompute(function, leaf() * 1, session=regions.session).sum()
    with torch.no_grad():
        kept[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda y: y.zero_(),
    "an alias": lambda y: y.detach().mul_(2),
    "foreach": lambda y: torch._foreach_mul_([y], 2.0),
    "out": lambda y: torch.add(y, 1, out=y),
}


def test_a_generator_of_ones_own_is_where_it_was(regions: Regions) -> None:
    """To write a tape, the function would have to run: it would draw once more."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.bernoulli(torch.full_like(x, 0.5), generator=self.generator)).sin().exp()

    ours, plain = Drawing(), Drawing()
    for seed in range(4):
        assert_identical(gradients_of(regions, ours, seed=seed), gradients_of(None, plain, seed=seed))
        assert torch.equal(ours.generator.get_state(), plain.generator.get_state())


@pytest.mark.parametrize("wraps", [False, True])
def test_a_backward_inside_that_comes_in_one_run_only(regions: Regions, wraps: bool) -> None:
    """It may come in a trial, in a re-run, or when a tape is written; and the function may make an error of its own of
    what it is told."""

    class Sometimes(nn.Module):
        calls = HiddenAttribute(0)

        def __init__(self, at: int) -> None:
            super().__init__()
            self.at = at

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            z = x.exp().sin()
            if self.calls == self.at:
                try:
                    torch.autograd.grad(z.sum(), x, retain_graph=True)
                except Exception as error:
                    if wraps:
                        raise ValueError("wrapped") from error
                    raise
            return z.cos()

    for at in range(2, 9):
        ours, plain = Sometimes(at), Sometimes(0)
        for seed in range(4):
            assert_identical(gradients_of(regions, ours, seed=seed), gradients_of(None, plain, seed=seed))
        assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_many_calls_in_any_order(regions: Regions) -> None:
    blocks = [Block(), Block(0.0)]
    blocks[1].load_state_dict(blocks[0].state_dict())

    def step(call: Call) -> Iterator[Tensor]:
        xs = [leaf(seed=seed) for seed in range(4)]
        torch.manual_seed(4)
        losses = []
        for number, x in enumerate(xs):
            with call.context():
                losses.append(call(blocks[number % 2], x * 1).square().mean())
        for number in (2, 0, 3, 1):
            losses[number].backward()
        yield from grads(*xs)

    regions(step, passes=4)


def test_another_region_inside(regions: Regions) -> None:
    inner, calls = Block(), HiddenList()

    def outer(x: Tensor) -> Tensor:
        calls.append(1)
        return spillway.recompute(inner, x.sin(), session=regions.session).exp()

    for seed in range(5):
        ours = gradients_of(regions, outer, seed=seed)
        torch.manual_seed(seed)
        x = leaf()
        inner((x * 1).sin()).exp().square().mean().backward()
        assert torch.equal(ours[1], x.grad if x.grad is not None else x)
    assert len(calls) > 5


def test_a_function_that_fails_half_way(regions: Regions) -> None:
    fails = False

    def function(x: Tensor) -> Tensor:
        y = x.sin().cos()
        if fails:
            raise ValueError("half-way")
        return y.exp().tanh()

    for _ in range(3):
        assert_identical(gradients_of(regions, function), gradients_of(None, function))
    fails = True
    with pytest.raises(ValueError, match="half-way"):
        gradients_of(regions, function)
    fails = False
    assert_identical(gradients_of(regions, function), gradients_of(None, function))
