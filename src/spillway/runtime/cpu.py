"""The CPU's backend: a stream is a queue with a thread, and compute is the calling thread."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from spillway.errors import SessionError
from spillway.runtime.backend import Backend, Event, HostQueue, HostTasks, Stream, Task, be_in_task
from spillway.runtime.bytes import Bytes, Cells, Form
from spillway.runtime.process_memory import ResidentPeak, set_malloc


def anonymous_pages(nbytes: int, *, huge: bool = False, for_children: bool = True) -> torch.Tensor:
    """Page-aligned zeroed CPU memory, given back to the system when the tensor dies.

    Args:
        nbytes: how many.
        huge: ask the system for pages of 2 MiB, where it has such.
        for_children: whether a forked child gets a copy of what is in it.
    """
    if sys.platform == "win32":
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    # Private: Python's default is shared pages, those of a file in memory, which are four times slower.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for wanted, advice in ((huge, "MADV_HUGEPAGE"), (not for_children, "MADV_DONTFORK")):
        if wanted and hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # advice, and a kernel without such pages says EINVAL
                pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)


class _CpuQueue:
    """The state that a CPU stream shares with its thread. The thread does not hold the stream, so a dead stream ends it."""

    def __init__(self) -> None:
        self.works: deque[Callable[[], None]] = deque()
        self.changed = threading.Condition()
        self.queued = 0
        self.done = 0
        self.closing = False

    def serve(self) -> None:
        be_in_task()
        while True:
            with self.changed:
                self.changed.wait_for(lambda: bool(self.works) or self.closing)
                if not self.works:
                    return
                work = self.works.popleft()
            work()
            # The work may hold the last reference to a tensor: drop it before its event counts as reached.
            del work
            with self.changed:
                self.done += 1
                self.changed.notify_all()

    def close(self, process: int) -> None:
        # In a forked child there is no thread, and the lock may have been taken at the moment of the fork.
        if os.getpid() == process:
            with self.changed:
                self.closing = True
                self.changed.notify_all()


class _CpuStream:
    """A thread that runs queued copies in order. An event is a number: how many were queued before it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue = _CpuQueue()
        self._thread: threading.Thread | None = None
        self._end = weakref.finalize(self, self._queue.close, os.getpid())

    def submit(self, work: Callable[[], None]) -> None:
        queue = self._queue
        with queue.changed:
            if queue.closing:
                # The work would never run, and its waiter would wait for ever.
                raise SessionError(
                    "got a closed session with work of an optimizer or of a backward under way, expected an open one; "
                    "close the session last"
                )
            queue.works.append(work)
            queue.queued += 1
            if self._thread is None:
                # A daemon: a stream that was not closed must not keep the interpreter alive.
                self._thread = threading.Thread(target=queue.serve, name=f"spillway-{self._name}", daemon=True)
                self._thread.start()
            queue.changed.notify_all()

    def record(self) -> _CpuEvent:
        return _CpuEvent(self._queue, self._queue.queued)

    def close(self) -> None:
        self._end()
        if self._thread is not None:
            self._thread.join()


class _CpuEvent:
    __slots__ = ("_number", "_queue")

    def __init__(self, queue: _CpuQueue, number: int) -> None:
        self._queue = queue
        self._number = number

    def query(self) -> bool:
        return self._queue.done >= self._number

    def synchronize(self) -> None:
        queue = self._queue
        if queue.done < self._number:
            with queue.changed:
                queue.changed.wait_for(lambda: queue.done >= self._number)


class _Compute:
    """The calling thread as a stream: its work is always done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuBackend(Backend):
    """Streams are threads, and compute is the caller.

    Args:
        device: ``torch.device("cpu")``.
        threads: how many threads read and write the spill file.
    """

    alignment = 64
    direct_disk = True

    def __init__(self, device: torch.device, *, threads: int = 2) -> None:
        super().__init__(device)
        self._compute = _Compute()
        self._streams: list[_CpuStream] = []
        self._tasks = HostTasks(threads)
        self._peak = ResidentPeak()
        self.malloc = set_malloc()

    def compute(self) -> Stream:
        return self._compute

    def new_stream(self, name: str) -> Stream:
        self._streams.append(_CpuStream(name))
        return self._streams[-1]

    def record(self, stream: Stream) -> Event:
        return stream.record() if isinstance(stream, _CpuStream) else self._compute

    def wait(self, stream: Stream, event: Event) -> None:
        if not isinstance(stream, _CpuStream):
            event.synchronize()
        elif not event.query():
            stream.submit(event.synchronize)

    def copy(self, stream: Stream, destination: Bytes, source: Bytes) -> None:
        assert isinstance(stream, _CpuStream)

        def work() -> None:
            # memmove instead of Tensor.copy_: one thread, without the interpreter's lock, and no second team of OpenMP
            # threads.
            ctypes.memmove(destination.address, source.address, source.nbytes)

        stream.submit(work)

    def convert(self, stream: Stream, destination: Cells, source: Cells) -> None:
        assert isinstance(stream, _CpuStream)
        stream.submit(lambda: _convert(destination, source))

    def run(self, task: Task) -> Event:
        return self._tasks.run(task)

    def host_queue(self, name: str, *, threads: int = 1, begin: Callable[[], None] | None = None) -> HostQueue:
        return HostTasks(threads, be_in_task, begin, name=name)

    def empty(self, form: Form) -> torch.Tensor:
        # The device is named, since the user's default may be another one.
        return torch.empty_strided(form.size, form.stride, dtype=form.dtype, device=self.device)

    def host_slab(self, nbytes: int) -> torch.Tensor:
        return anonymous_pages(nbytes)

    def peak_bytes(self) -> int:
        return self._peak.most()

    def close(self) -> None:
        self._tasks.close()
        for stream in self._streams:
            stream.close()


def _convert(destination: Cells, source: Cells) -> None:
    destination.tensor().copy_(source.tensor())
