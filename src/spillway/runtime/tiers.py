"""The tiers: memory or a disk that bytes are offloaded to.

A tier stores bytes in *slots*. ``store`` queues copies out and returns events after which the sources are not needed.
``load`` queues copies back and returns events after which the destinations are written. Both take a batch and do not
block. The caller has made the ``out`` stream wait for the sources, and the ``back`` stream for the destinations.

The disk tier has two variants: staged through CPU memory, and directly from and into a tensor's own memory.

*Staged*, for an accelerator. The ``out`` stream copies a storage to a page-aligned block of the arena, and a task
writes the block. On the way back, a task reads into a block, and the ``back`` stream copies it. The bytes that wait in
blocks for their write are limited: above the limit, ``reserve`` and ``store`` block the caller. Otherwise a slow disk
would become a CPU-memory tier without a cap. A large storage is cut into pieces, which several threads move at once.

*Direct*, for the CPU, where blocks would count towards a budget of resident memory. The file is written from the
storage itself, which is released when its write is done. It is read into memory that then belongs to the tensor: a
block of the tier's own arena, given back when that storage dies. Bytes lie as far from a page in the file as in memory.

An entry, its write and its reads each use the extent, and the last of them frees it. If it were freed with its write
still queued, the late write would overwrite the next owner's bytes.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spillway.errors import TierError, TierFullError, TransferError
from spillway.runtime.arena import PAGE, Arena, Block, pages
from spillway.runtime.backend import Backend, Event, Stream, on_error
from spillway.runtime.bytes import Bytes
from spillway.units import format_bytes

if TYPE_CHECKING:
    from spillway.runtime.spill_file import Extent, SpillFile

PIECE_BYTES = 16 << 20
"""Bytes that one thread writes or reads at a time."""

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


class StagedReads:
    """Reads of files to a device, each through a block of the arena."""

    def __init__(self, backend: Backend, arena: Arena, back: Stream) -> None:
        self._backend = backend
        self._arena = arena
        self._back = back
        self._ended = threading.Condition()
        self._blocks = 0
        """Blocks in use."""

    def read(self, fill: Callable[[Block], None], destination: Bytes) -> Event:
        """Let ``fill`` write a block, and queue its copy to the destination. Called in a task."""
        block = self._block(destination.nbytes)
        copied: tuple[Event, ...] = ()
        try:
            for event in block.after:
                event.synchronize()
            self._backend.host_access(block, write=True)
            fill(block)
            self._backend.copy(self._back, destination, block.part(0, destination.nbytes))
            copied = (self._backend.record(self._back),)
            return copied[0]
        finally:
            self._arena.free(block, copied)
            with self._ended:
                self._blocks -= 1
                self._ended.notify_all()

    def _block(self, nbytes: int) -> Block:
        """A block to read into.

        At the cap it waits for other reads, which are short. If no read is under way it exceeds the cap: without these
        bytes the graph is lost. It does not wait for writes, which may stand in the queue behind it.
        """
        with self._ended:
            while True:
                try:
                    block = self._arena.allocate(nbytes, over_cap=self._blocks == 0)
                except TierFullError:
                    if self._blocks == 0:
                        # The machine has no more CPU memory, and no read is under way that would free some.
                        raise
                    self._ended.wait()
                else:
                    self._blocks += 1
                    return block


class _Piece:
    """One extent's worth of a storage."""

    __slots__ = ("block", "extent", "is_freed", "users", "written")

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.block: Block | None = None
        """The bytes wait here for their write."""
        self.written: Event | None = None
        self.users = 1
        """How many need the extent: the entry, the write, the reads."""
        self.is_freed = False
        """Whether the entry needs it no more."""


class DiskTier(Tier):
    """Extents of the spill file, through blocks of the arena. At most ``staging`` bytes wait for their write.

    A slot is a list of pieces.
    """

    def __init__(
        self, backend: Backend, arena: Arena, file: SpillFile, *, out: Stream, back: Stream, staging: int
    ) -> None:
        super().__init__(backend, arena, out=out, back=back)
        self._file = file
        self._writes: deque[_Piece] = deque()
        self._lock = threading.Lock()
        self._staging = staging
        self._writing_bytes = 0
        self._reads = StagedReads(backend, arena, back)

    def reserve(self, source: Bytes) -> list[_Piece]:
        pieces: list[_Piece] = []
        with on_error(self.free, pieces):
            for part in cut(source):
                pieces.append(_Piece(self._file.allocate(part.nbytes)))  # noqa: PERF401  (after a failure, those before are freed)
            # The other blocks follow as writes end. Without the first, none would ever be free.
            pieces[0].block = self._stage(pieces[0].extent.nbytes)
        return pieces

    def store(self, slots: Sequence[list[_Piece]], sources: Sequence[Bytes]) -> Sequence[Event]:
        copied = []
        for slot, source in zip(slots, sources, strict=True):
            # Pieces are copied in order: after the last one, the source is no longer needed.
            copied.append([self._store(*piece) for piece in zip(slot, cut(source), strict=True)][-1])
        return copied

    def _store(self, piece: _Piece, source: Bytes) -> Event:
        block = piece.block = piece.block or self._stage(piece.extent.nbytes, over_cap=True)
        for event in block.after:
            self._backend.wait(self._out, event)
        self._backend.copy(self._out, block.part(0, piece.extent.nbytes), source)
        copied = self._backend.record(self._out)

        def write() -> None:
            try:
                copied.synchronize()
                # A piece that was freed meanwhile needs no write.
                if not piece.is_freed:
                    self._backend.host_access(block, write=False)
                    self._file.write(piece.extent, block.buffer())
            finally:
                self._arena.free(block)

        piece.written = self._start(piece, write)
        self._writes.append(piece)
        self._writing_bytes += block.nbytes
        return copied

    def load(self, slots: Sequence[list[_Piece]], destinations: Sequence[Bytes]) -> Sequence[Event]:
        loaded = []
        for slot, destination in zip(slots, destinations, strict=True):
            events = [self._load(*piece) for piece in zip(slot, cut(destination), strict=True)]
            loaded.append(self._backend.all_of(events))
        return loaded

    def _load(self, piece: _Piece, destination: Bytes) -> Event:
        assert piece.written is not None
        written = piece.written

        def read() -> Event:
            written.synchronize()
            return self._reads.read(lambda block: self._file.read(piece.extent, block.buffer()), destination)

        return self._start(piece, read)

    def free(self, slot: list[_Piece]) -> None:
        for piece in slot:
            if piece.written is None and piece.block is not None:
                self._arena.free(piece.block)
            piece.is_freed = True
            self._end_use(piece)

    def synchronize(self) -> None:
        while self._writes:
            self._settle()

    def _end_use(self, piece: _Piece) -> None:
        with self._lock:
            piece.users -= 1
            last = piece.users == 0
        if last:
            self._file.free(piece.extent)

    def _start(self, piece: _Piece, work: Callable[[], Event | None]) -> Event:
        """Queue a task that uses the piece's extent until it is done."""

        def task() -> Event | None:
            try:
                return work()
            finally:
                self._end_use(piece)

        with self._lock:
            piece.users += 1
        return self._backend.run(task)

    def _stage(self, nbytes: int, *, over_cap: bool = False) -> Block:
        """A block for the way out; waits for the oldest writes where too many bytes wait already."""
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

    def _settle(self) -> None:
        """Wait for the oldest write. If it failed, this raises: in the forward of the step that it belongs to."""
        piece = self._writes.popleft()
        assert piece.written is not None
        if piece.block is not None:
            self._writing_bytes -= piece.block.nbytes
        try:
            piece.written.synchronize()
        except TierError as error:
            if not piece.is_freed:
                raise TransferError(
                    f"A saved tensor's {format_bytes(piece.extent.nbytes)} could not be written to disk: {error}"
                ) from error


def cut(whole: Bytes) -> list[Bytes]:
    """Pieces of equal length, but for the last."""
    starts = range(0, whole.nbytes, PIECE_BYTES)
    return [whole.part(start, min(PIECE_BYTES, whole.nbytes - start)) for start in starts]


class DirectDiskTier(DiskTier):
    """Extents of the spill file, from and into the tensors' own memory: for :attr:`Backend.direct_disk`."""

    @functools.cached_property
    def _memory(self) -> Arena:
        # This is the device's own memory, as from its allocator: the CPU-memory budget does not apply.
        return Arena(self._backend.host_slab, capacity=sys.maxsize)

    def reserve(self, source: Bytes) -> list[_Piece]:
        # A failed write is reported where its storage was to be released: the storage is still there.
        while self._writes and _is_done(self._writes[0]):
            self._writes.popleft()
        return [_Piece(self._file.allocate(source.nbytes, phase=source.address % PAGE))]

    def store(self, slots: Sequence[list[_Piece]], sources: Sequence[Bytes]) -> Sequence[Event]:
        ready = self._backend.record(self._out)
        return [self._write(piece, source, ready) for (piece,), source in zip(slots, sources, strict=True)]

    def _write(self, piece: _Piece, source: Bytes, ready: Event) -> Event:
        # No byte of it yet. But a checking backend must see the source as it is now, not when the task runs.
        self._backend.host_access(source.part(0, 0), write=False)

        def write() -> None:
            ready.synchronize()
            if not piece.is_freed:
                self._backend.host_access(source, write=False)
                # The user may write to it unseen, through an alias with its own version counter (`.data`).
                self._file.write(piece.extent, source.buffer(), shared=True)

        piece.written = self._start(piece, write)
        self._writes.append(piece)
        return piece.written

    def destination(self, slot: list[_Piece], nbytes: int) -> Bytes:
        phase = slot[0].extent.phase
        block = self._memory.allocate(phase + nbytes)
        memory = self._backend.alias(block.part(phase, nbytes))
        weakref.finalize(memory.untyped_storage(), self._memory.free, block).atexit = False
        return Bytes.of(memory)

    def trim(self) -> int:
        return self._memory.trim()

    def load(self, slots: Sequence[list[_Piece]], destinations: Sequence[Bytes]) -> Sequence[Event]:
        ready = self._backend.record(self._back)
        return [self._read(piece, place, ready) for (piece,), place in zip(slots, destinations, strict=True)]

    def _read(self, piece: _Piece, destination: Bytes, ready: Event) -> Event:
        def read() -> None:
            # The write is done: the storage was not released before.
            ready.synchronize()
            self._backend.host_access(destination, write=True)
            self._file.read(piece.extent, destination.buffer())

        return self._start(piece, read)


def _is_done(piece: _Piece) -> bool:
    return piece.written is None or piece.written.query()
