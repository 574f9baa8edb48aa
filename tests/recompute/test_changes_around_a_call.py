"""What changes before, between or after forward and backward, from the first, second, third or fourth step on."""

from __future__ import annotations

import contextvars
import sys
import threading
import types
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

import spillway
from recompute.regions import HiddenList, Regions, one_place
from spillway.checkpointing.python_walk import Walk
from support import assert_identical

COUNT: contextvars.ContextVar[float] = contextvars.ContextVar("COUNT", default=1.0)
LISTED: contextvars.ContextVar[list[float]] = contextvars.ContextVar("LISTED")
LOCAL = threading.local()
SHARED = [1.0]


class Settings:
    factor = 1.0


settings = types.ModuleType("settings")
settings.factor = 1.0  # type: ignore[attr-defined]
settings.own = settings  # type: ignore[attr-defined]


class Case(nn.Module):
    """A block, and what a step does around its call. From some step on, ``changes`` is true."""

    changes = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8))
        self.changes = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x).tanh())).sin()
        return y

    def middle(self, x: Tensor) -> Tensor:
        return x

    def before_forward(self) -> None: ...
    def before_backward(self) -> None: ...
    def after_backward(self) -> None: ...

    def leaves(self) -> Iterable[Tensor]:
        return self.parameters()

    def state(self) -> Iterable[float]:
        return ()


# Attributes of tensors.


class ReadsAnAttribute(Case):
    def __init__(self) -> None:
        super().__init__()
        self.weight.factor = 1.0  # type: ignore[attr-defined]

    def middle(self, x: Tensor) -> Tensor:
        return x * self.weight.factor  # type: ignore[attr-defined]

    def before_backward(self) -> None:
        if self.changes:
            self.weight.factor = 2.0  # type: ignore[attr-defined]

    def after_backward(self) -> None:
        self.weight.factor = 1.0  # type: ignore[attr-defined]


class CountsInAnAttribute(Case):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.ones(8))
        self.buffer.count = 1  # type: ignore[attr-defined]

    def middle(self, x: Tensor) -> Tensor:
        self.buffer.count += self.changes  # type: ignore[attr-defined]
        return x * self.buffer.count  # type: ignore[attr-defined]

    def state(self) -> Iterable[float]:
        return [self.buffer.count]  # type: ignore[attr-defined]


class MakesAnAttribute(Case):
    def __init__(self) -> None:
        super().__init__()
        self.same = [self.weight]

    def middle(self, x: Tensor) -> Tensor:
        if self.changes:
            self.weight.count = getattr(self.weight, "count", 1) + 1  # type: ignore[attr-defined]
        return x * getattr(self.weight, "count", 1)

    def state(self) -> Iterable[float]:
        return [getattr(self.weight, "count", 1)]


class WritesIntoAnAttribute(Case):
    def __init__(self) -> None:
        super().__init__()
        self.weight.average, self.weight.history = torch.ones(8), [1.0]  # type: ignore[attr-defined]

    def middle(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if self.changes:
            weight.average.mul_(0.5).add_(x.detach().mean(0))
            weight.history.append(2.0)
        return x * weight.average * sum(weight.history)

    def state(self) -> Iterable[float]:
        return [*self.weight.average.tolist(), *self.weight.history]  # type: ignore[attr-defined]


# Whether a tensor requires grad.


class FlagOfATensor(Case):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(8, 8)

    def middle(self, x: Tensor) -> Tensor:
        return (x @ self.table).exp() * self.table[0]

    def leaves(self) -> Iterable[Tensor]:
        return [*self.parameters(), self.table]

    def before_forward(self) -> None:
        self.table.requires_grad_(False)

    def before_backward(self) -> None:
        self.table.requires_grad_(self.changes)


class FlagThatIsOff(FlagOfATensor):
    def before_forward(self) -> None:
        self.table.requires_grad_(True)

    def before_backward(self) -> None:
        self.table.requires_grad_(not self.changes)


class FlagOfASteps(FlagOfATensor):
    def before_forward(self) -> None:
        self.table.requires_grad_(self.changes)

    def before_backward(self) -> None: ...


# Context variables, and attributes of threads.


class ReadsAVariable(Case):
    def middle(self, x: Tensor) -> Tensor:
        return x * COUNT.get()

    def before_forward(self) -> None:
        self.token = COUNT.set(2.0 + self.changes)

    def before_backward(self) -> None:
        COUNT.reset(self.token)


class CountsInAVariable(Case):
    def __init__(self) -> None:
        super().__init__()
        COUNT.set(1.0)
        LISTED.set([1.0])

    def middle(self, x: Tensor) -> Tensor:
        if self.changes:
            COUNT.set(COUNT.get() + 1)
            LISTED.get().append(1.0)
        return x * COUNT.get() * sum(LISTED.get())

    def state(self) -> Iterable[float]:
        return [COUNT.get(), *LISTED.get()]


class Local(threading.local):
    pass


class CountsInAThread(Case):
    def __init__(self) -> None:
        super().__init__()
        LOCAL.count = 1
        self.local = Local()
        self.local.count = 1

    def middle(self, x: Tensor) -> Tensor:
        LOCAL.count += self.changes
        self.local.count += self.changes
        return x * LOCAL.count * self.local.count

    def state(self) -> Iterable[float]:
        return [LOCAL.count, self.local.count]


# Containers.


class CountsInArrays(Case):
    def __init__(self) -> None:
        super().__init__()
        self.array, self.long = array("d", [1.0]), array("i", [1])

    def middle(self, x: Tensor) -> Tensor:
        if self.changes:
            self.array[0] += 1
            self.long.append(1)
        return x * self.array[0] * len(self.long)

    def state(self) -> Iterable[float]:
        return [*self.array, *self.long]


class CountsThroughAView(Case):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = bytearray(b"\1")
        self.view, self.other = memoryview(self.bytes), memoryview(bytearray(b"\1"))

    def middle(self, x: Tensor) -> Tensor:
        self.view[0] += self.changes
        self.other[0] += self.changes
        return x * self.bytes[0] * self.other[0]

    def state(self) -> Iterable[float]:
        return [*self.bytes, *self.other]


class ReadsAReadOnlyDictionary(Case):
    def __init__(self) -> None:
        super().__init__()
        self.read = types.MappingProxyType({"count": [1.0]})

    def middle(self, x: Tensor) -> Tensor:
        self.read["count"][0] += self.changes
        return x * self.read["count"][0]

    def state(self) -> Iterable[float]:
        return self.read["count"]


class Key:
    pass


class CountsInWeakDictionaries(Case):
    def __init__(self) -> None:
        super().__init__()
        self.key = Key()
        self.by_key: weakref.WeakKeyDictionary[Key, float] = weakref.WeakKeyDictionary({self.key: 1.0})
        self.by_value: weakref.WeakValueDictionary[int, Key] = weakref.WeakValueDictionary({0: self.key})

    def middle(self, x: Tensor) -> Tensor:
        if self.changes:
            self.by_key[self.key] += 1
            self.by_value[len(self.by_value)] = self.key
        return x * self.by_key[self.key] * len(self.by_value)

    def state(self) -> Iterable[float]:
        return [*self.by_key.values(), *self.by_value]


class CountsInTwoPlaces(Case):
    """A list that is both an attribute and a global."""

    def __init__(self) -> None:
        super().__init__()
        SHARED[:] = [1.0]
        self.shared = SHARED

    def middle(self, x: Tensor) -> Tensor:
        if self.changes:
            SHARED.append(1.0)
        return x * sum(self.shared)

    def state(self) -> Iterable[float]:
        return SHARED


# Attributes of global modules and classes.


class CountsInAModule(Case):
    def __init__(self) -> None:
        super().__init__()
        settings.factor = Settings.factor = 1.0  # type: ignore[attr-defined]

    def middle(self, x: Tensor) -> Tensor:
        module: Any = settings
        module.own.factor += self.changes
        Settings.factor += self.changes
        return x * settings.own.factor * Settings.factor  # type: ignore[attr-defined]

    def state(self) -> Iterable[float]:
        return [settings.factor, Settings.factor]  # type: ignore[attr-defined]


# Gradients.


class ReadsAGradient(Case):
    """Gradients are accumulated, and set to zero after forward in each second step."""

    steps = 0

    def middle(self, x: Tensor) -> Tensor:
        return x * self.weight * self.gate()

    def gate(self) -> float:
        return sum((float(each.grad.abs().sum()) for each in self.parameters() if each.grad is not None), 1.0)

    def before_backward(self) -> None:
        if self.changes:
            self.steps += 1
            for each in self.parameters() if self.steps % 2 else ():
                each.grad = None


# Hooks.


class HookOfOneForward(Case):
    """A hook that is removed before backward. It counts where only the hook leads."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = HiddenList([[1.0]])

    def register(self) -> RemovableHandle:
        counts = self.hidden[0]

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            counts[0] += 1
            return output * counts[0]

        return self.first.register_forward_hook(hook)

    def before_forward(self) -> None:
        self.handle = self.register() if self.changes else None

    def before_backward(self) -> None:
        if self.handle is not None:
            self.handle.remove()

    def state(self) -> Iterable[float]:
        counts: list[float] = self.hidden[0]
        return counts


class HookBeforeOneForward(HookOfOneForward):
    def register(self) -> RemovableHandle:
        counts = self.hidden[0]

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            counts[0] += 1
            return (args[0] * 2,), kwargs

        return self.first.register_forward_pre_hook(hook, with_kwargs=True)


class HookOfAnObject(HookOfOneForward):
    def register(self) -> RemovableHandle:
        class Hook:
            count = 0.0

            def __call__(self, counts: list[float], module: nn.Module, args: Any, output: Tensor) -> Tensor:
                counts[0] += 1
                return output * 2

            def method(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
                self.count += 1
                return output * self.count

        self.hook = Hook()
        self.last.register_forward_hook(self.hook.method)
        return self.first.register_forward_hook(partial(self.hook, self.hidden[0]))

    def state(self) -> Iterable[float]:
        return [*self.hidden[0], self.hook.count] if self.changes else self.hidden[0]


class HookBeforeBackward(HookOfOneForward):
    def before_forward(self) -> None: ...

    def before_backward(self) -> None:
        self.handle = self.register() if self.changes else None

    def after_backward(self) -> None:
        if self.handle is not None:
            self.handle.remove()


class HookOfANode(Case):
    """Forward registers hooks of nodes from outside: of a product, and of a parameter's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Parameter(torch.ones(8))

    def before_forward(self) -> None:
        self.product = self.source * 2

    def middle(self, x: Tensor) -> Tensor:
        if self.changes:
            node = torch.autograd.graph.get_gradient_edge(self.weight).node
            # It would live as long as the graph.
            self.node = node
            node.register_prehook(lambda gradients: tuple(each * 2 for each in gradients))
            assert self.product.grad_fn is not None
            self.product.grad_fn.register_prehook(lambda gradients: tuple(each * 3 for each in gradients))
            self.product.grad_fn.register_hook(
                lambda inputs, outputs: tuple(None if each is None else each * 5 for each in inputs)
            )
        return x * self.product * self.weight

    def after_backward(self) -> None:
        self.node = None


CASES = [each for each in vars(sys.modules[__name__]).values() if isinstance(each, type) and issubclass(each, Case)]

WAYS: dict[str, dict[str, Any]] = {"recomputed": {}, "offloaded": {"offload": ["matmul"]}, "attached": {}}
ways = pytest.mark.parametrize("way", WAYS)


class Around(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return self.block(*args)


def called(block: nn.Module, way: str | None, session: spillway.Session | None) -> Callable[..., Tensor]:
    if way is None:
        return block
    if way != "attached":
        return partial(spillway.recompute, block, session=session, **WAYS[way])
    model = Around(block)
    spillway.attach(model, policy=spillway.Recompute(), blocks="block", session=session)
    return model


def trained(case: type[Case], when: int, way: str | None, session: spillway.Session | None = None) -> Iterator[Tensor]:
    torch.manual_seed(0)
    block = case()
    function = called(block, way, session)
    for step in range(5):
        x = torch.randn(4, 8, requires_grad=True)
        if case is not ReadsAGradient:
            for leaf in block.leaves():
                leaf.grad = None
        block.changes = step >= when
        block.before_forward()
        loss = function(x).square().sum()
        block.before_backward()
        loss.backward()
        block.after_backward()
        yield loss.detach()
        for leaf in (x, *block.leaves()):
            yield torch.empty(0) if leaf.grad is None else leaf.grad.clone()
        yield torch.tensor([*block.state()])


@one_place
@ways
@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.__name__)
def test_what_changes_is_as_in_plain_training(regions: Regions, case: type[Case], way: str) -> None:
    for when in range(4):
        assert_identical([*trained(case, when, way, regions.session)], [*trained(case, when, None)])


@one_place
@ways
def test_a_backward_in_another_thread_reads_what_forward_read(regions: Regions, way: str) -> None:
    class Reads(Case):
        def middle(self, x: Tensor) -> Tensor:
            return x * COUNT.get() * getattr(LOCAL, "count", 7)

    def run(way: str | None) -> Iterator[Tensor]:
        torch.manual_seed(0)
        block = Reads()
        function = called(block, way, regions.session)
        for step in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            LOCAL.count = step + 1
            token = COUNT.set(step + 2.0)
            loss = function(x).square().sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            COUNT.reset(token)
            assert x.grad is not None
            yield x.grad
            yield torch.tensor([LOCAL.count])

    assert_identical([*run(way)], [*run(None)])


@one_place
def test_each_replay_of_a_call_reads_the_context_variables_of_forward(regions: Regions) -> None:
    def function(x: Tensor) -> Tensor:
        COUNT.set(COUNT.get() + 1)
        return (x * COUNT.get()).sin()

    def run(call: Callable[..., Tensor]) -> Iterator[Tensor]:
        COUNT.set(1.0)
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(4, 8, requires_grad=True)
            loss = call(x * 1).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            assert x.grad is not None
            yield from (x.grad, torch.tensor(COUNT.get()))

    got = run(partial(spillway.recompute, function, session=regions.session))
    assert_identical([*got], [*run(function)])


class Held(Case):
    """A wrapper's attribute, and a gradient's buffer, of which forward names only the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.status, self.weight.main_grad = 1, torch.zeros(8)  # type: ignore[attr-defined]
        self.seen = HiddenList()

    def middle(self, x: Tensor) -> Tensor:
        assert self.weight.main_grad is not None  # type: ignore[attr-defined]
        self.seen.append(getattr(self.weight, "status"))  # noqa: B009
        return x + functional.max_pool1d(torch.ones(1, 16), 2)


@one_place
@ways
def test_attributes_of_wrappers_are_left_alone(regions: Regions, way: str) -> None:
    """A wrapper counts in them what it has gathered. Backward writes the buffer, which a replay does not read."""
    torch.manual_seed(0)
    block = Held()
    function, weight = called(block, way, regions.session), cast("Any", block.weight)
    for step in range(3):
        loss = function(torch.randn(4, 8, requires_grad=True)).sum()
        weight.main_grad.add_(1)
        weight.status = step + 2
        loss.backward()
        assert block.seen[-2:] == [step + 1, step + 2]


@one_place
def test_a_tensor_that_got_a_history_is_refused_as_any_that_was_written(regions: Regions) -> None:
    """Its flag cannot be put back: it is no leaf any more."""
    table, weight = torch.ones(8), torch.ones(8, requires_grad=True)
    loss = spillway.recompute(lambda x: (x + table).sin(), weight * 1, session=regions.session).sum()
    table.mul_(weight)
    with pytest.raises(spillway.RecomputeError, match="written in place"):
        loss.backward()


def test_hooks_of_torch_are_not_opened() -> None:
    """They hold the state of wrappers, as FSDP's."""
    counts, layer = [0.0], nn.Linear(2, 2)

    def hook(module: nn.Module, args: Any) -> None:
        counts[0] += 1

    layer.register_forward_pre_hook(hook)
    assert counts in Walk((layer,)).items
    hook.__module__ = "torch.distributed"
    assert counts not in Walk((layer,)).items


def uses_settings(x: Tensor) -> Any:
    return Settings.factor


def makes_settings(x: Tensor) -> Any:
    return Settings()


def test_a_class_is_read_if_an_attribute_of_it_is_named() -> None:
    assert Settings in Walk((uses_settings,)).found_classes
    assert Settings not in Walk((makes_settings,)).found_classes


@one_place
def test_a_function_that_reads_gradients_is_kept_and_told(regions: Regions) -> None:
    block = ReadsAGradient()
    with regions.offload() as context:
        loss = spillway.recompute(block, torch.randn(4, 8), session=regions.session).sum()
    loss.backward()
    assert any("reads the gradient of a tensor" in note for note in context.stats().notes)
    assert context.stats().recomputed_bytes == 0


def takes_gradients(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]


@one_place
def test_a_function_that_takes_a_gradient_is_not_taken_for_one_that_reads_them(regions: Regions) -> None:
    with regions.offload() as context:
        loss = spillway.recompute(takes_gradients, torch.randn(8, requires_grad=True) * 1, session=regions.session)
    loss.sum().backward()
    assert not any("reads the gradient" in note for note in context.stats().notes)


@one_place
@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.float32])
def test_a_number_among_the_arguments_that_forward_writes_through_data(regions: Regions, kind: torch.dtype) -> None:
    """Autograd does not see it. It may be a seed, which kernels leave unwritten, but here it is an argument."""

    def function(x: Tensor, step: Tensor) -> Tensor:
        step.data.add_(1)
        return (x * step).sin()

    def run(way: str | None) -> Iterator[Tensor]:
        step = torch.ones(1, dtype=kind)
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(4, 8, requires_grad=True)
            call = function if way is None else partial(spillway.recompute, function, session=regions.session)
            call(x * 1, step).sum().backward()
            assert x.grad is not None
            yield from (x.grad, step.clone())

    assert_identical([*run("recomputed")], [*run(None)])


class Squared(nn.Module):
    """A parametrization that saves tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.exp()


@one_place
@ways
@pytest.mark.parametrize("cached", ["forward", "both", "backward", "later"])
def test_cached_parametrizations(regions: Regions, cached: str, way: str) -> None:
    def run(way: str | None) -> Iterator[Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        parametrize.register_parametrization(block[0], "weight", Squared())
        function = called(block, way, regions.session)
        for step in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            if cached == "forward" or (cached == "later" and step > 1):
                with parametrize.cached():
                    loss = function(function(x)).square().sum()
                loss.backward()
            elif cached == "both":
                with parametrize.cached():
                    loss = function(function(x)).square().sum()
                    loss.backward()
            else:
                loss = function(function(x)).square().sum()
                with parametrize.cached():
                    loss.backward()
                    # It must not take a tensor that the replay has made.
                    loss = function(x).sum()
                    loss.backward()
            assert x.grad is not None
            yield from (
                loss.detach(),
                x.grad,
                *(each.grad.clone() for each in block.parameters() if each.grad is not None),
            )

    assert_identical([*run(way)], [*run(None)])


PRECISIONS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "medium": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "high": (lambda: torch.set_float32_matmul_precision("high"), lambda: torch.set_float32_matmul_precision("highest")),
    "allow_tf32": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False),
    ),
    "cudnn": (
        # Torch's own test utilities forbid to set it by its name.
        lambda: torch._C._set_cudnn_allow_tf32(False),
        lambda: torch._C._set_cudnn_allow_tf32(True),
    ),
    "newer": (
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"),
    ),
}


def precisions() -> list[Any]:
    found: list[Any] = [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]
    for read in (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cudnn.allow_tf32,
    ):
        try:
            found.append(read())
        except RuntimeError:
            # Torch refuses to read an older setting that a newer one contradicts.
            found.append(None)
    return found


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("inside", [False, True], ids=["around forward", "inside of forward"])
@one_place
def test_precisions_of_both_interfaces_are_those_of_forward(regions: Regions, name: str, inside: bool) -> None:
    """A kernel may ask for the older setting, and torch raises an error if it contradicts the newer one."""
    put, back = PRECISIONS[name]
    seen = HiddenList()

    def function(x: Tensor) -> Tensor:
        if inside:
            put()
        seen.append(precisions())
        y = x.sin().exp()
        if inside:
            back()
        return y

    before = precisions()
    try:
        # The last replay ends before the function has set it back.
        for first, second in ((put, back), (back, put), (back, back)):
            first()
            loss = spillway.recompute(function, torch.ones(3, requires_grad=True), session=regions.session).sum()
            second()
            now = precisions()
            loss.backward()
            assert precisions() == now
            # Without a change by the older interface, nothing says what it was.
            assert seen[0] == seen[1] or (name == "newer" and seen[0][:2] == seen[1][:2])
            seen.clear()
    finally:
        back()
    # A setting that was not set says so at first.
    assert precisions()[2:] == before[2:]
