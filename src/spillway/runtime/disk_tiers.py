"""The disk tier, in two ways: through blocks of host memory, and straight from and into the tensors' own memory.

*Staged*, for an accelerator. Direct I/O wants page-aligned host memory, and the device has none: device -> block on the
``out`` lane -> file in a task, and file -> block in a task -> device on the ``back`` lane. How much may wait in blocks
for its write is bounded: past that, ``reserve`` and ``store`` block the caller, since otherwise a disk slower than the
compute would turn into a host tier without a cap. A large storage is cut into pieces, which several threads write and
read at once, and of which the first is on the disk while the last is still being copied.

*Direct*, for the CPU, where a tensor is host memory already. Every copy costs the cores that compute. So the file is
written from the storage itself, which is let go when its write is done, and read into memory that then is the tensor's:
a block of an arena of the tier's own, which goes back to it when that storage dies. Bytes lie in the file at the same
distance from a page as in memory, so that all but the two edges moves without a copy, and come back to such an address.

An extent is wanted by its entry, by its write and by its reads; the last of them frees it. (Given back with its write
still queued, it would be handed out, and the late write would land in the next owner's bytes.)
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from spillway.errors import TierError, TierFullError, TransferError
from spillway.runtime.arena import PAGE, Arena, Block, pages
from spillway.runtime.backend import Backend, Event, Lane
from spillway.runtime.bytes import Bytes, Form
from spillway.runtime.disk import Extent, SpillFile
from spillway.runtime.tasks import quiet
from spillway.runtime.tiers import Slot, Tier

PIECE_BYTES = 16 << 20
"""What one thread writes or reads at a time."""


class _DiskSlot:
    __slots__ = ("block", "extent", "nbytes", "released", "users", "written")

    def __init__(self, nbytes: int, extent: Extent, block: Block | None = None) -> None:
        self.nbytes = nbytes
        self.extent = extent
        self.block = block
        """On the staged way out, once it is taken: where the bytes wait for their write."""
        self.written: Event | None = None
        self.users = 1
        """Who wants the extent: the entry, the write, the reads."""
        self.released = False


class _DiskTier(Tier):
    """What both ways have in common: whose the extents are, and which writes are under way."""

    def __init__(self, backend: Backend, file: SpillFile, *, out: Lane, back: Lane) -> None:
        super().__init__(backend)
        self._file = file
        self._out = out
        self._back = back
        self._writes: deque[_DiskSlot] = deque()
        self._lock = threading.Lock()

    def synchronize(self) -> None:
        while self._writes:
            self._settle()

    def _hold(self, slot: _DiskSlot) -> None:
        with self._lock:
            slot.users += 1

    def _let_go(self, slot: _DiskSlot) -> None:
        with self._lock:
            slot.users -= 1
            last = slot.users == 0
        if last:
            self._file.free(slot.extent)

    def _settle(self) -> None:
        """Wait for the oldest write. If it failed, this raises: in the forward of the step that it belongs to."""
        slot = self._writes.popleft()
        assert slot.written is not None
        try:
            slot.written.synchronize()
        except TierError as error:
            if not slot.released:
                raise TransferError(
                    f"a storage of {slot.nbytes} bytes could not be written to disk: {error}"
                ) from error


class StagedDiskTier(_DiskTier):
    """Extents of the session's spill file, through blocks of the arena.

    Args:
        backend: the device.
        arena: where the blocks are cut from.
        file: the spill file.
        out: the lane from the device.
        back: the lane to the device.
        staging: most bytes that may wait in blocks for their write.
    """

    def __init__(self, backend: Backend, arena: Arena, file: SpillFile, *, out: Lane, back: Lane, staging: int) -> None:
        super().__init__(backend, file, out=out, back=back)
        self._arena = arena
        self._staging = staging
        self._writing_bytes = 0
        self._landed = threading.Condition()
        self._landing_blocks = 0

    def reserve(self, source: Bytes) -> _Pieces:
        pieces: list[_DiskSlot] = []
        done = False
        try:
            for piece in _cut(source):
                with quiet():
                    pieces.append(_DiskSlot(piece.nbytes, self._file.allocate(piece.nbytes)))
            # The others follow as writes end: one has to be had, or none will.
            pieces[0].block = self._stage(pieces[0].nbytes)
            done = True
            return _Pieces(source.nbytes, pieces)
        finally:
            if not done:
                for slot in pieces:
                    self._release(slot)

    def store(self, slots: Sequence[Slot], sources: Sequence[Bytes]) -> Sequence[Event]:
        copied = []
        for slot, source in zip(slots, sources, strict=True):
            assert isinstance(slot, _Pieces)
            # They are copied one after the other: after the last, the source is no longer needed.
            copied.append([self._store(*piece) for piece in zip(slot.pieces, _cut(source), strict=True)][-1])
        return copied

    def _store(self, slot: _DiskSlot, source: Bytes) -> Event:
        block = slot.block = slot.block if slot.block is not None else self._stage(slot.nbytes, over_cap=True)
        for event in block.after:
            self._backend.wait(self._out, event)
        self._backend.copy(self._out, block.first(slot.nbytes), source)
        copied = self._backend.record(self._out)

        def write() -> None:
            try:
                copied.synchronize()
                # A slot that was given back meanwhile needs no writing.
                if not slot.released:
                    self._backend.host_access(block, write=False)
                    self._file.write(slot.extent, block.buffer())
            finally:
                self._arena.free(block)
                self._let_go(slot)

        self._hold(slot)
        slot.written = self._backend.run(write)
        self._writes.append(slot)
        self._writing_bytes += block.nbytes
        return copied

    def load(self, slots: Sequence[Slot], destinations: Sequence[Bytes]) -> Sequence[Event]:
        loaded = []
        for slot, destination in zip(slots, destinations, strict=True):
            assert isinstance(slot, _Pieces)
            events = [self._load(*piece) for piece in zip(slot.pieces, _cut(destination), strict=True)]
            loaded.append(self._backend.all_of(events))
        return loaded

    def _load(self, slot: _DiskSlot, destination: Bytes) -> Event:
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
                    self._backend.host_access(block, write=True)
                    self._file.read(slot.extent, block.buffer())
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
        assert isinstance(slot, _Pieces)
        for piece in slot.pieces:
            self._release(piece)

    def cancel(self, slot: Slot) -> None:
        assert isinstance(slot, _Pieces)
        for piece in slot.pieces:
            piece.released = True

    def _release(self, slot: _DiskSlot) -> None:
        if slot.written is None and slot.block is not None:
            self._arena.free(slot.block)
        slot.released = True
        self._let_go(slot)

    def _stage(self, nbytes: int, *, over_cap: bool = False) -> Block:
        """A block for the way to the disk; waits for the oldest writes where too many wait already."""
        wanted = pages(nbytes)
        while self._writes and (_is_done(self._writes[0]) or self._writing_bytes + wanted > self._staging):
            self._settle()
        while True:
            try:
                return self._arena.allocate(nbytes, over_cap=over_cap and not self._writes)
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
                    if self._landing_blocks == 0:
                        # There is no more host memory at all, and nobody to wait for.
                        raise
                    self._landed.wait()
                else:
                    self._landing_blocks += 1
                    return block

    def _settle(self) -> None:
        block = self._writes[0].block
        assert block is not None
        self._writing_bytes -= block.nbytes
        super()._settle()


class _Pieces:
    """A storage's place on disk: pieces that are written and read by several threads at once."""

    __slots__ = ("nbytes", "pieces")

    def __init__(self, nbytes: int, pieces: Sequence[_DiskSlot]) -> None:
        self.nbytes = nbytes
        self.pieces = pieces


def _cut(whole: Bytes) -> list[Bytes]:
    """The pieces of some bytes, of which all but the last are as long."""
    starts = range(0, whole.nbytes, PIECE_BYTES)
    return [Bytes(whole.storage, whole.start + start, min(PIECE_BYTES, whole.nbytes - start)) for start in starts]


class DirectDiskTier(_DiskTier):
    """Extents of the session's spill file, from and into the tensors' own memory.

    For a backend whose device is host memory (:attr:`Backend.direct_disk`).
    """

    def __init__(self, backend: Backend, file: SpillFile, *, out: Lane, back: Lane) -> None:
        super().__init__(backend, file, out=out, back=back)
        # What comes back is the device's own memory, as if its allocator had given it: no budget of ours holds for it.
        self._memory = Arena(backend.host_slab, capacity=sys.maxsize)

    def reserve(self, source: Bytes) -> _DiskSlot:
        # One that failed is heard of where its storage was to be let go: it still has it.
        while self._writes and _is_done(self._writes[0]):
            self._writes.popleft()
        with quiet():
            return _DiskSlot(source.nbytes, self._file.allocate(source.nbytes, phase=source.address % PAGE))

    def store(self, slots: Sequence[Slot], sources: Sequence[Bytes]) -> Sequence[Event]:
        ready = self._backend.record(self._out)
        return [self._store(slot, source, ready) for slot, source in zip(slots, sources, strict=True)]

    def _store(self, slot: Slot, source: Bytes, ready: Event) -> Event:
        assert isinstance(slot, _DiskSlot)
        # No byte of it yet, but a checking backend is to know the source as it is now, not when the task comes to it.
        self._backend.host_access(source.first(0), write=False)

        def write() -> None:
            try:
                ready.synchronize()
                if not slot.released:
                    self._backend.host_access(source, write=False)
                    # Through an alias with a counter of its own (`.data`) the user may write to it unseen.
                    self._file.write(slot.extent, source.buffer(), shared=True)
            finally:
                self._let_go(slot)

        self._hold(slot)
        slot.written = self._backend.run(write)
        self._writes.append(slot)
        return slot.written

    def release(self, slot: Slot) -> None:
        assert isinstance(slot, _DiskSlot)
        slot.released = True
        self._let_go(slot)

    def cancel(self, slot: Slot) -> None:
        assert isinstance(slot, _DiskSlot)
        slot.released = True

    def destination(self, slot: Slot, nbytes: int, form: Form | None) -> torch.Tensor:
        assert isinstance(slot, _DiskSlot)
        phase = slot.extent.phase
        block = self._memory.allocate(phase + nbytes)
        memory = self._backend.alias(Bytes(block.storage, block.start + phase, nbytes))
        weakref.finalize(memory.untyped_storage(), self._memory.free, block).atexit = False
        return memory

    def trim(self) -> int:
        return self._memory.trim()

    def load(self, slots: Sequence[Slot], destinations: Sequence[Bytes]) -> Sequence[Event]:
        ready = self._backend.record(self._back)
        return [self._load(slot, place, ready) for slot, place in zip(slots, destinations, strict=True)]

    def _load(self, slot: Slot, destination: Bytes, ready: Event) -> Event:
        assert isinstance(slot, _DiskSlot)

        def read() -> None:
            try:
                # Its write is done: the storage was not let go before.
                ready.synchronize()
                self._backend.host_access(destination, write=True)
                self._file.read(slot.extent, destination.buffer())
            finally:
                self._let_go(slot)

        self._hold(slot)
        return self._backend.run(read)


def _is_done(slot: _DiskSlot) -> bool:
    return slot.written is None or slot.written.query()
