"""What the tests of the spill file share: files to try, memory to move, and systems that are not like this one."""

from __future__ import annotations

import errno
import mmap
import os
import random
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spillway.runtime.spill_file import ALIGNMENT, Extent, SpillFile, SystemCalls
from steps import open_files

MiB = 2**20
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def page_aligned(content: bytes, *, reserved: int) -> memoryview:
    """Page-aligned writable memory that begins with ``content``; the rest is noise that must not matter."""
    memory = mmap.mmap(-1, reserved)
    memory[:] = content + random.randbytes(reserved - len(content))
    return memoryview(memory)


def make(directory: Path, **options: Any) -> SpillFile:
    """On whatever file system the tests' temporary directory has."""
    return SpillFile(directory, allow_memory_filesystem=True, **options)


@contextmanager
def opened(directory: Path, **options: Any) -> Iterator[SpillFile]:
    with closing(make(directory, **options)) as file:
        yield file


def store(file: SpillFile, extent: Extent, content: bytes) -> None:
    file.write(extent, page_aligned(content, reserved=extent.reserved))


def put(file: SpillFile, content: bytes) -> Extent:
    extent = file.allocate(len(content))
    store(file, extent, content)
    return extent


def get(file: SpillFile, extent: Extent) -> bytes:
    buffer = page_aligned(b"", reserved=extent.reserved)
    file.read(extent, buffer)
    return bytes(buffer[: extent.nbytes])


def descriptors() -> int:
    """How many files this process has open."""
    return len(open_files())


def system_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@contextmanager
def broken(calls: SystemCalls, name: str, error: BaseException) -> Iterator[None]:
    """As long as this lasts, one of the calls raises."""

    def fail(*arguments: object) -> None:
        raise error

    setattr(calls, name, fail)
    try:
        yield
    finally:
        delattr(calls, name)


class Plain(SystemCalls):
    """A file system without ``O_DIRECT``."""

    def set_direct(self, fd: int, on: bool) -> None:
        if on:
            raise system_error(errno.EINVAL)


class StrictDirect(SystemCalls):
    """Direct I/O everywhere, as the strictest file system would have it."""

    def set_direct(self, fd: int, on: bool) -> None:
        assert on, "nothing here gives a reason to switch it off"

    def check(self, view: memoryview, offset: int) -> None:
        address = np.frombuffer(view, np.uint8).ctypes.data
        if address % ALIGNMENT or len(view) % ALIGNMENT or offset % ALIGNMENT:
            raise system_error(errno.EINVAL)

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        self.check(view, offset)
        return super().pwrite(fd, view, offset)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        self.check(view, offset)
        return super().preadv(fd, view, offset)


class NoTmpfile(SystemCalls):
    """A file system on which an anonymous file must have a name first."""

    def __init__(self) -> None:
        self.named: list[str] = []

    def open(self, path: str, flags: int, mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise system_error(errno.EOPNOTSUPP)
        self.named.append(path)
        return super().open(path, flags, mode)


class Tampered(SystemCalls):
    """Remembers the file, so that a test can reach under it."""

    fd = -1
    moved_by = 0

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        self.fd = fd
        super().fallocate(fd, offset, length)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        return super().preadv(fd, view, offset ^ self.moved_by)

    def flip(self, offset: int) -> None:
        other = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR)
        os.pwrite(other, bytes([os.pread(other, 1, offset)[0] ^ 0x10]), offset)
        os.fsync(other)
        os.close(other)
