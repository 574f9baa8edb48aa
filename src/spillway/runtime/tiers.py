"""The tiers that a storage can leave for: host memory and the disk.

A tier stores flat bytes in *slots*. ``store`` queues the way out and says when the source is no longer needed; ``load``
queues the way back and says when the destination is written; both return at once. The caller has made the ``out``
lane wait for the source, and the ``back`` lane for the destination.

The disk tier goes through blocks of the arena, in both directions, because direct I/O wants whole pages at page
addresses: device -> block on the ``out`` lane -> file in a task, and file -> block in a task -> device on the ``back``
lane. How much may wait in blocks for its write is bounded: past that, ``store`` blocks the caller, since otherwise a
disk slower than the compute would turn into a host tier without a cap.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Protocol

import torch

from spillway.errors import TierError, TierFullError, TransferError
from spillway.runtime.arena import Arena, Block, pages
from spillway.runtime.backend import Backend, Event, Lane
from spillway.runtime.disk import Extent, SpillFile


class Slot(Protocol):
    """A place in a tier for one storage, owned by one entry."""

    nbytes: int


class Tier(ABC):
    """Where bytes can go."""

    @abstractmethod
    def reserve(self, nbytes: int) -> Slot:
        """A slot for ``nbytes``; raises :class:`~spillway.errors.TierFullError`."""

    @abstractmethod
    def store(self, slot: Slot, source: torch.Tensor) -> Event:
        """Queue the way out. After the event the source is no longer needed."""

    @abstractmethod
    def load(self, slot: Slot, destination: torch.Tensor) -> Event:
        """Queue the way back. After the event the destination is written."""

    @abstractmethod
    def release(self, slot: Slot) -> None:
        """Give the slot back, whatever is still queued for it."""

    def synchronize(self) -> None:  # noqa: B027  (nothing to wait for by default)
        """Wait until every write that is under way has ended."""


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
        self._backend = backend
        self._arena = arena
        self._out = out
        self._back = back

    def reserve(self, nbytes: int) -> _HostSlot:
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


class _DiskSlot:
    __slots__ = ("block", "extent", "nbytes", "pending", "released", "written")

    def __init__(self, nbytes: int, extent: Extent, block: Block) -> None:
        self.nbytes = nbytes
        self.extent = extent
        self.block = block
        """On the way out: where the bytes wait for their write."""
        self.written: Event | None = None
        self.pending = 1
        """Who still needs the extent: the entry, the write, the reads."""
        self.released = False


class DiskTier(Tier):
    """Extents of the session's spill file.

    Args:
        staging: most bytes that may wait in blocks of the arena for their write.
    """

    def __init__(self, backend: Backend, arena: Arena, file: SpillFile, *, out: Lane, back: Lane, staging: int) -> None:
        self._backend = backend
        self._arena = arena
        self._file = file
        self._out = out
        self._back = back
        self._staging = staging
        self._writes: deque[tuple[_DiskSlot, Event]] = deque()
        self._writing_bytes = 0
        self._lock = threading.Lock()
        self._landed = threading.Condition()
        self._landing_blocks = 0

    def reserve(self, nbytes: int) -> _DiskSlot:
        block = self._stage(nbytes)
        try:
            return _DiskSlot(nbytes, self._file.allocate(nbytes), block)
        except TierError:
            self._arena.free(block)
            raise

    def store(self, slot: Slot, source: torch.Tensor) -> Event:
        assert isinstance(slot, _DiskSlot)
        for event in slot.block.after:
            self._backend.wait(self._out, event)
        self._backend.copy(self._out, slot.block.first(slot.nbytes), source)
        copied = self._backend.record(self._out)

        def write() -> None:
            try:
                copied.synchronize()
                # A slot that was given back meanwhile needs no writing.
                if not slot.released:
                    self._backend.host_access(slot.block.bytes, write=False)
                    self._file.write(slot.extent, _buffer(slot.block))
            finally:
                self._arena.free(slot.block)
                self._let_go(slot)

        self._hold(slot)
        slot.written = self._backend.run(write)
        self._writes.append((slot, slot.written))
        self._writing_bytes += slot.block.nbytes
        return copied

    def load(self, slot: Slot, destination: torch.Tensor) -> Event:
        assert isinstance(slot, _DiskSlot)
        assert slot.written is not None
        written = slot.written

        def read() -> Event:
            try:
                written.synchronize()
                block = self._landing(slot.nbytes)
                copied: tuple[Event, ...] = ()
                try:
                    for event in block.after:
                        event.synchronize()
                    self._backend.host_access(block.bytes, write=True)
                    self._file.read(slot.extent, _buffer(block))
                    self._backend.copy(self._back, destination, block.first(slot.nbytes))
                    copied = (self._backend.record(self._back),)
                    return copied[0]
                finally:
                    self._arena.free(block, copied)
                    with self._landed:
                        self._landing_blocks -= 1
                        self._landed.notify_all()
            finally:
                self._let_go(slot)

        self._hold(slot)
        return self._backend.run(read)

    def release(self, slot: Slot) -> None:
        assert isinstance(slot, _DiskSlot)
        slot.released = True
        if slot.written is None:
            self._arena.free(slot.block)
        self._let_go(slot)

    def synchronize(self) -> None:
        while self._writes:
            self._settle()

    def _hold(self, slot: _DiskSlot) -> None:
        with self._lock:
            slot.pending += 1

    def _let_go(self, slot: _DiskSlot) -> None:
        """The entry, the write or a read needs the extent no more; the last of them frees it.

        An extent that is given back with its write still queued must not be handed out: the late write would land in
        the next owner's bytes.
        """
        with self._lock:
            slot.pending -= 1
            last = slot.pending == 0
        if last:
            self._file.free(slot.extent)

    def _stage(self, nbytes: int) -> Block:
        """A block for the way to the disk; waits for the oldest writes where too many wait already."""
        wanted = pages(nbytes)
        while self._writes and (self._writes[0][1].query() or self._writing_bytes + wanted > self._staging):
            self._settle()
        while True:
            try:
                return self._arena.allocate(nbytes)
            except TierFullError:
                if not self._writes:
                    raise
                self._settle()

    def _landing(self, nbytes: int) -> Block:
        """A block for the way back; called in a task.

        Where the cap is reached it waits for other reads, which are short. If none is under way it passes the cap:
        without these bytes the graph is lost. (Writes are not waited for: they may stand in the queue behind this.)
        """
        with self._landed:
            while True:
                try:
                    block = self._arena.allocate(nbytes, over_cap=self._landing_blocks == 0)
                except TierFullError:
                    self._landed.wait()
                else:
                    self._landing_blocks += 1
                    return block

    def _settle(self) -> None:
        """Wait for the oldest write. If it failed, this raises: in the forward of the step that it belongs to."""
        slot, written = self._writes.popleft()
        self._writing_bytes -= slot.block.nbytes
        try:
            written.synchronize()
        except TierError as error:
            if not slot.released:
                raise TransferError(
                    f"a storage of {slot.nbytes} bytes could not be written to disk: {error}"
                ) from error


def _buffer(block: Block) -> memoryview:
    return memoryview(block.bytes.numpy())  # type: ignore[arg-type]
