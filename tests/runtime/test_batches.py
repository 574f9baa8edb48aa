"""What leaves or returns together has one event: what becomes of the others when one of them goes wrong."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import spillway
from spillway.errors import TransferError
from spillway.runtime import tiers
from spillway.runtime.arena import Arena
from spillway.runtime.backend import Stream
from spillway.runtime.bytes import Bytes
from spillway.runtime.cpu import CpuBackend
from spillway.runtime.entry import ByteCounters, Entry
from spillway.runtime.mover import Mover
from spillway.runtime.tiers import HostTier
from spillway.testing import AdversaryBackend
from spillway.types import Decision, Event, EventKind, EventList, SavedTensor

NBYTES = 4000


def entries(count: int) -> list[Entry]:
    """Entry ``n`` is a thousand times the number ``n``."""
    return [Entry(n, torch.full((1000,), float(n)).untyped_storage(), 0, NBYTES, ByteCounters()) for n in range(count)]


def host(adversary: AdversaryBackend, mover: Mover) -> HostTier:
    out, back = mover.streams
    return HostTier(adversary, Arena(adversary.host_slab, capacity=1 << 26), out=out, back=back)


class Upcoming:
    """An order that names what it is given."""

    def __init__(self, named: Sequence[Entry]) -> None:
        self._named = named

    def upcoming(self) -> Iterator[Entry | None]:
        return iter(self._named)

    def fetched(self, count: int) -> None:
        pass


def first_number(storage: torch.UntypedStorage) -> float:
    return float(torch.empty(0).set_(storage)[0])  # type: ignore[call-overload]


def push_out(mover: Mover, tier: HostTier) -> None:
    mover.put([Entry(99, torch.ones(1000).untyped_storage(), 0, NBYTES, ByteCounters())], tier, window=0)


def test_an_entry_that_is_named_twice_is_fetched_once() -> None:
    adversary = AdversaryBackend()
    mover = Mover(adversary, window=1 << 20)
    tier, there = host(adversary, mover), entries(4)
    mover.put(there, tier)
    push_out(mover, tier)
    mover.take(there[0], -1, Upcoming([there[1], there[1], there[2]]))
    for entry in there[1:3]:
        assert first_number(mover.take(entry, -1)[0]) == entry.number
    assert mover.counts()["returning bytes"] == 0
    adversary.check()


def test_an_entry_that_was_offloaded_before_is_not_stored_again() -> None:
    adversary = AdversaryBackend()
    events = EventList()
    mover = Mover(adversary, window=1 << 20, recorder=events)
    tier, there = host(adversary, mover), entries(1)
    mover.see(there[0])
    # The second handle has not asked: the entry stays on the device, and keeps its slot.
    assert mover.adopt(there[0], same_content=True)
    mover.put(there, tier)
    push_out(mover, tier)
    mover.take(there[0], -1)
    mover.put(there, tier)
    assert [kind for kind, entry in events.schedule() if entry == 0] == ["leave", "release", "return", "take"]
    adversary.check()


def test_neighbours_in_two_tiers_are_fetched_each_from_its_own(tmp_path: Path) -> None:
    def gradient(context: contextlib.AbstractContextManager[object]) -> torch.Tensor:
        leaf = torch.linspace(-1, 1, 100, requires_grad=True)
        with context:
            hidden = leaf
            for _ in range(40):
                hidden = hidden.tanh()
        hidden.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def in_turn(saved: SavedTensor) -> Decision:
        return Decision.OFFLOAD_HOST if saved.position % 2 else Decision.OFFLOAD_DISK

    # A batch is an eighth of the window: two tensors.
    with spillway.Session(window=8192, spill_directory=tmp_path, allow_memory_filesystem=True) as session:
        context = spillway.offload(session=session, policy=in_turn, min_bytes=0)
        assert torch.equal(gradient(context), gradient(contextlib.nullcontext()))
        assert context.stats().reloaded_bytes > 0


@pytest.mark.parametrize("kind", [EventKind.LEAVE, EventKind.RETURN], ids=str)
def test_a_recorder_that_raises_in_a_batch_does_no_harm(kind: EventKind) -> None:
    armed = False

    def recorder(event: Event) -> None:
        if armed and event.kind is kind and event.entry == 1:
            raise KeyError("recorder")

    adversary = AdversaryBackend()
    mover = Mover(adversary, window=1 << 20, recorder=recorder)
    tier, there = host(adversary, mover), entries(4)
    armed = kind is EventKind.LEAVE
    if armed:
        with pytest.raises(KeyError):
            mover.put(there, tier)
    else:
        mover.put(there, tier)
        push_out(mover, tier)
        armed = True
        with pytest.raises(KeyError):
            mover.take(there[0], -1, Upcoming(there[1:]))
    armed = False
    gc.collect()
    push_out(mover, tier)
    for _ in range(2):
        for entry in there[1:]:
            assert first_number(mover.take(entry, entry.round - 1)[0]) == entry.number
            gc.collect()
    adversary.check()


def test_a_lane_that_only_shares_what_another_saved_is_waited_for() -> None:
    adversary = AdversaryBackend()
    with spillway.Session(backend=adversary.serve, window=0) as session:
        leaf = torch.randn(64, 64, requires_grad=True)
        parameter = torch.nn.Parameter(torch.randn(64, 64))
        with spillway.offload(session=session, min_bytes=0, tier="host"):
            hidden = leaf.exp()
            with adversary.stream("side"):
                product = hidden @ parameter
            loss = product.sum()
        assert session.runtime(leaf.device).mover.counts()["compute streams"] == 2
        loss.backward()
    adversary.check()


class LateBack(CpuBackend):
    """Copies back are slow, and hold their ends no more than a device's would."""

    direct_disk = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), threads=4)
        self.into_the_dead = 0

    def copy(self, stream: Stream, destination: Bytes, source: Bytes) -> None:
        if stream is not self._streams[1]:
            super().copy(stream, destination, source)
            return
        alive, held = weakref.ref(destination.storage), source

        def work() -> None:
            time.sleep(0.05)
            self.into_the_dead += alive() is None
            assert held is not None

        stream.submit(work)  # type: ignore[attr-defined]


def test_a_piece_that_cannot_be_read_does_not_free_what_the_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "PIECE_BYTES", 4096)
    backend = LateBack()
    options = {"spill_directory": tmp_path, "allow_memory_filesystem": True, "window": 0}
    with spillway.Session(backend=lambda device: backend, **options) as session:  # type: ignore[arg-type]
        leaf = torch.randn(4 * 1024, requires_grad=True)
        with spillway.offload(session=session, min_bytes=0, tier="disk"):
            loss = leaf.exp().exp().exp().sum()
        session.synchronize()
        assert session._file is not None
        read, lock, calls = session._file.read, threading.Lock(), []

        def fail_first(*arguments: object) -> None:
            with lock:
                calls.append(arguments)
                first = len(calls) == 1
            if first:
                raise TransferError("not now")
            read(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(session._file, "read", fail_first)
        with pytest.raises(TransferError, match="not now"):
            loss.backward(retain_graph=True)
        gc.collect()
        backend.record(session.runtime(leaf.device).mover.streams[1]).synchronize()
        assert len(calls) >= 4
        assert backend.into_the_dead == 0
