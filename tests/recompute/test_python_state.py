"""Both runs of a recomputed function are on one Python state.

See NOTE [ Python state ] in ``checkpointing/python_state.py``.
"""

from __future__ import annotations

import collections
import functools
import gc
import io
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import spillway
from recompute.regions import Call, HiddenAttribute, Regions, gradients, one_place, ways
from spillway.checkpointing.learned import LearnedFunctions
from spillway.checkpointing.python_state import PythonState
from support import assert_identical

pytestmark = one_place

Options = dict[str, Any]


def seed_all() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def generators() -> Iterator[Tensor]:
    """The states of all global generators."""
    yield torch.get_rng_state()
    yield torch.tensor(random.getstate()[1])
    _, words, *rest = np.random.get_state()
    yield torch.tensor(words.astype(np.int64))
    yield torch.tensor(rest, dtype=torch.float64)


class Stateful(nn.Module):
    """Two layers, and a factor that hangs on Python state which each call changes."""

    shared = 0
    numbers: dict[str, Any]

    def __init__(self, kind: str) -> None:
        super().__init__()
        seed_all()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kind = kind
        self.steps, self.log, self.table, self.names = 0, [1], {"a": [{"b": [0]}]}, {0}
        self.array = np.zeros(2)
        self.own = random.Random(5)
        self.numpys = np.random.default_rng(5)
        self.torchs = torch.Generator().manual_seed(5)
        self.words = bytearray(2)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()))
        self.plain = torch.zeros(8)
        type(self).shared = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * self.factor(x))

    def factor(self, x: Tensor) -> Any:
        """Changes some state, and reads it."""
        return CHANGES[self.kind](self, x)

    def state(self) -> Iterator[Tensor]:
        """All of it."""
        yield from (self.mean, self.count, self.plain, self.torchs.get_state())
        numbers = [self.steps, *self.log, self.table["a"][0]["b"][0], len(self.names), *self.array, type(self).shared]
        yield torch.tensor([float(each) for each in (*numbers, *self.words)])
        yield torch.tensor(self.own.getstate()[1])
        yield torch.tensor(self.numpys.bit_generator.state["state"]["state"] % 2**60)


def attribute(m: Stateful, x: Tensor) -> float:
    m.steps += 1
    return min(1.0, m.steps / 4)


def content_of_a_list(m: Stateful, x: Tensor) -> float:
    m.log.append(len(m.log))
    return 1 / len(m.log)


def deep_content(m: Stateful, x: Tensor) -> float:
    m.table["a"][0]["b"][0] += 1
    return 1 / m.table["a"][0]["b"][0]


def content_of_a_set(m: Stateful, x: Tensor) -> float:
    m.names.add(len(m.names))
    return 1 / len(m.names)


def array(m: Stateful, x: Tensor) -> float:
    m.array[0] += 1
    return 1 / m.array[0]


def bytes_in_place(m: Stateful, x: Tensor) -> float:
    m.words[0] += 1
    return 1 / m.words[0]


def class_attribute(m: Stateful, x: Tensor) -> float:
    type(m).shared += 1
    return 1 / type(m).shared


def pythons_generator(m: Stateful, x: Tensor) -> float:
    return random.random()


def numpys_generator(m: Stateful, x: Tensor) -> float:
    return float(np.random.rand())


def numpys_normal_numbers(m: Stateful, x: Tensor) -> float:
    return float(np.random.randn())


def own_generator(m: Stateful, x: Tensor) -> float:
    return m.own.random()


def own_generator_of_numpy(m: Stateful, x: Tensor) -> float:
    return float(m.numpys.random())


def own_generator_of_torch(m: Stateful, x: Tensor) -> Tensor:
    return torch.rand(8, generator=m.torchs)


def branch_by_chance(m: Stateful, x: Tensor) -> Any:
    return torch.sin(m.up(x)) if random.random() < 0.5 else 0.5


def replaced_buffer(m: Stateful, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    return 1 - m.mean


def replaced_attribute(m: Stateful, x: Tensor) -> Tensor:
    m.plain = 0.9 * m.plain + 0.1 * x.detach().mean(0)
    return 1 - m.plain


def memory_of_a_buffer(m: Stateful, x: Tensor) -> Tensor:
    m.count.data = m.count.data + 1
    return 1 / m.count


def buffer_in_place(m: Stateful, x: Tensor) -> Tensor:
    m.count += 1
    return 1 / m.count


CHANGES: dict[str, Callable[[Stateful, Tensor], Any]] = {
    each.__name__: each
    for each in (
        *(attribute, content_of_a_list, deep_content, content_of_a_set, array, bytes_in_place, class_attribute),
        *(pythons_generator, numpys_generator, numpys_normal_numbers, own_generator, own_generator_of_numpy),
        *(own_generator_of_torch, branch_by_chance, replaced_buffer, replaced_attribute, memory_of_a_buffer),
        *(buffer_in_place,),
    )
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("calls", [1, 3], ids=["one call", "three calls"])
@ways
@pytest.mark.covered(times=3)
def test_state_that_forward_changes_is_as_in_plain_training(
    regions: Regions, how: Options, calls: int, kind: str
) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        model = Stateful(kind)
        for _ in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            model.zero_grad()
            with call.context():
                loss = sum(call(model, x * 1, **how).square().sum() for _ in range(calls))
            loss.backward()
            yield loss.detach()
            # The reentrant mode adds up parameters' gradients in another order.
            yield from gradients(x) if how.get("use_reentrant") and calls > 1 else gradients(x, *model.parameters())
            yield from (each.clone() for each in model.state())
            yield from generators()

    if how.get("use_reentrant") and kind == "buffer_in_place" and calls > 1:
        # Plainly, each call saves the buffer's own bytes, and the next one writes them.
        regions.right_or_refused(step)
    else:
        regions(step)


@pytest.mark.parametrize("kind", ["attribute", "replaced_buffer", "pythons_generator"])
@pytest.mark.parametrize("how", [{}, {"save": "pointwise"}], ids=["nothing", "save"])
def test_state_that_changes_in_a_later_call_only(regions: Regions, how: Options, kind: str) -> None:
    """By then it is known what the function does, and its calls are compared only since they are to be."""

    class Later(Stateful):
        calls = HiddenAttribute(0)

        def factor(self, x: Tensor) -> Any:
            self.calls += 1
            return super().factor(x) if self.calls > 10 else 1.0

    model, twin = Later(kind), Later(kind)
    for step in range(15):
        results = []
        for one, call in (
            (twin, lambda f, x: f(x)),
            (model, lambda f, x: spillway.recompute(f, x, verify="always", **how)),
        ):
            seed_all()
            model.calls = twin.calls = step
            one.zero_grad()
            torch.manual_seed(step)
            x = torch.randn(4, 8, requires_grad=True)
            try:
                call(one, x).square().sum().backward()
            except spillway.RecomputeError:
                # Hidden state counts the re-run, too.
                return
            results.append([x.grad, *(p.grad for p in one.parameters()), *generators()])
        assert_identical(*results)


def test_carried_state_with_a_history(regions: Regions) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            seed_all()
            self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
            self.h = torch.zeros(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.h = torch.tanh(self.inner(x + self.h))
            return self.out(self.h)

    def step(call: Call) -> Iterator[Tensor]:
        cell = Cell()
        for _ in range(4):
            cell.h = torch.zeros(4, 8)
            x = torch.randn(4, 8, requires_grad=True)
            cell.zero_grad()
            with call.context():
                loss = sum(call(cell, x * n).square().mean() for n in range(1, 4))
            loss.backward()
            yield from (loss.detach(), cell.h.detach(), *gradients(x, *cell.parameters()))

    for how in ({}, {"save": "matmul"}, {"offload": "pointwise"}, {"early_stop": False}, {"use_reentrant": True}):
        regions(step, **how)


@pytest.mark.parametrize("where", ["closure", "global", "default"])
def test_state_outside_of_modules(regions: Regions, where: str) -> None:
    results = []
    for call in (lambda f, x: f(x), spillway.recompute):
        seed_all()
        box, linear = [0], nn.Linear(8, 8)
        _BOX[0] = 0

        def function(x: Tensor, default: list[int] = [0]) -> Tensor:  # noqa: B006
            each = {"closure": box, "global": _BOX, "default": default}[where]  # noqa: B023
            each[0] += 1
            return torch.tanh(linear(x)) / each[0]  # noqa: B023

        found: list[Any] = []
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            call(function, x).sum().backward()
            found += [x.grad, torch.tensor([box[0], _BOX[0], *function.__defaults__[0]])]
        results.append(found)
    assert_identical(*results)


_BOX = [0]


def test_what_the_user_changes_before_backward_is_not_read(regions: Regions) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            seed_all()
            self.up, self.scale = nn.Linear(8, 8), 1.0

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.up(x) * self.scale)
            return y.sin() if self.training else y.cos()

    def step(call: Call) -> Iterator[Tensor]:
        block = Block()
        for _ in range(5):
            block.train()
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                loss = call(block, x * 1).sum()
            block.scale += 0.5
            block.eval()
            loss.backward()
            assert not block.training
            yield from (*gradients(x), torch.tensor(block.scale))

    for how in ({}, {"save": "matmul"}, {"use_reentrant": True}):
        regions(step, **how)


def test_a_function_with_an_iterator_is_kept_and_told(regions: Regions) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            seed_all()
            self.up, self.factors = nn.Linear(8, 8), itertools.cycle([1.0, 0.5, 2.0])

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.up(x)) * next(self.factors)

    def step(call: Call) -> Iterator[Tensor]:
        block = Block()
        for _ in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                loss = call(block, x * 1).sum()
            loss.backward()
            yield from gradients(x)

    regions(step)
    assert "has an iterator" in str(regions.last.stats().notes)


def test_changed_state_is_told_by_name(regions: Regions) -> None:
    model, x = Stateful("attribute"), torch.randn(4, 8, requires_grad=True)
    with regions.offload() as context:
        spillway.recompute(model, x * 1, session=regions.session).sum().backward()
    assert "Stateful: its forward changes Python state (steps)" in str(context.stats().notes)


def test_a_state_is_put_back_where_the_function_fails(regions: Regions) -> None:
    class Box:
        def __init__(self) -> None:
            self.value = 1

    box = Box()
    state = PythonState(lambda: box.value)
    box.value = 2

    def fail() -> None:
        with state.in_force():
            assert box.value == 1
            box.value = 3
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail()
    assert box.value == 2
    assert state.changes


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


NUMBER = 0


def counts_in_a_global() -> int:
    global NUMBER
    NUMBER += 1
    return NUMBER


def counts_in_an_attribute() -> int:
    counts_in_an_attribute.count += 1  # type: ignore[attr-defined]
    return counts_in_an_attribute.count  # type: ignore[attr-defined, no-any-return]


def counts_in_a_default(seen: list[int] = []) -> int:  # noqa: B006  (on purpose)
    seen.append(1)
    return len(seen)


class Counts(nn.Module):
    """Divides by a number that each call counts, after all that is saved."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        global NUMBER
        NUMBER = counts_in_an_attribute.count = 0  # type: ignore[attr-defined]
        counts_in_a_default.__defaults__[0].clear()  # type: ignore[index]
        self.up, self.where = nn.Linear(8, 8), where
        self.slots, self.counter = Slots(), collections.Counter[str]()
        self.file: Any = io.StringIO() if where == "file" else None

    def count(self) -> int:
        if self.where == "slots":
            self.slots.count += 1
            return self.slots.count
        if self.where == "counter":
            self.counter["k"] += 1
            return self.counter["k"]
        self.file.write("a")
        return int(self.file.tell())

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "global of a helper":
            return torch.relu(self.up(x)) / counts_in_a_global()
        if self.where == "attribute of a helper":
            return torch.relu(self.up(x)) / counts_in_an_attribute()
        if self.where == "default of a helper":
            return torch.relu(self.up(x)) / counts_in_a_default()
        return torch.relu(self.up(x)) / self.count()


@ways
@pytest.mark.parametrize(
    "where",
    ["slots", "counter", "file", "global of a helper", "attribute of a helper", "default of a helper"],
)
def test_what_counts_behind_all_that_is_saved_counts_once(regions: Regions, how: Options, where: str) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        block = Counts(where)
        for _ in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                y = call(block, x * 1, **how)
            y.sum().backward()
            yield from (y.detach().clone(), *(each.clone() for each in gradients(x, block)))

    regions(step)


@ways
def test_whether_a_parameter_requires_grad(regions: Regions, how: Options) -> None:
    class Toggles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.up.weight.requires_grad_(not self.up.weight.requires_grad)
            return self.down(torch.tanh(self.up(x)))

    def step(call: Call) -> Iterator[Tensor]:
        block = Toggles()
        for _ in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            block.zero_grad()
            with call.context():
                y = call(block, x * 1, **how)
            y.sum().backward()
            found = [each.grad for each in (x, *block.parameters()) if each.grad is not None]
            yield from (*found, torch.tensor(block.up.weight.requires_grad))

    regions(step)


def test_a_file_keeps_what_is_saved(regions: Regions) -> None:
    with regions.offload():
        spillway.recompute(Counts("file"), torch.randn(4, 8, requires_grad=True), session=regions.session)
    assert "has an iterator, or a file," in " ".join(regions.session.stats().notes + regions.last.stats().notes)


def test_a_function_that_deletes_what_it_reads_beside_unseen_state(regions: Regions) -> None:
    """The state of now lacks what was deleted: to run on it is no way out, and its error is ours."""

    class Deletes(nn.Module):
        given: Any
        calls = HiddenAttribute(0)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = x.exp() / self.calls + self.given
            del self.given
            return y.sin()

    block = Deletes()
    block.given = torch.ones(8)
    y = spillway.recompute(block, torch.randn(4, 8, requires_grad=True) * 1, session=regions.session)
    with pytest.raises(spillway.RecomputeError, match="other values when"):
        y.sum().backward()


class Renames(nn.Module):
    """Its state has the same values under other names, or in containers that were empty."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up = kind, nn.Linear(8, 8)
        self.named, self.children_of_it = {"a": 2.0}, nn.ModuleDict()
        self.generator = np.random.RandomState(3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        if self.kind == "a key":
            (name,) = self.named
            self.named[name + "a"] = self.named.pop(name)
            return (y * len(name)).sin()
        if self.kind == "a first buffer":
            seen = self._buffers.get("seen")
            self.register_buffer("seen", torch.ones(8) if seen is None else seen * 2)
            return (y * self.get_buffer("seen")).sin()
        if self.kind == "a first module":
            self.children_of_it["more" * (len(self.children_of_it) + 1)] = nn.Identity()
            return (y * len(self.children_of_it)).sin()
        return (y * float(self.generator.randn())).sin()


@pytest.mark.parametrize("kind", ["a key", "a first buffer", "a first module", "a pair of normal numbers"])
def test_what_changes_in_names_alone_is_seen(regions: Regions, kind: str) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        block = Renames(kind)
        for _ in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            block.zero_grad()
            call(block, x * 1).sum().backward()
            assert x.grad is not None
            yield from (x.grad, *(each.grad for each in block.parameters() if each.grad is not None))
        yield torch.tensor([len(name) for name in block.named] + [len(block.children_of_it)])

    regions(step)


def test_a_source_without_state_is_no_state(regions: Regions) -> None:
    assert not PythonState(partial(lambda source: source, random.SystemRandom())).changes


class Plain:
    """An object without a class attribute of its state."""

    def __init__(self) -> None:
        self.count = 1


class Late(nn.Module):
    """Changes its state in later calls only: by then calls have learned what the first ones change."""

    shared: dict[str, list[float]] = {"all": []}

    def __init__(self, kind: str) -> None:
        super().__init__()
        seed_all()
        self.kind, self.up = kind, nn.Linear(8, 8)
        self.todo, self.done = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], list[float]()
        self.named: dict[str, Any] = {"a": None, "b": None}
        self.plain, self.order = Plain(), collections.OrderedDict(a=1.0, b=2.0)
        self.register_buffer("grid", torch.arange(16.0).view(2, 8))
        self.shared["all"].clear()
        globals().pop("FIRST", None)

    def forward(self, x: Tensor, changes: bool) -> Tensor:
        factor = LATE[self.kind](self, changes)
        return torch.tanh(self.up(x) * factor).sin()


def moves_an_item(m: Late, changes: bool) -> float:
    factor = m.todo[-1]
    if changes:
        m.todo.pop()
        m.done.insert(0, factor)
    return factor


def renames_a_key(m: Late, changes: bool) -> float:
    name = next(iter(m.named))
    if changes:
        m.named = m.named
        m.named[name + "a"] = m.named.pop(name)
    return float(len(name))


def reorders_a_dictionary(m: Late, changes: bool) -> float:
    name = next(iter(m.order))
    if changes:
        m.order.move_to_end(name)
    return m.order[name]


def gives_other_strides(m: Late, changes: bool) -> Tensor:
    factor = m.get_buffer("grid")[0].clone()
    if changes:
        data = m.grid.data  # type: ignore[union-attr]
        m.grid.data = data.view(8, 2).t() if data.is_contiguous() else data.t().view(2, 8)  # type: ignore[union-attr]
    return factor


def replaces_the_attributes(m: Late, changes: bool) -> float:
    factor = m.plain.count
    if changes:
        m.plain.__dict__ = {"count": factor + 1}
    return float(factor)


def draws_a_normal_number(m: Late, changes: bool) -> float:
    return float(np.random.randn()) if changes else 1.0


def content_that_objects_share(m: Late, changes: bool) -> float:
    if changes:
        m.shared["all"].append(2.0)
    return sum(m.shared["all"], 1.0)


def a_first_global(m: Late, changes: bool) -> float:
    global FIRST
    factor = globals().get("FIRST", 1.0)
    if changes:
        FIRST = factor + 1.0
    return float(factor)


LATE: dict[str, Callable[[Late, bool], Any]] = {
    each.__name__: each
    for each in (
        *(moves_an_item, renames_a_key, reorders_a_dictionary, gives_other_strides, replaces_the_attributes),
        *(draws_a_normal_number, content_that_objects_share),
    )
}


class FirstGlobal(Late):
    def forward(self, x: Tensor, changes: bool) -> Tensor:
        return torch.tanh(self.up(x) * a_first_global(self, changes)).sin()


class Around(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return self.block(*args)


def late_state(block: Late) -> Iterator[Tensor]:
    yield from (torch.tensor(each) for each in (block.todo, block.done, [float(block.plain.count)]))
    yield torch.tensor([ord(each) for each in "".join((*block.named, *block.order))])
    grid = block.get_buffer("grid")
    yield from (grid, torch.tensor(grid.stride()), torch.tensor(block.shared["all"]))
    yield torch.tensor(globals().get("FIRST", 0.0))


@pytest.mark.parametrize("kind", [*LATE, "a_first_global"])
@pytest.mark.parametrize("attached", [False, True], ids=["recomputed", "attached"])
def test_what_a_later_call_changes_first_is_seen(regions: Regions, kind: str, attached: bool) -> None:
    def run(call: Callable[[nn.Module], Callable[..., Tensor]]) -> list[Tensor]:
        torch.manual_seed(0)
        block = FirstGlobal(kind) if kind == "a_first_global" else Late(kind)
        function, found = call(block), list[Tensor]()
        for step in range(5):
            x = torch.randn(4, 8, requires_grad=True)
            block.zero_grad()
            function(x, step > 1).sum().backward()
            found += [each.clone() for each in (*gradients(x, block), *late_state(block), *generators())]
        return found

    def attach(block: nn.Module) -> Callable[..., Tensor]:
        model = Around(block)
        spillway.attach(model, policy=spillway.Recompute(), blocks=[type(block)], session=regions.session)
        return model

    expected = run(lambda block: block)
    got = run(attach if attached else lambda block: partial(spillway.recompute, block, session=regions.session))
    assert_identical(got, expected)


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.attribute, self.items = nn.Linear(8, 8), torch.zeros(1), [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sin()


def test_no_memory_is_held_between_calls(regions: Regions) -> None:
    model = nn.Sequential(Held(), Held())
    attached = spillway.attach(model, policy=spillway.Recompute(), blocks=[Held], session=regions.session)
    for _ in range(3):
        for block in model:
            block.attribute, block.items = torch.zeros(8), [torch.zeros(8)]
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    weights = [weakref.ref(each.untyped_storage()) for each in model.parameters()]
    values = [weakref.ref(each) for block in model for each in (block.attribute, *block.items)]
    for each in model.parameters():
        each.data = torch.empty(0)
        each.grad = None
    for block in model:
        block.attribute, block.items = None, []
    gc.collect()
    assert not [each for each in (*weights, *values) if each() is not None]
    parameters = [weakref.ref(each) for each in model.parameters()]
    del model, block, each
    gc.collect()
    assert not [each for each in parameters if each() is not None]
    attached.remove()


def test_memory_is_not_held_after_removal(regions: Regions) -> None:
    block = nn.Sequential(Held())
    attached = spillway.attach(block, policy=spillway.Recompute(), blocks=[Held], session=regions.session)
    block(torch.randn(4, 8, requires_grad=True)).sum().backward()
    attached.remove()
    inner = weakref.ref(block[0].up)
    block[0].up = nn.Identity()
    gc.collect()
    assert inner() is None


def test_dead_namespaces_and_modules_are_not_held(regions: Regions) -> None:
    tensors = []
    for _ in range(4):
        names: dict[str, Any] = {"T": torch.zeros(4)}
        tensors.append(weakref.ref(names["T"]))
        exec("def function(x): return x * T + 1", names)
        spillway.recompute(
            names["function"], torch.randn(2, 4, requires_grad=True), session=regions.session
        ).sum().backward()
    del names
    gc.collect()
    assert not [each for each in tensors if each() is not None]
    for _ in range(8):
        function = partial(lambda module, x: module(x), nn.Linear(4, 4))
        spillway.recompute(function, torch.randn(2, 4, requires_grad=True), session=regions.session).sum().backward()
    assert len(regions.session.of(LearnedFunctions)._known) <= 3


class Owner:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.method(x)

    def method(self, x: Tensor) -> Tensor:
        return x * self.tensor


class SlotOwner:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class ClassOwner(nn.Module):
    tensor = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.tensor


def reaching(where: str, tensor: Tensor) -> Callable[..., Any]:
    """A function that reaches a tensor somewhere."""
    if where == "partial":
        return partial(lambda tensor, x: x * tensor, tensor)
    if where == "default":
        return lambda x, tensor=tensor: x * tensor
    if where == "keyword default":
        return lambda x, *, tensor=tensor: x * tensor
    if where == "tuple":
        both = (tensor, 1)
        return lambda x: x * both[0]
    if where == "slots":
        owner = SlotOwner(tensor)
        return lambda x: x * owner.tensor
    if where == "class attribute":
        ClassOwner.tensor = tensor
        return ClassOwner()
    return Owner(tensor).method if where == "method" else Owner(tensor)


@pytest.mark.parametrize(
    "where", ["partial", "default", "keyword default", "tuple", "slots", "class attribute", "method", "object"]
)
def test_each_tensor_that_a_function_reaches_is_known(regions: Regions, where: str) -> None:
    tensor = torch.ones(8)
    function = reaching(where, tensor)
    state = PythonState(function)
    names = [name for name, each in state.reachable() if each is tensor]
    assert len(names) == 1
    again = PythonState(function)
    assert [name for name, each in again.reachable() if each is tensor] == names


def test_a_reachable_tensor_comes_once_and_has_versions(regions: Regions) -> None:
    block = nn.Linear(8, 8)
    with torch.inference_mode():
        block.inferred = torch.ones(8)
    block.again = block.weight
    found = PythonState(block).reachable()
    assert {name for name, _ in found} == {"weight", "bias"}
    assert {id(each) for _, each in found} == {id(block.weight), id(block.bias)}


def test_an_embedding_that_writes_its_weight_is_kept_and_told(regions: Regions) -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.up = nn.Embedding(8, 8, max_norm=1.0), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.up(self.embedding(torch.arange(4)) + x))

    def step(call: Call) -> Iterator[Tensor]:
        seed_all()
        block = Embeds()
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            block.zero_grad()
            with call.context():
                loss = call(lambda x: call(block, x) * 2, x * 1).sum()
            loss.backward()
            yield from (*gradients(x, block), block.embedding.weight)

    regions(step)
    assert "has an embedding with max_norm" in str(regions.last.stats().notes)


def test_numpys_second_normal_number_set_by_hand(regions: Regions) -> None:
    """The words are the same with a second number and without: `set_state` may exchange the two."""
    results = []
    for call in (lambda f, x: f(x), partial(spillway.recompute, session=regions.session)):
        seed_all()
        np.random.randn()
        one_left = np.random.get_state()
        np.random.randn()
        linear, found = nn.Linear(8, 8), list[Any]()
        for step in range(4):
            if step % 2:
                np.random.set_state(one_left)
            x = torch.randn(4, 8, requires_grad=True)
            call(lambda x: torch.tanh(linear(x)) * float(np.random.randn()), x).sum().backward()  # noqa: B023
            found += [x.grad, *generators()]
        results.append(found)
    assert_identical(*results)


class Common:
    """An object that several layers have."""

    def __init__(self) -> None:
        self.scale, self.items, self.tensor = 1.0, [1.0], torch.ones(8)


class Sharing(nn.Module):
    factor = 1.0

    def __init__(self, common: Common, kind: str) -> None:
        super().__init__()
        seed_all()
        self.common, self.kind, self.up = common, kind, nn.Linear(8, 8)

    def forward(self, x: Tensor, changes: bool) -> Tensor:
        common = self.common
        scale = common.scale * sum(common.items) * type(self).factor * getattr(type(self), "late", 1.0)
        result = torch.tanh(self.up(x) * common.tensor * scale).sin()
        if changes and self.kind == "attribute":
            common.scale += 1.0
        elif changes and self.kind == "item":
            common.items.append(2.0)
        elif changes and self.kind == "tensor":
            common.tensor = common.tensor + 1.0
        elif changes and self.kind == "class":
            type(self).factor += 1.0
        elif changes:
            type(self).late = getattr(type(self), "late", 1.0) + 1.0  # type: ignore[attr-defined]
        return result


@pytest.mark.parametrize("kind", ["attribute", "item", "tensor", "class", "new in a class"])
def test_layers_that_change_what_they_share(regions: Regions, kind: str) -> None:
    def run(call: Callable[[nn.Module], Callable[..., Tensor]]) -> list[Tensor]:
        torch.manual_seed(0)
        layer_class = type("Layer", (Sharing,), {})
        common = Common()
        layers, found = [layer_class(common, kind) for _ in range(4)], list[Tensor]()
        functions = [call(layer) for layer in layers]
        for step in range(4):
            x = y = torch.randn(4, 8, requires_grad=True)
            for place, function in enumerate(functions):
                layers[place].zero_grad()
                y = function(y, step > 1 and place in (1, 2))
            y.sum().backward()
            found += [each.clone() for each in (*gradients(x, nn.ModuleList(layers)), common.tensor)]
            of_class = layer_class.factor, getattr(layer_class, "late", 1.0)
            found.append(torch.tensor([common.scale, *common.items, *of_class]))
        return found

    expected = run(lambda layer: layer)
    got = run(lambda layer: partial(spillway.recompute, layer, session=regions.session))
    assert_identical(got, expected)


def test_what_layers_share_is_not_held_between_calls(regions: Regions) -> None:
    common = Common()
    layers = [Sharing(common, "") for _ in range(2)]
    for _ in range(3):
        y = torch.randn(4, 8, requires_grad=True)
        for layer in layers:
            y = spillway.recompute(layer, y, False, session=regions.session)
        y.sum().backward()
    tensor, items = weakref.ref(common.tensor), weakref.ref(common)
    del y, common.tensor
    assert tensor() is None
    del common, layer, layers
    gc.collect()
    assert items() is None


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("how", [{}, {"save": "pointwise"}, {"use_reentrant": True}], ids=str)
def test_parameters_of_a_functional_call_are_those_of_forward(regions: Regions, how: Options, needs_grad: bool) -> None:
    """``torch.func.functional_call`` puts the module's own parameters back before backward."""

    class Model(nn.Module):
        def __init__(self, call: Any) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.call = call

        def forward(self, x: Tensor) -> Tensor:
            return self.call(self.block, x, **how)  # type: ignore[no-any-return]

    def step(call: Call) -> Iterator[Tensor]:
        torch.manual_seed(0)
        model = Model(call)
        for _ in range(4):
            given = {name: torch.randn_like(each).requires_grad_(needs_grad) for name, each in model.named_parameters()}
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                loss = torch.func.functional_call(model, given, (x * 1,)).square().sum()
            loss.backward()
            yield from gradients(x, *(given.values() if needs_grad else ()))
            assert all(each.grad is None for each in model.parameters())

    regions(step)


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_a_scripted_module_inside(regions: Regions, kind: str) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            inner = nn.Linear(8, 8)
            self.inner: Any = torch.jit.script(inner) if kind == "scripted" else torch.jit.trace(inner, torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return cast("Tensor", self.inner(x.sin())).exp()

    def step(call: Call) -> Iterator[Tensor]:
        block = Around()
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            block.zero_grad()
            call(block, x * 1).sum().backward()
            yield from gradients(x, block)

    regions(step)
    block = Around()
    y = spillway.recompute(block, torch.randn(4, 8, requires_grad=True) * 1, session=regions.session)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(2)
    with pytest.raises(spillway.RecomputeError, match="written in place"):
        y.sum().backward()
    torch.ones(1, requires_grad=True).sum().backward()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.count = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.up(x).sin()


def test_a_count_that_is_reset_before_backward_stays_reset(regions: Regions) -> None:
    """A replay begins with the state of forward then, and changes it all the same."""
    block = Counting()
    for _ in range(4):
        loss = spillway.recompute(block, torch.randn(4, 8, requires_grad=True), session=regions.session).sum()
        block.count = 0
        loss.backward()
        assert block.count == 0


# Changes that the function undoes itself, behind the last tensor that backward needs.


class Undoes(nn.Module):
    """Changes something for a part of its forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)
        self.kind, self.depth = kind, 0

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, getattr(self, self.kind)(x))

    def body(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(torch.tanh(self.first(x))))

    def attribute(self, x: Tensor) -> Tensor:
        self.depth += 1
        y = self.body(x * self.depth)
        self.depth -= 1
        return y

    def evaluation(self, x: Tensor) -> Tensor:
        dropped = self.drop(x)
        self.drop.eval()
        y = self.body(dropped + self.drop(x))
        self.drop.train()
        return y

    def memory(self, x: Tensor) -> Tensor:
        before = self.first.weight.data
        self.first.weight.data = before * 2
        y = self.body(x)
        self.first.weight.data = before
        return y

    def seed(self, x: Tensor) -> Tensor:
        before = random.getstate(), np.random.get_state()
        random.seed(7)
        np.random.seed(7)
        y = self.body(x * random.random() * np.random.rand())
        random.setstate(before[0])
        np.random.set_state(before[1])
        return y

    def setting(self, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        y = self.body(x * torch.tensor(0.5).item())
        torch.set_default_dtype(torch.float32)
        return y

    def autocast(self, x: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", True)
        y = self.body(x).float()
        torch.set_autocast_enabled("cpu", False)
        return y

    def hook(self, x: Tensor) -> Tensor:
        handle = self.first.register_forward_hook(lambda module, args, output: output * 1.5)
        y = self.body(x)
        handle.remove()
        return y


@pytest.mark.parametrize("how", [{}, {"save": "matmul"}, {"save": "pointwise"}], ids=str)
@pytest.mark.parametrize(
    "kind",
    ["attribute", "evaluation", "memory", "seed", "setting", "autocast", "hook"],
)
def test_what_forward_undoes_is_undone_after_a_replay_that_ends_before(
    regions: Regions, kind: str, how: Options
) -> None:
    block: Any = None

    def step(call: Call) -> Iterator[Tensor]:
        nonlocal block
        seed_all()
        block = Undoes(kind)
        for _ in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            block.zero_grad()
            with call.context():
                loss = call(block, x * 1, **how).square().sum()
            loss.backward()
            yield from gradients(x, block)
            yield block.first.weight.detach().clone()
            flags = block.depth, block.drop.training, len(block.first._forward_hooks)
            yield torch.tensor([*flags, torch.is_autocast_enabled("cpu")])
            assert torch.get_default_dtype() is torch.float32
        yield from generators()

    regions(step)


class Collects(nn.Module):
    """Collects losses from some step on. The loop reads them, and clears the list before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.losses: list[Tensor] = []
        self.collects = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.collects:
            self.losses.append(hidden.detach().square().mean())
        return cast(Tensor, self.last(hidden))


def test_state_that_a_later_call_changes_and_the_loop_resets_before_backward(regions: Regions) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        seed_all()
        block = Collects()
        for number in range(6):
            block.collects = number >= 3
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                y = call(block, x * 1)
            loss = y.square().sum() * (1 + sum(block.losses))
            yield torch.tensor(len(block.losses))
            block.losses.clear()
            block.zero_grad()
            loss.backward()
            yield from gradients(x, block)

    regions(step)


# State in further places.


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return 1 + self.count / 10


class Pair(NamedTuple):
    mean: Tensor
    counts: list[int]


def decorated(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any) -> Any:
        return method(*args)

    return call


COUNTER = Counter()
BOUND = COUNTER.__call__
PARTIAL = partial(Counter.__call__, COUNTER)
COUNT = 0


class CountsThere(nn.Module):
    """Counts its calls in some place."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.up, self.where = nn.Linear(8, 8), where
        self.pair = Pair(torch.zeros(8), [0])
        self.matrix = np.zeros((2, 2)).view(np.recarray)
        self.fixed = np.zeros(2)
        self.fixed.flags.writeable = False

    @decorated
    def forward(self, x: Tensor) -> Tensor:
        counts = {
            "object": self.object,
            "bound": self.bound,
            "partial": self.partial,
            "tuple": self.tuple,
            "array": self.array,
            "method": self.method,
        }
        return torch.tanh(self.up(x) * counts[self.where]())

    def object(self) -> float:
        return COUNTER()

    def bound(self) -> float:
        return BOUND()

    def partial(self) -> float:
        return PARTIAL()

    def tuple(self) -> float:
        self.pair.counts[0] += 1
        self.pair.mean.add_(1)
        return 1 + self.pair.counts[0] / 10

    def array(self) -> float:
        self.matrix += 1
        return 1 + float(self.matrix[0, 0]) / 10

    def method(self) -> float:
        global COUNT
        COUNT += 1
        return 1 + COUNT / 10

    def counts(self) -> list[float]:
        return [COUNTER.count, COUNT, self.pair.counts[0], self.pair.mean[0].item(), float(self.matrix[0, 0])]


@pytest.mark.parametrize("where", ["object", "bound", "partial", "tuple", "array", "method"])
def test_counts_in_further_places_are_of_one_run(regions: Regions, where: str) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        global COUNT
        COUNT = COUNTER.count = 0
        seed_all()
        block = CountsThere(where)
        for _ in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            block.zero_grad()
            with call.context():
                y = call(block, x * 1)
            y.square().sum().backward()
            yield from gradients(x, block)
            yield torch.tensor(block.counts())

    regions(step)


def test_a_hook_that_the_function_registers_on_a_tensor_from_outside_acts_once(regions: Regions) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        seed_all()
        before, inside = nn.Linear(8, 8), nn.Linear(8, 8)
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            outside = before(x)

            def function(y: Tensor, outside: Tensor = outside) -> Tensor:
                outside.register_hook(lambda gradient: gradient * 0.5)
                return torch.tanh(inside(y) + outside)

            with call.context():
                loss = call(function, torch.randn(4, 8)).square().sum()
            loss.backward()
            yield from gradients(x, before)

    regions(step)
