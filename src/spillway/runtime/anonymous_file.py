"""A file without a name, and every system call of the spill file."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import time
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path

from spillway.errors import CorruptError, SpillPathError, TierFullError, TransferError
from spillway.runtime.system import mounts
from spillway.units import format_bytes

ALIGNMENT = 4096
"""Bytes: ``O_DIRECT`` wants addresses, offsets and lengths that are multiples of this."""
_LARGEST_CALL = 2**30  # Linux moves just under 2 GiB in one call; other systems refuse more than that.
_PATIENCE = 8  # Calls in a row that may move less than a block.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})


def _set_direct(fd: int, on: bool) -> None:
    flag = getattr(os, "O_DIRECT", 0)
    if on and not flag:
        raise OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT")
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if on else flags & ~flag)


def _cannot_reserve(fd: int, offset: int, length: int) -> None:
    raise OSError(errno.EOPNOTSUPP, "this system cannot reserve space")


class SystemCalls:
    """Every system call of a spill file: the one seam at which tests inject faults."""

    mounts = staticmethod(mounts)
    monotonic = staticmethod(time.monotonic)
    open = staticmethod(os.open)
    unlink = staticmethod(os.unlink)
    close = staticmethod(os.close)
    set_direct = staticmethod(_set_direct)
    fallocate = staticmethod(getattr(os, "posix_fallocate", _cannot_reserve))
    ftruncate = staticmethod(os.ftruncate)
    pwrite = staticmethod(os.pwrite)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view], offset)


class AnonymousFile:
    """A file without a name that only grows. Growing and releasing need the caller's lock, transfers need none."""

    direct: bool
    """Whether transfers bypass the page cache (``O_DIRECT``), so that buffers must be page-aligned."""

    def __init__(self, directory: Path, calls: SystemCalls) -> None:
        self.directory = directory
        self._calls = calls
        self._fd = -1
        self._size = 0
        self._finalizer: weakref.finalize[[SystemCalls, int, int], AnonymousFile] | None = None
        # A trial file shows that one can be made, and whether O_DIRECT works. The real one is made when needed.
        try:
            fd, self.direct = _open(directory, calls)
        except TierFullError:  # The disk may have space later: growing will tell.
            self.direct = hasattr(os, "O_DIRECT")
        else:
            calls.close(fd)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the file, used or free. It never shrinks before it is closed."""
        return self._size

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
            except InterruptedError:
                continue
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

    def _release(self) -> None:
        """Close the descriptor, with no transfer under way. In the owner this frees the space."""
        if self._finalizer is not None:
            self._finalizer()
        self._fd = -1
        self._size = 0


def _close(calls: SystemCalls, fd: int, owner: int) -> None:
    if os.getpid() == owner:
        with suppress(OSError):  # The close below frees the space too, only later.
            calls.ftruncate(fd, 0)
    with suppress(OSError):  # A failed close releases the descriptor all the same.
        calls.close(fd)


def _open(directory: Path, calls: SystemCalls) -> tuple[int, bool]:
    """The descriptor of a new anonymous file, and whether it is in ``O_DIRECT`` mode."""
    try:
        with ExitStack() as undo:
            fd = _open_anonymous(directory, calls)
            undo.callback(calls.close, fd)
            direct = _made_direct(fd, calls)
            undo.pop_all()
        return fd, direct
    except OSError as error:
        kind = TierFullError if error.errno in _FULL else SpillPathError
        raise kind(
            f"spill file: got {error.strerror!r} in {directory}, expected a directory in which files can be made; "
            f"set SPILLWAY_DIR or give another one"
        ) from error


def _open_anonymous(directory: Path, calls: SystemCalls) -> int:
    if hasattr(os, "O_TMPFILE"):
        # Systems differ in how they refuse it. After any refusal, the way below decides.
        with suppress(OSError):
            # O_EXCL: the file can never be given a name.
            return calls.open(str(directory), os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    path = str(directory / f".spillway-{secrets.token_hex(16)}")
    fd = calls.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
    with ExitStack() as undo:
        undo.callback(calls.close, fd)
        calls.unlink(path)
        undo.pop_all()
    return fd


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
