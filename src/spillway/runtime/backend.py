"""What the runtime asks of a device, and the CPU's answer.

NOTE [ Lanes, events, waits ]

A *lane* is an ordered queue of copies: what was queued first is done first, and lanes do not wait for each other
unless told to. An *event* is a point in a lane. ``wait(lane, event)`` makes everything that is queued on the lane
afterwards start after the event. That is the only order there is: two accesses to the same bytes from different lanes
are ordered by a chain of recorded and awaited events, or they race.

The *compute* lane is the caller's: on an accelerator the current stream of the calling thread, asked for at the time of
use, since the user may have changed it; on the CPU the calling thread itself, so that waiting on it blocks.

A *task* is host work (a read or a write of the spill file) done by one of a few threads. Its event is reached when the
task is done and, if it returned an event itself (of a copy that it queued), when that one is. An error in a task is
raised to whoever waits for its event.

Copies are between ranges of bytes (``bytes.py``). Three backends exist: :class:`CpuBackend` here, the accelerator's in
``accelerator.py``, and the adversary in :mod:`spillway.testing`.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn, Protocol

import psutil
import torch

from spillway.runtime.bytes import Bytes, Form
from spillway.runtime.ledger import Stalls


class Event(Protocol):
    """A point in a lane, or the end of a task."""

    def query(self) -> bool:
        """Whether it has been reached."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until it is reached; raises what the task raised."""
        ...


class Lane(Protocol):
    """An ordered queue of copies. Equal lanes are the same queue."""

    def __hash__(self) -> int: ...


Task = Callable[[], Event | None]


class Backend(ABC):
    """One device, as the runtime sees it. See NOTE [ Lanes, events, waits ]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    alignment: int
    """Every address that the device's allocator gives for a storage is a multiple of this."""

    @abstractmethod
    def compute(self) -> Lane:
        """The compute lane of the calling thread, now."""

    @abstractmethod
    def lane(self, name: str) -> Lane:
        """A new lane for copies."""

    @abstractmethod
    def record(self, lane: Lane) -> Event:
        """An event at the end of what is queued on ``lane``."""

    @abstractmethod
    def wait(self, lane: Lane, event: Event) -> None:
        """Whatever is queued on ``lane`` from now on starts after ``event``."""

    def all_of(self, events: Sequence[Event]) -> Event:
        """An event that is reached when all of these are. Not to be recorded again, only waited for."""
        return events[0] if len(events) == 1 else Several(events)

    def timed_wait(self, lane: Lane, event: Event, stalls: Stalls) -> None:
        """The same, and count how long the lane has to wait."""
        before = time.perf_counter()
        self.wait(lane, event)
        stalls.known_seconds += time.perf_counter() - before

    @abstractmethod
    def copy(self, lane: Lane, destination: Bytes, source: Bytes) -> None:
        """Queue a copy of as many bytes. Both must live until an event after it is reached."""

    @abstractmethod
    def run(self, task: Task) -> Event:
        """Queue host work."""

    @abstractmethod
    def empty(self, form: Form) -> torch.Tensor:
        """An unwritten tensor on the device, for use on the calling thread's compute lane."""

    def hand_back(self, storage: torch.UntypedStorage, lanes: Iterable[Lane]) -> None:  # noqa: B027
        """Told before the runtime lets go of a storage that it did not allocate, and that these lanes have used."""

    @abstractmethod
    def host_slab(self, nbytes: int) -> torch.Tensor:
        """Page-aligned host memory that lanes copy from and to at full rate. It is given back when it dies."""

    direct_disk: bool = False
    """Whether the device's memory is host memory, which files can be written from and read into."""

    poisons: bool = False
    """Whether memory that nobody wrote must show, if somebody reads it all the same: for a backend that checks."""

    unified: bool = False
    """Whether the device's memory is the host's own, so that moving bytes to host memory frees none."""

    def memory_info(self) -> tuple[int, int] | None:
        """Bytes of the device that nobody has reserved, and all of them; ``None`` where it is not worth knowing."""
        return None

    def alias(self, block: Bytes) -> torch.Tensor:
        """Host memory as a storage of its own, for use on the calling thread's compute lane. It keeps the memory."""
        memory = (ctypes.c_ubyte * block.nbytes).from_address(block.address)
        memory.storage = block.storage  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def host_access(self, block: Bytes, *, write: bool) -> None:  # noqa: B027  (nothing to do by default)
        """Told before host code reads or writes a block itself, for a backend that checks."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Peak of allocated device bytes (on the CPU: resident bytes of the process) since it was last reset."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads. What was queued is done first."""


class Several:
    """All of some events."""

    __slots__ = ("events",)

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events

    def query(self) -> bool:
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        self.each(lambda event: event.synchronize())

    def each(self, wait: Callable[[Event], None]) -> None:
        """Wait for all of them, also for those behind one that failed: they may still be reading and writing."""
        with contextlib.ExitStack() as stack:
            for event in reversed(self.events):
                stack.callback(wait, event)


class _Here(threading.local):
    task = False


_here = _Here()


def in_task() -> bool:
    """Whether the calling thread does a task, or holds a lock that a task may want: it must not wait for one."""
    return _here.task


def be_in_task() -> None:
    """The calling thread does tasks, from now on."""
    _here.task = True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, the calling thread counts as one that does a task."""
    before, _here.task = _here.task, True
    try:
        yield
    finally:
        _here.task = before


class HostTasks:
    """A few threads for host work. They start with the first task.

    Args:
        threads: how many.
        begin: what each of them does first.
    """

    def __init__(self, threads: int, begin: Callable[[], None] = be_in_task) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spillway-task", initializer=begin)

    def run(self, task: Task) -> TaskEvent:
        # The thread keeps what it was given until a moment after the event is reached, and a task holds memory: so it
        # is given a box, and takes the task out of it.
        return TaskEvent(self._pool.submit(_take_and_run, [task]))

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def _take_and_run(box: list[Task]) -> Event | None:
    return box.pop()()


class TaskEvent:
    """The end of a task, and of the copy that it queued."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[Event | None]) -> None:
        self._future = future

    def query(self) -> bool:
        if not self._future.done():
            return False
        inner = None if self._future.exception() else self._future.result()
        return inner is None or inner.query()

    def resolve(self) -> Event | None:
        """Block until the task is done; the event of the copy that it queued, if it queued one."""
        error = self._future.exception()
        if error is not None:
            raise_again(error)
        return self._future.result()

    def synchronize(self) -> None:
        inner = self.resolve()
        if inner is not None:
            inner.synchronize()


def raise_again(error: BaseException) -> NoReturn:
    """Raise an error that several may ask for.

    A copy of it: raising the very object would hang the frames of whoever asks onto it, and what keeps the object (an
    event of an entry of a graph that those frames hold) would keep the graph, in a circle that no collector sees.
    """
    raise copy.copy(error).with_traceback(None) from error


def anonymous_pages(nbytes: int, *, huge: bool = False, for_children: bool = True) -> torch.Tensor:
    """Page-aligned zeroed host memory, given back to the system when the tensor dies.

    Args:
        nbytes: how many.
        huge: ask the system for pages of 2 MiB, where it has such.
        for_children: whether a forked child gets a copy of what is in it.
    """
    if sys.platform == "win32":
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    # Private: shared pages, which are Python's default, are those of a file in memory, and come four times slower.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for wanted, advice in ((huge, "MADV_HUGEPAGE"), (not for_children, "MADV_DONTFORK")):
        if wanted and hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # advice, and a kernel without such pages says EINVAL
                pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)


class _CpuQueue:
    """What a CPU lane and its thread share. The thread holds no lane, so that a lane that nobody holds can end it."""

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
            # The work may hold the last reference to a tensor: let go of it before its event is seen as reached.
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


class _CpuLane:
    """A thread that does what is queued, in order. An event is a number: how many copies were queued before it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue = _CpuQueue()
        self._thread: threading.Thread | None = None
        self._end = weakref.finalize(self, self._queue.close, os.getpid())

    def submit(self, work: Callable[[], None]) -> None:
        queue = self._queue
        with queue.changed:
            queue.works.append(work)
            queue.queued += 1
            if self._thread is None:
                # A daemon: a lane that nobody closed must not keep the interpreter from ending.
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
    """The calling thread as a lane: whatever it did is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuBackend(Backend):
    """Lanes are threads, and compute is the caller.

    Args:
        device: ``torch.device("cpu")``.
        threads: how many threads read and write the spill file.
    """

    alignment = 64
    direct_disk = True

    def __init__(self, device: torch.device, *, threads: int = 2) -> None:
        super().__init__(device)
        self._compute = _Compute()
        self._lanes: list[_CpuLane] = []
        self._tasks = HostTasks(threads)
        self._process = psutil.Process()

    def compute(self) -> Lane:
        return self._compute

    def lane(self, name: str) -> Lane:
        self._lanes.append(_CpuLane(name))
        return self._lanes[-1]

    def record(self, lane: Lane) -> Event:
        return lane.record() if isinstance(lane, _CpuLane) else self._compute

    def wait(self, lane: Lane, event: Event) -> None:
        if not isinstance(lane, _CpuLane):
            event.synchronize()
        elif not event.query():
            lane.submit(event.synchronize)

    def copy(self, lane: Lane, destination: Bytes, source: Bytes) -> None:
        assert isinstance(lane, _CpuLane)

        def work() -> None:
            # memmove and not Tensor.copy_: one thread, without the interpreter's lock, and no second team of OpenMP
            # threads beside the one that computes.
            ctypes.memmove(destination.address, source.address, source.nbytes)

        lane.submit(work)

    def run(self, task: Task) -> Event:
        return self._tasks.run(task)

    def empty(self, form: Form) -> torch.Tensor:
        # The device is named, since the user's default may be another one.
        return torch.empty_strided(form.size, form.stride, dtype=form.dtype, device=self.device)

    def host_slab(self, nbytes: int) -> torch.Tensor:
        return anonymous_pages(nbytes)

    def peak_bytes(self) -> int:
        return resident_peak_bytes()

    def close(self) -> None:
        self._tasks.close()
        for lane in self._lanes:
            lane.close()


def resident_peak_bytes() -> int:
    """Peak resident bytes of this process, by the operating system."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    # Where there is no /proc: what psutil knows, the peak on Windows and the present figure on macOS.
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))
