"""A block's state that is used again: what ends that, and what it holds. See NOTE [ States that stay the same ]."""

from __future__ import annotations

import contextvars
import copy
import gc
import random
import sys
import threading
import types
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import spillway
from spillway.checkpointing import identities
from spillway.checkpointing.identities import have_same_items
from spillway.checkpointing.python_state import LatestState

factor: Any = float
"""No state, as long as it is a class."""
local, variable = threading.local(), contextvars.ContextVar[Any]("variable")


class Scale:
    """An object of a block."""

    factor = 1.0


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.scale = Scale()
        self.factors = [1.0]
        self.function = scaled
        self.extra: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale.factor * self.factors[0] + self.shift
        y = self.function(y) * (factor[0] if isinstance(factor, list) else 1.0)
        if self.extra is not None:
            y = y * self.extra()
        return torch.tanh(y) * getattr(self, "more", 1.0) * random.Random(len(self.factors)).random()


class Half(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class Double(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, scale: Scale | None = None) -> Tensor:
        y: Tensor = x + self.inner(x)
        y = y * getattr(self, "more", 1.0)
        return y if scale is None else y * scale.factor


class HalfBlock(Block):
    def forward(self, x: Tensor, scale: Scale | None = None) -> Tensor:
        return super().forward(x, scale) * 0.5


class DoubleBlock(Block):
    def forward(self, x: Tensor, scale: Scale | None = None) -> Tensor:
        return super().forward(x, scale) * 2


# Changes of a state, which give another result for each number.


def attribute(inner: Any, number: float) -> None:
    inner.more = number


def content_of_a_list(inner: Any, number: float) -> None:
    inner.factors[0] = number


def content_of_an_object(inner: Any, number: float) -> None:
    inner.scale.factor = number


def another_object(inner: Any, number: float) -> None:
    inner.scale = Scale()
    inner.scale.factor = number


def class_attribute(inner: Any, number: float) -> None:
    Scale.factor = number


def parameter(inner: Any, number: float) -> None:
    inner.linear.weight = nn.Parameter(torch.full((4, 4), number))


def memory_of_a_parameter(inner: Any, number: float) -> None:
    inner.linear.weight.data = torch.full((4, 4), number)


def buffer(inner: Any, number: float) -> None:
    inner.shift = torch.full((4,), number)


def submodule(inner: Any, number: float) -> None:
    torch.manual_seed(int(10 * number))
    inner.linear = nn.Linear(4, 4)


def parts_of_a_module(inner: Any, number: float) -> None:
    inner.linear._parameters = {**inner.linear._parameters, "weight": nn.Parameter(torch.full((4, 4), number))}


def forward_of_a_module(inner: Any, number: float) -> None:
    forward = type(inner.linear).forward
    inner.linear.forward = lambda x: forward(inner.linear, x) * number


def hook(inner: Any, number: float) -> None:
    for handle in inner.__dict__.pop("handles", ()):
        handle.remove()
    handles = [inner.linear.register_forward_hook(lambda module, args, output: output * number)]
    inner.__dict__["handles"] = handles


def hook_before(inner: Any, number: float) -> None:
    inner.linear.register_forward_pre_hook(lambda module, args: (args[0] * number,))


def class_of_a_module(inner: Any, number: float) -> None:
    inner.__class__ = Half if number == 0.5 else Double


def class_of_the_block(block: Any, number: float) -> None:
    block.__class__ = HalfBlock if number == 0.5 else DoubleBlock


def attributes_of_the_block(block: Any, number: float) -> None:
    block.__dict__ = {**block.__dict__, "more": number}


def default_of_a_function(inner: Any, number: float) -> None:
    scaled.__defaults__ = (number,)


def global_that_was_a_class(inner: Any, number: float) -> None:
    globals()["factor"] = [number]


def attributes_of_a_module(inner: Any, number: float) -> None:
    inner.__dict__ = {**inner.__dict__, "more": number}


def variable_of_a_context(inner: Any, number: float) -> None:
    variable.set([number])


def attribute_of_a_thread(inner: Any, number: float) -> None:
    local.number = number


class Read:
    """Reads state that only its owner knows."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __call__(self) -> float:
        found: float = self.of.get()[0] if isinstance(self.of, contextvars.ContextVar) else self.of.number
        return found


CHANGES: list[Callable[[Any, float], None]] = [
    attribute,
    content_of_a_list,
    content_of_an_object,
    another_object,
    class_attribute,
    parameter,
    memory_of_a_parameter,
    buffer,
    submodule,
    parts_of_a_module,
    forward_of_a_module,
    hook,
    hook_before,
    class_of_a_module,
    class_of_the_block,
    attributes_of_the_block,
    default_of_a_function,
    global_that_was_a_class,
    attributes_of_a_module,
    variable_of_a_context,
    attribute_of_a_thread,
]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys.modules[__name__], "factor", float)
    monkeypatch.setattr(Scale, "factor", 1.0)
    yield
    scaled.__defaults__ = (1.0,)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each call of a block found its latest state again."""
    found: list[bool] = []
    of_now = LatestState.of_now

    def noted(self: LatestState, module: nn.Module | None) -> Any:
        found.append((kept := of_now(self, module)) is not None)
        return kept

    with monkeypatch.context() as patched:
        patched.setattr(LatestState, "of_now", noted)
        yield found


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def gradients(model: nn.Module, between: Callable[[], object] = lambda: None) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, 4, requires_grad=True)
    model.zero_grad()
    loss = model(x).square().sum()
    parameters = [*model.parameters()]
    between()
    loss.backward()
    return [x.grad, *(each.grad for each in parameters if each.grad is not None)]  # type: ignore[list-item]


_NOT_COPIED = (parts_of_a_module, default_of_a_function, class_of_a_module, class_of_the_block, attributes_of_the_block)
"""Changes that no copy has: they are seen by the next call only."""


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_ends_it(change: Callable[[Any, float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    is_kept = change not in (variable_of_a_context, attribute_of_a_thread)
    for is_attached in (False, True):
        monkeypatch.setattr(sys.modules[__name__], "factor", float)
        monkeypatch.setattr(Scale, "factor", 1.0)
        scaled.__defaults__ = (1.0,)
        trained: Any = model()
        changed = trained[0] if "block" in change.__name__ else trained[0].inner
        if not is_kept:
            change(changed, 1.0)
            trained[0].inner.extra = Read(variable if change is variable_of_a_context else local)
        attached = spillway.attach(trained, policy=spillway.Recompute(), blocks=Block) if is_attached else None
        with counted(monkeypatch) as found:
            for _ in range(3):
                gradients(trained)
            if is_attached:
                assert found == [False, False, is_kept, True, is_kept, True]
            change(changed, 0.5)
            # And the same again after forward.
            again = 0.5 if change in _NOT_COPIED else 2.0
            got = gradients(trained, between=partial(change, changed, again))
            if is_attached and change is not memory_of_a_parameter:
                assert not found[6]
            results.append([*got, *gradients(trained), *gradients(trained)])
        if attached is not None:
            attached.remove()
    plain, ours = results
    assert len(plain) == len(ours) and all(map(torch.equal, plain, ours))


def test_objects_among_the_arguments_are_read_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: Any = Block()
    x = torch.randn(3, 4, requires_grad=True)
    with (
        counted(monkeypatch) as found,
        spillway.attach(nn.Sequential(trained), policy=spillway.Recompute(), blocks=Block),
    ):
        for _ in range(3):
            scale = Scale()
            scale.factor = 3.0
            loss = trained(x, scale).sum()
            scale.factor = 5.0
            (got,) = torch.autograd.grad(loss, x)
            scale.factor = 3.0
            (wanted,) = torch.autograd.grad(Block.forward(trained, x, scale).sum(), x)
            assert torch.equal(got, wanted)
    assert found == []


def test_parameters_that_a_wrapper_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of its own, as FSDP's are, and plain ones in a later call."""

    class Sharded(nn.Parameter):
        pass

    trained: Any = model()
    linear = trained[0].inner.linear
    plain: Any = copy.deepcopy(trained)
    plain[0].inner.linear.weight = nn.Parameter(torch.full((4, 4), 0.25))
    linear._parameters["weight"] = Sharded(torch.full((4, 4), 0.5))
    with counted(monkeypatch) as found, spillway.attach(trained, policy=spillway.Recompute(), blocks=Block):
        for _ in range(2):
            gradients(trained)
        linear._parameters["weight"] = nn.Parameter(torch.full((4, 4), 0.25))
        between = partial(linear._parameters.__setitem__, "weight", nn.Parameter(torch.zeros(4, 4)))
        assert all(map(torch.equal, gradients(trained, between), gradients(plain)))
    assert found == [False, False, False, True, False, True]


def test_global_generators_are_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = model()
    before = numpy.random.get_bit_generator()
    with counted(monkeypatch) as found, spillway.attach(trained, policy=spillway.Recompute(), blocks=Block):
        for _ in range(2):
            gradients(trained)
        try:
            numpy.random.set_bit_generator(numpy.random.MT19937(1))
            gradients(trained)
        finally:
            numpy.random.set_bit_generator(before)
    assert found == [False, False, True, True, False, False]


def test_cached_parametrizations_are_read_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = model()
    with counted(monkeypatch) as found, spillway.attach(trained, policy=spillway.Recompute(), blocks=Block):
        gradients(trained)
        with parametrize.cached():
            gradients(trained)
        gradients(trained)
    assert found == [False] * 4 + [True] * 2


def test_a_state_that_changes_in_each_call_is_no_longer_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: Any = Block()
    kept: list[bool] = []
    found = LatestState.found

    def noted(self: LatestState, module: nn.Module | None, copies: Any) -> Any:
        result = found(self, module, copies)
        kept.append(result is not None)
        return result

    monkeypatch.setattr(LatestState, "found", noted)
    with spillway.attach(nn.Sequential(trained), policy=spillway.Recompute(), blocks=Block):
        for number in range(20):
            trained.inner.more = float(number)
            gradients(trained)
    assert kept == [True] * 16 + [False] * 4


@pytest.mark.parametrize("what", ["tensor", "graph", "module", "method", "items", "names", "numbers", "iterator"])
def test_what_is_not_held(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: Any = model()
    for block in trained:
        inner = block.inner
        if what == "tensor":
            inner.factors.append(torch.ones(2))
        elif what == "graph":
            inner.shift = nn.Parameter(torch.ones(4)) * 2
        elif what == "module":
            inner.scale.owner = block
        elif what == "method":
            inner.factors.append(types.MethodType(Block.forward, block))
        elif what == "iterator":
            inner.scale.iterator = iter([1.0])
        elif what == "items":
            inner.factors += [1.0] * 5000
        elif what == "names":
            inner.names = dict.fromkeys(range(5000))
        else:
            inner.numbers = array("d", [0.0] * 20000)
    with counted(monkeypatch) as found, spillway.attach(trained, policy=spillway.Recompute(), blocks=Block):
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            trained(x).sum().backward(retain_graph=True)
    assert found == [False] * 6


def test_a_model_is_freed_at_once() -> None:
    for handle_goes_first in (False, True):
        trained: Any = model()
        attached = spillway.attach(trained, policy=spillway.Recompute(), blocks=Block)
        for _ in range(3):
            gradients(trained)
        dead = [weakref.ref(each) for each in (trained, trained[0], trained[0].inner, *trained.parameters())]
        gc.collect()
        gc.disable()
        try:
            if handle_goes_first:
                del attached
            del trained
            assert not [each for each in dead if each() is not None]
        finally:
            gc.enable()


def test_detaching_lets_go() -> None:
    trained: Any = model()
    attached = spillway.attach(trained, policy=spillway.Recompute(), blocks=Block)
    for _ in range(3):
        gradients(trained)
    old = weakref.ref(trained[0].inner.shift)
    attached.remove()
    trained[0].inner.shift = torch.zeros(4)
    assert old() is None


def test_lists_of_parameters_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.gru(x)[0]
            return y

    trained = nn.Sequential(Recurrent(), Recurrent())
    with counted(monkeypatch) as found, spillway.attach(trained, policy=spillway.Recompute(), blocks=Recurrent):
        for _ in range(2):
            gradients(trained)
    assert found == [False, False, True, True]


def test_a_replaced_buffer_is_held_until_the_next_call() -> None:
    trained: Any = model()
    with spillway.attach(trained, policy=spillway.Recompute(), blocks=Block):
        for _ in range(3):
            gradients(trained)
        old = weakref.ref(trained[0].inner.shift)
        trained[0].inner.shift = torch.zeros(4)
        trained(torch.randn(3, 4, requires_grad=True))
        assert old() is None


@pytest.mark.parametrize("has_addresses", [True, False])
def test_the_same_items(has_addresses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert identities._HAS_ADDRESSES
    monkeypatch.setattr(identities, "_HAS_ADDRESSES", has_addresses)
    one, other = object(), float("1.5")
    for count in (0, 1, 2, 300):
        items = (*[one] * count, other)
        assert have_same_items(items, (*[one] * count, other))
        assert not have_same_items(items, (*[one] * count, float("1.5")))
        assert not have_same_items(items, items[:-1])
        assert have_same_items(items[:0], ())


def test_a_forward_that_is_exchanged_for_a_call_is_put_back() -> None:
    """The replay ends before the code that puts it back."""

    class Exchanging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.linear.forward = lambda x: torch.sin(x)  # type: ignore[method-assign]
            y = self.linear(x)
            del self.linear.forward
            return y

    trained = nn.Sequential(Exchanging(), Exchanging())
    x = torch.randn(3, 4, requires_grad=True)
    with spillway.attach(trained, policy=spillway.Recompute(), blocks=Exchanging):
        for _ in range(3):
            (got,) = torch.autograd.grad(trained(x).sum(), x)
            assert "forward" not in vars(trained[0].linear) and "forward" not in vars(trained[1].linear)
    (wanted,) = torch.autograd.grad(torch.sin(torch.sin(x)).sum(), x)
    assert torch.equal(got, wanted)
