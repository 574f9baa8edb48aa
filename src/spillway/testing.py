"""A backend for tests that finds missing waits and missing references.

On a CPU most missing waits do no harm, and on a GPU they do harm now and then. Under :class:`AdversaryBackend` they
fail every time:

* **Late.** A copy or a task is done when a caller waits for an event after it, and not before. Until then its
  destination holds poison.
* **Weak.** A queued copy holds neither its source nor its destination. If one of them has died when the copy is done,
  that is a race.
* **Ordered.** Each stream keeps a vector clock (Fidge 1988; Mattern 1989): how far into every other one it has waited.
  Every access to bytes that a copy reads or writes is compared with the accesses before it. Two accesses are a race if
  one of them writes and no chain of recorded and awaited events orders them, also if the bytes happen to be right.

The compute stream behaves like an accelerator's: it runs behind the CPU. So work that the CPU queued earlier may not be
done, and the CPU knows of an event only after waiting for it. The backend does not see work on the compute stream. Each
time the runtime asks for that stream, the backend supposes that compute has written anything since. CPU threads hand
memory over under locks, and count as one line.

Example:
    >>> import torch, spillway
    >>> adversary = AdversaryBackend()
    >>> weight = torch.ones(64, 64, requires_grad=True)
    >>> with spillway.Session(backend=adversary.serve, window=0) as session:
    ...     with spillway.offload(session=session, min_bytes=0, tier="host"):
    ...         loss = weight.exp().sum()
    ...     loss.backward()
    >>> adversary.check()
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from spillway.errors import RaceError
from spillway.runtime.arena import anonymous_pages
from spillway.runtime.backend import Backend, Event, HostQueue, Several, Stream, Task, TaskEnd, finish, raise_again
from spillway.runtime.bytes import Bytes, Cells

POISON = 0xA5
"""The byte that unwritten memory is full of."""

_Clock = dict[int, int]


class _Line:
    """A stream or the CPU: it does its work in order."""

    _numbers = itertools.count()

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(self._numbers)
        self.time = 0
        self.busy = -1
        """When it got its latest copy."""
        self.capture: int | None = None
        """The capture that it is part of."""
        self.clock: _Clock = {}
        """The latest time of every other line that this one has waited for."""
        self.queue: deque[Callable[[], object]] = deque()

    def join(self, clock: _Clock) -> None:
        for number, moment in clock.items():
            self.clock[number] = max(self.clock.get(number, -1), moment)

    def snapshot(self) -> _Clock:
        """The clock of this moment. All later work of the line has a later time."""
        clock = {**self.clock, self.number: self.time}
        self.time += 1
        return clock


class _Point:
    """An event: a moment of a line, reached when all work before it is done."""

    def __init__(self, adversary: AdversaryBackend, line: _Line, clock: _Clock, *, reached: bool) -> None:
        self._adversary = adversary
        self.line = line
        self.clock = clock
        self.capture = line.capture
        self.reached = reached
        self._seen = False

    def query(self) -> bool:
        self._adversary._check_asked(self)
        return self._seen

    def synchronize(self) -> None:
        self._adversary._check_asked(self)
        with self._adversary._lock:
            self._adversary._reach(self)
            self._adversary._host.join(self.clock)
        self._seen = True


class _Job(TaskEnd):
    """A task's event. The task runs when it is waited for."""

    def __init__(self, task: Task) -> None:
        self._task: Task | None = task
        self._error: BaseException | None = None
        self.inner: Event | None = None

    def query(self) -> bool:
        return self._task is None and (self.inner is None or self.inner.query())

    def synchronize(self) -> None:
        self.run()
        if self.inner is not None:
            self.inner.synchronize()

    def finish(self) -> None:
        # Its error is raised to the callers that wait for it.
        with contextlib.suppress(RuntimeError, OSError):
            self.run()
        finish(self.inner)

    def run(self) -> None:
        """Do the task, if it was not done yet."""
        task, self._task = self._task, None
        if task is not None:
            try:
                self.inner = task()
            except (RuntimeError, OSError) as error:
                self._error = error
        if self._error is not None:
            raise_again(self._error)


class _JobQueue:
    """A host queue: a job runs when it is waited for; with one thread, after all that were queued before it."""

    def __init__(self, adversary: AdversaryBackend, threads: int) -> None:
        self._adversary = adversary
        self._threads = threads
        self._jobs: deque[_Job] = deque()

    def run(self, task: Task) -> TaskEnd:
        if self._threads > 1:
            return self._adversary._new_job(task)

        def in_turn() -> Event | None:
            try:
                while self._jobs[0] is not job:
                    self._jobs[0].finish()
            finally:
                # Also if an earlier one raised: this one would be waited for for ever.
                self._jobs.remove(job)
            return task()

        job = self._adversary._new_job(in_turn)
        self._jobs.append(job)
        return job

    def close(self) -> None:
        while self._jobs:
            self._jobs[0].finish()


@dataclass(frozen=True, slots=True)
class _Access:
    line: int
    time: int
    start: int
    end: int
    write: bool
    what: str


class AdversaryBackend(Backend):
    """A backend for CPU tensors that finds missing waits. See :mod:`spillway.testing`.

    Args:
        device: the device of the tensors.
        direct_disk: let the disk tier write from and read into the tensors' own memory.
    """

    alignment = 64
    poisons = True

    def __init__(self, device: torch.device | None = None, *, direct_disk: bool = False) -> None:
        super().__init__(device if device is not None else torch.device("cpu"))
        self.direct_disk = direct_disk
        self.faults: list[RaceError] = []
        """Races found so far. A finaliser, which cannot raise, adds to them as well."""
        self._lock = threading.RLock()
        self._computes: dict[str, _Line] = {}
        self._stream = threading.local()
        self._host = _Line("host")
        self._streams: list[_Line] = []
        self._captures = itertools.count(1)
        self._starts: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._mapped: weakref.WeakKeyDictionary[torch.UntypedStorage, Bytes] = weakref.WeakKeyDictionary()
        """The pinned memory of storages that compute reads there."""
        self._jobs: weakref.WeakSet[_Job] = weakref.WeakSet()
        self._history: weakref.WeakKeyDictionary[torch.UntypedStorage, list[_Access]] = weakref.WeakKeyDictionary()

    def serve(self, device: torch.device) -> Backend:
        """This backend, for ``Session(backend=...)``."""
        return self

    def check(self) -> None:
        """Raise the first race, as a :class:`~spillway.errors.RaceError`."""
        if self.faults:
            raise self.faults[0]

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Inside, the calling thread has another compute stream, as under ``torch.cuda.stream``."""
        before = getattr(self._stream, "name", "compute")
        self._stream.name = name
        try:
            yield
        finally:
            self._stream.name = before

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, the calling thread's compute stream is captured into a graph, by the rules of CUDA's graphs.

        No graph is replayed. Operations that a capture does not allow are found.
        """
        with self._lock:
            compute = self._compute()
            compute.capture = next(self._captures)
        try:
            yield
        finally:
            with self._lock:
                number, compute.capture = compute.capture, None
                for stream in self._streams:
                    if stream.capture == number:
                        stream.capture = None
                        if compute.clock.get(stream.number, -1) < stream.busy:
                            self._fault(
                                f"a capture ended while compute had not waited for all that is on {stream.name}"
                            )

    # The backend's own methods.

    def is_capturing(self) -> bool:
        return self._compute().capture is not None

    def capture(self) -> int | None:
        # Not by `compute`, after which compute may have written anything.
        return self._compute().capture

    def capture_of(self, stream: Stream) -> int | None:
        return self._line(stream).capture

    def compute(self) -> Stream:
        with self._lock:
            line = self._compute()
            line.time += 1
            return line

    def new_stream(self, name: str, *, first: bool = False) -> Stream:
        self._streams.append(_Line(name))
        return self._streams[-1]

    def compute_on(self, stream: Stream) -> AbstractContextManager[object]:
        line = self._line(stream)
        return self.stream(f"{line.name} {line.number}")

    def record(self, stream: Stream) -> Event:
        with self._lock:
            line = self._line(stream)
            line.join(self._host.clock)
            point = _Point(self, line, line.snapshot(), reached=line in self._computes.values())
            if not point.reached:
                line.queue.append(lambda: setattr(point, "reached", True))
            return point

    def wait(self, stream: Stream, event: Event) -> None:
        with self._lock:
            line = self._line(stream)
            if isinstance(event, Several):
                event.each(lambda one: self.wait(stream, one))
                return
            if isinstance(event, _Job):
                event.run()
                if event.inner is not None:
                    self.wait(stream, event.inner)
                return
            assert isinstance(event, _Point)
            if event.capture != line.capture:
                if event.capture is None or line not in self._streams:
                    self._fault(f"{line.name} waits for an event of {event.line.name} that its capture has no part in")
                line.capture = event.capture
            line.join(event.clock)
            if line in self._computes.values():
                self._reach(event)
            else:
                point = event
                line.queue.append(lambda: self._reach(point))

    def copy(self, stream: Stream, destination: Bytes, source: Bytes) -> None:
        self.convert(stream, Cells(destination, torch.uint8), Cells(source, torch.uint8))

    def convert(self, stream: Stream, destination: Cells, source: Cells) -> None:
        # A queued copy holds no memory.
        types = destination.dtype, source.dtype
        target, origin = (_weak(self._pinned_of(each.memory)) for each in (destination, source))
        with self._lock:
            line = self._line(stream)
            # All that the CPU has done or waited for comes before all that it queues from now on.
            line.join(self._host.snapshot())
            line.busy = line.time
            self._access(line, source.memory, write=False, what=f"copy on {line.name} reads")
            self._access(line, destination.memory, write=True, what=f"copy on {line.name} writes")

            def work() -> None:
                written, read = target(), origin()
                if written is None or read is None:
                    dead = "destination" if written is None else "source"
                    if written is not None:
                        written.fill_(POISON)
                    self._fault(f"a copy on {line.name} was done after its {dead} had died")
                else:
                    written.view(types[0]).copy_(read.view(types[1]))

            line.queue.append(work)

    def _pinned_of(self, memory: Bytes) -> Bytes:
        """The same bytes in an owner that lives as long as they do."""
        pinned = self._mapped.get(memory.storage)
        return memory if pinned is None else Bytes(pinned.storage, pinned.start + memory.start, memory.nbytes)

    def run(self, task: Task) -> Event:
        return self._new_job(task)

    def host_queue(self, name: str, *, threads: int = 1, begin: Callable[[], None] | None = None) -> HostQueue:
        # Jobs run in the threads that wait for them: there is none to begin in.
        return _JobQueue(self, threads)

    def empty(self, nbytes: int) -> Bytes:
        with self._lock:
            memory = super().empty(nbytes)
            memory.tensor().fill_(POISON)
            self._hand_out(memory)
            return memory

    def alias(self, block: Bytes) -> torch.Tensor:
        with self._lock:
            self._hand_out(block)
            memory = super().alias(block)
            # Both storages are the same bytes, and have one history.
            self._history[memory.untyped_storage()] = self._history[block.storage]
            self._starts[memory.untyped_storage()] = block.start
            return memory

    def mapped(self, memory: Bytes, owner: object) -> torch.Tensor:
        with self._lock:
            mapped = super().mapped(memory, owner)
            storage = mapped.untyped_storage()
            self._history[storage] = self._history.setdefault(memory.storage, [])
            self._starts[storage] = memory.start
            self._mapped[storage] = memory
            # The caller has written it, and gives it to compute.
            self._compute().join(self._host.snapshot())
            return mapped

    def hand_back(self, memory: Bytes, streams: Iterable[Stream]) -> None:
        # An allocator keeps its memory until the stream has done what is queued there by now.
        storage = memory.storage
        with self._lock:
            if storage in self._mapped:
                return
            for line in map(self._line, streams):
                if line.queue:
                    line.queue.append(storage.nbytes)

    def host_slab(self, nbytes: int) -> torch.Tensor:
        self._check_captures("new host memory")
        # All of it is written now.
        return anonymous_pages(nbytes, huge=True).fill_(POISON)

    def host_access(self, block: Bytes, *, write: bool) -> None:
        with self._lock:
            self._access(self._host, block, write=write, what=f"the host {'writes' if write else 'reads'}")

    def compute_access(self, memory: Bytes) -> None:
        with self._lock:
            whole = Bytes(memory.storage, 0, memory.storage.nbytes())
            self._access(self._compute(), whole, write=True, what="compute writes")

    def peak_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Do all work that was not waited for."""
        with self._lock:
            for job in list(self._jobs):
                if not job.query():
                    # No caller waited for a task that fails here.
                    with contextlib.suppress(RuntimeError, OSError):
                        job.synchronize()
            for line in self._streams:
                while line.queue:
                    line.queue.popleft()()

    def _new_job(self, task: Task) -> _Job:
        with self._lock:
            self._check_captures("host work")
            job = _Job(task)
            self._jobs.add(job)
            return job

    # Below, the lock is held.

    def _line(self, stream: Stream) -> _Line:
        assert isinstance(stream, _Line)
        return stream

    def _compute(self) -> _Line:
        name = getattr(self._stream, "name", "compute")
        return self._computes.setdefault(name, _Line(name))

    def _reach(self, point: _Point) -> None:
        while not point.reached:
            point.line.queue.popleft()()

    def _hand_out(self, memory: Bytes) -> None:
        """Compute gets memory that earlier queued work may still use."""
        compute = self._compute()
        compute.join(self._host.snapshot())
        self._access(compute, memory, write=True, what="compute had it before")

    def _access(self, line: _Line, memory: Bytes, *, write: bool, what: str) -> None:
        storage = memory.storage
        history = self._history.setdefault(storage, [])
        start = memory.start + self._starts.get(storage, 0)
        end = start + memory.nbytes
        if not history and not write:
            # Not made by the runtime: compute wrote it, at the latest just before the runtime was called.
            compute = self._compute()
            history.append(_Access(compute.number, compute.time - 1, 0, storage.nbytes(), True, "compute writes"))
        if not memory.nbytes:
            return
        access = _Access(line.number, line.time, start, end, write, what)
        for earlier in history:
            overlap = earlier.start < end and start < earlier.end and (earlier.write or write)
            if overlap and earlier.line != line.number and line.clock.get(earlier.line, -1) < earlier.time:
                self._fault(f"{access.what} bytes {start} to {end}, not ordered after: {earlier.what}")
        if write:
            history[:] = [earlier for earlier in history if not (start <= earlier.start and earlier.end <= end)]
        history.append(access)

    def _check_captures(self, what: str) -> None:
        if self.is_capturing():
            self._fault(f"{what} was asked for in a capture")

    def _check_asked(self, point: _Point) -> None:
        if self.is_capturing() or point.capture is not None:
            self._fault(f"an event of {point.line.name} was asked whether it is reached, in a capture or of one")

    def _fault(self, text: str) -> None:
        self.faults.append(RaceError(f"{text}; expected an event that one records and the other waits for"))
        raise self.faults[-1]


def _weak(memory: Bytes) -> Callable[[], torch.Tensor | None]:
    """Gives a range of a storage that is not kept alive; ``None``: it has died."""
    reference, start, nbytes = weakref.ref(memory.storage), memory.start, memory.nbytes

    def get() -> torch.Tensor | None:
        storage = reference()
        return None if storage is None else Bytes(storage, start, nbytes).tensor()

    return get
