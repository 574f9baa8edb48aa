"""The CPU's backend: a stream is a thread with a queue, and compute is the calling thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from spillway.runtime.arena import anonymous_pages
from spillway.runtime.backend import Backend, Event, HostQueue, HostTasks, Stream, Task
from spillway.runtime.bytes import Bytes, Cells
from spillway.runtime.process_memory import ResidentPeak, set_malloc


class _Compute:
    """The calling thread as a stream. As an event, it is always reached."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


_DONE = _Compute()


class _CpuStream:
    """A thread that runs queued copies in order."""

    def __init__(self, name: str) -> None:
        self._tasks = HostTasks(1, name=name)
        self.end: Event = _DONE
        """Reached when everything queued by now is done."""

    def submit(self, work: Callable[[], None]) -> None:
        self.end = self._tasks.run(work)

    def close(self) -> None:
        self._tasks.close()


class CpuBackend(Backend):
    """Streams are threads, and compute is the caller. ``threads`` read and write the spill file."""

    alignment = 64
    direct_disk = True

    def __init__(self, device: torch.device, *, threads: int = 2) -> None:
        super().__init__(device)
        self._streams: list[_CpuStream] = []
        self._tasks = HostTasks(threads)
        self._peak = ResidentPeak()
        self.malloc = set_malloc()

    def compute(self) -> Stream:
        return _DONE

    def new_stream(self, name: str, *, first: bool = False) -> Stream:
        self._streams.append(_CpuStream(name))
        return self._streams[-1]

    def record(self, stream: Stream) -> Event:
        return stream.end if isinstance(stream, _CpuStream) else _DONE

    def wait(self, stream: Stream, event: Event) -> None:
        if not isinstance(stream, _CpuStream):
            event.synchronize()
        elif not event.query():
            stream.submit(event.synchronize)

    def copy(self, stream: Stream, destination: Bytes, source: Bytes) -> None:
        assert isinstance(stream, _CpuStream)

        def work() -> None:
            # memmove needs no OpenMP threads, and releases the interpreter's lock.
            ctypes.memmove(destination.address, source.address, source.nbytes)

        stream.submit(work)

    def convert(self, stream: Stream, destination: Cells, source: Cells) -> None:
        assert isinstance(stream, _CpuStream)

        def work() -> None:
            destination.tensor().copy_(source.tensor())

        stream.submit(work)

    def run(self, task: Task) -> Event:
        return self._tasks.run(task)

    def host_queue(self, name: str, *, threads: int = 1, begin: Callable[[], None] | None = None) -> HostQueue:
        return HostTasks(threads, *([begin] if begin else []), name=name)

    def host_slab(self, nbytes: int) -> torch.Tensor:
        return anonymous_pages(nbytes)

    def peak_bytes(self) -> int:
        return self._peak.most()

    def close(self) -> None:
        self._tasks.close()
        for stream in self._streams:
            stream.close()
