"""CPU memory for copies: slabs, cut in exact sizes, reused, with a cap in bytes.

NOTE [ A freed block may be in use ]

A block is given back when its *content* is no longer needed. A copy that reads or writes it may still be queued. So the
caller names the events after which the block may be written. They travel with the bytes: the next owner of any part of
them finds them in ``Block.after``, and waits for them before it writes. Without this, a pinned buffer that is handed
out again while its copy is queued delivers the next owner's bytes to the first.

Blocks are multiples of a page, so that direct I/O can read and write any of them.

A training step asks for the same sizes again and again. A block that is given back goes to the bin of its size, uncut.
Only when a bin is empty are all bins emptied, neighbours joined, and the best fit cut.

Slabs grow with the arena: large ones are pinned faster, and the unused rest of the last one stays small.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable

import torch

from spillway.errors import TierFullError
from spillway.runtime.backend import Backend, Event
from spillway.runtime.bytes import Bytes
from spillway.units import format_bytes

PAGE = 4096
SLAB_BYTES = 32 << 20
MOST_SLAB_BYTES = 512 << 20
_SHARE_OF_A_SLAB = 128


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
        """Add a range that overlaps no other one, and the events to wait for before the next write.

        ``asks``: events may be asked whether they have been reached, and those that have are forgotten.
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

    def largest(self, end: int, growth: int) -> int:
        """The most bytes that one range could have, if the file may grow by ``growth`` behind ``end``."""
        return max([self.tail(end) + growth, *(nbytes for _, nbytes, _ in self.ranges)])


class _Slab:
    """One piece of CPU memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.storage = memory.untyped_storage()
        self.nbytes = memory.numel()
        self.closed = False
        self.free = FreeRanges()
        self.free.give(0, self.nbytes)

    def cut(self, nbytes: int) -> Block | None:
        found = self.free.take(nbytes)
        return None if found is None else Block(self, found[0], nbytes, found[1])


class Arena:
    """Cuts blocks from slabs that the backend makes, up to ``capacity`` bytes. May be called from any thread."""

    def __init__(
        self, make_slab: Callable[[int], torch.Tensor], *, capacity: int, slab_bytes: int = SLAB_BYTES
    ) -> None:
        self._make_slab = make_slab
        self._refusal: str | None = None
        self._slab_bytes = slab_bytes
        self._slabs: list[_Slab] = []
        self._bins: dict[int, list[Block]] = {}
        self._freed: deque[Block] = deque()
        self._lock = threading.Lock()
        self.capacity = capacity
        self.reserved_bytes = 0
        """Bytes of all slabs."""
        self._used = 0

    def allocate(self, nbytes: int, *, over_cap: bool = False, grows: bool = True) -> Block:
        """A block of at least ``nbytes``, rounded up to a page.

        Args:
            nbytes: how many.
            over_cap: exceed the cap rather than fail.
            grows: whether slabs may be made, or given back, and events be asked: not in a capture.

        Raises:
            TierFullError: no slab has the space, and another one would exceed the cap or could not be made once.
        """
        nbytes = pages(nbytes)
        with self._lock:
            if self._freed:
                self._fill_bins()
            same_size = self._bins.get(nbytes)
            block = same_size.pop() if same_size else self._cut(nbytes, over_cap=over_cap, grows=grows)
            self._used += nbytes
            return block

    def free(self, block: Block, after: tuple[Event, ...] = ()) -> None:
        """Give a block back; its bytes may be written again after the events. See NOTE [ A freed block may be in use ].

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
            self.reserved_bytes -= freed
            return freed

    def close(self) -> None:
        """Drop all slabs, when nothing is queued. A block that is still held keeps its slab."""
        with self._lock:
            for slab in self._slabs:
                slab.closed = True
            self._slabs.clear()
            self._bins.clear()
            self._freed.clear()
            self.reserved_bytes = self._used = 0

    def _fill_bins(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            if block.slab.closed:
                continue
            self._used -= block.nbytes
            self._bins.setdefault(block.nbytes, []).append(block)

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
                f"host memory: got a request for {format_bytes(nbytes)} while a graph is captured, which allows no new "
                f"memory. Run a step like it before the capture, in the same session."
            )
        return self._grow(nbytes, over_cap=over_cap)

    def _grow(self, nbytes: int, *, over_cap: bool) -> Block:
        left = self.capacity - self.reserved_bytes
        if nbytes > left and not over_cap:
            raise TierFullError(
                f"host memory: got a request for {format_bytes(nbytes)} with {format_bytes(self._used)} of "
                f"{format_bytes(self.capacity)} in use, expected it to fit; raise host_budget, or offload more to disk"
            )
        # A multiple of the request, since a step asks for the same sizes again and again.
        usual = min(max(self.reserved_bytes // _SHARE_OF_A_SLAB, self._slab_bytes), MOST_SLAB_BYTES)
        wanted = nbytes * -(-usual // nbytes)
        slab = _Slab(self._made(wanted if wanted <= left else max(nbytes, left // nbytes * nbytes)))
        self._slabs.append(slab)
        self.reserved_bytes += slab.nbytes
        block = slab.cut(nbytes)
        assert block is not None
        return block

    def _made(self, nbytes: int) -> torch.Tensor:
        # A failure would repeat for every tensor, and take as long each time.
        if self._refusal is not None:
            raise TierFullError(self._refusal)
        try:
            return self._make_slab(nbytes)
        except (TierFullError, OSError) as error:
            self._refusal = str(error) if isinstance(error, TierFullError) else f"host memory: the system said {error}"
            raise TierFullError(self._refusal) from error


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

    @property
    def bytes(self) -> Bytes:
        return self.block.part(0, self.nbytes)

    def mapped(self, backend: Backend) -> torch.Tensor:
        """The bytes as a tensor of the device, which holds this object.

        The device reads and writes CPU memory over the link then. So does every stream of the device, in order.
        """
        return backend.mapped(self.bytes, _Mapped(self, backend))

    def alias(self) -> torch.Tensor:
        """The bytes as a storage of their own, which holds this object."""
        return self.block.part(0, max(self.nbytes, 1)).owned_by(self)


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


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def anonymous_pages(nbytes: int, *, huge: bool = False, for_children: bool = True) -> torch.Tensor:
    """Page-aligned zeroed CPU memory, given back to the system when the tensor dies.

    ``huge`` asks the system for pages of 2 MiB. ``for_children``: a forked child gets a copy.
    """
    # Private: Python's default is shared pages, those of a file in memory, which are four times slower.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for wanted, advice in ((huge, "MADV_HUGEPAGE"), (not for_children, "MADV_DONTFORK")):
        if wanted and hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # advice, and a kernel without such pages says EINVAL
                pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)
