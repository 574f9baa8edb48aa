"""The way back: what was asked for, and what will be."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from spillway.errors import TierError
from spillway.events import EventKind
from spillway.runtime.backend import Backend, Event, Lane
from spillway.runtime.bytes import Bytes, Form
from spillway.runtime.compute_lanes import ComputeLanes
from spillway.runtime.departures import Tell
from spillway.runtime.entry import Entry, State
from spillway.runtime.labels import labelled


class Order(Protocol):
    """Knows what will be asked for."""

    def upcoming(self) -> Iterator[Entry | None]:
        """What is expected to be asked for next, in order; ``None`` for what is gone."""
        ...

    def fetched(self, count: int) -> None:
        """So many of them need not be named again."""
        ...


class Returns:
    """Entries that are RETURNING. Used with the mover's lock held.

    Args:
        backend: the device.
        back: the lane of the copies.
        compute: what they wait for, and what waits for them.
        window: bytes that may be fetched ahead.
        batch: bytes that are fetched together, where it is no more than this.
        tell: told of everything that happens, or ``None``.
    """

    def __init__(
        self, backend: Backend, back: Lane, compute: ComputeLanes, *, window: int, batch: int, tell: Tell | None
    ) -> None:
        self._backend = backend
        self._back = back
        self._compute = compute
        self.resize(window, batch)
        self._tell = tell
        self._awaited: Event | None = None
        self.nbytes = 0
        """Bytes of all of them."""

    def resize(self, window: int, batch: int) -> None:
        """From now on, so many bytes may be fetched ahead."""
        self._window = window
        self._batch = batch
        self._refill_at = window - batch

    @labelled("take")
    def take(self, entry: Entry, compute: Lane) -> torch.UntypedStorage:
        """The entry's bytes, which are not on the device yet, or not for this compute lane."""
        if entry.state is State.RETURNING and entry.lane != compute:
            self.give_up(entry)
        if entry.state is not State.RETURNING:
            self._fetch((entry,), compute)
        storage, copied, entry.copied = entry.storage, entry.copied, None
        assert storage is not None
        assert copied is not None
        self.nbytes -= entry.nbytes
        entry.state = State.AWAY
        # What was fetched together has one lane and one event, and needs to be waited for once.
        if copied is not self._awaited:
            self._awaited = None
            try:
                self._backend.timed_wait(compute, copied, entry.ledger.back)
                self._awaited = copied
            finally:
                if self._awaited is None:
                    # A read failed, and what was queued beside it has been waited for: whoever asks again, tries again.
                    entry.let_go()
        entry.state = State.RESIDENT
        entry.ledger.reloaded_bytes += entry.nbytes
        entry.alive = weakref.ref(storage)
        entry.low = entry.start
        entry.round += 1
        entry.asked = 0
        if self._tell is not None:
            self._tell(EventKind.TAKE, entry)
        return storage

    def fetch(self, entries: Sequence[Entry], compute: Lane) -> None:
        """Fetch these, whatever the window. What is not AWAY, or alive, is passed."""
        wanted = [
            entry for entry in entries if entry.state is State.AWAY and entry.handles > 0 and entry.alive() is None
        ]
        if wanted:
            self._fetch(wanted, compute)

    def prefetch(self, order: Order, compute: Lane) -> None:
        """Fetch what will be asked for, in order, as far as the window goes. What is not AWAY, or alive, is passed."""
        if self.nbytes > self._refill_at:
            return
        count, nbytes = 0, self.nbytes
        wanted: dict[Entry, None] = {}
        for entry in order.upcoming():
            if (
                entry is not None
                and entry.state is State.AWAY
                and entry.handles > 0
                and entry not in wanted
                and entry.alive() is None
            ):
                nbytes += entry.nbytes
                if nbytes > self._window:
                    break
                wanted[entry] = None
            count += 1
        if wanted:
            try:
                self._fetch(list(wanted), compute)
            except (TierError, torch.OutOfMemoryError):
                # Nobody has asked for it yet. Who does, fetches it, and hears of it.
                return
        order.fetched(count)

    def give_up(self, entry: Entry) -> None:
        """Nobody wants it any more, or not here."""
        self.nbytes -= entry.nbytes
        entry.state = State.AWAY
        try:
            self._compute.let_go(entry, entry.ledger.back)
        except TierError:
            # The read has failed, so it is over, and nobody asks for these bytes.
            entry.copied = None
            entry.let_go()

    @labelled("fetch")
    def _fetch(self, entries: Sequence[Entry], compute: Lane) -> None:
        made = []
        for entry in entries:
            assert entry.tier is not None
            assert entry.slot is not None
            made.append(entry.tier.destination(entry.slot, entry.nbytes, entry.form))
        # The allocator may have handed out bytes that queued work on the compute lane still uses.
        self._backend.wait(self._back, self._backend.record(compute))
        first = 0
        while first < len(entries):
            # As a rule all are of one tier. They have one event, which whoever needs the first of them waits for.
            tier, end, nbytes = entries[first].tier, first + 1, entries[first].nbytes
            while end < len(entries) and entries[end].tier is tier and nbytes + entries[end].nbytes <= self._batch:
                nbytes += entries[end].nbytes
                end += 1
            self._load(entries[first:end], made[first:end], compute)
            first = end

    def _load(self, entries: Sequence[Entry], made: Sequence[torch.Tensor], compute: Lane) -> None:
        tier = entries[0].tier
        assert tier is not None
        storages = [tensor.untyped_storage() for tensor in made]
        slots = [entry.slot for entry in entries if entry.slot is not None]
        destinations = [Bytes(storage, 0, entry.nbytes) for storage, entry in zip(storages, entries, strict=True)]
        copied = tier.load(slots, destinations)
        for entry, tensor, storage, event in zip(entries, made, storages, copied, strict=True):
            entry.copied = event
            entry.storage = storage
            entry.made = tensor if _has_form(tensor, entry.form) else None
            # Not before the bytes are there: a failed read may leave the destination alive, in a traceback.
            entry.alive = _nowhere
            entry.lane = compute
            entry.state = State.RETURNING
            self.nbytes += entry.nbytes
        if self._tell is not None:
            for entry in entries:
                self._tell(EventKind.RETURN, entry)


def _has_form(tensor: torch.Tensor, form: Form | None) -> bool:
    # The stride too: along a dimension of length 1 it may be anything.
    return (
        form is not None and tensor.dtype == form.dtype and tensor.shape == form.size and tensor.stride() == form.stride
    )


def _nowhere() -> None:
    return None
