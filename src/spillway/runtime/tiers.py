"""What a tier is, and the host tier.

A tier stores flat bytes in *slots*. ``store`` queues the way out and says when the source is no longer needed; ``load``
queues the way back and says when the destination is written; both return at once. The caller has made the ``out``
lane wait for the source, and the ``back`` lane for the destination. The disk tiers are in ``disk_tiers.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from spillway.runtime.arena import Arena, Block
from spillway.runtime.backend import Backend, Event, Lane


class Slot(Protocol):
    """A place in a tier for one storage, owned by one entry."""

    nbytes: int


class Tier(ABC):
    """Where bytes can go."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @abstractmethod
    def reserve(self, source: torch.Tensor) -> Slot:
        """A slot for these bytes; raises :class:`~spillway.errors.TierFullError`."""

    @abstractmethod
    def store(self, slot: Slot, source: torch.Tensor) -> Event:
        """Queue the way out. After the event the source is no longer needed."""

    def destination(self, slot: Slot) -> torch.Tensor:
        """Bytes on the device that the slot can be loaded into, for use on the calling thread's compute lane."""
        return self._backend.empty(slot.nbytes)

    @abstractmethod
    def load(self, slot: Slot, destination: torch.Tensor) -> Event:
        """Queue the way back, into what :meth:`destination` gave. After the event it is written."""

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


class _HostSlot:
    __slots__ = ("block", "loaded", "nbytes", "stored")

    def __init__(self, nbytes: int, block: Block) -> None:
        self.nbytes = nbytes
        self.block = block
        self.stored: Event | None = None
        self.loaded: Event | None = None


class HostTier(Tier):
    """Blocks of host memory."""

    def __init__(self, backend: Backend, arena: Arena, *, out: Lane, back: Lane) -> None:
        super().__init__(backend)
        self._arena = arena
        self._out = out
        self._back = back

    def reserve(self, source: torch.Tensor) -> _HostSlot:
        nbytes = source.numel()
        return _HostSlot(nbytes, self._arena.allocate(nbytes))

    def store(self, slot: Slot, source: torch.Tensor) -> Event:
        assert isinstance(slot, _HostSlot)
        for event in slot.block.after:
            self._backend.wait(self._out, event)
        self._backend.copy(self._out, slot.block.first(slot.nbytes), source)
        slot.stored = self._backend.record(self._out)
        return slot.stored

    def load(self, slot: Slot, destination: torch.Tensor) -> Event:
        assert isinstance(slot, _HostSlot)
        assert slot.stored is not None
        # The two lanes know nothing of each other: a copy back that overtakes its own copy out brings back garbage.
        self._backend.wait(self._back, slot.stored)
        self._backend.copy(self._back, destination, slot.block.first(slot.nbytes))
        slot.loaded = self._backend.record(self._back)
        return slot.loaded

    def release(self, slot: Slot) -> None:
        assert isinstance(slot, _HostSlot)
        # The copy back came after the copy out.
        last = slot.loaded if slot.loaded is not None else slot.stored
        self._arena.free(slot.block, () if last is None else (last,))
