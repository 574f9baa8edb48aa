"""What a tier is, and the host tier.

A tier stores bytes in *slots*. ``store`` queues the way out and says when the sources are no longer needed; ``load``
queues the way back and says when the destinations are written; both take several at once, so that what a lane has to
be told is told once for all of them, and return at once. The caller has made the ``out`` lane wait for the sources, and
the ``back`` lane for the destinations. The disk tiers are in ``disk_tiers.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from spillway.runtime.arena import Block
from spillway.runtime.backend import Backend, Event, Lane
from spillway.runtime.bytes import Bytes, Flat, Form


class Slot(Protocol):
    """A place in a tier for one storage, owned by one entry."""

    nbytes: int
    """Bytes that it has room for."""


class Tier(ABC):
    """Where bytes can go."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @abstractmethod
    def reserve(self, source: Bytes) -> Slot:
        """A slot for these bytes; raises :class:`~spillway.errors.TierFullError`."""

    @abstractmethod
    def store(self, slots: Sequence[Slot], sources: Sequence[Bytes]) -> Sequence[Event]:
        """Queue the way out. After its event a source is no longer needed."""

    def destination(self, slot: Slot, nbytes: int, form: Form | None) -> torch.Tensor:
        """A tensor on the device over ``nbytes`` bytes that the slot can be loaded into, in ``form`` if it can.

        It is for use on the calling thread's compute lane.
        """
        return self._backend.empty(form if form is not None else Flat((nbytes,)))

    @abstractmethod
    def load(self, slots: Sequence[Slot], destinations: Sequence[Bytes]) -> Sequence[Event]:
        """Queue the way back, into what :meth:`destination` gave. After its event a destination is written."""

    def cancel(self, slot: Slot) -> None:  # noqa: B027  (a copy is quick, and is done)
        """Nobody will load it: what is queued for it need not be done."""

    @abstractmethod
    def release(self, slot: Slot) -> None:
        """Give the slot back, whatever is still queued for it."""

    def synchronize(self) -> None:  # noqa: B027  (nothing to wait for by default)
        """Wait until every write that is under way has ended."""

    def trim(self) -> int:
        """Give memory of its own that nobody uses back to the system; returns its bytes."""
        return 0


class Slots(Protocol):
    """Where host memory comes from: an arena, as a rule."""

    def allocate(self, nbytes: int) -> Block: ...

    def free(self, block: Block, after: tuple[Event, ...] = ()) -> None: ...


class HostTier(Tier):
    """Blocks of host memory. A slot is a block, and its ``after`` the end of the last copy from or to it."""

    def __init__(self, backend: Backend, arena: Slots, *, out: Lane, back: Lane) -> None:
        super().__init__(backend)
        self._arena = arena
        self._out = out
        self._back = back

    def reserve(self, source: Bytes) -> Block:
        return self._arena.allocate(source.nbytes)

    def store(self, slots: Sequence[Slot], sources: Sequence[Bytes]) -> Sequence[Event]:
        backend, out = self._backend, self._out
        try:
            for block, source in zip(slots, sources, strict=True):
                assert isinstance(block, Block)
                for event in block.after:
                    backend.wait(out, event)
                backend.copy(out, block.first(source.nbytes), source)
        finally:
            # Also where one failed: the others are under way.
            copied = self._recorded(out, slots)
        return copied

    def load(self, slots: Sequence[Slot], destinations: Sequence[Bytes]) -> Sequence[Event]:
        backend, back = self._backend, self._back
        last: Event | None = None
        for block, destination in zip(slots, destinations, strict=True):
            assert isinstance(block, Block)
            # The two lanes know nothing of each other: a copy back that overtakes its own copy out brings back garbage.
            for event in block.after:
                # What left together has one event.
                if event is not last:
                    backend.wait(back, event)
                    last = event
            backend.copy(back, destination, block.first(destination.nbytes))
        return self._recorded(back, slots)

    def release(self, slot: Slot) -> None:
        assert isinstance(slot, Block)
        self._arena.free(slot, slot.after)

    def _recorded(self, lane: Lane, blocks: Sequence[Slot]) -> Sequence[Event]:
        event = self._backend.record(lane)
        after = (event,)
        for block in blocks:
            assert isinstance(block, Block)
            block.after = after
        return after * len(blocks)
