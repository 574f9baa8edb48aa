"""The simulated step: what each stream does when, and how many bytes each tier holds.

NOTE [ The simulated step ]

Compute has a clock. A stream is known by when it is free, and works in the order in which the program asks. So one walk
through the tasks says when everything happens: work begins when its stream is free and its inputs are ready.

- Before a task, its inputs are reloaded. Compute waits for an input that is AWAY. An input that is LEAVING stays, and
  compute does not wait. After each take, storages are prefetched in the order of their takes, as far as the window has
  room. No copy back begins before compute reaches the place that queued it: its destination may be in use until then.
- After a task, each of its sends makes room in the window: compute waits for the oldest copies, and their bytes are
  freed. The copies themselves wait for the task, not for those waits.
- A storage for the disk is copied to CPU memory and then written, and freed when it is written. On its way back it is
  read and then copied.

NOTE [ Bytes before seconds ]

The window is counted in the order of tasks (NOTE [ Program order ] in ``tasks.py``). So no clock is needed to say which
storages it lets go of, and which are taken while they are still LEAVING. The engine learns these in a step, and does
not copy them in the next. A stream must know of each earlier storage whether it is copied, which may turn out long
after. So :class:`StorageLifetimes` finds this first, in a walk of its own, and checks the program.

A key that no task sends stands for a storage that stays on the device: taking or dropping it means nothing. A key that
was dropped may be sent again, and is another storage then. So storages have numbers, in the order of their sends.

NOTE [ The host ]

The CPU queues tasks in program order, and waits for nothing. It begins when the step does, or earlier by its lead,
which is its lead at the end of the step before: so a step takes no less than the CPU needs to queue all of it. A task
is modelled as one kernel. If the CPU is late, the task is delayed until it ends when the CPU has queued it. That delay
is no stall, since no stream causes it. Copies cost the CPU nothing beyond the ``host_seconds`` of tasks.

NOTE [ Holders of bytes ]

A byte counts for one holder at a time, and the holders of an instant add up to the bytes on the device. The
``change_bytes`` of a block's task are kept, except for gradients and recomputed bytes; those of other tasks count
apart. A storage is kept until its copy is queued. While a task runs, all its allocations count as working.

A block frees its input, which the block before it has counted. So the count of one holder may fall below zero while the
sum is right: see :func:`settled`.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from operator import attrgetter
from typing import Any

from spillway.errors import UsageError
from spillway.planner.tasks import Phase, Program, Rates, Sent, Task


class Lane(enum.Enum):
    """A queue of work. See the glossary in ``docs/how-it-works.md``."""

    COMPUTE = "compute"
    OUT = "out"
    BACK = "back"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Span:
    """What a lane does for a while, in seconds from the begin of the step."""

    lane: Lane
    name: str
    start: float
    end: float
    reason: str = ""
    """Of a wait of the compute lane: what it waits for. ``""``: it works."""


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes on each tier at an instant, in program order."""

    seconds: float
    device: int
    host: int
    disk: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated step."""

    seconds: float
    """From its begin to the end of its last task."""
    stall_seconds: float
    """Of these, what compute waited for the lanes."""
    host_wait_seconds: float
    """Of these, what compute waited for the host to queue its tasks."""
    peak_bytes: int
    """Most bytes on the device at once, static ones included."""
    peak_task: str
    """The first task in which that is."""
    host_bytes: int
    """Most bytes in host memory at once."""
    disk_bytes: int
    spans: tuple[Span, ...] = ()
    """Of all lanes, by their start. Only where asked for."""
    levels: tuple[Level, ...] = ()
    """Only where asked for."""
    holders: tuple[Holders, ...] = ()
    """What holds the device's bytes at each of ``levels``. Only where asked for."""

    @property
    def wait_seconds(self) -> float:
        """All that compute waited, for the lanes and for the host."""
        return self.stall_seconds + self.host_wait_seconds

    def to_dict(self) -> dict[str, Any]:
        """Its figures, without spans, levels and holders."""
        names = [field.name for field in fields(self) if field.name not in ("spans", "levels", "holders")]
        return {name: getattr(self, name) for name in names}


def simulate_program(program: Program, rates: Rates, *, spans: bool = False) -> Timeline:
    """Simulate a step.

    Its seconds count the waits for the window after the last task, but no copy that nobody waits for. A storage counts
    in host memory, or on the disk, from when its copy is queued until it is dropped; the buffers in host memory through
    which bytes get to the disk do not count.

    Args:
        program: the step.
        rates: what the lanes carry, and the windows.
        spans: also say what each lane does when, what each tier holds when, and for what the device holds it. While a
            task runs, its level is the most that it needs.

    Raises:
        UsageError: if a rate or the window is not positive, or the program is none: see :class:`StorageLifetimes`.
    """
    for name in ("out", "back", "disk_write", "disk_read", "window", "ahead", "host"):
        value = getattr(rates, name)
        # Said this way round, it also refuses what is not a number.
        if value is not None and not value > 0:
            raise UsageError(f"rates: {name}: got {value}, expected more than 0; measure it again")
    if not 0 <= program.lead < math.inf:
        raise UsageError(f"program: lead: got {program.lead}, expected 0 or more seconds; measure it again")
    walk = _Walk(program, rates, spans)
    for task in program.tasks:
        walk.visit(task)
    return walk.ended()


class _Queue:
    """A lane of copies: when it is free, in seconds from the begin of the step."""

    __slots__ = ("_free", "_lane", "_spans")

    def __init__(self, lane: Lane, spans: list[Span] | None) -> None:
        self._lane = lane
        self._spans = spans
        self._free = 0.0

    def run(self, name: str, ready: float, seconds: float) -> float:
        """Do something as soon as it is ready and the lane is free; when that has ended."""
        start = ready if ready > self._free else self._free
        self._free = end = start + seconds
        if self._spans is not None:
            self._spans.append(Span(self._lane, name, start, end))
        return end


class _Walk:
    """One walk through a program. See NOTE [ The simulated step ]."""

    def __init__(self, program: Program, rates: Rates, spans: bool) -> None:
        self._program = program
        self._storages = storages = StorageLifetimes(program, rates.window)
        static_bytes = program.static_bytes
        self._rates = rates
        self._ahead = rates.window if rates.ahead is None else rates.ahead
        self._spans: list[Span] | None = [] if spans else None
        self._out = _Queue(Lane.OUT, self._spans)
        self._back = _Queue(Lane.BACK, self._spans)
        self._disk = _Queue(Lane.DISK, self._spans)
        self._now = 0.0
        self._issued = -program.lead
        """When the host has queued all tasks up to this place of the program."""
        self._stall = self._host_wait = 0.0
        self._device, self._host, self._stored = static_bytes, 0, 0
        self._peak = static_bytes
        self._peak_task: str | None = None
        self._most_host = self._most_stored = 0
        # By number, the next five.
        count = len(storages.sent)
        self._next = 0
        self._left_at = [0.0] * count
        self._away = [False] * count
        """It is not on the device, or is RETURNING."""
        self._back_at: list[float | None] = [None] * count
        """When its copy back ends, if one is queued."""
        self._numbers: dict[int, int] = {}
        """What keys stand for at this place of the program."""
        self._wanted: list[int] = []
        """A heap: turns of what is AWAY with no copy back queued, and will be taken."""
        self._returning_bytes = 0
        self._held: dict[str, int] | None = {"static": static_bytes} if spans else None
        self._levels: list[Level] = []
        self._holders: list[Holders] = []
        self._note_level()

    def visit(self, task: Task) -> None:
        for key in task.takes:
            if key in self._numbers:
                self._take(self._numbers[key], task.name)
        self._issued += task.host_seconds * self._rates.host
        self._host_wait += self._wait(self._issued - task.seconds, "host", task.name)
        begin, before = self._now, self._device
        self._now = end = begin + task.seconds
        self._device = before + task.change_bytes
        most = before + max(task.peak_bytes, task.change_bytes)
        if most > self._peak or self._peak_task is None:
            self._peak, self._peak_task = most, task.name
        if self._held is not None and self._spans is not None:
            self._levels.append(Level(begin, before + task.peak_bytes, self._host, self._stored))
            self._holders.append(Holders(**self._held, working=task.peak_bytes))
            self._spans.append(Span(Lane.COMPUTE, task.name, begin, end))
            self._hold("gradients", task.gradient_bytes)
            self._hold("recomputed", task.recomputed_bytes)
            rest = task.change_bytes - task.gradient_bytes - task.recomputed_bytes
            if task.phase is Phase.OUTSIDE:
                # A storage that such a task sends is kept like any other one.
                sent = sum(each.nbytes for each in task.sends)
                self._hold("outside", rest - sent)
                self._hold("kept", sent)
            else:
                self._hold("kept", rest)
            self._note_level()
        for _ in task.sends:
            self._send(end, task.name)
        for key in task.drops:
            if key in self._numbers:
                self._drop(self._numbers.pop(key))

    def ended(self) -> Timeline:
        """The timeline, after the last task. See NOTE [ The host ]."""
        last = self._program.tasks[-1].name if self._program.tasks else ""
        waited = self._wait(self._issued + self._program.lead, "host", last)
        self._host_wait += waited
        if waited:
            self._note_level()
        return Timeline(
            seconds=self._now,
            stall_seconds=self._stall,
            host_wait_seconds=self._host_wait,
            peak_bytes=self._peak,
            peak_task=self._peak_task or "",
            host_bytes=self._most_host,
            disk_bytes=self._most_stored,
            # What a lane does at one instant stays in order.
            spans=tuple(sorted(self._spans or (), key=attrgetter("start"))),
            levels=tuple(self._levels),
            holders=tuple(self._holders),
        )

    def _take(self, number: int, task: str) -> None:
        if self._away[number]:
            back_at = self._back_at[number]
            if back_at is None:
                # All that was to be taken earlier was, so this one's turn is next.
                heapq.heappop(self._wanted)
                back_at = self._fetch(number)
            sent = self._storages.sent[number]
            self._stall += self._wait(back_at, "disk" if sent.on_disk else "back", task)
            self._away[number] = False
            self._returning_bytes -= sent.nbytes
            self._hold("returning", -sent.nbytes)
            self._hold("returned", sent.nbytes)
        wanted, storages = self._wanted, self._storages
        while wanted:
            ahead = storages.taken[wanted[0]]
            if self._returning_bytes + storages.sent[ahead].nbytes > self._ahead:
                break
            heapq.heappop(wanted)
            self._fetch(ahead)

    def _fetch(self, number: int) -> float:
        """Queue a copy back; when it ends."""
        sent, name, ready = self._storages.sent[number], self._storages.senders[number], self._now
        if sent.on_disk:
            ready = self._disk.run(name, ready, sent.nbytes / self._rates.disk_read)
        self._back_at[number] = back_at = self._back.run(name, ready, sent.nbytes / self._rates.back)
        self._returning_bytes += sent.nbytes
        self._device += sent.nbytes
        self._hold("returning", sent.nbytes)
        self._note_level()
        return back_at

    def _send(self, ready: float, task: str) -> None:
        """The next storage leaves, which is written at ``ready``."""
        storages, number = self._storages, self._next
        self._next += 1
        for oldest in storages.room[number]:
            self._stall += self._wait(self._left_at[oldest], "out", task)
            self._away[oldest] = True
            if storages.turns[oldest] != NEVER:
                heapq.heappush(self._wanted, storages.turns[oldest])
            self._device -= storages.sent[oldest].nbytes
            self._hold("leaving", -storages.sent[oldest].nbytes)
            self._note_level()
        sent = storages.sent[number]
        self._numbers[sent.key] = number
        if storages.reused[number]:
            return
        left_at = self._out.run(task, ready, sent.nbytes / self._rates.out)
        if sent.on_disk:
            left_at = self._disk.run(task, left_at, sent.nbytes / self._rates.disk_write)
        self._left_at[number] = left_at
        self._count(number, sent.nbytes)
        self._hold("kept", -sent.nbytes)
        self._hold("leaving", sent.nbytes)
        self._note_level()

    def _drop(self, number: int) -> None:
        nbytes = self._storages.sent[number].nbytes
        reused = self._storages.reused[number]
        if not reused:
            self._count(number, -nbytes)
        if not self._away[number]:
            self._device -= nbytes
            returned = "leaving" if self._back_at[number] is None else "returned"
            self._hold("kept" if reused else returned, -nbytes)
        self._note_level()

    def _count(self, number: int, nbytes: int) -> None:
        if self._storages.sent[number].on_disk:
            self._stored += nbytes
            self._most_stored = max(self._most_stored, self._stored)
        else:
            self._host += nbytes
            self._most_host = max(self._most_host, self._host)

    def _wait(self, until: float, reason: str, task: str) -> float:
        """Compute does nothing before then; for how long that is."""
        begin = self._now
        if until <= begin:
            return 0.0
        if self._spans is not None:
            self._spans.append(Span(Lane.COMPUTE, task, begin, until, reason))
        self._now = until
        return until - begin

    def _hold(self, holder: str, nbytes: int) -> None:
        if self._held is not None:
            self._held[holder] = self._held.get(holder, 0) + nbytes

    def _note_level(self) -> None:
        if self._held is not None:
            self._levels.append(Level(self._now, self._device, self._host, self._stored))
            self._holders.append(Holders(**self._held))


NEVER = -1
"""The turn of a storage that nobody takes."""


class StorageLifetimes:
    """When each storage of a program is copied, freed and taken. See NOTE [ Bytes before seconds ].

    At most a window's bytes are LEAVING at once.

    Raises:
        UsageError: if the program is none: negative seconds or bytes; a key that is sent while it stands for a storage
            already, or taken or dropped while it does not, though a task sends it.
    """

    def __init__(self, program: Program, window: int) -> None:
        if program.static_bytes < 0:
            raise UsageError(f"static_bytes: got {program.static_bytes}, expected at least 0 bytes")
        # By a storage's number, the next five.
        self.sent: list[Sent] = []
        self.senders: list[str] = []
        """Names of the tasks that send them."""
        self.room: list[tuple[int, ...]] = []
        """Storages that are freed so that this one has room in the window, oldest first."""
        self.reused: list[bool] = []
        """Whether it is taken while it is LEAVING: then it is never copied."""
        self.turns: list[int] = []
        """Its place in ``taken``, or ``NEVER``."""
        self.taken: list[int] = []
        """Numbers of the storages that are taken, in the order of their first takes."""
        self._window = window
        self._numbers: dict[int, int] = {}
        """What keys stand for at this place of the program."""
        self._leaving: OrderedDict[int, int] = OrderedDict()
        """Bytes of storages that are LEAVING, oldest first."""
        self._leaving_bytes = 0
        self._dropped: set[int] = set()
        """Keys that stood for something once."""
        self._kept: dict[int, str] = {}
        """Keys that seem to be sent by no task, and who asked for them."""
        for task in program.tasks:
            self._visit(task)

    def _visit(self, task: Task) -> None:
        if not (0 <= task.seconds < math.inf and 0 <= task.host_seconds < math.inf and task.peak_bytes >= 0):
            raise UsageError(
                f"task {task.name!r}: got {task.seconds} s, {task.host_seconds} s of the host and a peak of "
                f"{task.peak_bytes} bytes, expected finite seconds and none to be negative; measure the task again"
            )
        for key in task.takes:
            number = self._numbers.get(key)
            if number is None:
                self._note_kept(key, task, "takes")
            elif self.turns[number] == NEVER:
                self.turns[number] = len(self.taken)
                self.taken.append(number)
                if number in self._leaving:
                    self.reused[number] = True
                    self._leaving_bytes -= self._leaving.pop(number)
        for sent in task.sends:
            self._send(sent, task)
        for key in task.drops:
            number = self._numbers.pop(key, None)
            if number is None:
                self._note_kept(key, task, "drops")
            else:
                self._dropped.add(key)
                if number in self._leaving:
                    self._leaving_bytes -= self._leaving.pop(number)

    def _send(self, sent: Sent, task: Task) -> None:
        key, nbytes = sent.key, sent.nbytes
        if nbytes < 0:
            raise UsageError(f"task {task.name!r} sends key {key}: got {nbytes} bytes, expected at least 0")
        if key in self._numbers:
            raise UsageError(
                f"task {task.name!r} sends key {key}: got a key that task "
                f"{self.senders[self._numbers[key]]!r} has sent and nobody has dropped, expected one that stands "
                f"for nothing; drop it first, or count keys on"
            )
        if key in self._kept:
            raise UsageError(
                f"task {task.name!r} sends key {key}: got a key that task {self._kept[key]!r} has taken or dropped "
                f"already, expected this to come first; send it earlier, or give it another key"
            )
        room: tuple[int, ...] = ()
        while self._leaving and self._leaving_bytes + nbytes > self._window:
            oldest, its_bytes = self._leaving.popitem(last=False)
            self._leaving_bytes -= its_bytes
            room += (oldest,)
        number = len(self.sent)
        self._numbers[key] = number
        self._leaving[number] = nbytes
        self._leaving_bytes += nbytes
        self.sent.append(sent)
        self.senders.append(task.name)
        self.room.append(room)
        self.reused.append(False)
        self.turns.append(NEVER)

    def _note_kept(self, key: int, task: Task, does: str) -> None:
        if key in self._dropped:
            raise UsageError(
                f"task {task.name!r} {does} key {key}: got a key that was dropped, expected one that was sent and not "
                f"dropped since; drop it later"
            )
        self._kept.setdefault(key, task.name)


@dataclass(frozen=True, slots=True)
class Holders:
    """Bytes on the device at an instant, by what holds them. See NOTE [ Holders of bytes ]."""

    static: int
    """There when the step begins."""
    gradients: int = 0
    """Of parameters, made in this step."""
    outside: int = 0
    """Of what is no block's."""
    kept: int = 0
    """Held by blocks from their forward to their backward."""
    leaving: int = 0
    """Queued to be copied out, and not let go of."""
    returning: int = 0
    """Fetched, and not yet asked for."""
    returned: int = 0
    """Fetched and asked for, and not yet let go of."""
    recomputed: int = 0
    """Computed again, and not yet let go of."""
    working: int = 0
    """What the task that runs has allocated at most, beyond what was there when it began."""

    @property
    def total(self) -> int:
        """What the device has."""
        return sum(astuple(self))


def settled(shares: Sequence[int]) -> list[int]:
    """The same sum with no share below zero: what one lacks is taken off the one before it.

    Args:
        shares: bytes of holders, in an order in which each may take from those before. The first takes what is left
            over, and may stay below zero.

    Example:
        >>> settled([10, 4, -1, 2])
        [10, 3, 0, 2]
    """
    found = list(shares)
    for place in range(len(found) - 1, 0, -1):
        if found[place] < 0:
            found[place - 1] += found[place]
            found[place] = 0
    return found
