"""Pinned memory with an owner: it is freed with its last reference, after the last copies."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable

import torch

from spillway.runtime.arena import Arena, Block
from spillway.runtime.backend import Backend, Event
from spillway.runtime.bytes import Bytes


class Pinned:
    """A block of pinned memory. When the last reference is gone it is freed, after the last copies."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self.arena = arena
        self.block = arena.allocate(max(nbytes, 1))
        self.nbytes = nbytes
        self._copies: dict[Hashable, Event] = {}
        self._before = list(self.block.after)
        weakref.finalize(self, _free_after, arena, self.block, self._copies, self._before).atexit = False

    def before_write(self) -> tuple[Event, ...]:
        """Events that a writer waits for: of the memory's earlier owners, and of copies."""
        return (*self._before, *self._copies.values())

    def after(self, name: Hashable, event: Event) -> None:
        """A copy uses the memory until this event. A later event of the same name replaces it."""
        self._copies[name] = event
        self._before.clear()

    def synchronize(self, name: Hashable = None) -> None:
        """Block until no copy uses the memory, or one copy does not."""
        if name is not None:
            event = self._copies.get(name)
            if event is not None:
                event.synchronize()
            return
        for event in self.before_write():
            event.synchronize()
        self._copies.clear()
        self._before.clear()

    def range(self, start: int, nbytes: int) -> Bytes:
        return Bytes(self.block.storage, self.block.start + start, nbytes)

    def mapped(self, backend: Backend) -> torch.Tensor:
        """The bytes as a tensor of the device, which holds this object.

        The device reads and writes CPU memory over the link then. So does every stream of the device, in order.
        """
        return backend.mapped(self.range(0, self.nbytes), _Mapped(self, backend))

    def alias(self) -> torch.Tensor:
        """The bytes as a storage of their own, which holds this object."""
        return self.range(0, max(self.nbytes, 1)).owned_by(self)


class _Mapped:
    """Owns a block while a tensor of the device is made of it."""

    def __init__(self, pinned: Pinned, backend: Backend) -> None:
        self.pinned = pinned
        self._backend = backend

    def __del__(self) -> None:
        # Kernels that read or write it may be queued.
        if not sys.is_finalizing() and not self._backend.is_capturing():
            self.pinned.after("mapped", self._backend.record(self._backend.compute()))


def _free_after(arena: Arena, block: Block, copies: dict[Hashable, Event], before: list[Event]) -> None:
    arena.free(block, (*before, *copies.values()))
