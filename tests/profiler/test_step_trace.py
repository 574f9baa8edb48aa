"""What a watch makes of instants: bytes without those that lanes carry, and the host's time without its own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from spillway.profiler.compile import _outside
from spillway.profiler.meter import Meter, Reading
from spillway.profiler.step_trace import StepTrace, StepTracer


class Counter(Meter):
    """Reads a level that is set by hand."""

    def __init__(self) -> None:
        self.level = self.peak = 0
        self.readings: list[Reading] = []

    def mark(self) -> None:
        self.readings.append(Reading(float(len(self.readings)), self.level, self.peak))
        self.peak = self.level

    def finish(self) -> list[Reading]:
        return self.readings

    def take(self, nbytes: int) -> None:
        self.level += nbytes
        self.peak = max(self.peak, self.level)


class Lanes:
    """Carry so many bytes, and tell of each change."""

    def __init__(self, counter: Counter) -> None:
        self.counter, self.nbytes = counter, 0
        self.tell: Callable[[bool], object] = lambda begins: None

    def carry(self, nbytes: int) -> None:
        self.tell(True)
        self.counter.take(nbytes)
        self.nbytes += nbytes
        self.tell(False)


@pytest.mark.parametrize("order", ["more comes late", "more comes early", "less comes late"])
def test_bytes_that_lanes_carry_are_in_no_peak_whenever_they_come(order: str) -> None:
    counter = Counter()
    lanes = Lanes(counter)
    watch = StepTracer(torch.device("cuda"), lambda: lanes.nbytes, counter)
    lanes.tell = watch.moves
    layer = nn.Linear(1, 1)
    x = torch.ones(1, 1, requires_grad=True)
    watch.block_begins("a", "kind", (x,))
    output = layer(x)
    watch.block_ended(0, output)
    if order == "less comes late":
        lanes.carry(1000)
    output.sum().backward()
    if order == "more comes early":
        lanes.carry(1000)
    counter.take(70)
    counter.take(-70)
    if order != "more comes early":
        lanes.carry(1000 if order == "more comes late" else -1000)
    watched = watch.finish()
    assert watched is not None
    assert watched.peak(("back", 0), ("done", 0)) - watched.level(("back", 0)) == 70
    assert watched.level(("done", 0)) == 0


class Node(torch.autograd.Function):
    """Tells which of the tensors that it was given are there when it has released them."""

    there: ClassVar[list[weakref.ref[torch.UntypedStorage]]] = []
    found: ClassVar[list[list[bool]]] = []

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a + b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        ctx.saved_tensors  # noqa: B018
        Node.found.append([each() is not None for each in Node.there])
        return gradient, gradient


@pytest.mark.parametrize(("number", "weighs"), [(1, True), (0, True), (1, False)])
def test_tensors_of_one_call_are_held_until_the_next_node_begins(number: int, weighs: bool) -> None:
    tracer = StepTracer(torch.device("cuda"), lambda: 0, Counter(), weighs=weighs)
    for _ in range(2):
        tracer.block_begins("a", "kind", ())
    Node.there, Node.found = [], []

    def unpack(tensor: Tensor) -> Tensor:
        made = tensor.clone()
        tracer.asked(number, 0, made)
        Node.there.append(weakref.ref(made.untyped_storage()))
        return made

    x = torch.ones(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.detach, unpack):
        y = Node.apply(Node.apply(x, x), x)
    y.sum().backward()
    is_held = weighs and number == 1
    assert Node.found == [[is_held] * 2, [False] * 2 + [is_held] * 2]
    assert tracer.finish().held == ({1} if is_held else set())
    assert not any(each() is not None for each in Node.there)


def test_a_node_whose_python_object_is_made_again_is_the_same_node() -> None:
    tracer = StepTracer(torch.device("cuda"), lambda: 0, Counter(), weighs=True)
    for _ in range(2):
        tracer.block_begins("a", "kind", ())
    there: list[weakref.ref[torch.UntypedStorage]] = []
    found: list[bool] = []
    others = []

    def unpack(tensor: Tensor) -> Tensor:
        made = tensor.clone()
        tracer.asked(1, 0, made)
        there.append(weakref.ref(made.untyped_storage()))
        # Takes the memory of the node's object.
        others.append((tensor @ torch.ones(2, 2, requires_grad=True)).grad_fn)
        return made

    with torch.autograd.graph.saved_tensors_hooks(torch.detach, unpack):
        y = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2, requires_grad=True)
    y.grad_fn.register_hook(lambda *_: found.extend(each() is not None for each in there))
    loss = y.sum()
    del y
    loss.backward()
    assert found == [True, True]
    tracer.close()


def test_what_is_held_goes_with_the_graph_of_a_backward_that_failed() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            ctx.save_for_backward(a)
            return a * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            ctx.saved_tensors  # noqa: B018
            raise RuntimeError("failed")

    tracer = StepTracer(torch.device("cuda"), lambda: 0, Counter(), weighs=True)
    for _ in range(2):
        tracer.block_begins("a", "kind", ())
    Node.there = []

    def unpack(tensor: Tensor) -> Tensor:
        made = tensor.clone()
        tracer.asked(1, 0, made)
        Node.there.append(weakref.ref(made.untyped_storage()))
        return made

    x = torch.ones(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.detach, unpack):
        y = Failing.apply(x.neg()).sum()
    with pytest.raises(RuntimeError, match="failed"):
        y.backward()
    assert len(Node.there) == 1
    del y
    gc.collect()
    assert Node.there[0]() is None


def test_the_first_move_between_two_instants_is_found() -> None:
    counter = Counter()
    watch = StepTracer(torch.device("cuda"), lambda: 0, counter)
    x = torch.ones(1, requires_grad=True)
    number = watch.block_begins("a", "kind", (x,))
    watch.moves(True)
    watch.moves(False)
    output = x * 2
    watch.block_ended(number, output)
    output.sum().backward()
    watch.asked(number, 7)
    watched = watch.finish()
    assert watched is not None
    assert watched.first_move(("forward", 0), ("end", 0)) == ("moving", 0)
    assert watched.first_move(("end", 0), ("done", 0)) == ("done", 0)
    assert watched.asked == [(0, 7)] and ("asked", 0) in watched.readings


def test_the_host_is_timed_without_what_the_watch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("spillway.profiler.step_trace.time.perf_counter", lambda: now[0])

    class Slow(Counter):
        def mark(self) -> None:
            super().mark()
            now[0] += 100.0

    watch = StepTracer(torch.device("cuda"), lambda: 0, Slow())
    x = torch.ones(1, requires_grad=True)
    now[0] += 2.0
    number = watch.block_begins("a", "kind", (x,))
    now[0] += 3.0
    output = x * 2
    watch.block_ended(number, output)
    output.sum().backward()
    watched = watch.finish()
    assert watched is not None
    assert watched.host_seconds(("begin", 0), ("forward", 0)) == 2.0
    assert watched.host_seconds(("forward", 0), ("end", 0)) == 3.0


class Lagging(Counter):
    """A device on which an hour goes by whenever it is to lag."""

    def __init__(self) -> None:
        super().__init__()
        self.hours = 0

    def mark(self) -> None:
        self.readings.append(Reading(3600.0 * self.hours, 0, 0))

    def lag(self, seconds: float) -> None:
        self.hours += 1


def passed(watch: StepTracer, layers: list[nn.Linear], output: torch.Tensor) -> StepTrace:
    """What was seen of a pass through blocks, forward and backward."""
    for layer in layers:
        number = watch.block_begins("a", "kind", (output,))
        output = layer(output)
        watch.block_ended(number, output)
    output.sum().backward()
    watched = watch.finish()
    assert watched is not None
    return watched


@pytest.mark.parametrize("lag", [0.0, 1.0])
def test_a_device_that_lags_is_behind_its_host_from_the_first_block_on(lag: float) -> None:
    watch = StepTracer(torch.device("cuda"), lambda: 0, Lagging(), lag=lag)
    watched = passed(watch, [nn.Linear(1, 1) for _ in range(2)], torch.ones(1, 1, requires_grad=True) * 1)
    behind = [watched.is_behind(place) for place in watched.order]
    if not lag:
        assert not any(behind)
        return
    # Nothing that is outside of blocks has waited for it.
    assert watched.order[:3] == [("begin", 0), ("started", 0), ("forward", 0)]
    assert behind == [place[0] not in ("begin", "started") for place in watched.order]
    hours = [watched.readings[place].seconds / 3600 for place in (("end", 1), ("turned", 0), ("back", 1), ("back", 0))]
    assert hours == [1, 1, 2, 2]


class Ticking(Lagging):
    """One on which a second goes by from instant to instant, besides."""

    def mark(self) -> None:
        self.readings.append(Reading(3600.0 * self.hours + len(self.readings), 0, 0))


def test_frozen_blocks_are_outside_and_the_lag_is_nowhere() -> None:
    watch = StepTracer(torch.device("cuda"), lambda: 0, Ticking(), lag=1.0)
    watched = passed(watch, [nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1)], torch.ones(1, 1))
    names = [what for what, _ in watched.order]
    assert names == ["begin", "started", "frozen", "frozen", "forward", "end", "turned", "back", "done"]
    before = _outside(watched, watched, ("begin", 0), ("forward", 0), stops=("started", 0))
    middle = _outside(watched, watched, ("end", 0), ("back", 0), stops=("turned", 0))
    # From the first instant to where it lags; and from the frozen block's begin to its end, and on to the next one.
    assert (before.seconds, middle.seconds) == (3.0, 1.0)
    assert 0 <= before.host_seconds < 1
