"""The disk tier: one anonymous, preallocated file a session, cut into extents that each have a checksum.

Note: who may use the file, and when
------------------------------------

*Aligned.* Every extent begins on a 4 KiB boundary and reserves a multiple of 4 KiB, as direct I/O wants it. A buffer
holds all of what is reserved, though only the first ``nbytes`` bytes count: raw bytes, nothing is pickled.

*Forked.* A child shares the open file with its parent: what it wrote, truncated or punched would be the parent's loss.
So the file belongs to the process that made it. In a child every call but ``free`` and ``close`` raises, ``free`` does
nothing, and closing closes the child's descriptor. The process id is looked at before the lock is touched: the lock may
have been held by a thread that the child does not have.

*Freed from anywhere.* ``free`` runs in finalisers, which the garbage collector may start inside any call here, with the
lock held. So ``free`` takes no lock: one ``dict.pop`` decides who frees, one ``deque.append`` leaves the range to
whoever next holds the lock. A range that a thread is still writing or reading is given back when that thread is done,
and so is the descriptor on ``close``: a number that is reused too early is another file.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spillway.errors import CorruptError, SessionError, SizeError, TierFullError, TransferError, UsageError
from spillway.runtime.anonymous_file import AnonymousFile
from spillway.runtime.checksum import checksum
from spillway.runtime.free_ranges import FreeRanges
from spillway.runtime.spill_directory import choose_directory
from spillway.runtime.system_calls import ALIGNMENT, SystemCalls
from spillway.runtime.wear import Bucket, Wear
from spillway.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

_GROWTH = 64 * 2**20  # The file grows by this or by what is needed: few calls, and no rush for the whole disk.


@dataclass(frozen=True, slots=True)
class Extent:
    """A place in a spill file.

    It is known by what it is, not by its numbers: a copy, or an extent whose place was given to another since, is
    refused.
    """

    offset: int
    """Where it begins, in bytes; a multiple of :data:`ALIGNMENT`."""
    nbytes: int
    """Bytes that count."""
    reserved: int
    """Bytes that it takes in the file: ``phase + nbytes`` rounded up to :data:`ALIGNMENT`."""
    phase: int = 0
    """How far behind ``offset`` the bytes begin: as far as they begin behind a page in memory."""


@dataclass(slots=True)
class _Slot:
    """An extent's life: from ``allocate`` until its range is free again."""

    extent: Extent
    promise: Bucket | None
    """Where its first write is counted before it is made."""
    checksum: int | None = None
    """Of what it holds; ``None`` while it holds nothing."""
    users: int = 0
    """Threads that read or write it now."""

    def withdraw(self) -> None:
        """Count the promise no more: it was kept, and is counted as what was written, or never will be."""
        if self.promise is not None:
            self.promise.nbytes -= self.extent.reserved
            self.promise = None


class SpillFile(AnonymousFile):
    """One anonymous, preallocated file, and the extents in it.

    Every method may be called from several threads at once. Only the process that made it may use it.

    Args:
        directory: where the file lives; ``None`` for what :func:`choose_directory` finds.
        capacity: the most bytes that the file may have; ``None`` for as many as the disk has.
        bytes_per_hour: the most bytes that may be promised and written in any hour (flash wears out); ``None`` for no
            limit. Above it, ``allocate`` refuses. Writing an extent again counts too, but is not refused.
        allow_memory_filesystem: accept a directory on a file system that is host memory, where spilling saves nothing.
        calls: the system calls to use.

    Raises:
        SpillPathError: no file can be made there, or the directory is in memory.
        SizeError: a negative ``capacity`` or ``bytes_per_hour``.

    Example:
        >>> file = SpillFile("/var/tmp", capacity=2**30)  # doctest: +SKIP
        >>> extent = file.allocate(len(tensor_bytes))  # doctest: +SKIP
        >>> file.write(extent, page_aligned_block_of_extent_reserved_bytes)  # doctest: +SKIP
    """

    capacity: int | None
    """The most bytes that the file may have."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        capacity: int | None = None,
        bytes_per_hour: int | None = None,
        allow_memory_filesystem: bool = False,
        calls: SystemCalls | None = None,
    ) -> None:
        for what, limit in (("capacity", capacity), ("bytes_per_hour", bytes_per_hour)):
            if limit is not None and limit < 0:
                raise SizeError(f"{what}: got {limit}, expected at least 0 bytes, or None for no limit")
        calls = calls or SystemCalls()
        super().__init__(choose_directory(directory, allow_memory_filesystem, calls.mounts()), calls)
        self.capacity = capacity
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._used = 0
        self._written = 0
        self._transfers = 0
        self._wear = Wear(bytes_per_hour, calls.monotonic)
        self._ranges = FreeRanges()
        self._live: dict[int, _Slot] = {}
        self._freed: deque[_Slot] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes reserved by extents that are not given back yet."""
        if os.getpid() == self._pid:
            with self._lock:
                if not self._closed:
                    self._settle()
        return self._used

    @property
    def written_bytes(self) -> int:
        """Bytes written since the file was made, rounded up to whole blocks as the extents are."""
        return self._written

    def allocate(self, nbytes: int, *, phase: int = 0) -> Extent:
        """Reserve a place for ``nbytes`` bytes.

        Args:
            nbytes: how many.
            phase: how far behind a page the buffers begin that it will be written from and read into.

        Raises:
            TierFullError: the capacity, the disk or the hour's budget has no room for them.
            SpillPathError: the first call makes the file, and its directory is no longer there.
            TransferError: the disk failed.
            SizeError: ``nbytes`` is less than 1.
            SessionError: the file is closed, or belongs to the parent of this process.
        """
        if nbytes < 1:
            raise SizeError(f"extent: got {nbytes} bytes, expected at least 1; what is empty needs no place on a disk")
        self._check_owner()
        reserved = -(-(phase + nbytes) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._check_open()
            self._settle()
            self._wear.check(reserved)
            while (offset := self._ranges.take(reserved)) is None:
                self._grow(reserved)
            extent = Extent(offset, nbytes, reserved, phase)
            self._used += reserved
            self._live[id(extent)] = _Slot(extent, self._wear.charge(reserved))
        return extent

    def free(self, extent: Extent) -> None:
        """Give an extent back. It takes no lock and may run in a finaliser; in a forked child it does nothing.

        Raises:
            UsageError: the extent is not of this file, or was given back before.
            SessionError: the file is closed.
        """
        if os.getpid() != self._pid:
            return
        slot = self._live.pop(id(extent), None)
        if slot is None or self._closed:
            self._check_open()
            raise UsageError(self._unknown(extent))
        self._freed.append(slot)

    def write(self, extent: Extent, buffer: Buffer, *, shared: bool = False) -> None:
        """Write the first ``extent.nbytes`` bytes of ``buffer``, and return when the system has taken all of them.

        Args:
            extent: from :meth:`allocate`.
            buffer: at least so many contiguous bytes of memory, which begin ``extent.phase`` behind a page if
                :attr:`direct`. Whole pages of it move without a copy, and so does the last one if the buffer has all
                of it.
            shared: others may write to the buffer meanwhile: it is written again until it is found unchanged, so that
                the checksum is of what is in the file.

        Raises:
            TransferError: the write failed; the extent holds nothing now.
            TierFullError: the disk is full, on a file system where ``allocate`` could not reserve.
            UsageError: an extent that is not alive, or a buffer that is too short or not aligned.
            SessionError: the file is closed, or belongs to the parent of this process.
        """
        with self._transfer(extent) as slot:
            data = self._bytes_of(buffer, extent)
            slot.checksum = None  # from here on the old bytes are gone, whatever comes
            sum_of_it = checksum(data[: extent.nbytes])
            self._write_pieces(data, extent)
            while shared and (sum_now := checksum(data[: extent.nbytes])) != sum_of_it:
                sum_of_it = sum_now
                self._write_pieces(data, extent)
            with self._lock:
                self._written += extent.reserved
                slot.withdraw()
                self._wear.charge(extent.reserved)
            slot.checksum = sum_of_it

    def read(self, extent: Extent, buffer: Buffer) -> None:
        """Fill the first ``extent.nbytes`` bytes of ``buffer``, and verify them.

        Args:
            extent: from :meth:`allocate`, and written since.
            buffer: writable; otherwise as for :meth:`write`.

        Raises:
            CorruptError: other bytes came back than were written, or too few. ``buffer`` holds nothing of use.
            TransferError: the read failed, or nothing was ever written there.
            UsageError: an extent that is not alive, or a buffer that is too short, not aligned or read-only.
            SessionError: the file is closed, or belongs to the parent of this process.
        """
        with self._transfer(extent) as slot:
            data = self._bytes_of(buffer, extent)
            if not data.flags.writeable:
                raise UsageError(f"spill file: got a read-only buffer to read {extent} into; give a writable one")
            expected = slot.checksum
            if expected is None:
                raise TransferError(
                    f"spill file: got a read of {extent}, which holds nothing, as no write to it has succeeded; "
                    f"do not drop a tensor before its write has returned"
                )
            self._read_pieces(data, extent)
            got = checksum(data[: extent.nbytes])
            if got != expected:
                raise CorruptError(
                    f"spill file in {self.directory}: {extent.nbytes} bytes at offset {extent.offset} came back with "
                    f"checksum {got:#018x}, expected {expected:#018x}; these are not the bytes that were written: "
                    f"look for errors of the disk in the system's log, or spill to another directory"
                )

    def close(self) -> None:
        """Give everything back. A second call does nothing; any other later call raises ``SessionError``.

        Transfers that are under way end first. In a forked child only the child's descriptor is closed.
        """
        if os.getpid() != self._pid:
            self._closed = True
            self._release()
            return
        with self._lock:
            self._closed = True
            if self._transfers == 0:
                self._let_go()

    def _let_go(self) -> None:
        """Close the descriptor; under the lock, with no transfer under way."""
        self._release()
        self._used = 0
        self._live.clear()
        self._freed.clear()

    def _check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise SessionError(
                f"spill file: used in process {os.getpid()}, expected its owner, process {self._pid}, from which this "
                f"one was forked; make a session in each process"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("spill file: it is closed, expected an open one; make a new session")

    def _unknown(self, extent: Extent) -> str:
        return (
            f"spill file: got {extent}, expected an extent that this file gave out and that was not given back since; "
            f"use each extent with its own file, and free it once"
        )

    @contextmanager
    def _transfer(self, extent: Extent) -> Iterator[_Slot]:
        """Holds the extent's place and the descriptor while a thread reads or writes without the lock."""
        self._check_owner()
        with self._lock:
            self._check_open()
            slot = self._live.get(id(extent))
            if slot is None:
                raise UsageError(self._unknown(extent))
            slot.users += 1
            self._transfers += 1
        try:
            yield slot
        finally:
            with self._lock:
                slot.users -= 1
                self._transfers -= 1
                if self._closed and self._transfers == 0:
                    self._let_go()

    def _settle(self) -> None:
        """Give back the ranges that were freed and that no thread uses; under the lock."""
        for _ in range(len(self._freed)):
            slot = self._freed.popleft()
            if slot.users:
                self._freed.append(slot)
            else:
                self._ranges.give(slot.extent.offset, slot.extent.reserved)
                self._used -= slot.extent.reserved
                slot.withdraw()

    def _grow(self, nbytes: int) -> None:
        """Lengthen the file until its last free range holds ``nbytes``; under the lock."""
        end = self._size
        needed = nbytes - self._ranges.tail(end)
        step = max(needed, _GROWTH)
        if self.capacity is not None:
            room = self.capacity // ALIGNMENT * ALIGNMENT - end
            if needed > room:
                raise TierFullError(
                    f"spill file in {self.directory}: got {format_bytes(nbytes)} to place, expected no more than fits "
                    f"into the capacity of {format_bytes(self.capacity)}, of which {format_bytes(self._used)} are in "
                    f"use and the rest is in pieces of at most {format_bytes(self._ranges.largest(end, room))}; raise "
                    f"the capacity, or offload less"
                )
            step = min(step, room)
        self._ranges.give(end, self._lengthen(step, needed))

    def _bytes_of(self, buffer: Buffer, extent: Extent) -> NDArray[np.uint8]:
        """The buffer's bytes that belong to the extent, checked for what the file's mode of I/O asks."""
        try:
            data: NDArray[np.uint8] = np.frombuffer(memoryview(buffer), dtype=np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise UsageError(
                f"spill file: got {type(buffer).__name__} ({error}), expected a buffer of {extent.reserved} "
                f"contiguous bytes; cut it from the arena"
            ) from error
        if len(data) < extent.nbytes:
            raise UsageError(
                f"spill file: got a buffer of {len(data)} bytes for {extent}, expected at least {extent.nbytes}"
            )
        if self._direct and (address := data.ctypes.data) % ALIGNMENT != extent.phase:
            raise UsageError(
                f"spill file: got a buffer at address {address:#x}, expected one {extent.phase} bytes behind a "
                f"multiple of {ALIGNMENT}, since {self.directory} is used with O_DIRECT; allocate the extent with the "
                f"phase of its buffers"
            )
        return data[: extent.reserved - extent.phase]

    def _write_pieces(self, data: NDArray[np.uint8], extent: Extent) -> None:
        for piece, offset in self._pieces(data, extent):
            if self._direct and len(piece) % ALIGNMENT:
                page, begin = _edge_page(), offset % ALIGNMENT
                page[begin : begin + len(piece)] = piece
                self._write_all(page, offset - begin)
            else:
                self._write_all(piece, offset)

    def _read_pieces(self, data: NDArray[np.uint8], extent: Extent) -> None:
        for piece, offset in self._pieces(data, extent):
            if self._direct and len(piece) % ALIGNMENT:
                page, begin = _edge_page(), offset % ALIGNMENT
                self._read_all(page, offset - begin)
                piece[:] = page[begin : begin + len(piece)]
            else:
                self._read_all(piece, offset)

    def _pieces(self, data: NDArray[np.uint8], extent: Extent) -> Iterator[tuple[memoryview, int]]:
        """Parts of the buffer and where they go: whole blocks, and the edges before and behind them."""
        begin = extent.offset + extent.phase
        end = len(data) if len(data) == extent.reserved - extent.phase else extent.nbytes
        cuts = [0, end]
        if self._direct:
            head = min(-extent.phase % ALIGNMENT, end)
            cuts = [0, head, end - (end - head) % ALIGNMENT, end]
        for first, last in itertools.pairwise(cuts):
            if first < last:
                yield data.data[first:last], begin + first


def _edge_page() -> memoryview:
    """A page for a part of one. It goes when its last view does, which may be in a traceback."""
    return memoryview(mmap.mmap(-1, ALIGNMENT))
