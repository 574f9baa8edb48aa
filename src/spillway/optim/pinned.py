"""Pinned memory that goes back to its arena by itself."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Hashable

import torch

from spillway.runtime.arena import Arena, Block
from spillway.runtime.backend import Event
from spillway.runtime.bytes import Bytes


class Pinned:
    """A block of an arena. It is given back when nobody holds this any more, after the last copies.

    Args:
        arena: the arena.
        nbytes: how many bytes.

    Raises:
        TierFullError: if there is no room for them.
    """

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self.block = arena.allocate(max(nbytes, 1))
        self.nbytes = nbytes
        self._copies: dict[Hashable, Event] = {}
        self._before = list(self.block.after)
        weakref.finalize(self, _give_back, arena, self.block, self._copies, self._before).atexit = False

    def before_write(self) -> tuple[Event, ...]:
        """Events of the memory's earlier owners, and of copies: whoever writes to it waits for them."""
        return (*self._before, *self._copies.values())

    def after(self, copy: Hashable, event: Event) -> None:
        """A copy, which waited for the above, uses it until the event; no more until the last event of that name."""
        self._copies[copy] = event
        self._before.clear()

    def synchronize(self) -> None:
        """Block until no copy uses it."""
        for event in self.before_write():
            event.synchronize()
        self._copies.clear()
        self._before.clear()

    def range(self, start: int, nbytes: int) -> Bytes:
        """Some of its bytes."""
        return Bytes(self.block.storage, self.block.start + start, nbytes)

    def alias(self) -> torch.Tensor:
        """Its bytes as a storage of their own, which holds this."""
        memory = (ctypes.c_ubyte * max(self.nbytes, 1)).from_address(self.block.address)
        memory.pinned = self  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)


def _give_back(arena: Arena, block: Block, copies: dict[Hashable, Event], before: list[Event]) -> None:
    arena.free(block, (*before, *copies.values()))
