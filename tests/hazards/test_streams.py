"""Hazards 33 to 35 and 42 to 45: copies that are late, and bytes that change hands while a copy is on its way.

Lanes are made slow or stopped, and backends made to watch, at the public seam ``Session(backend=...)``.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spillway
from spillway import EventKind, EventList
from spillway.errors import TierError
from spillway.runtime.backend import Event, Stalls, Stream
from spillway.runtime.bytes import Bytes
from spillway.runtime.cpu import CpuBackend
from spillway.runtime.device import DeviceRuntime
from spillway.runtime.spill_file import SpillFile
from spillway.runtime.tiers import Slot, Tier
from spillway.saved_tensors.hooks import SavedState
from spillway.testing import AdversaryBackend
from support import (
    CPU,
    Context,
    Saves,
    SlowBackend,
    Trial,
    Way,
    assert_identical,
    assert_nothing_left,
    grads,
    mlp,
    run,
    session_on,
    training_step,
    two_graphs,
)

MIB = 1 << 20


class Gate(CpuBackend):
    """The CPU's backend, with streams that can be stopped. Everything goes over them, as on an accelerator."""

    direct_disk = False

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.open = {"out": threading.Event(), "back": threading.Event()}
        self._named: dict[str, Stream] = {}

    def new_stream(self, name: str, *, first: bool = False) -> Stream:
        self._named[name] = super().new_stream(name, first=first)
        return self._named[name]

    def copy(self, stream: Stream, destination: Bytes, source: Bytes) -> None:
        gate = next(self.open[name] for name, known in self._named.items() if known is stream)

        def stop() -> None:
            gate.wait(20)

        stream.submit(stop)  # type: ignore[attr-defined]
        super().copy(stream, destination, source)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[tuple[Gate, DeviceRuntime]]:
    backend = Gate()
    file = SpillFile(tmp_path, allow_memory_filesystem=True)
    runtime = DeviceRuntime(backend, lambda: file, window=64 * MIB, host_budget=64 * MIB)
    yield backend, runtime
    for event in backend.open.values():
        event.set()
    runtime.close()
    file.close()


def content(number: int) -> torch.Tensor:
    return torch.full((3 * 4096,), number, dtype=torch.uint8)


def reserve(tier: Tier, tensor: torch.Tensor) -> Slot:
    return tier.reserve(Bytes.of(tensor))


def store(tier: Tier, slot: Slot, tensor: torch.Tensor) -> Event:
    (event,) = tier.store((slot,), (Bytes.of(tensor),))
    return event


def load(tier: Tier, slot: Slot, tensor: torch.Tensor) -> Event:
    (event,) = tier.load((slot,), (Bytes.of(tensor),))
    return event


@pytest.mark.parametrize("tier_name", ["host", "disk"])
def test_h42_a_reload_issued_before_its_own_copy_out_is_done(gate: tuple[Gate, DeviceRuntime], tier_name: str) -> None:
    backend, runtime = gate
    tier, source, destination = runtime.tier(tier_name), content(7), content(0)
    slot = reserve(tier, source)
    store(tier, slot, source)
    backend.open["back"].set()
    loaded = load(tier, slot, destination)
    time.sleep(0.02)
    assert not loaded.query()
    backend.open["out"].set()
    loaded.synchronize()
    assert torch.equal(destination, content(7))


@pytest.mark.parametrize("tier_name", ["host", "disk"])
def test_h44_a_buffer_given_back_while_its_copy_back_is_queued(
    gate: tuple[Gate, DeviceRuntime], tier_name: str
) -> None:
    """The next owner gets the same bytes, and must not write them before the copy has read them."""
    backend, runtime = gate
    backend.open["out"].set()
    tier = runtime.tier(tier_name)
    first, destination = reserve(tier, content(7)), content(0)
    store(tier, first, content(7)).synchronize()
    tier.synchronize()
    loaded = load(tier, first, destination)
    tier.free(first)
    others = [reserve(tier, content(9)) for _ in range(3)]
    stored = [store(tier, slot, content(9)) for slot in others]
    time.sleep(0.02)
    backend.open["back"].set()
    loaded.synchronize()
    assert torch.equal(destination, content(7))
    for event in stored:
        event.synchronize()
    for slot in others:
        load(tier, slot, destination).synchronize()
        assert torch.equal(destination, content(9))
        tier.free(slot)


@pytest.mark.parametrize("tier_name", ["host", "disk"])
def test_h44_a_buffer_given_back_while_its_copy_out_is_queued(gate: tuple[Gate, DeviceRuntime], tier_name: str) -> None:
    """Its graph was dropped at once. The late copy must not land in the next owner's bytes."""
    backend, runtime = gate
    backend.open["back"].set()
    tier = runtime.tier(tier_name)
    dropped = reserve(tier, content(7))
    store(tier, dropped, content(7))
    tier.free(dropped)
    slot, destination = reserve(tier, content(9)), content(0)
    store(tier, slot, content(9))
    loaded = load(tier, slot, destination)
    time.sleep(0.02)
    backend.open["out"].set()
    loaded.synchronize()
    assert torch.equal(destination, content(9))
    tier.free(slot)


@pytest.mark.parametrize("late", ["out", "back"])
def test_h42_h44_slow_lanes_change_nothing(way: Way, events: EventList, tmp_path: Path, late: str) -> None:
    with session_on(SlowBackend(late).serve, way, events, tmp_path) as session:
        Trial(session, events, way)(training_step)


@pytest.mark.parametrize("step", [training_step, two_graphs])
def test_h42_h43_h44_under_the_adversary(
    way: Way, events: EventList, tmp_path: Path, step: Callable[[Context], Iterator[torch.Tensor]]
) -> None:
    """Each copy is done as late as the events allow, and holds neither its source nor its destination."""
    adversary = AdversaryBackend()
    with session_on(adversary.serve, way, events, tmp_path) as session:
        Trial(session, events, way)(step)
    adversary.check()


class SameDevice(CpuBackend):
    """Looks at what is allocated: bytes copied to another device than meant end the process."""

    def empty(self, nbytes: int) -> Bytes:
        memory = super().empty(nbytes)
        assert memory.storage.device == self.device
        return memory


def test_h33_bytes_return_to_their_device_whatever_the_default_is(way: Way, events: EventList, tmp_path: Path) -> None:
    """The default device is another one: in forward, in backward, and where a saved tensor is read from the graph."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(1024, device="cpu", requires_grad=True)
        with torch.device("meta"):
            with context():
                hidden = (leaf * 2).sin()
                loss = Saves.apply(hidden, hidden * 2, hidden.exp()).sin().exp().sum()
            node: Any = hidden.grad_fn
            del hidden
            yield node._saved_self
            loss.backward()
        yield from grads(leaf)

    with session_on(SameDevice, way, events, tmp_path) as session:
        Trial(session, events, way)(step)


def test_h34_the_compute_lane_is_asked_for_when_it_is_used(way: Way, events: EventList, tmp_path: Path) -> None:
    """Session, forward and backward each on another stream: the accounts say who waited for whom."""
    adversary = AdversaryBackend()
    plain = run(training_step, lambda **_: torch.enable_grad())

    def backward_elsewhere(context: Context) -> Iterator[torch.Tensor]:
        model, batch = mlp(32, 128, 128, 128, 8), torch.randn(16, 32, requires_grad=True)
        with adversary.stream("forward"), context():
            loss = model(batch).square().mean()
        with adversary.stream("backward"):
            loss.backward()
        yield loss.detach()
        yield from grads(*model.parameters(), batch)

    with adversary.stream("construction"):
        session = session_on(adversary.serve, way, events, tmp_path)
        session.runtime(CPU)
    with session:
        trial = Trial(session, events, way)
        for _ in range(3):
            assert_identical(run(backward_elsewhere, trial.offload), plain)
            assert_nothing_left(session)
    adversary.check()


@pytest.mark.parametrize("way", [Way("host", 20_000), Way("disk", 20_000)], ids=str)
def test_h35_what_is_let_go_and_when_does_not_depend_on_timing(way: Way, tmp_path: Path) -> None:
    """``record_stream`` frees when the copy happens to be done. Here program order alone decides.

    Four storages fit into the window, so that one whose copy is done could be let go too early.
    """

    def unhurried(context: Context) -> Iterator[torch.Tensor]:
        hidden = leaf = torch.randn(1024, requires_grad=True)
        with context():
            for _ in range(12):
                hidden = hidden.sin() * 1.5
                time.sleep(0.001)
        hidden.sum().backward()
        yield from grads(leaf)

    schedules = []
    for backend in (CpuBackend(CPU), SlowBackend("out", 0.01), SlowBackend("back", 0.01)):
        events = EventList()
        with session_on(lambda device, backend=backend: backend, way, events, tmp_path) as session:
            Trial(session, events, way)(unhurried)
        schedules.append(events.schedule())
    assert schedules[0] == schedules[1] == schedules[2]


def test_h45_destinations_are_allocated_where_they_are_used(way: Way, events: EventList, tmp_path: Path) -> None:
    """By the thread that asks, on its own compute stream: a stream or a task would pile them up in its pool."""
    backend = SlowBackend("nothing")
    with session_on(backend.serve, way, events, tmp_path) as session:
        Trial(session, events, way)(training_step)
    assert backend.allocating_threads == {threading.get_ident()}


class Allocating(AdversaryBackend):
    """Writes down on which compute stream each tensor was allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()

    def empty(self, nbytes: int) -> Bytes:
        memory = super().empty(nbytes)
        self.lanes[memory.storage] = self._line(self.compute()).name
        return memory


def test_h45_bytes_prefetched_for_another_compute_lane_are_fetched_again(tmp_path: Path) -> None:
    """The allocator would give them back to the first stream while the second may still read them."""
    adversary, events = Allocating(), EventList()
    with session_on(adversary.serve, Way("host", 1 << 20), events, tmp_path) as session:
        leaf = torch.randn(1024, requires_grad=True)
        with spillway.offload(session=session, min_bytes=0, tier="host"):
            made = [leaf * 2]
            for _ in range(4):
                made.append(made[-1].sin())
        wanted = made[0].clone()
        nodes: list[Any] = [each.grad_fn for each in made]
        for entry in list(session.of(SavedState).learned(None)._waiting[-1][2]._entries):
            session.runtime(CPU).mover.release([found for found in (entry(),) if found is not None])
        del made, entry
        with adversary.stream("one"):
            last = nodes[-1]._saved_self
        prefetched = sum(event.kind is EventKind.RETURN for event in events.events)
        assert prefetched > 1
        with adversary.stream("two"):
            first = nodes[1]._saved_self
        assert adversary.lanes[last.untyped_storage()] == "one"
        assert adversary.lanes[first.untyped_storage()] == "two"
        assert torch.equal(first, wanted)
        del nodes, last, first
    adversary.check()


def test_h43_bytes_are_held_until_their_copy_is_done(way: Way, events: EventList, tmp_path: Path) -> None:
    """What is let go is waited for first, by compute: the allocator may hand it out in the next line."""

    class Watching(SlowBackend):
        pending: list[tuple[Event, torch.UntypedStorage]] = []
        overtaken = 0

        def copy(self, stream: Stream, destination: Bytes, source: Bytes) -> None:
            super().copy(stream, destination, source)
            if self._named[stream] == "out":
                self.pending.append((self.record(stream), source.storage))

    backend = Watching("out")

    def recorder(event: spillway.Event) -> None:
        events(event)
        if event.kind is EventKind.RELEASE:
            copied, _ = backend.pending.pop(0)
            backend.overtaken += not copied.query()

    with spillway.Session(
        backend=backend.serve,
        window=way.window,
        spill_directory=tmp_path,
        allow_memory_filesystem=True,
        recorder=recorder,
    ) as session:
        context = spillway.offload(session=session, min_bytes=0, tier=way.tier)
        leaf = torch.randn(1024, requires_grad=True)
        with context:
            hidden = leaf * 2
            for _ in range(6):
                hidden = hidden.sin().exp()
        assert events.events[-1].kind is EventKind.LEAVE
        assert len(backend.pending) == 1
        assert backend.overtaken == 0
        backend.pending.clear()
        hidden.sum().backward()


class Noting(AdversaryBackend):
    """Writes down which compute streams wait for what leaves, and were named when memory was handed back."""

    def __init__(self, refuses: str = "") -> None:
        super().__init__()
        self.refuses = refuses
        self.waits: dict[Event, list[str]] = {}
        self.handed: list[tuple[int, list[str]]] = []

    def timed_wait(self, stream: Stream, event: Event, stalls: Stalls) -> None:
        name = self._line(stream).name
        self.waits.setdefault(event, []).append(name)
        if name == self.refuses:
            raise TierError("got a write that failed, for a test")
        super().timed_wait(stream, event, stalls)

    def hand_back(self, memory: Bytes, streams: Iterable[Stream]) -> None:
        self.handed.append((memory.nbytes, [self._line(stream).name for stream in streams]))


def on_two_lanes(adversary: Noting, path: Path) -> None:
    """What was saved on the first leaves while the second is at work."""
    with session_on(adversary.serve, Way("host", 20_000), EventList(), path) as session:
        leaf = torch.randn(1024, requires_grad=True)
        with spillway.offload(session=session, min_bytes=0, tier="host"):
            with adversary.stream("one"):
                hidden = (leaf * 2).sin()
            with adversary.stream("two"):
                for _ in range(12):
                    hidden = hidden.sin()
        with adversary.stream("two"):
            hidden.sum().backward()


def test_h43_all_compute_lanes_wait_for_what_is_let_go(tmp_path: Path) -> None:
    adversary = Noting()
    on_two_lanes(adversary, tmp_path)
    leaving = [names for names in adversary.waits.values() if len(names) > 1]
    assert len(leaving) >= 4 and all(names[:2] == ["one", "two"] for names in leaving)
    assert len(adversary.handed) >= 4 and all(names[:2] == ["one", "two"] for _, names in adversary.handed)


def test_h43_all_compute_lanes_wait_though_the_first_hears_of_an_error(tmp_path: Path) -> None:
    adversary = Noting("one")
    with pytest.raises(TierError, match="for a test"):
        on_two_lanes(adversary, tmp_path)
    assert next(iter(adversary.waits.values())) == ["one", "two"]
