"""A file without a name, that only grows, and moves whole blocks.

Note: how the file keeps its promises
-------------------------------------

*Anonymous.* The file has no name (``O_TMPFILE``, or a name that is removed before the first byte is written) and mode
0600. So the kernel frees it when the process ends, by whatever signal, and two jobs on one path cannot meet.

*Preallocated.* Space is reserved when the file grows, before anything relies on it. A full disk is then an error at a
moment when the caller can still keep the tensor. The file is never mapped, so a full disk cannot be a SIGBUS either. A
file system that cannot reserve gets a sparse file, and the error comes with the write.

*Aligned.* Under ``O_DIRECT`` address, offset and length must be multiples of a block. After a short write the next one
begins again at the last whole block. Where ``O_DIRECT`` is refused, or accepted and then fails, plain I/O through the
page cache does the same work.

*Given back.* The owner truncates the file before it closes it: a forked child shares the open file, and if it lives on
with its descriptor, it does not hold the space. In the child only the child's descriptor is closed.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from spillway.errors import CorruptError, SpillPathError, TierFullError, TransferError
from spillway.runtime.system_calls import ALIGNMENT, SystemCalls
from spillway.units import format_bytes

_LARGEST_CALL = 2**30  # Linux moves just under 2 GiB in one call, and others refuse more than that.
_PATIENCE = 8  # Calls in a row that may move less than a block.

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})


class AnonymousFile:
    """The base of :class:`~spillway.runtime.disk.SpillFile`: the file as the system sees it.

    Growing and releasing need the caller's lock; transfers need none, as long as the file is not released meanwhile.

    Args:
        directory: where the file lives.
        calls: the system calls to use.

    Raises:
        SpillPathError: no file can be made there.
    """

    directory: Path
    """Where the file lives; absolute."""

    def __init__(self, directory: Path, calls: SystemCalls) -> None:
        self.directory = directory
        self._calls = calls
        self._fd = -1
        self._size = 0
        self._finalizer: weakref.finalize[[SystemCalls, int, int], AnonymousFile] | None = None
        # A first file shows that one can be made and whether O_DIRECT works. The one to use is made when it is needed.
        try:
            fd, self._direct = _open(directory, calls)
        except TierFullError:  # full now is not full for ever: growing will tell
            self._direct = hasattr(os, "O_DIRECT")
        else:
            calls.close(fd)

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache (``O_DIRECT``), so that buffers must be page-aligned."""
        return self._direct

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the file has, in use or free for use. It never shrinks before it is closed."""
        return self._size

    def _lengthen(self, nbytes: int, least: int) -> int:
        """Reserve ``nbytes`` more, or only ``least`` where the disk has no room for as many; which it was.

        The first call makes the file.
        """
        if self._fd < 0:
            self._fd, self._direct = _open(self.directory, self._calls)
            self._finalizer = weakref.finalize(self, _close, self._calls, self._fd, os.getpid())
            # At exit the kernel closes it; we would close it under a thread that still writes.
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

    def _write_all(self, view: memoryview, offset: int) -> None:
        """Write all of ``view``, whose address and length fit :attr:`direct`."""
        self._move_all("write", self._calls.pwrite, view, offset, early_end=TransferError)

    def _read_all(self, view: memoryview, offset: int) -> None:
        """Fill all of ``view``, whose address and length fit :attr:`direct`."""
        self._move_all("read", self._calls.preadv, view, offset, early_end=CorruptError)

    def _move_all(
        self,
        verb: str,
        call: Callable[[int, memoryview, int], int],
        view: memoryview,
        offset: int,
        *,
        early_end: type[TransferError] | type[CorruptError],
    ) -> None:
        """Call until all has moved: the system may move less at a time, and ends a file early with 0."""
        done = idle = 0
        while done < len(view):
            try:
                moved = call(self._fd, view[done : done + _LARGEST_CALL], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                kind = TierFullError if error.errno in _FULL else TransferError
                raise kind(self._failed(verb, view, offset, f"{error.strerror!r} after {done} bytes")) from error
            now = done + moved
            if self._direct:  # the next call must begin on a block: what was moved of a torn one is moved again
                now -= now % ALIGNMENT
            idle = idle + 1 if now == done else 0
            done = now
            if idle > _PATIENCE:
                raise early_end(self._failed(verb, view, offset, f"{done + moved} bytes and then no more"))

    def _failed(self, verb: str, view: memoryview, offset: int, what: str) -> str:
        return (
            f"spill file in {self.directory}: {verb} of {len(view)} bytes at offset {offset} got {what}, "
            f"expected all of them; look at that disk (its free space, the system's log), or spill to another directory"
        )

    def _release(self) -> None:
        """Close the descriptor, with no transfer under way. In the owner the space is free then."""
        if self._finalizer is not None:
            self._finalizer()
        self._fd = -1
        self._size = 0


def _close(calls: SystemCalls, fd: int, owner: int) -> None:
    """Close the descriptor; the owner gives the space back first, as a forked child may hold the file open."""
    if os.getpid() == owner:
        with suppress(OSError):  # the close below frees it too, only later
            calls.ftruncate(fd, 0)
    with suppress(OSError):  # a descriptor is gone even if its close fails, and nobody wants these bytes any more
        calls.close(fd)


def _open(directory: Path, calls: SystemCalls) -> tuple[int, bool]:
    """The descriptor of a new anonymous file, and whether it is in ``O_DIRECT`` mode."""
    try:
        fd = _open_anonymous(directory, calls)
        with ExitStack() as undo:
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
        # Systems differ in how they refuse it, so any refusal counts: the way below has the last word.
        with suppress(OSError):
            # Here O_EXCL means that the file can never be given a name.
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
