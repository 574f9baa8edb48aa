"""CPU memory for copies: slabs, cut in exact sizes, reused, with a cap in bytes.

NOTE [ Given back is not free ]

A block is given back when its *content* is no longer needed. A copy that reads or writes it may still be queued. So the
caller names the events after which the block may be written. They travel with the bytes: the next owner of any part of
them finds them in ``Block.after``, and waits for them before it writes. Without this, a pinned buffer that is handed
out again while its copy is queued delivers the next owner's bytes to the first.

Blocks are multiples of a page, so that direct I/O can read and write any of them.

A training step asks for the same sizes again and again. A block that is given back goes to the bin of its size, uncut.
Only when a bin is empty are all bins emptied, neighbours joined, and the best fit cut.

Slabs grow with the arena. To pin a slab, the system clears its pages and the driver registers them: two slabs can be
made at once, beside a copy into a third. So in a large arena the next two slabs are made in advance. At most a
twentieth of them is unused by a step, and is given back when blocks are reused.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from spillway.errors import TierFullError
from spillway.runtime.backend import Event, be_in_task
from spillway.runtime.bytes import Bytes
from spillway.units import format_bytes

PAGE = 4096
SLAB_BYTES = 32 << 20
MOST_SLAB_BYTES = 512 << 20
_SHARE_OF_A_SLAB = 128
_AHEAD = 2
"""Slabs that are made in advance."""


class Block(Bytes):
    """Page-aligned bytes of a slab, a multiple of a page long, owned until they are given back."""

    __slots__ = ("after", "slab")

    def __init__(self, slab: _Slab, start: int, nbytes: int, after: tuple[Event, ...]) -> None:
        super().__init__(slab.storage, start, nbytes)
        self.slab = slab
        self.after = after
        """Wait for these before the next access."""


class FreeRanges:
    """The unused ranges of a slab or a file. Best fit; neighbours are joined. The owner has a lock."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int, tuple[Event, ...]]] = []
        """Offset, bytes, and events to wait for before a write. Sorted; no two touch."""

    def take(self, nbytes: int) -> tuple[int, tuple[Event, ...]] | None:
        """The offset of ``nbytes`` cut from the smallest range that has them, and its events; ``None``: none has."""
        fits = [(length, index) for index, (_, length, _) in enumerate(self.ranges) if length >= nbytes]
        if not fits:
            return None
        _, index = min(fits)
        offset, length, after = self.ranges.pop(index)
        if length > nbytes:
            self.ranges.insert(index, (offset + nbytes, length - nbytes, after))
        return offset, after

    def give(self, offset: int, nbytes: int, after: tuple[Event, ...] = (), *, asks: bool = False) -> None:
        """Add a range that overlaps no other one.

        Args:
            offset: its first byte.
            nbytes: how many.
            after: events to wait for before the next write.
            asks: whether events may be asked if they have been reached: those that have are forgotten.
        """
        ranges = self.ranges
        index = bisect.bisect(ranges, offset, key=lambda item: item[0])
        if index < len(ranges) and ranges[index][0] == offset + nbytes:
            _, length, events = ranges.pop(index)
            nbytes, after = nbytes + length, (*after, *events)
        if index > 0 and sum(ranges[index - 1][:2]) == offset:
            offset, length, events = ranges.pop(index - 1)
            nbytes, after = nbytes + length, (*events, *after)
            index -= 1
        if asks:
            after = tuple(event for event in after if not event.query())
        ranges.insert(index, (offset, nbytes, after))

    def tail(self, end: int) -> int:
        """Free bytes just before ``end``, the end of the file."""
        return self.ranges[-1][1] if self.ranges and sum(self.ranges[-1][:2]) == end else 0

    def largest(self, end: int, room: int) -> int:
        """The most bytes that one range could have, if the file may grow by ``room`` behind ``end``."""
        return max([self.tail(end) + room, *(nbytes for _, nbytes, _ in self.ranges)])


class _Slab:
    """One piece of CPU memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.storage = memory.untyped_storage()
        self.nbytes = memory.numel()
        self.closed = False
        self.free = FreeRanges()
        self.free.give(0, self.nbytes)

    def cut(self, nbytes: int) -> Block | None:
        """A block of the smallest free range that has so many bytes."""
        found = self.free.take(nbytes)
        return None if found is None else Block(self, found[0], nbytes, found[1])


class _SlabMaker:
    """Makes slabs in advance. Used with the arena's lock held."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._coming: deque[tuple[int, Future[torch.Tensor]]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def prepare(self, nbytes: int) -> bool:
        """Start to make one, if fewer than two are on the way; says whether."""
        if self._closed or len(self._coming) >= _AHEAD:
            return False
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="spillway-slab", initializer=be_in_task)
        self._coming.append((nbytes, self._pool.submit(self._make, nbytes)))
        return True

    def prepared(self) -> torch.Tensor | None:
        """The oldest one, after waiting for it; raises its error."""
        return self._coming.popleft()[1].result() if self._coming else None

    @property
    def coming_bytes(self) -> int:
        """Bytes of those not used yet."""
        return sum(nbytes for nbytes, _ in self._coming)

    @property
    def is_busy(self) -> bool:
        """Whether one is being made."""
        return not all(slab.done() for _, slab in self._coming)

    def drop(self) -> None:
        """Make no more, and drop those on the way when they are made."""
        self._closed = True
        self._coming.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def close(self) -> None:
        """The same, and wait for the threads to end."""
        self.drop()
        if self._pool is not None:
            self._pool.shutdown(wait=True)


class Arena:
    """Cuts blocks from slabs that the backend makes. All methods may be called from any thread.

    Args:
        make_slab: bytes in, CPU memory out (:meth:`Backend.host_slab`).
        capacity: most bytes that all slabs together may have.
        slab_bytes: least size of a slab.
    """

    def __init__(
        self, make_slab: Callable[[int], torch.Tensor], *, capacity: int, slab_bytes: int = SLAB_BYTES
    ) -> None:
        self._make_slab = make_slab
        self._maker = _SlabMaker(make_slab)
        self._refusal: str | None = None
        self._slab_bytes = slab_bytes
        self._slabs: list[_Slab] = []
        self._bins: dict[int, list[Block]] = {}
        self._freed: deque[Block] = deque()
        self._lock = threading.Lock()
        self.capacity = capacity
        self._slabs_bytes = 0
        self._used = 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slabs, with those that are being made."""
        return self._slabs_bytes + self._maker.coming_bytes

    @property
    def is_growing(self) -> bool:
        """Whether a slab is being made for later."""
        with self._lock:
            return self._maker.is_busy

    def allocate(self, nbytes: int, *, over_cap: bool = False, grows: bool = True) -> Block:
        """A block of at least ``nbytes``, rounded up to a page.

        Args:
            nbytes: how many.
            over_cap: pass the cap rather than fail.
            grows: whether slabs may be made, or given back, and events be asked: not in a capture.

        Raises:
            TierFullError: when it fits in no slab, and another one would pass the cap or could not be made once.
        """
        nbytes = pages(nbytes)
        with self._lock:
            if self._freed:
                self._fill_bins()
            same_size = self._bins.get(nbytes)
            if same_size:
                block = same_size.pop()
                if self._maker.coming_bytes and grows:
                    # A step has ended, and this is the next. Slabs that the first step did not need are not needed.
                    self._maker.drop()
            else:
                block = self._cut(nbytes, over_cap=over_cap, grows=grows)
            self._used += nbytes
            return block

    def free(self, block: Block, after: tuple[Event, ...] = ()) -> None:
        """Give a block back; its bytes may be written again after the events. See NOTE [ Given back is not free ].

        It takes no lock, since it may run in a finaliser, which the collector starts anywhere.
        """
        block.after = after
        self._freed.append(block)

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks that were not given back."""
        with self._lock:
            self._fill_bins()
            return self._used

    def trim(self) -> int:
        """Give unused slabs back to the system; returns their bytes."""
        with self._lock:
            self._empty_bins(asks=True)
            idle = [slab for slab in self._slabs if slab.free.tail(slab.nbytes) == slab.nbytes]
            for slab in idle:
                for event in slab.free.ranges[0][2]:
                    event.synchronize()
                self._slabs.remove(slab)
            freed = sum(slab.nbytes for slab in idle)
            self._slabs_bytes -= freed
            freed += self._maker.coming_bytes
            self._maker.drop()
            return freed

    def close(self) -> None:
        """Drop all slabs, when nothing is queued. A block that is still held keeps its slab."""
        with self._lock:
            self._maker.close()
            for slab in self._slabs:
                slab.closed = True
            self._slabs.clear()
            self._bins.clear()
            self._freed.clear()
            self._slabs_bytes = self._used = 0

    def _fill_bins(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            if block.slab.closed:
                continue
            self._used -= block.nbytes
            same_size = self._bins.get(block.nbytes)
            if same_size is None:
                same_size = self._bins[block.nbytes] = []
            same_size.append(block)

    def _empty_bins(self, *, asks: bool) -> None:
        self._fill_bins()
        for blocks in self._bins.values():
            for block in blocks:
                block.slab.free.give(block.start, block.nbytes, block.after, asks=asks)
        self._bins.clear()

    def _cut(self, nbytes: int, *, over_cap: bool, grows: bool) -> Block:
        self._empty_bins(asks=grows)
        for slab in self._slabs:
            block = slab.cut(nbytes)
            if block is not None:
                return block
        if not grows:
            raise TierFullError(
                f"host memory: got a request for {format_bytes(nbytes)} when no memory can be registered, expected "
                f"room that earlier steps have left; run a step like it before, in the same session"
            )
        while (memory := self._made(self._maker.prepared)) is not None:
            block = self._add(memory).cut(nbytes)
            if block is not None:
                self._prepare(block.slab.nbytes)
                return block
        return self._grow(nbytes, over_cap=over_cap)

    def _grow(self, nbytes: int, *, over_cap: bool) -> Block:
        """A block of a new slab."""
        room = self.capacity - self.reserved_bytes
        if nbytes > room and not over_cap:
            raise TierFullError(
                f"host memory: got a request for {format_bytes(nbytes)} with {format_bytes(self._used)} of "
                f"{format_bytes(self.capacity)} in use, expected it to fit; raise host_budget, or send more to disk"
            )
        # Large slabs are made faster, but the unused rest of the last one must be small. A multiple of the request,
        # since a step asks for the same sizes again and again.
        usual = min(max(self.reserved_bytes // _SHARE_OF_A_SLAB, self._slab_bytes), MOST_SLAB_BYTES)
        wanted = nbytes * -(-usual // nbytes)
        size = wanted if wanted <= room else max(nbytes, room // nbytes * nbytes)
        memory = self._made(lambda: self._make_slab(size))
        assert memory is not None
        block = self._add(memory).cut(nbytes)
        assert block is not None
        if usual > self._slab_bytes:
            self._prepare(size)
        return block

    def _prepare(self, nbytes: int) -> None:
        """Have slabs of this size made in advance, as far as the cap allows."""
        while self.reserved_bytes + nbytes <= self.capacity:
            if not self._maker.prepare(nbytes):
                return

    def _made(self, make: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        # A failure would repeat for every tensor, and take as long each time.
        if self._refusal is not None:
            raise TierFullError(self._refusal)
        try:
            return make()
        except (TierFullError, OSError) as error:
            self._refusal = str(error) if isinstance(error, TierFullError) else f"host memory: the system said {error}"
            self._maker.drop()
            raise TierFullError(self._refusal) from error

    def _add(self, memory: torch.Tensor) -> _Slab:
        slab = _Slab(memory)
        self._slabs.append(slab)
        self._slabs_bytes += slab.nbytes
        return slab


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE
