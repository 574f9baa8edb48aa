"""A block's state that is used again: what ends that, and what it holds. See NOTE [ States that stay the same ]."""

from __future__ import annotations

import contextvars
import copy
import gc
import random
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
from spillway._torch import PLACE
from spillway.checkpointing import identities
from spillway.checkpointing.identities import have_same_items
from spillway.checkpointing.preserved import PreservingCall
from spillway.checkpointing.python_state import LatestState
from spillway.checkpointing.selectors import Planned
from spillway.types import Decision

factor: Any = float
"""No state, as long as it is a class."""
local, variable = threading.local(), contextvars.ContextVar[Any]("variable")


class Scale:
    """An object of a block."""

    factor = 1.0


class OtherScale(Scale):
    factor = 1.0


class Slots:
    __slots__ = ("unused",)
    slot_factor = 1.0


class OtherSlots(Slots):
    __slots__ = ()
    slot_factor = 1.0


class Settings:
    """Has no attribute ``factor``, until a test gives it one."""


class Base:
    base_factor = 1.0


class OtherBase:
    base_factor = 1.0


class Inner(Base, nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.scale = Scale()
        self.slots = Slots()
        self.factors = [1.0]
        self.function = scaled
        self.partial = partial(scaled, by=1.0)
        self.keyword = keyword_scaled
        self.extra: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale.factor * self.factors[0] + self.shift
        y = self.function(y) * (factor[0] if isinstance(factor, list) else 1.0)
        y = self.keyword(self.partial(y)) * self.base_factor * self.slots.slot_factor
        if hasattr(Settings, "factor"):
            y = y * Settings.factor
        if self.extra is not None:
            y = y * self.extra()
        return torch.tanh(y * getattr(self, "more", 1.0) * random.Random(len(self.factors)).random())


class Half(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class Double(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by


def keyword_scaled(x: Tensor, *, by: float = 1.0) -> Tensor:
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


def class_of_an_object(inner: Any, number: float) -> None:
    inner.scale.__class__ = OtherScale
    OtherScale.factor = number


def class_of_an_object_with_slots(inner: Any, number: float) -> None:
    inner.slots.__class__ = OtherSlots
    OtherSlots.slot_factor = number


def bases_of_a_class(inner: Any, number: float) -> None:
    Inner.__bases__ = (OtherBase, nn.Module)
    OtherBase.base_factor = number


def new_attribute_of_a_class(inner: Any, number: float) -> None:
    Settings.factor = number  # type: ignore[attr-defined]


def keyword_of_a_partial_function(inner: Any, number: float) -> None:
    inner.partial.keywords["by"] = number


def keyword_of_a_function(inner: Any, number: float) -> None:
    keyword_scaled.__kwdefaults__["by"] = number


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
    class_of_an_object,
    class_of_an_object_with_slots,
    bases_of_a_class,
    new_attribute_of_a_class,
    keyword_of_a_partial_function,
    keyword_of_a_function,
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
def _as_before() -> Iterator[None]:
    _start_again()
    yield
    _start_again()


def _start_again() -> None:
    globals()["factor"] = float
    Scale.factor = OtherScale.factor = OtherBase.base_factor = OtherSlots.slot_factor = 1.0
    Inner.__bases__ = (Base, nn.Module)
    if hasattr(Settings, "factor"):
        del Settings.factor
    scaled.__defaults__ = (1.0,)
    keyword_scaled.__kwdefaults__["by"] = 1.0


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


_NOT_COPIED = (
    parts_of_a_module,
    default_of_a_function,
    class_of_a_module,
    class_of_the_block,
    attributes_of_the_block,
)
"""Changes that no copy has: they are seen by the next call only."""


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_ends_it(change: Callable[[Any, float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    is_kept = change not in (variable_of_a_context, attribute_of_a_thread)
    for is_attached in (False, True):
        _start_again()
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


_NOT_HELD = ["tensor", "graph", "module", "method", "items", "names", "numbers", "iterator", "generator"]


@pytest.mark.parametrize("what", _NOT_HELD)
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
        elif what == "generator":
            inner.generator = torch.Generator()
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


@pytest.mark.parametrize("what", ["parent", "registry", "hook"])
def test_a_model_that_its_state_led_to_is_freed_at_once(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: Any = model()
    links: list[Any] = [trained]
    if what == "parent":
        trained[0].inner.links = links
    elif what == "registry":
        monkeypatch.setattr(Scale, "links", links, raising=False)
    else:
        holder = types.SimpleNamespace(model=trained)
        handle = trained[0].inner.register_forward_hook(partial(lambda holder, *_: None, holder))
        del holder
    attached = spillway.attach(trained, policy=spillway.Recompute(), blocks=Block)
    for _ in range(3):
        gradients(trained)
    dead = weakref.ref(trained[0])
    gc.collect()
    gc.disable()
    try:
        if what == "hook":
            handle.remove()
        links.clear()
        del trained
        assert dead() is None
    finally:
        gc.enable()
    attached.remove()


def test_a_part_of_a_call_that_is_alive_may_be_out_of_date() -> None:
    """A global that was a class is a list now, and only its name was compared."""
    results = []
    for is_attached in (False, True):
        _start_again()
        trained: Any = model()
        attached = spillway.attach(trained, policy=spillway.Recompute(), blocks=Block) if is_attached else None
        for _ in range(2):
            gradients(trained)
        trained[0].inner.more = 1.0
        alive = trained(torch.randn(3, 4, requires_grad=True))
        global_that_was_a_class(None, 0.5)
        got = gradients(trained)
        del alive
        got += gradients(trained, between=lambda: factor.__setitem__(0, 2.0))
        results.append(got)
        if attached is not None:
            attached.remove()
    assert all(map(torch.equal, *results))


def test_a_parameter_of_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its identity."""

    class Other(nn.Parameter):
        pass

    trained: Any = model()
    with counted(monkeypatch) as found, spillway.attach(trained, policy=spillway.Recompute(), blocks=Block):
        for _ in range(2):
            gradients(trained)
        trained.zero_grad()
        torch.utils.swap_tensors(trained[0].inner.linear.weight, Other(torch.ones(4, 4)))
        gradients(trained)
    assert found == [False, False, True, True, False, True]


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


@pytest.mark.parametrize("next_call", ["recomputed", "kept", "preserving", "with an object"])
def test_a_replaced_buffer_is_held_until_the_next_call(next_call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: Any = model()
    preserving: list[bool] = []
    run = PreservingCall.run

    def noted(self: PreservingCall, forward: Any) -> Any:
        preserving.append(True)
        return run(self, forward)

    monkeypatch.setattr(PreservingCall, "run", noted)
    with spillway.attach(trained, policy=spillway.Recompute(), blocks=Block):
        call = vars(trained[0])[PLACE]
        if next_call == "preserving":
            call.how = planned = spillway.Recompute(policy=Planned({}, Decision.KEEP, False))
            for _ in range(3):
                gradients(trained)
            call.how = spillway.Recompute()
        for _ in range(3):
            gradients(trained)
        old = weakref.ref(trained[0].inner.shift)
        trained[0].inner.shift = torch.zeros(4)
        preserving.clear()
        if next_call in ("kept", "preserving"):
            call.how = None if next_call == "kept" else planned
        trained[0](torch.randn(3, 4, requires_grad=True), Scale() if next_call == "with an object" else None)
        assert old() is None
    assert bool(preserving) == (next_call == "preserving")


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


@pytest.mark.parametrize("hooks", ["none", "of the block", "of all modules"])
def test_the_state_of_a_forward_that_a_user_has_put_there(hooks: str) -> None:
    results = []
    for is_attached in (False, True):
        trained: Any = model()
        handles = []
        if hooks == "of the block":
            handles.append(trained[0].register_forward_hook(lambda *_: None))
        elif hooks == "of all modules":
            handles.append(nn.modules.module.register_module_forward_hook(lambda *_: None))
        attached = spillway.attach(trained, policy=spillway.Recompute(), blocks=Block) if is_attached else None
        got: list[Tensor] = []
        for number in range(6):
            if number % 3 == 0:
                factors = [0.5]
                trained[0].forward = partial(_forward, weakref.ref(trained[0]), factors)
            got += gradients(trained, between=partial(factors.__setitem__, 0, 2.0))
            factors[0] = 0.5
        results.append(got)
        for handle in handles:
            handle.remove()
        if attached is not None:
            attached.remove()
    assert all(map(torch.equal, *results))


def _forward(block: weakref.ref[Block], factors: list[float], x: Tensor) -> Tensor:
    found = block()
    assert found is not None
    return torch.tanh(Block.forward(found, x) * factors[0])


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
