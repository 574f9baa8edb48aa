"""The interface of a tier, and the tier in CPU memory. The other one is ``disk_tier.py``.

A tier stores bytes in *slots*. ``store`` queues copies out and returns events after which the sources are not needed.
``load`` queues copies back and returns events after which the destinations are written. Both take a batch and do not
block. The caller has made the ``out`` stream wait for the sources, and the ``back`` stream for the destinations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from spillway.runtime.arena import Arena, Block
from spillway.runtime.backend import Backend, Event, Stream
from spillway.runtime.bytes import Bytes

Slot = Any
"""A place in a tier for one storage, owned by one entry. Only its tier knows its type."""


class Tier(ABC):
    """Memory or a disk that bytes are offloaded to."""

    def __init__(self, backend: Backend, arena: Arena, *, out: Stream, back: Stream) -> None:
        self._backend = backend
        self._arena = arena
        self._out = out
        self._back = back

    @abstractmethod
    def reserve(self, source: Bytes) -> Slot:
        """A slot for these bytes; raises :class:`~spillway.errors.TierFullError`."""

    @abstractmethod
    def store(self, slots: Sequence[Slot], sources: Sequence[Bytes]) -> Sequence[Event]:
        """Queue the copies out. After its event a source is no longer needed."""

    def destination(self, slot: Slot, nbytes: int) -> Bytes:
        """Memory of the device for :meth:`load` to fill."""
        return self._backend.empty(nbytes)

    @abstractmethod
    def load(self, slots: Sequence[Slot], destinations: Sequence[Bytes]) -> Sequence[Event]:
        """Queue the copies back, into memory of :meth:`destination`. After its event a destination is written."""

    @abstractmethod
    def free(self, slot: Slot) -> None:
        """Give the slot back. Work that is still queued for it may be skipped, and does no harm."""

    def synchronize(self) -> None:  # noqa: B027  (nothing to wait for by default)
        """Wait for every write that is under way."""

    def trim(self) -> int:
        """Give unused memory of the tier back to the system; returns its bytes."""
        return 0


class HostTier(Tier):
    """Blocks of CPU memory. A slot is a block; its ``after`` is the end of the last copy from or to it."""

    def reserve(self, source: Bytes) -> Block:
        return self._arena.allocate(source.nbytes)

    def store(self, slots: Sequence[Block], sources: Sequence[Bytes]) -> Sequence[Event]:
        backend, out = self._backend, self._out
        try:
            for block, source in zip(slots, sources, strict=True):
                for event in block.after:
                    backend.wait(out, event)
                backend.copy(out, block.part(0, source.nbytes), source)
        finally:
            # Also after a failure: the other copies are under way.
            copied = self._recorded(out, slots)
        return copied

    def load(self, slots: Sequence[Block], destinations: Sequence[Bytes]) -> Sequence[Event]:
        backend, back = self._backend, self._back
        last: Event | None = None
        for block, destination in zip(slots, destinations, strict=True):
            # The two streams are not ordered: a copy back must not overtake its own copy out.
            for event in block.after:
                # A batch has one event.
                if event is not last:
                    backend.wait(back, event)
                    last = event
            backend.copy(back, destination, block.part(0, destination.nbytes))
        return self._recorded(back, slots)

    def free(self, slot: Block) -> None:
        self._arena.free(slot, slot.after)

    def _recorded(self, stream: Stream, blocks: Sequence[Block]) -> Sequence[Event]:
        event = self._backend.record(stream)
        after = (event,)
        for block in blocks:
            block.after = after
        return after * len(blocks)
