"""The interface between the runtime and a device, and the threads for host work.

NOTE [ Streams, events, waits ]

A *stream* is an ordered queue of copies. Streams do not wait for each other unless told to. An *event* is a point in a
stream. After ``wait(stream, event)`` everything queued on the stream starts after the event. There is no other order.
Two accesses to the same bytes from different streams race, unless a chain of recorded and awaited events orders them.

The *compute* stream belongs to the caller. On an accelerator it is the current stream of the calling thread, which the
user may change at any time. On the CPU it is the calling thread itself, so waiting on it blocks.

A *task* is host work, such as a read of the spill file, done by one of a few threads. Its event is reached when the
task is done. If the task returned the event of a copy that it queued, that one must be reached too. An error in a task
is raised to every caller that waits for its event. A *host queue* runs tasks in order, in one thread or in several.

Three backends exist: ``cpu.py``, ``accelerator.py``, and the adversary in :mod:`spillway.testing`.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch

from spillway._torch import is_profiling
from spillway.errors import SessionError
from spillway.runtime.bytes import Bytes, Cells


class Event(Protocol):
    """A point in a stream, or the end of a task."""

    __slots__ = ()

    def query(self) -> bool:
        """Whether it has been reached."""

    def synchronize(self) -> None:
        """Block the calling thread until it is reached; raises the task's error."""


class Stream(Protocol):
    """An ordered queue of copies. Equal streams are the same queue."""

    def __hash__(self) -> int: ...


Task = Callable[[], Event | None]


class TaskEnd(Event, ABC):
    """The end of a task and of the copies that it queued."""

    __slots__ = ()

    @abstractmethod
    def finish(self) -> None:
        """Block until the task, and every task that it queued, is done or has failed. Raises no error of theirs."""


class HostQueue(Protocol):
    """A queue of host work, started in order by one thread or by several."""

    def run(self, task: Task) -> TaskEnd:
        """Queue a task. An error in one task does not stop the next."""

    def close(self) -> None:
        """Run every queued task, then stop the threads."""


@dataclass(eq=False, slots=True)
class Several:
    """An event that is reached when all of its events are."""

    events: Sequence[Event]

    def query(self) -> bool:
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        self.each(lambda event: event.synchronize())

    def each(self, wait: Callable[[Event], None]) -> None:
        """Wait for all of them. If one fails, wait for the rest too: they may still be reading and writing."""
        with contextlib.ExitStack() as stack:
            for event in reversed(self.events):
                stack.callback(wait, event)


def finish(event: Event | None) -> None:
    """Block until tasks are done or have failed. Copies may still be under way."""
    if isinstance(event, Several):
        for one in event.events:
            finish(one)
    elif isinstance(event, TaskEnd):
        event.finish()


@dataclass(slots=True, eq=False)
class Stalls:
    """The waits of the compute stream for one other stream."""

    known_seconds: float = 0.0
    """Sum of the finished waits."""
    pending: list[Callable[[], float | None]] = field(default_factory=list)
    """Waits that may not be finished: each gives its seconds, or ``None`` while it is not over, and never blocks."""

    def seconds(self) -> float:
        """Sum of the waits that are finished by now."""
        unknown = []
        for stall in self.pending:
            seconds = stall()
            if seconds is None:
                unknown.append(stall)
            else:
                self.known_seconds += seconds
        self.pending = unknown
        return self.known_seconds


class Backend(ABC):
    """One device, as the runtime uses it. See NOTE [ Streams, events, waits ]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    alignment: int
    """Every address from the device's allocator is a multiple of this."""
    malloc: str = ""
    """How the C library's ``malloc`` is configured, if it allocates the device's memory."""
    direct_disk: bool = False
    """Whether the device's memory is CPU memory, which files can be written from and read into."""
    poisons: bool = False
    """Whether a read of unwritten memory must be noticed: for a backend that checks."""
    unified: bool = False
    """Whether device and CPU share one memory, so that copying to CPU memory frees nothing."""

    @abstractmethod
    def compute(self) -> Stream:
        """The compute stream of the calling thread, now."""

    @abstractmethod
    def new_stream(self, name: str, *, first: bool = False) -> Stream:
        """A new stream. If ``first``, its kernels start before those of others that are queued at the time."""

    def compute_on(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside, a new stream is the calling thread's compute stream. Only one thread at a time may be inside."""
        return nullcontext()

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event at the end of everything queued on ``stream``."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Everything queued on ``stream`` from now on starts after ``event``."""

    def all_of(self, events: Sequence[Event]) -> Event:
        """An event that is reached when all of these are. It can be waited for, not recorded again."""
        return events[0] if len(events) == 1 else Several(events)

    def timed_wait(self, stream: Stream, event: Event, stalls: Stalls) -> None:
        """Wait, and add the time that the stream had to wait to ``stalls``."""
        before = time.perf_counter()
        self.wait(stream, event)
        stalls.known_seconds += time.perf_counter() - before

    @abstractmethod
    def copy(self, stream: Stream, destination: Bytes, source: Bytes) -> None:
        """Queue a copy of equally many bytes. Both must live until an event after it is reached."""

    @abstractmethod
    def convert(self, stream: Stream, destination: Cells, source: Cells) -> None:
        """Queue a copy of elements from CPU memory to the device, converted to the destination's dtype."""

    @abstractmethod
    def run(self, task: Task) -> Event:
        """Queue host work."""

    @abstractmethod
    def host_queue(self, name: str, *, threads: int = 1, begin: Callable[[], None] | None = None) -> HostQueue:
        """A new stream for host work. Each of its threads calls ``begin`` first."""

    def empty(self, nbytes: int) -> Bytes:
        """Unwritten memory of the device, for the calling thread's compute stream."""
        return Bytes.of(torch.empty(nbytes, dtype=torch.uint8, device=self.device))

    def hand_back(self, memory: Bytes, streams: Iterable[Stream]) -> None:  # noqa: B027
        """Called before the runtime releases memory that it did not allocate and that these streams have used."""

    @abstractmethod
    def host_slab(self, nbytes: int) -> torch.Tensor:
        """Page-aligned CPU memory that streams copy at full rate. It is freed when the tensor dies."""

    def memory_info(self) -> tuple[int, int] | None:
        """Free and total bytes of the device; ``None`` where the device has no memory of its own."""
        return None

    def is_capturing(self) -> bool:
        """Whether the calling thread's compute stream is being captured into a graph: see ``device.py``."""
        return False

    def may_wait(self) -> bool:
        """Whether the calling thread's compute stream may wait for any event: not inside a capture."""
        return not self.is_capturing()

    def capture(self) -> int | None:
        """The number of the capture under way; ``None`` for none."""
        return self.capture_of(self.compute()) if self.is_capturing() else None

    def capture_of(self, stream: Stream) -> int | None:
        """The number of the capture that the stream is part of; ``None`` for none."""
        return None

    def record_untimed(self, stream: Stream) -> Event:
        """As :meth:`record`, for a capture, whose events cannot be timed."""
        return self.record(stream)

    def alias(self, block: Bytes) -> torch.Tensor:
        """CPU memory as a storage of its own, for the calling thread's compute stream. It keeps the memory alive."""
        return block.owned_by(block.storage)

    def mapped(self, memory: Bytes, owner: object) -> torch.Tensor:
        """Pinned memory as a tensor of the device, which keeps the owner alive. Raises ``UnsupportedError``."""
        return memory.owned_by(owner)

    def host_access(self, block: Bytes, *, write: bool) -> None:  # noqa: B027
        """Called before host code reads or writes a block itself, for a backend that checks."""

    def compute_access(self, memory: Bytes) -> None:  # noqa: B027
        """For a backend that checks: queued compute may write this memory, and no later compute will for a while.

        Called where another thread queues a copy later.
        """

    @abstractmethod
    def peak_bytes(self) -> int:
        """Peak of allocated device bytes (CPU: resident bytes of the process) since the last reset."""

    @abstractmethod
    def close(self) -> None:
        """Finish everything queued, then stop the threads."""


# Host work.


class _Here(threading.local):
    task = False


_here = _Here()


def in_task() -> bool:
    """Whether the calling thread runs a task, or holds a lock that a task may need: it must not wait for one."""
    return _here.task


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, the calling thread counts as one that runs a task."""
    before, _here.task = _here.task, True
    try:
        yield
    finally:
        _here.task = before


class HostTasks:
    """A few threads for host work, started with the first task. Each calls the functions ``begin`` first."""

    def __init__(self, threads: int, *begin: Callable[[], None] | None, name: str = "task") -> None:
        def start() -> None:
            _here.task = True
            for each in filter(None, begin):
                each()

        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"spillway-{name}", initializer=start)
        self._closed = False

    def run(self, task: Task) -> TaskEvent:
        if self._closed:
            raise SessionError(
                "The session was closed while a backward or an optimizer still used it. Close the session last."
            )
        # A worker keeps its arguments until shortly after the event is reached, and a task holds memory. So the worker
        # gets a box, and takes the task out of it.
        return TaskEvent(self._pool.submit(lambda box: box.pop()(), [task]))

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=True)


class TaskEvent(TaskEnd):
    """The end of a task, and of the copy that it queued."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[Event | None]) -> None:
        self._future = future

    def query(self) -> bool:
        if not self._future.done():
            return False
        inner = None if self._future.exception() else self._future.result()
        return inner is None or inner.query()

    def finish(self) -> None:
        if self._future.exception() is None:
            finish(self._future.result())

    def resolve(self) -> Event | None:
        """Block until the task is done; gives the event of the copy that it queued, if any."""
        error = self._future.exception()
        if error is not None:
            raise_again(error)
        return self._future.result()

    def synchronize(self) -> None:
        inner = self.resolve()
        if inner is not None:
            inner.synchronize()


@contextlib.contextmanager
def on_error(undo: Callable[..., object], *args: Any) -> Iterator[None]:
    """Undo something if the block raises."""
    try:
        yield
    except BaseException:
        undo(*args)
        raise


def raise_again(error: BaseException) -> NoReturn:
    """Raise a copy of an error that several callers may ask for.

    Raising the object itself would attach the callers' frames to it. An event that keeps the error would then keep the
    graph in those frames alive, in a cycle that the garbage collector cannot see.
    """
    raise copy.copy(error).with_traceback(None) from error


def label(name: str) -> AbstractContextManager[object]:
    """A span ``spillway.<name>`` in a profiler's trace (an NVTX range under ``emit_nvtx``). Free without a profiler."""
    return torch.profiler.record_function(f"spillway.{name}") if is_profiling() else nullcontext()
