"""The disk tier: one anonymous, preallocated file a session, cut into extents that each have a checksum.

Note: how the file keeps its promises
-------------------------------------

*Anonymous.* The file has no name (``O_TMPFILE``, or a name that is removed before the first byte is written) and mode
0600. So the kernel frees it when the process ends, by whatever signal, and two jobs on one path cannot meet. It never
holds anything but raw bytes: nothing is pickled.

*Preallocated.* Space is reserved at :meth:`SpillFile.allocate`, before anything relies on it. A full disk is then an
error of ``allocate``, where the caller can still keep the tensor. The file is never mapped, so a full disk cannot be a
SIGBUS either. A file system that cannot reserve gets a sparse file, and the error comes at ``write``.

*Aligned.* Under ``O_DIRECT`` address, offset and length must be multiples of a block. Every extent begins on a 4 KiB
boundary and reserves a multiple of 4 KiB; a buffer holds all of what is reserved, though only the first ``nbytes``
bytes count. After a short write the next one begins again at the last whole block. Where ``O_DIRECT`` is refused, or
accepted and then fails, plain I/O through the page cache does the same work.

*Forked.* A child shares the open file with its parent: what it wrote, truncated or punched would be the parent's loss.
So the file belongs to the process that made it. In a child every call but ``free`` and ``close`` raises, ``free`` does
nothing, and closing closes the child's descriptor. The process id is looked at before the lock is touched: the lock may
have been held by a thread that the child does not have. When the owner closes the file it truncates it first, so that
a child that still holds a descriptor does not hold the space.

*Freed from anywhere.* ``free`` runs in finalisers, which the garbage collector may start inside any call here, with the
lock held. So ``free`` takes no lock: one ``dict.pop`` decides who frees, one ``deque.append`` leaves the range to
whoever next holds the lock. A range that a thread is still writing or reading is given back when that thread is done,
and so is the descriptor on ``close``: a number that is reused too early is another file.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import secrets
import tempfile
import threading
import time
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spillway.errors import (
    CorruptError,
    SessionError,
    SizeError,
    SpillPathError,
    TierFullError,
    TransferError,
    UsageError,
)
from spillway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

ALIGNMENT = 4096
"""Bytes: every extent begins at a multiple of this, and reserves one."""

_GROWTH = 64 * 2**20  # The file grows by this or by what is needed: few calls, and no rush for the whole disk.
_LARGEST_CALL = 2**30  # Linux moves just under 2 GiB in one call, and others refuse more than that.
_PATIENCE = 8  # Calls in a row that may move less than a block.
_HOUR = 3600.0
_BUCKET = 10.0  # Seconds. A busy hour of writes is remembered in 360 numbers.

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_MEMORY_DEVICES = ("/dev/ram", "/dev/zram")
_DEFAULT_PLACES: tuple[Callable[[], str], ...] = (tempfile.gettempdir, lambda: "/var/tmp", os.getcwd)


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
    """Bytes that it takes in the file: ``nbytes`` rounded up to :data:`ALIGNMENT`."""


class Mount(NamedTuple):
    """A mounted file system."""

    point: str
    kind: str
    """Its type, as ``"ext4"``."""
    device: str


class SystemCalls:
    """Every call by which a spill file meets the system. Tests put faults in here; nothing else has to be faked."""

    def mounts(self) -> Sequence[Mount]:
        """All mounted file systems, in the order in which they were mounted."""
        import psutil  # not at the top: only a session that spills to disk needs it

        return [Mount(part.mountpoint, part.fstype, part.device) for part in psutil.disk_partitions(all=True)]

    def monotonic(self) -> float:
        """Seconds."""
        return time.monotonic()

    def open(self, path: str, flags: int, mode: int) -> int:
        """A descriptor."""
        return os.open(path, flags, mode)

    def unlink(self, path: str) -> None:
        """Remove the name."""
        os.unlink(path)

    def close(self, fd: int) -> None:
        """Give the descriptor back."""
        os.close(fd)

    def set_direct(self, fd: int, on: bool) -> None:
        """Switch ``O_DIRECT``; ``OSError`` where the file system has none."""
        flag = getattr(os, "O_DIRECT", 0)
        if on and not flag:
            raise OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT")
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if on else flags & ~flag)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve space on the disk; ``OSError`` where there is none, or where the file system cannot."""
        if not hasattr(os, "posix_fallocate"):
            raise OSError(errno.EOPNOTSUPP, "this system cannot reserve space")
        os.posix_fallocate(fd, offset, length)

    def ftruncate(self, fd: int, length: int) -> None:
        """Cut or lengthen the file, and reserve nothing."""
        os.ftruncate(fd, length)

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        """Bytes written, which may be fewer than asked for."""
        return os.pwrite(fd, view, offset)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        """Bytes read into ``view``, which may be fewer than asked for; 0 at the end of the file."""
        return os.preadv(fd, [view], offset)


class SpillFile:
    """One anonymous, preallocated file, and the extents in it.

    Every method may be called from several threads at once. Only the process that made it may use it.

    Args:
        directory: where the file lives. By default ``$SPILLWAY_DIR``, else the first of the temporary directory,
            ``/var/tmp`` and the working directory that is not in memory.
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

    directory: Path
    """Where the file lives; absolute."""
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
        self._calls = calls if calls is not None else SystemCalls()
        self.directory = _choose_directory(directory, allow_memory_filesystem, self._calls)
        self.capacity = capacity
        self._wear = None if bytes_per_hour is None else _Wear(bytes_per_hour)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._fd = -1
        self._finalizer: weakref.finalize[[SystemCalls, int, int], SpillFile] | None = None
        self._size = 0
        self._used = 0
        self._written = 0
        self._transfers = 0
        self._ranges = _FreeRanges()
        self._live: dict[int, _Slot] = {}
        self._freed: deque[_Slot] = deque()
        # A first file shows that one can be made and whether O_DIRECT works. The one to use is made when it is needed.
        try:
            fd, self._direct = _open_file(self.directory, self._calls)
        except TierFullError:  # full now is not full for ever: allocate will tell
            self._direct = hasattr(os, "O_DIRECT")
        else:
            self._calls.close(fd)

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache (``O_DIRECT``), so that buffers must be page-aligned."""
        return self._direct

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the file has, in use or free for use. It never shrinks before it is closed."""
        return self._size

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

    def allocate(self, nbytes: int) -> Extent:
        """Reserve a place for ``nbytes`` bytes.

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
        reserved = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._check_open()
            self._settle()
            now = self._calls.monotonic()
            if self._wear is not None:
                self._wear.check(reserved, now)
            while (offset := self._ranges.take(reserved)) is None:
                self._grow(reserved)
            extent = Extent(offset, nbytes, reserved)
            self._used += reserved
            promise = None if self._wear is None else self._wear.charge(reserved, now)
            self._live[id(extent)] = _Slot(extent, promise)
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

    def write(self, extent: Extent, buffer: Buffer) -> None:
        """Write the first ``extent.reserved`` bytes of ``buffer``, and return when the system has taken all of them.

        Args:
            extent: from :meth:`allocate`.
            buffer: at least ``extent.reserved`` contiguous bytes of memory, page-aligned if :attr:`direct`. The first
                ``extent.nbytes`` count; what lies behind them is written, and has no meaning.

        Raises:
            TransferError: the write failed; the extent holds nothing now.
            TierFullError: the disk is full, on a file system where ``allocate`` could not reserve.
            UsageError: an extent that is not alive, or a buffer that is too short or not aligned.
            SessionError: the file is closed, or belongs to the parent of this process.
        """
        with self._transfer(extent) as slot:
            data = self._bytes_of(buffer, extent)
            slot.checksum = None  # from here on the old bytes are gone, whatever comes
            checksum = _checksum(data[: extent.nbytes])
            self._move_all("write", self._calls.pwrite, extent, data.data)
            with self._lock:
                self._written += extent.reserved
                if self._wear is not None:
                    self._wear.spend(slot.promise, extent.reserved, self._calls.monotonic())
                    slot.promise = None
            slot.checksum = checksum

    def read(self, extent: Extent, buffer: Buffer) -> None:
        """Fill the first ``extent.reserved`` bytes of ``buffer``, and verify those that count.

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
            self._move_all("read", self._calls.preadv, extent, data.data)
            got = _checksum(data[: extent.nbytes])
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
            if self._finalizer is not None:
                self._finalizer()
            return
        with self._lock:
            self._closed = True
            if self._transfers == 0:
                self._let_go()

    def _let_go(self) -> None:
        """Close the descriptor; under the lock, with no transfer under way."""
        if self._finalizer is not None:
            self._finalizer()
        self._fd = -1
        self._size = self._used = 0
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
                continue
            self._ranges.give(slot.extent.offset, slot.extent.reserved)
            self._used -= slot.extent.reserved
            if slot.promise is not None:  # promised and never written
                slot.promise.nbytes -= slot.extent.reserved

    def _grow(self, nbytes: int) -> None:
        """Lengthen the file until its last free range holds ``nbytes``; under the lock."""
        needed = nbytes - self._ranges.tail(self._size)
        room = math.inf if self.capacity is None else self.capacity // ALIGNMENT * ALIGNMENT - self._size
        if needed > room:
            raise TierFullError(
                f"spill file in {self.directory}: got {format_bytes(nbytes)} to place, expected no more than fits into "
                f"the capacity of {format_bytes(self.capacity or 0)}, of which {format_bytes(self._used)} are in use "
                f"and the rest is in pieces of at most {format_bytes(self._ranges.largest(self._size, room))}; raise "
                f"the capacity, or offload less"
            )
        if self._fd < 0:
            self._fd, self._direct = _open_file(self.directory, self._calls)
            self._finalizer = weakref.finalize(self, _release, self._calls, self._fd, self._pid)
            # At exit the kernel closes it; we would close it under a thread that still writes.
            self._finalizer.atexit = False
        step = int(min(max(needed, _GROWTH), room))
        try:
            try:
                self._reserve(step)
            except OSError as error:
                if step == needed or error.errno not in _FULL:
                    raise
                step = needed  # no room for a whole step, but there may be for this
                self._reserve(step)
        except OSError as error:
            kind = TierFullError if error.errno in _FULL else TransferError
            raise kind(
                f"spill file in {self.directory}: got {error.strerror!r} for {format_bytes(step)} more than the "
                f"{format_bytes(self._size)} it has; free space on that disk, spill to another one, or offload less"
            ) from error
        self._ranges.give(self._size, step)
        self._size += step

    def _reserve(self, nbytes: int) -> None:
        """Space for ``nbytes`` more at the end of the file."""
        try:
            self._calls.fallocate(self._fd, self._size, nbytes)
        except OSError as error:
            if error.errno in _CANNOT_RESERVE:
                self._calls.ftruncate(self._fd, self._size + nbytes)
                return
            with suppress(OSError):  # a refusal may leave a part behind: others can use it. The refusal is the news.
                self._calls.ftruncate(self._fd, self._size)
            raise

    def _bytes_of(self, buffer: Buffer, extent: Extent) -> NDArray[np.uint8]:
        """The buffer's bytes that belong to the extent, checked for what the file's mode of I/O asks."""
        try:
            data: NDArray[np.uint8] = np.frombuffer(memoryview(buffer), dtype=np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise UsageError(
                f"spill file: got {type(buffer).__name__} ({error}), expected a buffer of {extent.reserved} "
                f"contiguous bytes; cut it from the arena"
            ) from error
        if len(data) < extent.reserved:
            raise UsageError(
                f"spill file: got a buffer of {len(data)} bytes for {extent}, expected at least {extent.reserved}, "
                f"since transfers are multiples of {ALIGNMENT} bytes; give the whole reserved block"
            )
        address: int = data.ctypes.data
        if self._direct and address % ALIGNMENT:
            raise UsageError(
                f"spill file: got a buffer at address {address:#x}, expected a multiple of {ALIGNMENT}, since "
                f"{self.directory} is used with O_DIRECT; cut it from the arena"
            )
        return data[: extent.reserved]

    def _move_all(
        self, verb: str, call: Callable[[int, memoryview, int], int], extent: Extent, view: memoryview
    ) -> None:
        """Call until all of the extent has moved: the system may move less at a time, and ends a file early with 0."""
        done = idle = 0
        while done < extent.reserved:
            try:
                moved = call(self._fd, view[done : done + _LARGEST_CALL], extent.offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                kind = TierFullError if error.errno in _FULL else TransferError
                raise kind(self._failed(verb, extent, f"{error.strerror!r} after {done} bytes")) from error
            now = done + moved
            if self._direct:  # the next call must begin on a block: what was moved of a torn one is moved again
                now -= now % ALIGNMENT
            idle = idle + 1 if now == done else 0
            done = now
            if idle > _PATIENCE:
                ended = CorruptError if verb == "read" else TransferError
                raise ended(self._failed(verb, extent, f"{done + moved} bytes and then no more"))

    def _failed(self, verb: str, extent: Extent, what: str) -> str:
        return (
            f"spill file in {self.directory}: {verb} of {extent.reserved} bytes at offset {extent.offset} got {what}, "
            f"expected all of them; look at that disk (its free space, the system's log), or spill to another directory"
        )


@dataclass(slots=True)
class _Bucket:
    start: float
    nbytes: int


@dataclass(slots=True)
class _Slot:
    """An extent's life: from ``allocate`` until its range is free again."""

    extent: Extent
    promise: _Bucket | None
    """Where its first write is counted before it is made."""
    checksum: int | None = None
    """Of what it holds; ``None`` while it holds nothing."""
    users: int = 0
    """Threads that read or write it now."""


class _FreeRanges:
    """The free ranges of the file: best fit, and neighbours become one."""

    def __init__(self) -> None:
        self._by_offset: list[tuple[int, int]] = []  # (offset, size)
        self._by_size: list[tuple[int, int]] = []  # (size, offset)

    def take(self, nbytes: int) -> int | None:
        """The offset of ``nbytes`` cut from the smallest range that has them, or ``None``."""
        index = bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        size, offset = self._by_size[index]
        self._remove(offset, size)
        if size > nbytes:
            self._add(offset + nbytes, size - nbytes)
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Take a range back."""
        index = bisect_left(self._by_offset, (offset, 0))
        if index < len(self._by_offset) and self._by_offset[index][0] == offset + nbytes:
            nbytes += self._by_offset[index][1]
            self._remove(*self._by_offset[index])
        if index > 0 and sum(self._by_offset[index - 1]) == offset:
            offset, before = self._by_offset[index - 1]
            nbytes += before
            self._remove(offset, before)
        self._add(offset, nbytes)

    def tail(self, end: int) -> int:
        """Free bytes just before ``end``."""
        return self._by_offset[-1][1] if self._by_offset and sum(self._by_offset[-1]) == end else 0

    def largest(self, end: int, room: float) -> int:
        """The most bytes that one range could have, if the file may yet grow by ``room`` behind ``end``."""
        return max(self._by_size[-1][0] if self._by_size else 0, self.tail(end) + int(room))

    def _add(self, offset: int, size: int) -> None:
        insort(self._by_offset, (offset, size))
        insort(self._by_size, (size, offset))

    def _remove(self, offset: int, size: int) -> None:
        del self._by_offset[bisect_left(self._by_offset, (offset, size))]
        del self._by_size[bisect_left(self._by_size, (size, offset))]


class _Wear:
    """Bytes promised and written in the last hour.

    A bucket is forgotten an hour after its *last* moment, so that no hour, wherever it begins, has more than the limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buckets: deque[_Bucket] = deque()

    def check(self, nbytes: int, now: float) -> None:
        """Raise ``TierFullError`` if ``nbytes`` more would be too many."""
        while self._buckets and self._buckets[0].start + _BUCKET + _HOUR <= now:
            self._buckets.popleft()
        spent = sum(bucket.nbytes for bucket in self._buckets)
        over = spent + nbytes - self._limit
        if over <= 0:
            return
        again = "never, as it is more than a whole hour's"
        for bucket in self._buckets if nbytes <= self._limit else ():
            over -= bucket.nbytes
            if over <= 0:
                again = f"in {format_seconds(bucket.start + _BUCKET + _HOUR - now)}"
                break
        raise TierFullError(
            f"spill file: got {format_bytes(nbytes)} to write after {format_bytes(spent)} in this hour, expected no "
            f"more than bytes_per_hour={format_bytes(self._limit)}; it may go on {again}, or raise the limit"
        )

    def charge(self, nbytes: int, now: float) -> _Bucket:
        """Count ``nbytes`` now; the bucket they are in."""
        if not self._buckets or self._buckets[-1].start + _BUCKET <= now:
            self._buckets.append(_Bucket(now, 0))
        self._buckets[-1].nbytes += nbytes
        return self._buckets[-1]

    def spend(self, promise: _Bucket | None, nbytes: int, now: float) -> None:
        """Count what was written when it was written, in place of the promise if this was the first time."""
        if promise is not None:
            promise.nbytes -= nbytes
        self.charge(nbytes, now)


def _checksum(data: NDArray[np.uint8]) -> int:
    """A checksum at the speed of memory.

    The 64-bit words of each 4 KiB block are added, each sum is mixed with the number of its block (the finaliser of
    SplitMix64, a bijection), and the mixed sums and the length are added.

    It finds any change of one word, of one block whose sum changes, and blocks that were lost, doubled, shifted or
    swapped, in one extent or between two. It does not find words that changed places inside one block, nor errors in
    one block that cancel out in the sum. It is against faults of hardware and software, not against an adversary.
    """
    whole = len(data) - len(data) % ALIGNMENT
    sums: NDArray[np.uint64] = np.add.reduce(data[:whole].view(np.uint64).reshape(-1, ALIGNMENT // 8), axis=1)
    if whole < len(data):
        tail = np.zeros(ALIGNMENT, dtype=np.uint8)
        tail[: len(data) - whole] = data[whole:]
        sums = np.append(sums, np.add.reduce(tail.view(np.uint64)))
    sums += np.arange(1, len(sums) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    sums = (sums ^ (sums >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    sums = (sums ^ (sums >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    sums ^= sums >> np.uint64(31)
    return (int(np.add.reduce(sums)) + len(data) * 0x9E3779B97F4A7C15) % 2**64


def _release(calls: SystemCalls, fd: int, owner: int) -> None:
    """Close the descriptor; the owner gives the space back first, as a forked child may hold the file open."""
    if os.getpid() == owner:
        with suppress(OSError):  # the close below frees it too, only later
            calls.ftruncate(fd, 0)
    with suppress(OSError):  # a descriptor is gone even if its close fails, and nobody wants these bytes any more
        calls.close(fd)


def _choose_directory(
    directory: str | os.PathLike[str] | None, allow_memory_filesystem: bool, calls: SystemCalls
) -> Path:
    mounts = calls.mounts()
    named = directory if directory is not None else os.environ.get("SPILLWAY_DIR") or None
    if named is not None:
        return _usable(named, allow_memory_filesystem, mounts)
    refusals: dict[str, None] = {}
    for in_memory in (False, True) if allow_memory_filesystem else (False,):
        for place in _DEFAULT_PLACES:
            try:
                return _usable(place(), in_memory, mounts)
            except (SpillPathError, OSError) as error:  # OSError: no temporary or no working directory at all
                refusals[str(error)] = None
    raise SpillPathError(
        "spill file: found no directory for it; set SPILLWAY_DIR or give a directory on a disk. Tried:\n  "
        + "\n  ".join(refusals)
    )


def _usable(place: str | os.PathLike[str], allow_memory_filesystem: bool, mounts: Sequence[Mount]) -> Path:
    """The directory's absolute path, if it is one that may be used."""
    expected = "expected a directory on a disk in which files can be made; set SPILLWAY_DIR or give another one"
    try:
        path = Path(place).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise SpillPathError(f"spill file: got {os.fspath(place)!r} ({error}), {expected}") from error
    if not path.is_dir():
        raise SpillPathError(f"spill file: got {str(path)!r}, which is not a directory, {expected}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise SpillPathError(f"spill file: got {str(path)!r}, which is not writable, {expected}")
    mount = Mount("/", "", "")
    for other in mounts:  # of two on one point the later one is seen
        if path.is_relative_to(other.point) and len(Path(other.point).parts) >= len(Path(mount.point).parts):
            mount = other
    in_memory = mount.kind in _MEMORY_FILESYSTEMS or mount.device.startswith(_MEMORY_DEVICES)
    if in_memory and not allow_memory_filesystem:
        raise SpillPathError(
            f"spill file: got {str(path)!r} on {mount.point!r} ({mount.kind}), which is host memory: spilling there "
            f"saves nothing; {expected}, or allow_memory_filesystem=True"
        )
    return path


def _open_file(directory: Path, calls: SystemCalls) -> tuple[int, bool]:
    """The descriptor of a new anonymous file, and whether it is in ``O_DIRECT`` mode."""
    try:
        fd = _open_anonymous(directory, calls)
        try:
            return fd, _made_direct(fd, calls)
        except BaseException:
            calls.close(fd)
            raise
    except OSError as error:
        kind = TierFullError if error.errno in _FULL else SpillPathError
        raise kind(
            f"spill file: got {error.strerror!r} in {directory}, expected a directory in which files can be made; "
            f"set SPILLWAY_DIR or give another one"
        ) from error


def _open_anonymous(directory: Path, calls: SystemCalls) -> int:
    if hasattr(os, "O_TMPFILE"):
        # Systems differ in how they refuse it, so any refusal counts: the way below has the last word.
        with suppress(OSError):
            # Here O_EXCL means that the file can never be given a name.
            return calls.open(str(directory), os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    path = str(directory / f".spillway-{secrets.token_hex(16)}")
    fd = calls.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
    try:
        calls.unlink(path)
    except BaseException:
        calls.close(fd)
        raise
    return fd


def _made_direct(fd: int, calls: SystemCalls) -> bool:
    """Whether ``O_DIRECT`` works on the file: some file systems accept the flag and refuse the transfer."""
    page = mmap.mmap(-1, ALIGNMENT)  # aligned; anonymous memory, not the file
    view = memoryview(page)
    try:
        calls.set_direct(fd, True)
        if calls.pwrite(fd, view, 0) == calls.preadv(fd, view, 0) == ALIGNMENT:
            return True
    except OSError as error:
        if error.errno in _FULL:
            raise
    finally:
        view.release()
        page.close()
    calls.set_direct(fd, False)
    return False
