"""What the runtime asks of a device.

NOTE [ Lanes, events, waits ]

A *lane* is an ordered queue of copies: what was queued first is done first, and lanes do not wait for each other
unless told to. An *event* is a point in a lane. ``wait(lane, event)`` makes everything that is queued on the lane
afterwards start after the event. That is the only order there is: two accesses to the same bytes from different lanes
are ordered by a chain of recorded and awaited events, or they race.

The *compute* lane is the caller's: on an accelerator the current stream of the calling thread, asked for at the time of
use, since the user may have changed it; on the CPU the calling thread itself, so that waiting on it blocks.

A *task* is host work (a read or a write of the spill file) done by one of a few threads. Its event is reached when the
task is done and, if it returned an event itself (of a copy that it queued), when that one is. An error in a task is
raised to whoever waits for its event. A *host lane* does tasks one after the other, in a thread of its own, or in
several at a time, in threads of its own.

Copies are between ranges of bytes (``bytes.py``). Three backends exist: the CPU's in ``cpu.py``, the
accelerator's in ``accelerator.py``, and the adversary in :mod:`spillway.testing`.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch

from spillway.runtime.bytes import Bytes, Cells, Form
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


@runtime_checkable
class TaskEnd(Event, Protocol):
    """The end of a task, and of what it queued."""

    def finish(self) -> None:
        """Block until the task is done, and those that it queued, or failed: whoever waits for them hears of that."""
        ...


class HostLane(Protocol):
    """A queue of host work: begun in order, by one thread or by several."""

    def run(self, task: Task) -> TaskEnd:
        """Queue it behind what was queued before. An error in one task does not keep the next from being done."""
        ...

    def close(self) -> None:
        """Do what was queued, and end."""
        ...


class Backend(ABC):
    """One device, as the runtime sees it. See NOTE [ Lanes, events, waits ]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    alignment: int
    """Every address that the device's allocator gives for a storage is a multiple of this."""
    malloc: str = ""
    """How the C library's ``malloc`` is set, if it allocates the device's memory."""

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
    def convert(self, lane: Lane, destination: Cells, source: Cells) -> None:
        """Queue a copy of as many elements of host memory to the device, where they become of the other type."""

    @abstractmethod
    def run(self, task: Task) -> Event:
        """Queue host work."""

    @abstractmethod
    def host_lane(self, name: str, *, threads: int = 1, begin: Callable[[], None] | None = None) -> HostLane:
        """A new lane for host work. ``begin`` is the first that each of its threads does."""

    @abstractmethod
    def empty(self, form: Form) -> torch.Tensor:
        """An unwritten tensor on the device, for use on the calling thread's compute lane."""

    def hand_back(self, memory: Bytes, lanes: Iterable[Lane]) -> None:  # noqa: B027
        """Told before the runtime lets go of memory that it did not allocate, and that these lanes have used."""

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

    def is_capturing(self) -> bool:
        """Whether what the calling thread's compute lane is given is captured into a graph: see ``capturing.py``."""
        return False

    def may_wait(self) -> bool:
        """Whether the calling thread's compute lane may wait for whatever was queued: not inside of a capture."""
        return not self.is_capturing()

    def capture(self) -> int | None:
        """A number for that capture; ``None`` for none."""
        return None

    def capture_of(self, lane: Lane) -> int | None:
        """A number for the capture that the lane is part of; ``None`` for none."""
        return None

    def record_captured(self, lane: Lane) -> Event:
        """An event on a lane that is part of a capture."""
        return self.record(lane)

    def alias(self, block: Bytes) -> torch.Tensor:
        """Host memory as a storage of its own, for use on the calling thread's compute lane. It keeps the memory."""
        memory = (ctypes.c_ubyte * block.nbytes).from_address(block.address)
        memory.storage = block.storage  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def host_access(self, block: Bytes, *, write: bool) -> None:  # noqa: B027  (nothing to do by default)
        """Told before host code reads or writes a block itself, for a backend that checks."""

    def compute_access(self, memory: Bytes) -> None:  # noqa: B027  (nothing to do by default)
        """Told that what compute was given by now may write memory, and that it is given no more that does for a while.

        For a backend that checks, where a copy is queued by another thread later.
        """

    @abstractmethod
    def peak_bytes(self) -> int:
        """Peak of allocated device bytes (on the CPU: resident bytes of the process) since it was last reset."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads. What was queued is done first."""


def finish(event: Event | None) -> None:
    """Block until tasks are done or have failed; copies may still be under way."""
    if isinstance(event, Several):
        for one in event.events:
            finish(one)
    elif isinstance(event, TaskEnd):
        event.finish()


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
