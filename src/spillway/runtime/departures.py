"""The way out: which entries are leaving, and when their bytes are let go."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

from spillway.errors import TierError, TierFullError
from spillway.events import EventKind
from spillway.runtime.backend import Event, Lane
from spillway.runtime.bytes import Bytes
from spillway.runtime.compute_lanes import ComputeLanes
from spillway.runtime.entry import Entry, State
from spillway.runtime.labels import labelled
from spillway.runtime.tiers import Slot, Tier

Tell = Callable[[EventKind, Entry], None]


class Departures:
    """Entries that are LEAVING, oldest first. Used with the mover's lock held.

    Args:
        out: the lane of the copies.
        compute: what they wait for, and what waits for them.
        tell: told of everything that happens, or ``None``.
    """

    def __init__(self, out: Lane, compute: ComputeLanes, tell: Tell | None) -> None:
        self._out = out
        self._compute = compute
        self._tell = tell
        self._leaving: OrderedDict[Entry, None] = OrderedDict()
        self.nbytes = 0
        """Bytes of all of them."""
        self._held: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        """Those that were let go of while somebody held their memory, by their numbers."""

    def __len__(self) -> int:
        return len(self._leaving)

    def held_bytes(self) -> int:
        """Bytes of what is AWAY and on the device, since the program holds it still. May be called without the lock."""
        entries = [entry for reference in self._held.valuerefs() if (entry := reference()) is not None]
        return sum(
            entry.nbytes
            for entry in entries
            if entry.state is State.AWAY and entry.round == 0 and entry.alive() is not None
        )

    @labelled("release")
    def make_room(self, nbytes: int, window: int) -> None:
        """Let go of the oldest until so many more are within the window."""
        while self._leaving and self.nbytes + nbytes > window:
            self._settle(next(iter(self._leaving)))

    @labelled("release")
    def settle(self, entries: Sequence[Entry]) -> None:
        """Let go of these, where their copies are under way."""
        for entry in entries:
            if entry.state is State.LEAVING and entry.copied is not None:
                self._settle(entry)

    def follow(self) -> None:
        """Copies that are queued from now on start after all that compute was given to do by now."""
        self._compute.go_before(self._out)

    def hold(self, entries: Sequence[Entry], tier: Tier) -> None:
        """Entries that are only copied if the window wants their room."""
        for entry in entries:
            entry.tier = tier
            self._join(entry)

    @labelled("leave")
    def start(self, entries: Sequence[Entry], tier: Tier) -> None:
        """Queue the copies out, after :meth:`follow`. Those that the tier has no room for stay RESIDENT."""
        started = self._store(entries, tier)
        for entry in started:
            self._join(entry)
        # When all is settled: whoever is told may raise.
        if self._tell is not None:
            for entry in started:
                self._tell(EventKind.LEAVE, entry)

    def drop(self, entry: Entry) -> None:
        """Nobody wants it any more."""
        self._leave(entry)
        if entry.copied is not None:
            if entry.tier is not None and entry.slot is not None:
                entry.tier.cancel(entry.slot)
            try:
                self._compute.let_go(entry, entry.ledger.out)
            except TierError:
                # The write has failed, so it is over, and nobody asks for these bytes.
                entry.copied = None
                entry.let_go()

    def clear(self) -> None:
        """Forget all of them."""
        self._leaving.clear()
        self._held.clear()
        self.nbytes = 0

    def _join(self, entry: Entry) -> None:
        entry.state = State.LEAVING
        self._leaving[entry] = None
        self.nbytes += entry.nbytes

    def _leave(self, entry: Entry) -> None:
        del self._leaving[entry]
        self.nbytes -= entry.nbytes

    def _store(self, entries: Sequence[Entry], tier: Tier) -> list[Entry]:
        """Queue the copies of all that the tier has room for, and give these."""
        stored: list[Entry] = []
        slots: list[Slot] = []
        sources: list[Bytes] = []
        copied: Sequence[Event] | None = None
        try:
            for entry in entries:
                self._reserve(entry, tier, stored, slots, sources)
            if stored:
                copied = tier.store(slots, sources)
        finally:
            if copied is None:
                # Also those of the batch that came before the one that failed.
                for slot in slots:
                    tier.release(slot)
        for entry, slot, source, event in zip(stored, slots, sources, copied or (), strict=True):
            entry.tier, entry.slot, entry.source, entry.copied = tier, slot, source, event
            entry.ledger.offloaded_bytes += entry.nbytes
        return stored

    def _reserve(self, entry: Entry, tier: Tier, stored: list[Entry], slots: list[Slot], sources: list[Bytes]) -> None:
        source = _source(entry)
        if source is None:
            self._refuse(entry, "its owner has taken the memory from under it")
            return
        try:
            slots.append(tier.reserve(source))
        except TierFullError as error:
            self._refuse(entry, str(error))
            return
        sources.append(source)
        stored.append(entry)

    def _refuse(self, entry: Entry, why: str) -> None:
        """It is kept, and using it is no reuse."""
        entry.counted = True
        entry.ledger.kept_bytes += entry.nbytes
        entry.ledger.note(f"kept on the device, since no tier could take it: {why}")
        if self._tell is not None:
            self._tell(EventKind.REFUSE, entry)

    def _settle(self, entry: Entry) -> None:
        """Let go of an entry."""
        self._leave(entry)
        entry.state = State.RESIDENT
        held = entry.copied is None
        if held:
            # It was held back in the hope that backward comes first.
            assert entry.tier is not None
            self.follow()
            if not self._store((entry,), entry.tier):
                return
        try:
            self._compute.let_go(entry, entry.ledger.out)
        except TierError:
            # It was not stored, but it is still here: it stays, and whoever filled the window hears of it.
            assert entry.tier is not None
            assert entry.slot is not None
            slot, entry.slot, entry.copied = entry.slot, None, None
            entry.tier.release(slot)
            raise
        entry.state = State.AWAY
        if entry.alive() is not None:
            self._held[entry.number] = entry
        if self._tell is not None:
            if held:
                self._tell(EventKind.LEAVE, entry)
            self._tell(EventKind.RELEASE, entry)


def _source(entry: Entry) -> Bytes | None:
    """What is to leave, unless the user has taken the memory from under it."""
    storage = entry.storage
    assert storage is not None
    source = Bytes(storage, entry.start, entry.nbytes)
    return source if source.is_there() else None
