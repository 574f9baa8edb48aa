"""The spill file under several threads at once, and under finalisers that run in the middle of its own calls."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.disk_support import MiB, get, make, opened, page_aligned, put
from spillway.errors import SessionError
from spillway.runtime.spill_file import ALIGNMENT, Extent, SpillFile, SystemCalls


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
