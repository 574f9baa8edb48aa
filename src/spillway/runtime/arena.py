"""Host memory for copies: slabs, cut in exact sizes, reused, with a cap in bytes.

NOTE [ Given back is not free ]

A block is given back when nobody needs its *content* any more. A copy that reads or writes it may still be queued: so
whoever gives it back names the events after which it may be written. They travel with the bytes: the next owner of
any part of them finds them in ``Block.after``, and waits for them before it writes. (A system that hands a pinned
buffer out again as soon as the copy from it is *queued* delivers the next owner's bytes to the first.)

Blocks are cut in multiples of a page, so that any of them can be read and written by direct I/O as it stands.

A training step asks for the same sizes again and again. So what is given back lies in a bin for its size, uncut, and is
handed out as it is; only when a bin is empty are all bins emptied, neighbours joined, and the best fit cut.

Slabs grow with the arena, and once it is large the next two are made in advance (``slab_maker.py``): all that a step
leaves unused of them is a twentieth at most. What was made in advance and is not needed when blocks are handed out for
the second time, is given back.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable

import torch

from spillway.errors import TierFullError
from spillway.runtime.backend import Event
from spillway.runtime.bytes import Bytes
from spillway.runtime.slab_maker import SlabMaker
from spillway.units import format_bytes

PAGE = 4096
SLAB_BYTES = 32 << 20
MOST_SLAB_BYTES = 512 << 20
_SHARE_OF_A_SLAB = 128


class Block(Bytes):
    """Bytes of a slab, owned until they are given back: page-aligned, a multiple of a page long."""

    __slots__ = ("after", "slab")

    def __init__(self, slab: _Slab, start: int, nbytes: int, after: tuple[Event, ...]) -> None:
        super().__init__(slab.storage, start, nbytes)
        self.slab = slab
        self.after = after
        """Wait for these before the next access."""


class _Slab:
    """One piece of host memory. ``free`` holds (offset, nbytes, events), sorted, never two that touch."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.storage = memory.untyped_storage()
        self.nbytes = memory.numel()
        self.closed = False
        self.free: list[tuple[int, int, tuple[Event, ...]]] = [(0, self.nbytes, ())]

    def smallest_fit(self, nbytes: int) -> int | None:
        """Index of the smallest free range that takes ``nbytes``."""
        fits = [(length, index) for index, (_, length, _) in enumerate(self.free) if length >= nbytes]
        return min(fits)[1] if fits else None

    def cut(self, index: int, nbytes: int) -> Block:
        offset, length, after = self.free.pop(index)
        if length > nbytes:
            self.free.insert(index, (offset + nbytes, length - nbytes, after))
        return Block(self, offset, nbytes, after)

    def mend(self, block: Block, *, asks: bool) -> None:
        """Put a block back, joined with its free neighbours.

        Args:
            block: of this slab.
            asks: whether events may be asked if they have been reached: those that have are forgotten.
        """
        offset, nbytes, after = block.start, block.nbytes, block.after
        index = bisect.bisect(self.free, offset, key=lambda item: item[0])
        if index < len(self.free) and self.free[index][0] == offset + nbytes:
            _, length, events = self.free.pop(index)
            nbytes, after = nbytes + length, (*after, *events)
        if index > 0 and sum(self.free[index - 1][:2]) == offset:
            offset, length, events = self.free.pop(index - 1)
            nbytes, after = nbytes + length, (*events, *after)
            index -= 1
        if asks:
            after = tuple(event for event in after if not event.query())
        self.free.insert(index, (offset, nbytes, after))


class Arena:
    """Cuts blocks from slabs that the backend makes. All methods may be called from any thread.

    Args:
        make_slab: bytes in, host memory out (:meth:`Backend.host_slab`).
        capacity: most bytes that all slabs together may have.
        slab_bytes: least size of a slab.
    """

    def __init__(
        self, make_slab: Callable[[int], torch.Tensor], *, capacity: int, slab_bytes: int = SLAB_BYTES
    ) -> None:
        self._maker = SlabMaker(make_slab)
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
        """Bytes of all slabs, those that are being made too."""
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
                    # A step has ended, and this is the next: what it did not need, none will.
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
        """Give slabs that nobody uses back to the system; returns their bytes."""
        with self._lock:
            self._empty_bins(asks=True)
            idle = [slab for slab in self._slabs if slab.free and slab.free[0][1] == slab.nbytes]
            for slab in idle:
                for event in slab.free[0][2]:
                    event.synchronize()
                self._slabs.remove(slab)
            freed = sum(slab.nbytes for slab in idle)
            self._slabs_bytes -= freed
            freed += self._maker.coming_bytes
            self._maker.drop()
            return freed

    def close(self) -> None:
        """Let go of all slabs, when nothing is queued any more. Blocks that somebody still holds keep theirs."""
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
                block.slab.mend(block, asks=asks)
        self._bins.clear()

    def _cut(self, nbytes: int, *, over_cap: bool, grows: bool) -> Block:
        self._empty_bins(asks=grows)
        for slab in self._slabs:
            index = slab.smallest_fit(nbytes)
            if index is not None:
                return slab.cut(index, nbytes)
        if not grows:
            raise TierFullError(
                f"host memory: got a request for {format_bytes(nbytes)} when no memory can be registered, expected "
                f"room that earlier steps have left; run a step like it before, in the same session"
            )
        while (memory := self._made(self._maker.prepared)) is not None:
            slab = self._add(memory)
            if slab.nbytes >= nbytes:
                self._prepare(slab.nbytes)
                return slab.cut(0, nbytes)
        return self._grow(nbytes, over_cap=over_cap).cut(0, nbytes)

    def _grow(self, nbytes: int, *, over_cap: bool) -> _Slab:
        room = self.capacity - self.reserved_bytes
        if nbytes > room and not over_cap:
            raise TierFullError(
                f"host memory: got a request for {format_bytes(nbytes)} with {format_bytes(self._used)} of "
                f"{format_bytes(self.capacity)} in use, expected it to fit; raise host_budget, or send more to disk"
            )
        # Large slabs are made faster, and what is not used of the last one is to be little of all. A whole number of
        # what is asked for, since a step asks for the same sizes again and again.
        usual = min(max(self.reserved_bytes // _SHARE_OF_A_SLAB, self._slab_bytes), MOST_SLAB_BYTES)
        wanted = nbytes * -(-usual // nbytes)
        size = wanted if wanted <= room else max(nbytes, room // nbytes * nbytes)
        memory = self._made(lambda: self._maker.make(size))
        assert memory is not None
        slab = self._add(memory)
        if usual > self._slab_bytes:
            self._prepare(size)
        return slab

    def _prepare(self, nbytes: int) -> None:
        """Have slabs of this size made for what will be asked for next, as far as the cap allows."""
        while self.reserved_bytes + nbytes <= self.capacity:
            if not self._maker.prepare(nbytes):
                return

    def _made(self, make: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        # What failed once would fail for every tensor, and each time take as long.
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
