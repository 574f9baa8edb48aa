"""What a disk may do to bytes: fail, move fewer than asked for, and give others back. Nothing of it goes unnoticed."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.disk_support import (
    Plain,
    StrictDirect,
    Tampered,
    broken,
    get,
    needs_proc,
    opened,
    put,
    store,
    system_error,
)
from spillway.errors import CorruptError, TransferError
from spillway.runtime.spill_file import ALIGNMENT, SystemCalls


def test_h51_write_error_is_raised_at_once_and_the_old_bytes_do_not_come_back(tmp_path: Path) -> None:
    calls = SystemCalls()
    with opened(tmp_path, calls=calls) as file:
        put(file, b"before")
        extent = put(file, b"old bytes")
        message = r"write of 4096 bytes at offset 4096.*Input/output error"
        with broken(calls, "pwrite", system_error(errno.EIO)), pytest.raises(TransferError, match=message) as caught:
            store(file, extent, b"new bytes")
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(TransferError, match="is empty"):
            get(file, extent)
        store(file, extent, b"new bytes")
        assert get(file, extent) == b"new bytes"


def test_h51_write_error_is_not_needed_for_a_read_of_nothing_to_be_one(tmp_path: Path) -> None:
    with opened(tmp_path) as file, pytest.raises(TransferError, match="is empty"):
        get(file, file.allocate(1))


def test_an_interrupt_in_a_write_leaves_an_extent_that_holds_nothing(tmp_path: Path) -> None:
    calls = SystemCalls()
    with opened(tmp_path, calls=calls) as file:
        extent = put(file, b"old")
        with broken(calls, "pwrite", KeyboardInterrupt()):
            with pytest.raises(KeyboardInterrupt):
                put(file, b"new")
            with pytest.raises(KeyboardInterrupt):
                store(file, extent, b"new")
        with pytest.raises(TransferError):
            get(file, extent)
        file.free(extent)
        assert file.used_bytes == ALIGNMENT, "no thread is counted as still writing"


def test_a_read_error_is_raised_with_its_place_and_a_later_read_may_succeed(tmp_path: Path) -> None:
    calls = SystemCalls()
    with opened(tmp_path, calls=calls) as file:
        extent = put(file, b"kept")
        message = r"read of 4096 bytes at offset 0.*Input/output error"
        with broken(calls, "preadv", system_error(errno.EIO)), pytest.raises(TransferError, match=message):
            get(file, extent)
        assert get(file, extent) == b"kept"


class Short(SystemCalls):
    """Moves the bytes in pieces of given sizes."""

    def __init__(self, pieces: Sequence[int]) -> None:
        self.pieces = list(pieces)
        self.armed = False
        self.turn = 0

    def cut(self, view: memoryview, offset: int) -> memoryview:
        if not self.armed:
            return view
        self.turn += 1
        return view[: self.pieces[self.turn % len(self.pieces)]]

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return os.pwrite(fd, self.cut(view, offset), offset)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [self.cut(view, offset)], offset)


class ShortPlain(Short, Plain):
    pass


class ShortDirect(Short, StrictDirect):
    def cut(self, view: memoryview, offset: int) -> memoryview:
        self.check(view, offset)
        return super().cut(view, offset)


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [(ShortPlain, [1999, 4096, 1]), (ShortDirect, [4096]), (ShortDirect, [5000, 8192, 4095, 4097, 1])],
)
def test_short_transfers_are_completed(tmp_path: Path, kind: type[Short], pieces: list[int]) -> None:
    calls = kind(pieces)
    content = random.randbytes(40_000)
    with opened(tmp_path, calls=calls) as file:
        extent = file.allocate(len(content))
        calls.armed = True
        store(file, extent, content)
        assert get(file, extent) == content
        assert calls.turn > 10


@pytest.mark.parametrize(("kind", "piece"), [(ShortPlain, 0), (ShortDirect, 512)])
def test_a_transfer_that_never_gets_on_ends_in_an_error(tmp_path: Path, kind: type[Short], piece: int) -> None:
    calls = kind([piece])
    with opened(tmp_path, calls=calls) as file:
        extent = put(file, b"kept")
        calls.armed = True
        with pytest.raises(CorruptError, match=f"{piece} bytes and then no more"):
            get(file, extent)
        with pytest.raises(TransferError, match=f"{piece} bytes and then no more"):
            store(file, extent, b"lost")


@needs_proc
@pytest.mark.parametrize("offset", [0, 4095, 4096, 8191, 8192, 8999])
def test_a_flipped_bit_is_found(tmp_path: Path, offset: int) -> None:
    calls = Tampered()
    with opened(tmp_path, calls=calls) as file:
        extent = put(file, random.randbytes(9000))
        calls.flip(offset)
        with pytest.raises(CorruptError, match=r"9000 bytes at offset 0.*checksum 0x\w+, expected 0x\w+"):
            get(file, extent)


@needs_proc
def test_a_flipped_bit_in_the_padding_matters_to_nobody(tmp_path: Path) -> None:
    calls = Tampered()
    with opened(tmp_path, calls=calls) as file:
        content = random.randbytes(9000)
        extent = put(file, content)
        calls.flip(9000)
        assert get(file, extent) == content


def test_a_truncated_file_is_found(tmp_path: Path) -> None:
    calls = Tampered()
    with opened(tmp_path, calls=calls) as file:
        extent = put(file, random.randbytes(9000))
        for length in (8192, 5000, 0):
            os.ftruncate(calls.fd, length)
            with pytest.raises(CorruptError, match=f"read of 12288 bytes at offset 0 got {length} bytes and then no"):
                get(file, extent)


def test_swapped_extents_are_found(tmp_path: Path) -> None:
    calls = Tampered()
    with opened(tmp_path, calls=calls) as file:
        extents = [put(file, random.randbytes(4096)) for _ in range(2)]
        calls.moved_by = 4096
        for extent in extents:
            with pytest.raises(CorruptError):
                get(file, extent)
