"""The two queues of copies, out and back, and the compute streams that they are ordered with.

NOTE [ Streams of compute ]

A storage's bytes return to the stream on which they were allocated. The mover cannot know that stream. So it remembers
every compute stream on which a tensor was saved or asked for (nearly always one). The ``out`` stream waits for all of
them before it reads. All of them wait before the mover releases bytes that a copy reads or writes. The bytes may also
belong to a stream on which nothing was saved, such as a data loader's: so the backend is told which streams used them
(``hand_back``). A destination prefetched on one compute stream and asked for on another is dropped and fetched again.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from spillway.errors import TierError, TierFullError
from spillway.runtime.backend import Backend, Event, Stalls, Stream, label
from spillway.runtime.bytes import Bytes
from spillway.runtime.entry import Entry, State
from spillway.runtime.tiers import Slot, Tier
from spillway.types import EventKind

Tell = Callable[..., None]
"""Takes a kind of event, and the entries that it happened to."""


class ComputeStreams:
    """Every compute stream on which a tensor was saved or asked for. Used with the mover's lock held.

    See NOTE [ Streams of compute ].
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._seen: dict[Stream, None] = {}
        self._awaited: Event | None = None

    def now(self) -> Stream:
        stream = self._backend.compute()
        if stream not in self._seen:
            # A new dictionary, since `knows` reads it without the lock.
            self._seen = {**self._seen, stream: None}
            self._awaited = None
        return stream

    def knows(self) -> bool:
        """Whether the calling thread's stream is among them. Needs no lock."""
        return self._backend.compute() in self._seen

    def go_before(self, stream: Stream) -> None:
        """Everything queued on ``stream`` from now on starts after everything queued here by now."""
        for seen in self._seen:
            self._backend.wait(stream, self._backend.record(seen))

    def release(self, entry: Entry, stalls: Stalls) -> None:
        """Release an entry once the copy under way is done."""
        copied = entry.copied
        assert copied is not None
        # A batch has one event, and is waited for once.
        if copied is not self._awaited:
            self._wait(tuple(self._seen), copied, stalls)
            self._awaited = copied
        entry.copied = None
        if entry.source is not None and entry.round == 0:
            self._backend.hand_back(entry.source, self._seen)
        entry.release()

    def drop(self, entry: Entry, stalls: Stalls) -> None:
        """As :meth:`release`, of bytes that no caller asks for, also if the copy under way has failed."""
        try:
            self.release(entry, stalls)
        except TierError:
            entry.copied = None
            entry.release()

    def _wait(self, streams: Sequence[Stream], event: Event, stalls: Stalls) -> None:
        """All of them, also those behind one that gets an error."""
        try:
            self._backend.timed_wait(streams[0], event, stalls)
        finally:
            if len(streams) > 1:
                self._wait(streams[1:], event, stalls)

    def __len__(self) -> int:
        return len(self._seen)


class OffloadQueue:
    """Entries that are LEAVING on the stream ``out``, oldest first. Used with the mover's lock held."""

    def __init__(self, out: Stream, compute: ComputeStreams, tell: Tell) -> None:
        self._out = out
        self._compute = compute
        self._tell = tell
        self._leaving: OrderedDict[Entry, None] = OrderedDict()
        self.nbytes = 0
        """Bytes of all of them."""
        self._shared: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        """Entries, by number, that were released while the program still used their memory."""

    def __len__(self) -> int:
        return len(self._leaving)

    def shared_bytes(self) -> int:
        """Bytes in the state AWAY that the program still uses on the device. Needs no lock."""
        entries = [entry for reference in self._shared.valuerefs() if (entry := reference()) is not None]
        return sum(
            entry.nbytes
            for entry in entries
            if entry.state is State.AWAY and entry.round == 0 and entry.alive() is not None
        )

    def release_until_fits(self, nbytes: int, window: int) -> None:
        """Release the oldest entries until ``nbytes`` more are within the in-flight limit."""
        with label("release"):
            while self._leaving and self.nbytes + nbytes > window:
                self._release(next(iter(self._leaving)))

    def release(self, entries: Sequence[Entry]) -> None:
        """Release these entries, where their copies are under way."""
        with label("release"):
            for entry in entries:
                if entry.state is State.LEAVING and entry.copied is not None:
                    self._release(entry)

    def follow(self) -> None:
        """Copies queued from now on start after everything that compute was given by now."""
        self._compute.go_before(self._out)

    def defer(self, entries: Sequence[Entry], tier: Tier) -> None:
        """Add entries that are copied only if later ones would exceed the limit."""
        for entry in entries:
            entry.tier = tier
            self._add(entry)

    def start(self, entries: Sequence[Entry], tier: Tier) -> None:
        """Queue the copies out, after :meth:`follow`. Entries that do not fit into the tier stay RESIDENT."""
        with label("leave"):
            started = self._store(entries, tier)
            for entry in started:
                self._add(entry)
        # At the end, since a recorder may raise.
        self._tell(EventKind.LEAVE, *started)

    def drop(self, entry: Entry) -> None:
        """Remove an entry whose last handle has died."""
        self._remove(entry)
        if entry.copied is not None:
            self._compute.drop(entry, entry.ledger.out)

    def clear(self) -> None:
        self._leaving.clear()
        self._shared.clear()
        self.nbytes = 0

    def _add(self, entry: Entry) -> None:
        entry.state = State.LEAVING
        self._leaving[entry] = None
        self.nbytes += entry.nbytes

    def _remove(self, entry: Entry) -> None:
        del self._leaving[entry]
        self.nbytes -= entry.nbytes

    def _store(self, entries: Sequence[Entry], tier: Tier) -> list[Entry]:
        """Queue the copies of all entries that fit into the tier; gives these."""
        stored: list[Entry] = []
        slots: list[Slot] = []
        sources: list[Bytes] = []
        copied: Sequence[Event] | None = None
        try:
            for entry in entries:
                assert entry.storage is not None
                source = Bytes(entry.storage, entry.start, entry.nbytes)
                if not source.is_there():
                    self._refuse(entry, "its owner has resized the storage")
                    continue
                try:
                    slots.append(tier.reserve(source))
                except TierFullError as error:
                    self._refuse(entry, str(error))
                    continue
                sources.append(source)
                stored.append(entry)
            if stored:
                copied = tier.store(slots, sources)
        finally:
            if copied is None:
                # Also the slots reserved before the entry that failed.
                for slot in slots:
                    tier.free(slot)
        for entry, slot, source, event in zip(stored, slots, sources, copied or (), strict=True):
            entry.tier, entry.slot, entry.source, entry.copied = tier, slot, source, event
            entry.ledger.offloaded_bytes += entry.nbytes
        return stored

    def _refuse(self, entry: Entry, why: str) -> None:
        """Keep an entry. Using it later is no reuse."""
        entry.counted = True
        entry.ledger.kept_bytes += entry.nbytes
        entry.ledger.note(f"kept on the device, since no tier could take it: {why}")
        self._tell(EventKind.REFUSE, entry)

    def _release(self, entry: Entry) -> None:
        """Wait for an entry's copy on the compute streams, and release it."""
        self._remove(entry)
        entry.state = State.RESIDENT
        was_deferred = entry.copied is None
        if was_deferred:
            self.follow()
            if not self._store((entry,), _tier_of(entry)):
                return
        try:
            self._compute.release(entry, entry.ledger.out)
        except TierError:
            # It was not stored, but it is still on the device. It is kept, and this caller gets the error.
            slot, entry.slot, entry.copied = entry.slot, None, None
            _tier_of(entry).free(slot)
            raise
        entry.state = State.AWAY
        if entry.alive() is not None:
            self._shared[entry.number] = entry
        if was_deferred:
            self._tell(EventKind.LEAVE, entry)
        self._tell(EventKind.RELEASE, entry)


class Order(Protocol):
    """Predicts which entries backward will ask for."""

    def upcoming(self) -> Iterator[Entry | None]:
        """Entries in the order in which backward is expected to ask; ``None`` for those that have died."""

    def fetched(self, count: int) -> None:
        """The first ``count`` of them need not be named again."""


class PrefetchQueue:
    """Entries that are RETURNING on the stream ``back``. Used with the mover's lock held."""

    def __init__(self, backend: Backend, back: Stream, compute: ComputeStreams, tell: Tell) -> None:
        self._backend = backend
        self._back = back
        self._compute = compute
        self._tell = tell
        self._awaited: Event | None = None
        self.nbytes = 0
        """Bytes of all of them."""

    def take(self, entry: Entry, compute: Stream) -> torch.UntypedStorage:
        """The bytes of an entry that is not on the device yet, or not for this compute stream."""
        if entry.state is State.RETURNING and entry.stream != compute:
            self.drop(entry)
        if entry.state is not State.RETURNING:
            self._fetch((entry,), compute, entry.nbytes)
        storage, copied, entry.copied = entry.storage, entry.copied, None
        assert storage is not None
        assert copied is not None
        self.nbytes -= entry.nbytes
        entry.state = State.AWAY
        # A batch has one stream and one event, and is waited for once.
        if copied is not self._awaited:
            self._awaited = None
            try:
                self._backend.timed_wait(compute, copied, entry.ledger.back)
                self._awaited = copied
            finally:
                if self._awaited is None:
                    # A read failed, and the reads queued beside it were waited for. The next caller tries again.
                    entry.release()
        entry.state = State.RESIDENT
        entry.ledger.reloaded_bytes += entry.nbytes
        entry.alive = weakref.ref(storage)
        entry.round += 1
        entry.asked = 0
        self._tell(EventKind.TAKE, entry)
        return storage

    def fetch(self, entries: Sequence[Entry], compute: Stream, batch: int) -> None:
        """Fetch these, whatever the limit. Entries that are not AWAY, or that are alive, are skipped.

        ``batch``: so many bytes may share an event.
        """
        wanted = [entry for entry in entries if _is_needed(entry)]
        if wanted:
            self._fetch(wanted, compute, batch)

    def prefetch(self, order: Order, compute: Stream, window: int, batch: int) -> None:
        """Fetch what backward will ask for next, in order, until ``window`` bytes are under way."""
        if self.nbytes + batch > window:
            return
        count, nbytes = 0, self.nbytes
        wanted: dict[Entry, None] = {}
        for entry in order.upcoming():
            if entry is not None and _is_needed(entry) and entry not in wanted:
                nbytes += entry.nbytes
                if nbytes > window:
                    break
                wanted[entry] = None
            count += 1
        if wanted:
            try:
                self._fetch(list(wanted), compute, batch)
            except (TierError, torch.OutOfMemoryError):
                # Backward has not asked for it yet. When it does, it fetches the entry and gets the error.
                return
        order.fetched(count)

    def drop(self, entry: Entry) -> None:
        """Drop the fetched bytes of an entry that are not needed, or not on this stream."""
        self.nbytes -= entry.nbytes
        entry.state = State.AWAY
        self._compute.drop(entry, entry.ledger.back)

    def _fetch(self, entries: Sequence[Entry], compute: Stream, batch: int) -> None:
        with label("fetch"):
            made = iter([_tier_of(entry).destination(entry.slot, entry.nbytes) for entry in entries])
            # The allocator may have given bytes that queued work on the compute stream still uses.
            self._backend.wait(self._back, self._backend.record(compute))
            # A batch shares an event, which the first of it to be asked for waits for.
            for together in batches(entries, batch):
                self._load(together, list(itertools.islice(made, len(together))), compute)

    def _load(self, entries: Sequence[Entry], destinations: Sequence[Bytes], compute: Stream) -> None:
        copied = _tier_of(entries[0]).load([entry.slot for entry in entries], destinations)
        for entry, destination, event in zip(entries, destinations, copied, strict=True):
            entry.copied = event
            entry.storage = destination.storage
            # Not before the bytes are there: after a failed read a traceback may keep the destination alive.
            entry.alive = _nowhere
            entry.stream = compute
            entry.state = State.RETURNING
            self.nbytes += entry.nbytes
        self._tell(EventKind.RETURN, *entries)


def _is_needed(entry: Entry) -> bool:
    """Whether its bytes are in a tier only, and a handle may ask for them."""
    return entry.state is State.AWAY and entry.handles > 0 and entry.alive() is None


def batches(entries: Iterable[Entry], most: int) -> Iterator[list[Entry]]:
    """Neighbours of one tier, in batches of at most ``most`` bytes, or of one entry."""
    together: list[Entry] = []
    nbytes = 0
    for entry in entries:
        if together and (nbytes + entry.nbytes > most or entry.tier is not together[0].tier):
            yield together
            together, nbytes = [], 0
        together.append(entry)
        nbytes += entry.nbytes
    if together:
        yield together


def _tier_of(entry: Entry) -> Tier:
    assert entry.tier is not None
    return entry.tier


def _nowhere() -> None:
    return None
