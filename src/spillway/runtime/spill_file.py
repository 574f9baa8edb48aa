"""The spill file: one anonymous, preallocated file per session, cut into extents that each have a checksum.

NOTE [ The promises of the spill file ]

*Anonymous.* The file has no name (``O_TMPFILE``, or a name removed before the first byte is written) and mode 0600. The
kernel frees it when the process ends, by whatever signal. Two jobs on one path cannot meet.

*Preallocated.* Space is reserved when the file grows, so a full disk is an error while the caller can still keep the
tensor. The file is never mapped, so a full disk cannot be a SIGBUS. A file system that cannot reserve gets a sparse
file, and reports a full disk at the write.

*Aligned.* Under ``O_DIRECT``, address, offset and length must be multiples of 4 KiB. Extents begin and end on such
multiples. After a short write, the next one starts at the last whole block. If a file system refuses ``O_DIRECT``, or
accepts it and then fails, the page cache does the same work.

*Forked.* A child shares the open file with its parent, so only the process that made the file may use it. In a child
every call but ``free`` and ``close`` raises, ``free`` does nothing, and ``close`` closes the child's descriptor. The
process id is checked before the lock is touched: a thread that the child lacks may hold it. The owner truncates the
file before it closes it, so that a child that lives on does not hold the space.

*Freed from anywhere.* ``free`` runs in finalisers, which the garbage collector may start inside any call here, with the
lock held. So it takes no lock: one ``set.remove`` decides, and one ``deque.append`` leaves the range to the next holder
of the lock. A range that a thread is still moving is given back when that thread is done. So is the descriptor on
``close``: a descriptor number that is reused too early is another file.

*Checksummed.* The 64-bit words of each 4 KiB block are added. Each sum is mixed with the number of its block (the
finaliser of SplitMix64, a bijection), and the mixed sums and the length are added. This finds any changed word and any
block that was lost, doubled, shifted or swapped. It does not find words that changed places within a block.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import secrets
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

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
from spillway.runtime.arena import FreeRanges
from spillway.runtime.backend import on_error, quiet
from spillway.runtime.system import choose_directory, mounts
from spillway.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

ALIGNMENT = 4096
"""Bytes: ``O_DIRECT`` wants addresses, offsets and lengths that are multiples of this."""
_LARGEST_CALL = 2**30  # Linux moves just under 2 GiB in one call; other systems refuse more than that.
_PATIENCE = 8  # Calls in a row that may move less than a block.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})
_GROWTH = 64 * 2**20  # The file grows by this, or by what is needed.
_HOUR, _BUCKET = 3600, 10  # Seconds. Writes are counted in buckets: 360 numbers an hour.


class SystemCalls:
    """Every system call of a spill file: the one seam at which tests inject faults."""

    mounts = staticmethod(mounts)
    monotonic = staticmethod(time.monotonic)
    open = staticmethod(os.open)
    unlink = staticmethod(os.unlink)
    close = staticmethod(os.close)
    ftruncate = staticmethod(os.ftruncate)
    pwrite = staticmethod(os.pwrite)

    def set_direct(self, fd: int, on: bool) -> None:
        flag = getattr(os, "O_DIRECT", 0)
        if on and not flag:
            raise OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT")
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if on else flags & ~flag)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        if not hasattr(os, "posix_fallocate"):
            raise OSError(errno.EOPNOTSUPP, "this system cannot reserve space")
        os.posix_fallocate(fd, offset, length)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view], offset)


def checksum(data: NDArray[np.uint8]) -> int:
    """64 bits that tell whether the bytes are unchanged. See NOTE [ The promises of the spill file ]."""
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


@dataclass(slots=True, eq=False)
class Extent:
    """A place in a spill file. The very object names it: a copy, or an extent that was freed, is refused."""

    offset: int
    """First byte; a multiple of :data:`ALIGNMENT`."""
    nbytes: int
    """Bytes that count."""
    reserved: int
    """Bytes that it takes in the file: ``phase + nbytes`` rounded up to :data:`ALIGNMENT`."""
    phase: int = 0
    """Distance of the first byte from ``offset``: the same as its distance from a page in memory."""
    checksum: int | None = field(default=None, init=False, repr=False)
    """Checksum of the content; ``None`` while it has none. The file sets it."""
    users: int = field(default=0, init=False, repr=False)
    """Threads that read or write it now. The file counts them."""


class SpillFile:
    """One anonymous, preallocated file, and the extents in it. See NOTE [ The promises of the spill file ].

    Every method may be called from several threads at once, in the process that made it.

    Args:
        directory: of the file; ``None`` for the default of :func:`choose_directory`.
        capacity: the most bytes that the file may have; ``None`` for as many as the disk has.
        bytes_per_hour: the most bytes to write in any hour (flash wears out); ``None`` for no limit. ``allocate``
            refuses above it. Writing an extent again counts too, but is not refused.
        allow_memory_filesystem: accept a directory on a file system that is CPU memory, where spilling saves nothing.
        calls: the system calls to use.

    Raises:
        SpillPathError: no file can be made there, or the directory is in memory.
    """

    direct: bool
    """Whether transfers bypass the page cache (``O_DIRECT``), so that buffers must be page-aligned."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        capacity: int | None = None,
        bytes_per_hour: int | None = None,
        allow_memory_filesystem: bool = False,
        calls: SystemCalls | None = None,
    ) -> None:
        self._calls = calls or SystemCalls()
        self.directory = choose_directory(directory, allow_memory_filesystem, self._calls.mounts())
        self._fd = -1
        self._size = 0
        self._finalizer: weakref.finalize[[SystemCalls, int, int], SpillFile] | None = None
        # A trial file shows that one can be made, and whether O_DIRECT works. The real one is made when needed.
        try:
            fd, self.direct = _open(self.directory, self._calls)
        except TierFullError:  # The disk may have space later: growing will tell.
            self.direct = hasattr(os, "O_DIRECT")
        else:
            self._calls.close(fd)
        self.capacity = capacity
        self._per_hour = bytes_per_hour
        self._hour: Counter[int] = Counter()
        """Bytes written in the last hour, by bucket."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._used = 0
        self._transfers = 0
        self._ranges = FreeRanges()
        self._live: set[Extent] = set()
        self._freed: deque[Extent] = deque()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the file, used or free. It never shrinks before it is closed."""
        return self._size

    @property
    def used_bytes(self) -> int:
        """Bytes reserved by extents that are not free yet."""
        if os.getpid() == self._pid:
            with quiet(), self._lock:
                if not self._closed:
                    self._settle()
        return self._used

    def allocate(self, nbytes: int, *, phase: int = 0) -> Extent:
        """Reserve a place for ``nbytes`` bytes, at least one.

        ``phase`` is the distance of its buffers from the page before them. Raises ``TierFullError`` if the capacity,
        the disk or the hour's limit is exhausted, and ``SpillPathError`` if the directory is gone.
        """
        if nbytes < 1:
            raise SizeError(f"extent: got {nbytes} bytes, expected at least 1; what is empty needs no place on a disk")
        self._check_owner()
        reserved = -(-(phase + nbytes) // ALIGNMENT) * ALIGNMENT
        with quiet(), self._lock:
            self._check_open()
            self._settle()
            self._check_hour(reserved)
            while (found := self._ranges.take(reserved)) is None:
                self._grow(reserved)
            extent = Extent(found[0], nbytes, reserved, phase)
            self._used += reserved
            self._live.add(extent)
        return extent

    def free(self, extent: Extent) -> None:
        """Give an extent back. It takes no lock, and may run in a finaliser. In a forked child it does nothing."""
        if os.getpid() != self._pid:
            return
        self._check_open()
        try:
            self._live.remove(extent)
        except KeyError:
            self._check_open()
            raise UsageError(self._unknown(extent)) from None
        self._freed.append(extent)

    def write(self, extent: Extent, buffer: Buffer, *, shared: bool = False) -> None:
        """Write the first ``extent.nbytes`` bytes of ``buffer``. After an error the extent is empty.

        The buffer is contiguous and, if :attr:`direct`, begins ``extent.phase`` behind a page. If it is ``shared``,
        other code may write to it meanwhile: then it is written until it is found unchanged. Raises ``TransferError``,
        or ``TierFullError`` on a full disk where ``allocate`` could not reserve.
        """
        with self._transfer(extent):
            data = self._bytes_of(buffer, extent)
            extent.checksum = None  # The old bytes are lost, whatever happens now.
            written = checksum(data[: extent.nbytes])
            self._move_all(data, extent, write=True)
            while shared and (now := checksum(data[: extent.nbytes])) != written:
                written = now
                self._move_all(data, extent, write=True)
            with self._lock:
                if self._per_hour is not None:
                    self._hour[int(self._calls.monotonic() // _BUCKET)] += extent.reserved
                extent.checksum = written

    def read(self, extent: Extent, buffer: Buffer) -> None:
        """Fill the first ``extent.nbytes`` bytes of ``buffer``, and verify them.

        Raises ``CorruptError`` if they are not the written ones, and ``TransferError`` if the read failed or no write
        succeeded.
        """
        with self._transfer(extent):
            data = self._bytes_of(buffer, extent)
            expected = extent.checksum
            if expected is None:
                raise TransferError(
                    f"spill file: got a read of {extent}, which is empty, as no write to it has succeeded; do not drop "
                    f"a tensor before its write has returned"
                )
            self._move_all(data, extent, write=False)
            got = checksum(data[: extent.nbytes])
            if got != expected:
                raise CorruptError(
                    f"spill file in {self.directory}: {extent.nbytes} bytes at offset {extent.offset} have the "
                    f"checksum {got:#018x}, expected {expected:#018x}. They are not the bytes that were written. Look "
                    f"for errors of the disk in the system's log, or spill to another directory."
                )

    def close(self) -> None:
        """Free everything, after the transfers that are under way. Later calls raise ``SessionError``."""
        if os.getpid() != self._pid:
            self._closed = True
            self._end()
            return
        with self._lock:
            self._closed = True
            if self._transfers == 0:
                self._end()

    def _end(self) -> None:
        """Close the descriptor, with no transfer under way. In the owner this frees the space."""
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
    def _transfer(self, extent: Extent) -> Iterator[None]:
        """Keep the extent's place and the descriptor while a thread reads or writes without the lock."""
        self._check_owner()
        with self._lock:
            self._check_open()
            if extent not in self._live:
                raise UsageError(self._unknown(extent))
            extent.users += 1
            self._transfers += 1
        try:
            yield
        finally:
            with self._lock:
                extent.users -= 1
                self._transfers -= 1
                if self._closed and self._transfers == 0:
                    self._end()

    # Below, the lock is held.

    def _settle(self) -> None:
        """Give back the ranges that were freed and that no thread uses."""
        for _ in range(len(self._freed)):
            extent = self._freed.popleft()
            if extent.users:
                self._freed.append(extent)
            else:
                self._ranges.give(extent.offset, extent.reserved)
                self._used -= extent.reserved

    def _check_hour(self, nbytes: int) -> None:
        if self._per_hour is None:
            return
        # Extents without content are still to be written.
        promised = sum(extent.reserved for extent in list(self._live) if extent.checksum is None)
        # A bucket counts until all of it is over for an hour: no hour has more than the limit.
        first = int((self._calls.monotonic() - _HOUR) // _BUCKET)
        self._hour = Counter({bucket: written for bucket, written in self._hour.items() if bucket >= first})
        spent = promised + self._hour.total()
        if spent + nbytes > self._per_hour:
            raise TierFullError(
                f"spill file: got {format_bytes(nbytes)} to write after {format_bytes(spent)} in this hour, expected "
                f"no more than bytes_per_hour={format_bytes(self._per_hour)}; raise the limit, or offload less"
            )

    def _grow(self, nbytes: int) -> None:
        """Lengthen the file until its last free range holds ``nbytes``."""
        end = self._size
        needed = nbytes - self._ranges.tail(end)
        step = max(needed, _GROWTH)
        if self.capacity is not None:
            left = self.capacity // ALIGNMENT * ALIGNMENT - end
            if needed > left:
                raise TierFullError(
                    f"spill file in {self.directory}: got {format_bytes(nbytes)} to place, expected no more than fits "
                    f"into the capacity of {format_bytes(self.capacity)}, of which {format_bytes(self._used)} are in "
                    f"use and the rest is in pieces of at most {format_bytes(self._ranges.largest(end, left))}; raise "
                    f"the capacity, or offload less"
                )
            step = min(step, left)
        self._ranges.give(end, self._lengthen(step, needed))

    def _bytes_of(self, buffer: Buffer, extent: Extent) -> NDArray[np.uint8]:
        """The buffer's bytes that belong to the extent."""
        data: NDArray[np.uint8] = np.frombuffer(memoryview(buffer), dtype=np.uint8)
        if len(data) < extent.nbytes:
            raise UsageError(
                f"spill file: got a buffer of {len(data)} bytes for {extent}, expected at least {extent.nbytes}"
            )
        if self.direct and (address := data.ctypes.data) % ALIGNMENT != extent.phase:
            raise UsageError(
                f"spill file: got a buffer at address {address:#x}, expected one {extent.phase} bytes behind a "
                f"multiple of {ALIGNMENT}, since {self.directory} is used with O_DIRECT; allocate the extent with the "
                f"phase of its buffers"
            )
        return data[: extent.reserved - extent.phase]

    def _move_all(self, data: NDArray[np.uint8], extent: Extent, *, write: bool) -> None:
        """Whole blocks move straight from or into the buffer, the edges before and behind them through a page."""
        begin = extent.offset + extent.phase
        end = len(data) if len(data) == extent.reserved - extent.phase else extent.nbytes
        cuts = [0, end]
        if self.direct:
            head = min(-extent.phase % ALIGNMENT, end)
            cuts = [0, head, end - (end - head) % ALIGNMENT, end]
        for first, last in itertools.pairwise(cuts):
            piece, offset = data.data[first:last], begin + first
            if not (self.direct and len(piece) % ALIGNMENT):
                self._move(piece, offset, write=write)
                continue
            page, inside = aligned_page(), offset % ALIGNMENT
            place = page[inside : inside + len(piece)]
            if write:
                place[:] = piece
            self._move(page, offset - inside, write=write)
            if not write:
                piece[:] = place

    # The system calls. Growing needs the lock, a transfer does not.

    def _lengthen(self, nbytes: int, least: int) -> int:
        """Reserve ``nbytes`` more, or ``least`` on a full disk; gives which. Makes the file."""
        if self._fd < 0:
            self._fd, self.direct = _open(self.directory, self._calls)
            self._finalizer = weakref.finalize(self, _close, self._calls, self._fd, os.getpid())
            # At exit the kernel closes it. We might close it under a thread that still writes.
            self._finalizer.atexit = False
        try:
            self._reserve(nbytes)
        except OSError as error:
            if error.errno in _FULL and nbytes > least:
                return self._lengthen(least, least)
            kind = TierFullError if error.errno in _FULL else TransferError
            raise kind(
                f"spill file in {self.directory}: got {error.strerror!r} for {format_bytes(nbytes)} more than the "
                f"{format_bytes(self._size)} it has; free space on that disk, spill to another one, or offload less"
            ) from error
        self._size += nbytes
        return nbytes

    def _reserve(self, nbytes: int) -> None:
        try:
            self._calls.fallocate(self._fd, self._size, nbytes)
        except OSError as error:
            if error.errno in _CANNOT_RESERVE:
                self._calls.ftruncate(self._fd, self._size + nbytes)
                return
            with suppress(OSError):  # Give back what a refused growth took. The refusal is the error to report.
                self._calls.ftruncate(self._fd, self._size)
            raise

    def _move(self, view: memoryview, offset: int, *, write: bool) -> None:
        """Write or fill all of ``view``: the system may move less per call, and reports the end of the file as 0."""
        call = self._calls.pwrite if write else self._calls.preadv
        done = idle = 0
        while done < len(view):
            try:
                moved = call(self._fd, view[done : done + _LARGEST_CALL], offset + done)
            except OSError as error:
                kind = TierFullError if error.errno in _FULL else TransferError
                raise kind(self._failed(view, offset, f"{error.strerror!r} after {done} bytes", write)) from error
            now = done + moved
            if self.direct:  # The next call must start at a block: the bytes of a torn one are moved again.
                now -= now % ALIGNMENT
            idle = idle + 1 if now == done else 0
            done = now
            if idle > _PATIENCE:
                ended = TransferError if write else CorruptError
                raise ended(self._failed(view, offset, f"{done + moved} bytes and then no more", write))

    def _failed(self, view: memoryview, offset: int, what: str, write: bool) -> str:
        return (
            f"spill file in {self.directory}: {'write' if write else 'read'} of {len(view)} bytes at offset {offset} "
            f"got {what}, expected all of them; look at that disk (its free space, the system's log), or spill to "
            f"another directory"
        )


def _close(calls: SystemCalls, fd: int, owner: int) -> None:
    if os.getpid() == owner:
        with suppress(OSError):  # The close below frees the space too, only later.
            calls.ftruncate(fd, 0)
    with suppress(OSError):  # A failed close releases the descriptor all the same.
        calls.close(fd)


def _open(directory: Path, calls: SystemCalls) -> tuple[int, bool]:
    """The descriptor of a new anonymous file, and whether it is in ``O_DIRECT`` mode."""
    try:
        fd, name = _open_new(directory, calls)
        with on_error(calls.close, fd):
            if name:
                calls.unlink(name)
            return fd, _made_direct(fd, calls)
    except OSError as error:
        kind = TierFullError if error.errno in _FULL else SpillPathError
        raise kind(
            f"spill file: got {error.strerror!r} in {directory}, expected a directory in which files can be made; "
            f"set SPILLWAY_DIR or give another one"
        ) from error


def _open_new(directory: Path, calls: SystemCalls) -> tuple[int, str]:
    """The descriptor, and the name that is to be removed, if the system cannot do without."""
    if hasattr(os, "O_TMPFILE"):
        # Systems differ in how they refuse it. After any refusal, the way below decides.
        with suppress(OSError):
            # O_EXCL: the file can never be given a name.
            return calls.open(str(directory), os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600), ""
    name = str(directory / f".spillway-{secrets.token_hex(16)}")
    return calls.open(name, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600), name


def _made_direct(fd: int, calls: SystemCalls) -> bool:
    """Whether ``O_DIRECT`` works on the file: some file systems accept the flag and refuse the transfer."""
    page = aligned_page()
    try:
        calls.set_direct(fd, True)
        if calls.pwrite(fd, page, 0) == calls.preadv(fd, page, 0) == ALIGNMENT:
            return True
    except OSError as error:
        if error.errno in _FULL:
            raise
    calls.set_direct(fd, False)
    return False


def aligned_page() -> memoryview:
    """An aligned page of memory, freed with its last view."""
    return memoryview(mmap.mmap(-1, ALIGNMENT))
