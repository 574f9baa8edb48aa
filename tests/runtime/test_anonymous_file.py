"""How the spill file is made: without a name, and with direct I/O where that works."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from runtime.disk_support import (
    NoTmpfile,
    Plain,
    Tampered,
    broken,
    descriptors,
    get,
    make,
    needs_proc,
    opened,
    put,
    system_error,
)
from spillway.errors import SpillPathError
from spillway.runtime.spill_file import SystemCalls


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EMFILE])
def test_a_path_where_no_file_can_be_made_is_refused_at_once(tmp_path: Path, code: int) -> None:
    calls = SystemCalls()
    with broken(calls, "open", system_error(code)), pytest.raises(SpillPathError, match=os.strerror(code)):
        make(tmp_path, calls=calls)


def test_a_directory_that_goes_away_is_an_error_of_the_first_allocate(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    file = make(tmp_path / "scratch")
    (tmp_path / "scratch").rmdir()
    with pytest.raises(SpillPathError, match="No such file"):
        file.allocate(1)
    (tmp_path / "scratch").mkdir()
    assert get(file, put(file, b"back again")) == b"back again"
    file.close()


def test_without_tmpfile_the_name_is_gone_before_the_first_byte(tmp_path: Path) -> None:
    class Watch(NoTmpfile):
        def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
            assert list(tmp_path.iterdir()) == []
            return super().pwrite(fd, view, offset)

    calls = Watch()
    with opened(tmp_path, calls=calls) as file:
        put(file, b"x")
        assert len(set(calls.named)) == 2, "one to try, one to use"


@needs_proc
def test_a_name_that_cannot_be_removed_is_an_error_and_leaks_no_descriptor(tmp_path: Path) -> None:
    calls = NoTmpfile()
    before = descriptors()
    with broken(calls, "unlink", system_error(errno.EPERM)), pytest.raises(SpillPathError, match="not permitted"):
        make(tmp_path, calls=calls)
    assert descriptors() == before


def test_direct_io_that_is_accepted_and_then_fails_gives_way_to_plain_io(tmp_path: Path) -> None:
    class AcceptsThenFails(SystemCalls):
        on = False

        def set_direct(self, fd: int, on: bool) -> None:
            self.on = on

        def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
            if self.on:
                raise system_error(errno.EINVAL)
            return super().pwrite(fd, view, offset)

    with opened(tmp_path, calls=AcceptsThenFails()) as file:
        assert not file.direct
        assert get(file, put(file, b"plain")) == b"plain"
        assert not file.direct


def test_direct_io_is_what_the_descriptor_says(tmp_path: Path) -> None:
    for calls in (Tampered(), type("TamperedPlain", (Plain, Tampered), {})()):
        with opened(tmp_path, calls=calls) as file:
            put(file, b"x")
            assert bool(fcntl.fcntl(calls.fd, fcntl.F_GETFL) & os.O_DIRECT) == file.direct
