"""The spill file: real files on a real disk, with faults put in where it calls the system and nowhere else."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spillway.errors
from spillway.errors import (
    CorruptError,
    SessionError,
    SizeError,
    SpillPathError,
    TierFullError,
    TransferError,
    UsageError,
)
from spillway.runtime.disk import ALIGNMENT, Extent, Mount, SpillFile, SystemCalls, _checksum

KiB, MiB = 2**10, 2**20
LINUX = sys.platform == "linux"
needs_proc = pytest.mark.skipif(not LINUX, reason="looks into /proc")


def page_aligned(content: bytes, *, reserved: int) -> memoryview:
    """Page-aligned writable memory that begins with ``content``; the rest is noise that must not matter."""
    memory = mmap.mmap(-1, reserved)
    memory[:] = content + random.randbytes(reserved - len(content))
    return memoryview(memory)


def put(file: SpillFile, content: bytes) -> Extent:
    extent = file.allocate(len(content))
    file.write(extent, page_aligned(content, reserved=extent.reserved))
    return extent


def get(file: SpillFile, extent: Extent) -> bytes:
    buffer = page_aligned(b"", reserved=extent.reserved)
    file.read(extent, buffer)
    return bytes(buffer[: extent.nbytes])


def make(directory: Path, **options: Any) -> SpillFile:
    """On whatever file system the tests' temporary directory has."""
    return SpillFile(directory, allow_memory_filesystem=True, **options)


@contextmanager
def opened(directory: Path, **options: Any) -> Iterator[SpillFile]:
    with closing(make(directory, **options)) as file:
        yield file


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class OnDisk(SystemCalls):
    """Any directory counts as one on a disk."""

    def mounts(self) -> Sequence[Mount]:
        return [Mount("/", "ext4", "/dev/sda1")]


class Plain(SystemCalls):
    """A file system without ``O_DIRECT``."""

    def set_direct(self, fd: int, on: bool) -> None:
        if on:
            raise OSError(errno.EINVAL, "no O_DIRECT here")


class StrictDirect(SystemCalls):
    """Direct I/O everywhere, as the strictest file system would have it."""

    def set_direct(self, fd: int, on: bool) -> None:
        assert on, "nothing here gives a reason to switch it off"

    def check(self, view: memoryview, offset: int) -> None:
        address = np.frombuffer(view, np.uint8).ctypes.data
        if address % ALIGNMENT or len(view) % ALIGNMENT or offset % ALIGNMENT:
            raise OSError(errno.EINVAL, "not aligned")

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        self.check(view, offset)
        return self.pwrite_aligned(fd, view, offset)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        self.check(view, offset)
        return self.preadv_aligned(fd, view, offset)

    def pwrite_aligned(self, fd: int, view: memoryview, offset: int) -> int:
        return super().pwrite(fd, view, offset)

    def preadv_aligned(self, fd: int, view: memoryview, offset: int) -> int:
        return super().preadv(fd, view, offset)


class NoTmpfile(SystemCalls):
    """A file system on which an anonymous file must have a name first."""

    def __init__(self) -> None:
        self.named: list[str] = []

    def open(self, path: str, flags: int, mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        self.named.append(path)
        return super().open(path, flags, mode)


class Clock(SystemCalls):
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


# Storing and bringing back


@pytest.mark.parametrize("calls", [SystemCalls, Plain, StrictDirect, NoTmpfile])
@pytest.mark.parametrize("nbytes", [1, 7, 4095, 4096, 4097, 3 * MiB + 5])
def test_what_was_written_comes_back(tmp_path: Path, calls: type[SystemCalls], nbytes: int) -> None:
    content = random.randbytes(nbytes)
    with opened(tmp_path, calls=calls()) as file:
        extent = put(file, content)
        assert extent == Extent(0, nbytes, -(-nbytes // 4096) * 4096)
        assert get(file, extent) == content
        assert get(file, extent) == content, "reading does not use it up"
        assert file.written_bytes == extent.reserved


def test_an_extent_can_be_written_again(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        extent = put(file, b"a" * 5000)
        file.write(extent, page_aligned(b"b" * 5000, reserved=extent.reserved))
        assert get(file, extent) == b"b" * 5000


def test_a_read_only_buffer_can_be_written_and_not_read_into(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        extent = file.allocate(ALIGNMENT)
        buffer = page_aligned(b"x" * ALIGNMENT, reserved=ALIGNMENT).toreadonly()
        file.write(extent, buffer)
        assert get(file, extent) == b"x" * ALIGNMENT
        with pytest.raises(UsageError, match="read-only"):
            file.read(extent, buffer)


def test_arrays_of_any_type_are_buffers(tmp_path: Path) -> None:
    with opened(tmp_path, calls=Plain()) as file:
        extent = file.allocate(ALIGNMENT)
        array = np.arange(1024, dtype=np.float32).reshape(32, 32)
        file.write(extent, array.data)
        back = np.empty_like(array)
        file.read(extent, back.data)
        assert (back == array).all()
        with pytest.raises(UsageError, match="contiguous"):
            file.write(extent, np.zeros((128, 128), np.uint8)[:, ::2].data)


def test_a_buffer_that_is_too_short_is_refused_with_both_lengths(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        extent = file.allocate(5000)
        with pytest.raises(UsageError, match=r"5000 bytes.*at least 8192"):
            file.write(extent, page_aligned(b"", reserved=8192)[:5000])
        with pytest.raises(UsageError, match=r"4096 bytes.*at least 8192"):
            file.read(extent, page_aligned(b"", reserved=4096))


def test_a_longer_buffer_is_used_only_as_far_as_the_extent_goes(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        extent, neighbour = file.allocate(4096), put(file, b"n" * 4096)
        file.write(extent, page_aligned(b"x" * 8192, reserved=8192))
        assert get(file, neighbour) == b"n" * 4096
        buffer = page_aligned(b"y" * 8192, reserved=8192)
        file.read(extent, buffer)
        assert bytes(buffer) == b"x" * 4096 + b"y" * 4096


def test_an_unaligned_buffer_is_refused_under_direct_io_and_taken_otherwise(tmp_path: Path) -> None:
    buffer = page_aligned(b"", reserved=8192)[1:4097]
    with opened(tmp_path, calls=StrictDirect()) as file:
        assert file.direct
        extent = file.allocate(4096)
        with pytest.raises(UsageError, match=r"address 0x\w+, expected a multiple of 4096"):
            file.write(extent, buffer)
        with pytest.raises(UsageError, match=r"address 0x\w+, expected a multiple of 4096"):
            file.read(extent, buffer)
    with opened(tmp_path, calls=Plain()) as file:
        assert not file.direct
        extent = file.allocate(4096)
        file.write(extent, buffer)
        assert get(file, extent) == bytes(buffer)


def test_several_threads_store_and_bring_back_at_once(tmp_path: Path) -> None:
    def work(seed: int) -> None:
        rng = random.Random(seed)
        held: list[tuple[Extent, bytes]] = []
        for _ in range(60):
            content = rng.randbytes(rng.randint(1, 40_000))
            held.append((put(file, content), content))
            extent, content = held[rng.randrange(len(held))]
            assert get(file, extent) == content
            if len(held) > 4:
                file.free(held.pop(rng.randrange(len(held)))[0])
        for extent, _ in held:
            file.free(extent)

    with opened(tmp_path, capacity=4 * MiB) as file:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))  # raises what a thread raised
        assert file.used_bytes == 0
        assert file.allocate(4 * MiB).offset == 0, "all pieces became one again"


# Room


def test_the_file_is_made_by_the_first_allocate_and_not_before(tmp_path: Path) -> None:
    class Watch(SystemCalls):
        open_now = 0

        def open(self, path: str, flags: int, mode: int) -> int:
            self.open_now += 1
            return super().open(path, flags, mode)

        def close(self, fd: int) -> None:
            self.open_now -= 1
            super().close(fd)

    calls = Watch()
    file = make(tmp_path, calls=calls)
    assert (calls.open_now, file.reserved_bytes, file.used_bytes) == (0, 0, 0)
    file.allocate(1)
    assert (calls.open_now, file.used_bytes) == (1, ALIGNMENT)
    file.close()
    assert calls.open_now == 0


def test_the_cap_is_exact_and_what_is_freed_can_be_had_again(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=8 * ALIGNMENT + 4095) as file:
        assert file.capacity == 8 * ALIGNMENT + 4095
        first, _ = file.allocate(3 * ALIGNMENT), file.allocate(5 * ALIGNMENT - 9)
        assert file.used_bytes == file.reserved_bytes == 8 * ALIGNMENT
        with pytest.raises(TierFullError, match=r"4\.0 KiB to place.*capacity of 36\.0 KiB.*raise"):
            file.allocate(1)
        file.free(first)
        assert file.used_bytes == 5 * ALIGNMENT
        assert file.allocate(3 * ALIGNMENT).offset == first.offset


def test_a_capacity_of_nothing_takes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=0) as file, pytest.raises(TierFullError):
        file.allocate(1)


def test_the_message_of_a_full_file_says_how_large_a_piece_is_free(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=6 * ALIGNMENT) as file:
        pieces = [file.allocate(ALIGNMENT) for _ in range(6)]
        for piece in pieces[::2]:
            file.free(piece)
        with pytest.raises(TierFullError, match=r"pieces of at most 4\.0 KiB"):
            file.allocate(2 * ALIGNMENT)


def test_the_best_fit_is_taken(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=8 * ALIGNMENT) as file:
        wide, _, narrow, _ = (file.allocate(pages * ALIGNMENT) for pages in (3, 1, 1, 3))
        file.free(wide)
        file.free(narrow)
        assert file.allocate(ALIGNMENT).offset == narrow.offset
        assert file.allocate(3 * ALIGNMENT).offset == wide.offset


def test_the_file_grows_in_steps_and_no_further_than_the_cap(tmp_path: Path) -> None:
    class Watch(SystemCalls):
        def __init__(self) -> None:
            self.reserved: list[tuple[int, int]] = []

        def fallocate(self, fd: int, offset: int, length: int) -> None:
            self.reserved.append((offset, length))  # and no real space: nothing is written here

    calls = Watch()
    with opened(tmp_path, capacity=300 * MiB, calls=calls) as file:
        for size in (1, 63 * MiB, 2 * MiB, 180 * MiB, 30 * MiB):
            file.allocate(size)
    used = (ALIGNMENT + 63 * MiB, 2 * MiB, 180 * MiB)
    third = 180 * MiB - (128 * MiB - sum(used[:2]))  # what the free tail lacks
    assert calls.reserved == [
        (0, 64 * MiB),
        (64 * MiB, 64 * MiB),
        (128 * MiB, third),
        (128 * MiB + third, 300 * MiB - 128 * MiB - third),
    ]


operations = st.lists(
    st.tuples(st.sampled_from(["allocate", "allocate", "free"]), st.integers(1, 9 * ALIGNMENT), st.integers(0, 99)),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(operations=operations)
def test_extents_never_overlap_and_only_a_lack_of_a_gap_is_full(operations: list[tuple[str, int, int]]) -> None:
    capacity = 32 * ALIGNMENT
    live: list[tuple[Extent, bytes]] = []
    with tempfile.TemporaryDirectory() as directory, opened(Path(directory), capacity=capacity, calls=Plain()) as file:
        for operation, nbytes, number in operations:
            if operation == "free" and live:
                file.free(live.pop(number % len(live))[0])
            elif operation == "allocate":
                ends = sorted((e.offset, e.offset + e.reserved) for e, _ in live)
                gaps = zip([0, *(end for _, end in ends)], [*(start for start, _ in ends), capacity], strict=True)
                fits = max(end - start for start, end in gaps) >= nbytes
                content = bytes([number]) * nbytes
                try:
                    live.append((put(file, content), content))
                except TierFullError:
                    assert not fits, "there was a gap that is large enough"
                else:
                    assert fits
            assert file.used_bytes == sum(extent.reserved for extent, _ in live)
        for extent, content in live:
            assert get(file, extent) == content
            file.free(extent)
        assert file.allocate(capacity).offset == 0


def test_freeing_twice_or_to_another_file_is_an_error_and_does_no_harm(tmp_path: Path) -> None:
    with opened(tmp_path) as file, opened(tmp_path) as other:
        extent = put(file, b"mine")
        stranger = put(other, b"mine")
        assert extent == stranger
        for wrong in (stranger, Extent(extent.offset, extent.nbytes, extent.reserved)):
            with pytest.raises(UsageError, match="free it once"):
                file.free(wrong)
        file.free(extent)
        with pytest.raises(UsageError, match="free it once"):
            file.free(extent)
        again = put(file, b"next")
        assert again == extent
        with pytest.raises(UsageError):
            file.free(extent)
        with pytest.raises(UsageError):
            file.read(extent, page_aligned(b"", reserved=extent.reserved))
        assert get(file, again) == b"next"


def test_a_finaliser_may_free_while_the_lock_is_held(tmp_path: Path) -> None:
    class Collects(SystemCalls):
        run: Callable[[], None] = staticmethod(lambda: None)

        def fallocate(self, fd: int, offset: int, length: int) -> None:
            self.run()
            super().fallocate(fd, offset, length)

    calls = Collects()
    file = make(tmp_path, calls=calls, capacity=65 * MiB)
    extent = file.allocate(ALIGNMENT)
    calls.run = lambda: file.free(extent)
    thread = threading.Thread(target=lambda: file.allocate(64 * MiB), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "free waited for a lock that its own thread holds"
    assert file.used_bytes == 64 * MiB
    file.close()


class Gate(SystemCalls):
    """Holds the first write after it was armed until it is told to go on."""

    def __init__(self) -> None:
        self.armed = False
        self.arrived, self.go = threading.Event(), threading.Event()
        self.closed: list[int] = []

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        if self.armed:
            self.armed = False
            self.arrived.set()
            assert self.go.wait(30)
        return super().pwrite(fd, view, offset)

    def close(self, fd: int) -> None:
        self.closed.append(fd)
        super().close(fd)


def held_write(file: SpillFile, calls: Gate, extent: Extent) -> threading.Thread:
    """A thread that stands in a write of the extent."""
    calls.armed = True
    thread = threading.Thread(target=file.write, args=(extent, page_aligned(b"late", reserved=extent.reserved)))
    thread.start()
    assert calls.arrived.wait(30)
    return thread


def test_a_range_that_is_still_being_written_is_given_to_nobody_else(tmp_path: Path) -> None:
    calls = Gate()
    with opened(tmp_path, calls=calls) as file:
        extent = file.allocate(4)
        thread = held_write(file, calls, extent)
        file.free(extent)
        other = put(file, b"other")
        assert other.offset != extent.offset
        calls.go.set()
        thread.join()
        assert get(file, other) == b"other"
        assert file.used_bytes == ALIGNMENT
        assert file.allocate(1).offset == extent.offset, "afterwards it is free"


def test_the_descriptor_outlives_a_write_that_is_under_way(tmp_path: Path) -> None:
    calls = Gate()
    file = make(tmp_path, calls=calls)
    extent = file.allocate(4)
    before = len(calls.closed)
    thread = held_write(file, calls, extent)
    file.close()
    with pytest.raises(SessionError):
        file.allocate(1)
    with pytest.raises(SessionError):
        file.free(extent)
    assert len(calls.closed) == before, "its number could be another file's by the time the write begins"
    calls.go.set()
    thread.join()
    assert len(calls.closed) == before + 1


def test_sizes_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    for options in ({"capacity": -1}, {"bytes_per_hour": -1}):
        with pytest.raises(SizeError, match=f"{next(iter(options))}: got -1"):
            make(tmp_path, **options)
    with opened(tmp_path) as file:
        for nbytes in (0, -5):
            with pytest.raises(SizeError, match=f"got {nbytes} bytes"):
                file.allocate(nbytes)


# The hour's budget


def test_the_hours_budget_refuses_and_says_when_it_may_go_on(tmp_path: Path) -> None:
    calls = Clock()
    with opened(tmp_path, bytes_per_hour=10 * ALIGNMENT, calls=calls) as file:
        for _ in range(2):
            file.free(put(file, b"x" * 4 * ALIGNMENT))
            calls.now += 1000
        with pytest.raises(TierFullError, match=r"12\.0 KiB to write after 32\.0 KiB in this hour.*in 1610\.00 s"):
            file.allocate(3 * ALIGNMENT)
        put(file, b"x" * 2 * ALIGNMENT)
        calls.now += 1609
        with pytest.raises(TierFullError):
            file.allocate(1)
        calls.now += 1
        put(file, b"x" * 4 * ALIGNMENT)
        with pytest.raises(TierFullError, match="never"):
            file.allocate(11 * ALIGNMENT)


def test_writing_again_counts_and_what_was_never_written_does_not(tmp_path: Path) -> None:
    with opened(tmp_path, bytes_per_hour=4 * ALIGNMENT, calls=Clock()) as file:
        for _ in range(9):
            file.free(file.allocate(4 * ALIGNMENT))
        extent = put(file, b"x" * ALIGNMENT)
        for _ in range(2):
            file.write(extent, page_aligned(b"y", reserved=ALIGNMENT))
        file.allocate(ALIGNMENT)
        with pytest.raises(TierFullError):
            file.allocate(ALIGNMENT)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.floats(0, 1500), st.integers(1, 5)), max_size=40))
def test_no_hour_has_more_than_its_budget(steps: list[tuple[float, int]]) -> None:
    calls = Clock()
    writes: list[tuple[float, int]] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        opened(Path(directory), bytes_per_hour=6 * ALIGNMENT, calls=calls) as file,
    ):
        for wait, pages in steps:
            calls.now += wait
            try:
                file.free(put(file, b"x" * pages * ALIGNMENT))
            except TierFullError:
                continue
            writes.append((calls.now, pages))
            assert sum(n for when, n in writes if when > calls.now - 3600) <= 6


# Hazards


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_h49_disk_full_is_an_error_of_allocate_and_passes(tmp_path: Path, code: int) -> None:
    class Full(SystemCalls):
        room = 10 * ALIGNMENT
        truncated: int | None = None

        def fallocate(self, fd: int, offset: int, length: int) -> None:
            if offset + length > self.room:
                raise OSError(code, os.strerror(code))

        def ftruncate(self, fd: int, length: int) -> None:
            self.truncated = length
            super().ftruncate(fd, length)

    calls = Full()
    with opened(tmp_path, calls=calls) as file:
        extent = put(file, b"x" * 10 * ALIGNMENT)  # not a whole step fits, but what is needed does
        with pytest.raises(TierFullError, match=os.strerror(code)) as caught:
            file.allocate(1)
        assert isinstance(caught.value.__cause__, OSError)
        assert calls.truncated == 10 * ALIGNMENT, "what a refused growth took is given back"
        assert get(file, extent) == b"x" * 10 * ALIGNMENT
        file.free(extent)
        put(file, b"y" * 10 * ALIGNMENT)


@pytest.mark.parametrize("room", [0, 1, 4096, 5000, 8192, 12287])
@pytest.mark.parametrize("direct", [False, True])
def test_h49_disk_full_at_a_byte_of_a_write_where_space_cannot_be_reserved(
    tmp_path: Path, room: int, direct: bool
) -> None:
    class Sparse(StrictDirect if direct else Plain):  # type: ignore[misc]
        room: int | None = None

        def fallocate(self, fd: int, offset: int, length: int) -> None:
            raise OSError(errno.EOPNOTSUPP, "cannot reserve")

        def take(self, fd: int, view: memoryview, offset: int) -> int:
            if self.room is None:
                return os.pwrite(fd, view, offset)
            if offset >= self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return os.pwrite(fd, view[: self.room - offset], offset)

        def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
            if direct:
                self.check(view, offset)
                if self.room is not None and offset + ALIGNMENT > self.room:  # never a part of a block
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.take(fd, view, offset)

    calls = Sparse()
    with opened(tmp_path, calls=calls) as file:
        extent = file.allocate(12288)
        calls.room = room
        with pytest.raises(TierFullError, match="12288 bytes at offset 0"):
            file.write(extent, page_aligned(b"x" * 12288, reserved=12288))
        with pytest.raises(TransferError, match="holds nothing"):
            get(file, extent)
        calls.room = None
        file.write(extent, page_aligned(b"x" * 12288, reserved=12288))
        assert get(file, extent) == b"x" * 12288


# The packages' own __init__ are passed over: they import torch, which takes seconds and which the disk does not need.
CHILD = """
import mmap, os, signal, sys, threading, types
source = sys.argv.pop(1)
for name in ("spillway", "spillway.runtime"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [os.path.join(source, *name.split("."))]
from spillway.errors import *
from spillway.runtime.disk import *
signal.alarm(120)
def page(content, nbytes=ALIGNMENT):
    memory = mmap.mmap(-1, nbytes)
    memory[: len(content)] = content
    return memory
def raises(kind, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise SystemExit(f"{call} did not raise {kind}")
def say(*words):
    print(*words, flush=True)
file = SpillFile(sys.argv[1], allow_memory_filesystem=True)
"""


def start(directory: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    source = str(Path(spillway.errors.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + script, source, str(directory), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed, when it ended well."""
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, (process.returncode, out, err)
    assert not err
    return out


@needs_proc
def test_h49_disk_full_of_a_real_kernel_does_not_kill_the_process_and_nothing_is_mapped(tmp_path: Path) -> None:
    script = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
extent = file.allocate(2**20)
file.write(extent, page(b"x", 2**20))
say(raises(TierFullError, file.allocate, 1))
back = page(b"", 2**20)
file.read(extent, back)
assert back[:1] == b"x"
assert sys.argv[1] not in open("/proc/self/maps").read(), "the file is mapped: a full disk would be a SIGBUS"
"""
    assert "File too large" in finish(start(tmp_path, script))


@needs_proc
@pytest.mark.parametrize("end", ["file.close()", "del file; import gc; gc.collect()", "pass"])
def test_h50_forked_child_cannot_use_the_file_and_its_end_does_no_harm(tmp_path: Path, end: str) -> None:
    script = f"""
extent = file.allocate(8192)
file.write(extent, page(b"parent's", 8192))
child = os.fork()
if child == 0:
    for call in (lambda: file.allocate(1), lambda: file.write(extent, page(b"")), lambda: file.read(extent, page(b""))):
        assert f"expected its owner, process {{os.getppid()}}" in raises(SessionError, call)
    file.free(extent)
    file.free(extent)  # a finaliser of the parent's that ends here as well: nothing, and no error
    file.used_bytes, file.reserved_bytes, file.written_bytes
    {end}
    sys.exit()  # with all that the interpreter does at its end
assert os.waitpid(child, 0)[1] == 0
assert file.used_bytes == 8192
back = page(b"", 8192)
file.read(extent, back)
assert back[:8] == b"parent's"
another = file.allocate(8192)
file.write(another, back)
file.read(another, back)
file.close()
"""
    finish(start(tmp_path, script))


@needs_proc
def test_h50_forked_child_does_not_wait_for_a_lock_that_a_thread_of_the_parent_held(tmp_path: Path) -> None:
    script = """
standing, go = threading.Event(), threading.Event()
class Held(SystemCalls):
    def fallocate(self, fd, offset, length):
        if offset:
            standing.set()
            go.wait()
        super().fallocate(fd, offset, length)
file = SpillFile(sys.argv[1], allow_memory_filesystem=True, calls=Held())
extent = file.allocate(1)
thread = threading.Thread(target=file.allocate, args=(64 * 2**20,))
thread.start()
standing.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    raises(SessionError, file.allocate, 1)
    file.free(extent), file.used_bytes, file.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
go.set()
thread.join()
file.free(extent)
"""
    finish(start(tmp_path, script))


@needs_proc
def test_h50_forked_child_that_lives_on_does_not_hold_the_space_of_a_closed_file(tmp_path: Path) -> None:
    script = """
file.allocate(1)
inside, outside = os.pipe()
child = os.fork()
if child == 0:
    os.close(outside)
    os.read(inside, 1)
    os._exit(0)
def sizes():
    links = [f"/proc/{child}/fd/{fd}" for fd in os.listdir(f"/proc/{child}/fd")]
    return [os.stat(link).st_size for link in links if os.readlink(link).startswith(sys.argv[1])]
assert sizes() == [64 * 2**20], sizes()
file.close()
assert sizes() == [0], sizes()
os.close(outside)
assert os.waitpid(child, 0)[1] == 0
"""
    finish(start(tmp_path.resolve(), script))


class Broken(SystemCalls):
    """A device that fails when told to."""

    fails: str | None = None

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        if self.fails == "write":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pwrite(fd, view, offset)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        if self.fails == "read":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, view, offset)


def test_h51_write_error_is_raised_at_once_and_the_old_bytes_do_not_come_back(tmp_path: Path) -> None:
    calls = Broken()
    with opened(tmp_path, calls=calls) as file:
        put(file, b"before")
        extent = put(file, b"old bytes")
        calls.fails = "write"
        with pytest.raises(TransferError, match=r"write of 4096 bytes at offset 4096.*Input/output error") as caught:
            file.write(extent, page_aligned(b"new bytes", reserved=ALIGNMENT))
        assert isinstance(caught.value.__cause__, OSError)
        calls.fails = None
        with pytest.raises(TransferError, match="holds nothing"):
            get(file, extent)
        file.write(extent, page_aligned(b"new bytes", reserved=ALIGNMENT))
        assert get(file, extent) == b"new bytes"


def test_h51_write_error_is_not_needed_for_a_read_of_nothing_to_be_one(tmp_path: Path) -> None:
    with opened(tmp_path) as file, pytest.raises(TransferError, match="holds nothing"):
        get(file, file.allocate(1))


def test_an_interrupt_in_a_write_leaves_an_extent_that_holds_nothing(tmp_path: Path) -> None:
    class Interrupted(SystemCalls):
        now = False

        def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
            if self.now:
                raise KeyboardInterrupt
            return super().pwrite(fd, view, offset)

    calls = Interrupted()
    with opened(tmp_path, calls=calls) as file:
        extent = put(file, b"old")
        calls.now = True
        with pytest.raises(KeyboardInterrupt):
            put(file, b"new")
        with pytest.raises(KeyboardInterrupt):
            file.write(extent, page_aligned(b"new", reserved=ALIGNMENT))
        with pytest.raises(TransferError):
            get(file, extent)
        file.free(extent)
        assert file.used_bytes == ALIGNMENT, "no thread is counted as still writing"


def test_a_read_error_is_raised_with_its_place_and_a_later_read_may_succeed(tmp_path: Path) -> None:
    calls = Broken()
    with opened(tmp_path, calls=calls) as file:
        extent = put(file, b"kept")
        calls.fails = "read"
        with pytest.raises(TransferError, match=r"read of 4096 bytes at offset 0.*Input/output error"):
            get(file, extent)
        calls.fails = None
        assert get(file, extent) == b"kept"


@needs_proc
@pytest.mark.parametrize("deadly", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("way", ["tmpfile", "named"])
def test_h52_spill_files_left_after_sigterm_sigkill_are_none(tmp_path: Path, deadly: signal.Signals, way: str) -> None:
    script = """
class Calls(SystemCalls):
    def open(self, path, flags, mode):
        if sys.argv[2] == "named" and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "no O_TMPFILE here")
        return super().open(path, flags, mode)
os.umask(0)
file = SpillFile(sys.argv[1], allow_memory_filesystem=True, calls=Calls())
extent = file.allocate(2**20)
file.write(extent, page(b"x", 2**20))
say("written")
sys.stdin.read()
"""
    directory = tmp_path.resolve()
    process = start(directory, script, way)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        links = [f"/proc/{process.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{process.pid}/fd")]
        spilled = [link for link in links if os.readlink(link).startswith(str(directory))]
        assert len(spilled) == 1
        assert os.readlink(spilled[0]).endswith("(deleted)")
        status = os.stat(spilled[0])
        assert (status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0o600)
        assert status.st_blocks * 512 >= 64 * MiB, "the space is reserved"
        assert list(directory.iterdir()) == [], "it has no name even while it is in use"
    finally:
        process.send_signal(deadly)
        process.communicate(timeout=60)
    assert process.returncode == -deadly
    assert list(directory.iterdir()) == []


def test_h53_two_jobs_one_path_never_meet(tmp_path: Path) -> None:
    script = """
name = sys.argv[2].encode()
extents = [file.allocate(8192) for _ in range(50)]
for number, extent in enumerate(extents):
    file.write(extent, page(name * number, 8192))
say("written")
sys.stdin.readline()
for number, extent in enumerate(extents):
    back = page(b"", 8192)
    file.read(extent, back)
    assert back[:] == (name * number).ljust(8192, b"\\0")
file.close()
"""
    jobs = [start(tmp_path, script, name) for name in ("one", "two")]
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "written\n"
    finish(jobs[0])  # the first reads, closes and ends while the second still holds its own
    finish(jobs[1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "zram"])
def test_h68_tmpfs_and_its_like_are_refused_and_can_be_allowed(tmp_path: Path, kind: str) -> None:
    class Mounted(SystemCalls):
        def mounts(self) -> Sequence[Mount]:
            kind_here, device = ("ext4", "/dev/zram0") if kind == "zram" else (kind, kind)
            return [Mount("/", "ext4", "/dev/sda1"), Mount(str(tmp_path.resolve()), kind_here, device)]

    (tmp_path / "inside").mkdir()
    with pytest.raises(SpillPathError, match=r"host memory: spilling there saves nothing.*allow_memory_filesystem"):
        SpillFile(tmp_path / "inside", calls=Mounted())
    with closing(SpillFile(tmp_path / "inside", calls=Mounted(), allow_memory_filesystem=True)) as file:
        assert get(file, put(file, b"asked for")) == b"asked for"


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no /dev/shm")
def test_h68_tmpfs_that_is_real_is_known_from_the_mount_table(tmp_path: Path) -> None:
    with pytest.raises(SpillPathError, match="tmpfs"):
        SpillFile("/dev/shm")
    link = tmp_path / "looks-like-a-disk"
    link.symlink_to("/dev/shm")
    with pytest.raises(SpillPathError, match="tmpfs"):
        SpillFile(link)
    with closing(SpillFile("/dev/shm", allow_memory_filesystem=True)) as file:
        assert get(file, put(file, b"asked for")) == b"asked for"


def test_h68_tmpfs_is_told_by_the_mount_on_top_and_by_whole_names(tmp_path: Path) -> None:
    here = str(tmp_path.resolve())

    class Mounted(SystemCalls):
        def mounts(self) -> Sequence[Mount]:
            return [
                Mount("/", "tmpfs", "tmpfs"),
                Mount(here, "tmpfs", "tmpfs"),
                Mount(here, "xfs", "/dev/nvme0n1"),
                Mount(here + "/mem", "tmpfs", "tmpfs"),
            ]

    (tmp_path / "memory").mkdir()
    with closing(SpillFile(tmp_path / "memory", calls=Mounted())) as file:
        assert file.directory == tmp_path.resolve() / "memory"


# What a disk does to bytes


class Short(SystemCalls):
    """Moves the bytes in pieces of given sizes, and is interrupted in between."""

    def __init__(self, pieces: Sequence[int]) -> None:
        self.pieces = list(pieces)
        self.armed = False
        self.turn = 0

    def limit(self, length: int) -> int:
        if not self.armed:
            return length
        self.turn += 1
        if self.turn % 3 == 0:
            raise InterruptedError
        return min(length, self.pieces[self.turn % len(self.pieces)])

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return os.pwrite(fd, view[: self.limit(len(view))], offset)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view[: self.limit(len(view))]], offset)


class ShortPlain(Short, Plain):
    pass


class ShortDirect(Short, StrictDirect):
    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        self.check(view, offset)
        return super().pwrite(fd, view, offset)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        self.check(view, offset)
        return super().preadv(fd, view, offset)


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
        file.write(extent, page_aligned(content, reserved=extent.reserved))
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
            file.write(extent, page_aligned(b"lost", reserved=extent.reserved))


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


def checksum(content: bytes) -> int:
    return _checksum(np.frombuffer(content, np.uint8))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), pages=st.integers(2, 9), tail=st.integers(0, 4095), data=st.data())
def test_the_checksum_sees_flips_swaps_shifts_and_lengths(
    seed: int, pages: int, tail: int, data: st.DataObject
) -> None:
    content = random.Random(seed).randbytes(pages * 4096 + tail)
    right = checksum(content)
    assert right == checksum(bytes(content))
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    one, two = data.draw(st.lists(st.integers(0, pages - 1), min_size=2, max_size=2, unique=True))
    blocks = [content[at : at + 4096] for at in range(0, len(content), 4096)]
    blocks[one], blocks[two] = blocks[two], blocks[one]
    shifted = content[4096:] + content[:4096]
    for wrong in (bytes(flipped), b"".join(blocks), shifted, content + b"\0", content[:-1], b"\0" * len(content)):
        assert checksum(wrong) != right


def test_the_checksum_sees_swapped_blocks_that_differ_in_their_highest_bit_only() -> None:
    zero, high = bytes(4096), bytes(4095) + b"\x80"
    assert len({checksum(zero + high), checksum(high + zero), checksum(zero + zero), checksum(high + high)}) == 4
    assert len({checksum(bytes(nbytes)) for nbytes in range(1, 10_000, 7)}) == len(range(1, 10_000, 7))


# Where it lives


def test_a_path_that_is_gone_or_no_directory_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, why in [("gone", "No such file"), ("file", "not a directory"), ("file/under", "Not a directory")]:
        with pytest.raises(SpillPathError, match=why) as caught:
            make(tmp_path / path)
        assert str(tmp_path / path) in str(caught.value)
        assert "SPILLWAY_DIR" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_path_that_is_not_writable_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SpillPathError, match="not writable"):
        make(tmp_path)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EMFILE])
def test_a_path_where_no_file_can_be_made_is_refused_at_once(tmp_path: Path, code: int) -> None:
    class Refuses(SystemCalls):
        def open(self, path: str, flags: int, mode: int) -> int:
            raise OSError(code, os.strerror(code))

    with pytest.raises(SpillPathError, match=os.strerror(code)):
        make(tmp_path, calls=Refuses())


@needs_proc
def test_a_kernel_file_system_is_refused() -> None:
    with pytest.raises(SpillPathError):
        make(Path("/proc/self"))


def test_a_directory_that_goes_away_is_an_error_of_the_first_allocate(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    file = make(tmp_path / "scratch")
    (tmp_path / "scratch").rmdir()
    with pytest.raises(SpillPathError, match="No such file"):
        file.allocate(1)
    (tmp_path / "scratch").mkdir()
    assert get(file, put(file, b"back again")) == b"back again"
    file.close()


def test_a_full_disk_does_not_prevent_a_session(tmp_path: Path) -> None:
    class Full(StrictDirect):
        full = True

        def pwrite_aligned(self, fd: int, view: memoryview, offset: int) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().pwrite_aligned(fd, view, offset)

    calls = Full()
    with opened(tmp_path, calls=calls) as file:
        with pytest.raises(TierFullError, match="No space left"):
            file.allocate(1)
        calls.full = False
        assert get(file, put(file, b"later")) == b"later"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary and a working directory of the test's own, and no variable."""
    for name in ("temporary", "working", "chosen"):
        (tmp_path / name).mkdir()
    monkeypatch.delenv("SPILLWAY_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "working")
    return tmp_path.resolve()


def in_memory(*points: Path | str) -> SystemCalls:
    class Mounted(SystemCalls):
        def mounts(self) -> Sequence[Mount]:
            return [Mount("/", "ext4", "/dev/sda1"), *(Mount(str(point), "tmpfs", "tmpfs") for point in points)]

    return Mounted()


def test_the_default_is_the_first_directory_that_is_not_in_memory(places: Path) -> None:
    temporary, working, var = places / "temporary", places / "working", Path("/var/tmp").resolve()
    assert SpillFile(calls=in_memory()).directory == temporary
    if var.is_dir():
        assert SpillFile(calls=in_memory(temporary)).directory == var
    assert SpillFile(calls=in_memory(temporary, var)).directory == working
    with pytest.raises(SpillPathError, match="set SPILLWAY_DIR") as caught:
        SpillFile(calls=in_memory(temporary, var, working))
    assert all(str(place) in str(caught.value) for place in (temporary, working))
    allowed = SpillFile(calls=in_memory(temporary), allow_memory_filesystem=True).directory
    assert allowed != temporary, "being allowed is no reason to prefer it"
    assert SpillFile(calls=in_memory("/"), allow_memory_filesystem=True).directory == temporary


def test_the_variable_comes_before_the_defaults_and_an_argument_before_the_variable(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILLWAY_DIR", str(places / "chosen"))
    assert SpillFile(calls=OnDisk()).directory == places / "chosen"
    assert SpillFile("../temporary", calls=OnDisk()).directory == places / "temporary"
    with pytest.raises(SpillPathError, match="host memory"):
        SpillFile(calls=in_memory(places / "chosen"))
    monkeypatch.setenv("SPILLWAY_DIR", str(places / "gone"))
    with pytest.raises(SpillPathError, match="gone"):
        SpillFile(calls=OnDisk())
    monkeypatch.setenv("SPILLWAY_DIR", "")
    assert SpillFile(calls=OnDisk()).directory == places / "temporary"


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
    class Sticky(NoTmpfile):
        def unlink(self, path: str) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    before = descriptors()
    with pytest.raises(SpillPathError, match="not permitted"):
        make(tmp_path, calls=Sticky())
    assert descriptors() == before


def test_direct_io_that_is_accepted_and_then_fails_gives_way_to_plain_io(tmp_path: Path) -> None:
    class AcceptsThenFails(SystemCalls):
        on = False

        def set_direct(self, fd: int, on: bool) -> None:
            self.on = on

        def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
            if self.on:
                raise OSError(errno.EINVAL, "not after all")
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


# The end


def test_after_close_every_call_is_refused_and_closing_again_is_not(tmp_path: Path) -> None:
    file = make(tmp_path)
    extent = put(file, b"x")
    file.close()
    file.close()
    page = page_aligned(b"", reserved=ALIGNMENT)
    calls: list[Callable[[], object]] = [
        lambda: file.allocate(1),
        lambda: file.free(extent),
        lambda: file.write(extent, page),
        lambda: file.read(extent, page),
    ]
    for call in calls:
        with pytest.raises(SessionError, match="closed"):
            call()
    assert (file.reserved_bytes, file.used_bytes, file.written_bytes) == (0, 0, ALIGNMENT)
    make(tmp_path).close()  # one that never had a file


@needs_proc
def test_no_descriptor_is_left_after_close_or_garbage_collection(tmp_path: Path) -> None:
    gc.collect()
    before = descriptors()
    file = make(tmp_path)
    assert descriptors() == before
    put(file, b"x")
    assert descriptors() == before + 1
    file.close()
    assert descriptors() == before
    file = make(tmp_path)
    put(file, b"x")
    del file
    gc.collect()
    assert descriptors() == before
    for failing in (OSError(errno.EIO, "broken"), KeyboardInterrupt()):

        class Fails(SystemCalls):
            error = failing

            def set_direct(self, fd: int, on: bool) -> None:
                raise self.error

        with pytest.raises((SpillPathError, KeyboardInterrupt)):
            make(tmp_path, calls=Fails())
        assert descriptors() == before
