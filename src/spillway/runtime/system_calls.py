"""Every call by which a spill file meets the system: the one seam at which tests put faults in."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT = 4096
"""Bytes: address, offset and length of a transfer are multiples of this, as ``O_DIRECT`` wants them."""


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
