"""The simulated step: the work of each stream over time, and the bytes on each tier.

NOTE [ The simulated step ]

Compute has a clock. Each stream of copies has a time at which it is free, and copies in program order. So one walk
through the tasks finds the time of each event: work begins when its stream is free and its inputs are ready.

- Before a task, its inputs are reloaded. Compute stalls for an input that is offloaded. An input whose offload is still
  in flight stays on the GPU. After each take, storages are prefetched in the order of their takes, up to the in-flight
  limit. No reload begins before compute reaches the place that queued it: its destination may be in use until then.
- After a task, its sends are queued. If they exceed the in-flight limit, compute stalls for the oldest copies, and
  their bytes are freed. The copies themselves wait for the task only.
- A storage for the disk is copied to CPU memory and then written, and freed when it is written. A reload reads it and
  then copies it.

NOTE [ Bytes before seconds ]

The in-flight limit is counted in the order of tasks (NOTE [ Program order ] in ``tasks.py``). So no clock is needed to
find the storages that it frees, and those that are taken before that. The engine learns the latter in one step, and
does not copy them in the next. The simulation must know them before it queues their copies: :func:`storages_of` finds
them in a walk of its own.

Streamed parameters (NOTE [ Copies of weights ] in ``tasks.py``) that autograd saved are freed when they are sent. Those
of a forward or a replay are fetched whatever the limit, and count as prefetched until their block begins. They are on
the device until another task needs no or other ones.

A key that no task sends stands for a storage that stays on the GPU: taking or dropping it has no effect. A key that was
dropped may be sent again, and is another storage then.

NOTE [ The host ]

The CPU queues tasks in program order, and never waits. It begins when the step does: a CPU that is ahead of the GPU
then makes a step shorter than simulated. A task is modelled as one kernel. If the CPU is late, the task is delayed
until it ends when the CPU has queued it. That delay is no stall, since no stream causes it. Copies cost the CPU nothing
beyond the ``host_seconds`` of tasks.

NOTE [ Holders of bytes ]

A byte counts for one holder at a time, and the holders of an instant add up to the bytes on the GPU. The
``change_bytes`` of a block's task are kept, except for gradients and recomputed bytes; those of other tasks count
apart. A storage is kept until its copy is queued. While a task runs, all its allocations count as working.

A block frees its input, which the block before it has counted. So the count of one holder may fall below zero while the
sum is right: see :func:`settled`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from operator import attrgetter

from spillway.planner.tasks import Phase, Program, Rates, Sent, Task, Weights

STREAMS = ("compute", "out", "back", "disk")
"""Compute, offloading, reloading, and the disk's reads and writes."""


@dataclass(frozen=True, slots=True)
class Span:
    """Work of a stream, in seconds from the start of the step."""

    stream: str
    """One of :data:`STREAMS`."""
    name: str
    """The task that runs, or that sent the storage that is copied."""
    start: float
    end: float
    reason: str = ""
    """The stream that compute stalls for, or ``"host"``; ``""``: this is no stall."""
    key: int | None = None
    """The key of the storage that is copied; ``None``: no storage, or all streamed parameters of a block."""
    peak_bytes: int = 0
    """Most bytes on the GPU while a task runs; 0: it is a copy or a stall."""


@dataclass(frozen=True, slots=True)
class Holders:
    """Bytes on the GPU at an instant, by their holders. See NOTE [ Holders of bytes ]."""

    static: int
    """In use when the step begins."""
    gradients: int = 0
    """Gradients of parameters that this step made."""
    outside: int = 0
    """Activations outside of blocks."""
    kept: int = 0
    """Activations of blocks, from their forward to their backward."""
    leaving: int = 0
    """Being offloaded, and not freed yet."""
    returning: int = 0
    """Prefetched, and not used yet."""
    returned: int = 0
    """Reloaded and in use."""
    recomputed: int = 0
    """Recomputed and in use."""
    working: int = 0
    """The most that the running task allocates."""

    @property
    def total(self) -> int:
        """All bytes on the GPU."""
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes on each tier at an instant, in program order."""

    seconds: float
    holders: Holders
    host: int
    disk: int

    @property
    def device(self) -> int:
        """All bytes on the GPU."""
        return self.holders.total


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated step."""

    seconds: float
    stall_seconds: float
    """Seconds for which compute stalls for copies."""
    host_wait_seconds: float
    """Seconds for which compute waits for the CPU to queue its tasks."""
    peak_bytes: int
    """Most bytes on the GPU at once, static ones included."""
    peak_task: str
    """The first task with this peak."""
    host_bytes: int
    """Most bytes in CPU memory at once."""
    disk_bytes: int
    spans: tuple[Span, ...] = ()
    """Work of all streams, by its start. Only on request, as the next."""
    levels: tuple[Level, ...] = ()

    @property
    def wait_seconds(self) -> float:
        """Seconds for which compute stalls for copies or for the CPU."""
        return self.stall_seconds + self.host_wait_seconds


def simulate_program(program: Program, rates: Rates, *, spans: bool = False) -> Timeline:
    """Simulate a step.

    The stalls for the in-flight limit after the last task count, but no copy that the step does not wait for. A storage
    counts in CPU memory, or on the disk, from when its copy is queued until it is dropped. Buffers in CPU memory
    through which bytes get to the disk do not count.

    With ``spans``, it has the spans of each stream and the levels of each tier. While a task runs, its level is the
    most that it needs.
    """
    walk = _Walk(program, rates, spans)
    for task in program.tasks:
        walk.visit(task)
    return walk.ended()


@dataclass(slots=True, eq=False)
class Storage:
    """An offloaded storage of a program. See NOTE [ Bytes before seconds ]."""

    sent: Sent
    sender: str
    frees: tuple[Storage, ...]
    """Storages that must be freed before its copy is within the in-flight limit, oldest first."""
    is_reused: bool = False
    """Whether it is taken before it is freed. Then it is never copied."""
    turn: int | None = None
    """Its place in the order of first takes; ``None``: it is never taken."""
    gone_at: float = 0.0
    """When its copy out ends."""
    is_away: bool = False
    """Whether it was freed, and is not in use again."""
    back_at: float | None = None
    """When its reload ends, once it is queued."""


def storages_of(program: Program, window: int) -> tuple[list[Storage], list[Storage]]:
    """The storages of a program, in the order of their sends, and those that are taken, in the order of first takes.

    At most ``window`` bytes are in flight at once, or one larger storage.
    """
    sent: list[Storage] = []
    taken: list[Storage] = []
    by_key: dict[int, Storage] = {}
    in_flight: OrderedDict[int, Storage] = OrderedDict()
    nbytes = 0
    for task in program.tasks:
        for key in task.takes:
            storage = by_key.get(key)
            if storage is not None and storage.turn is None:
                storage.turn = len(taken)
                taken.append(storage)
                if in_flight.pop(key, None) is not None:
                    storage.is_reused = True
                    nbytes -= storage.sent.nbytes
        for each in task.sends:
            if each.is_weight:
                by_key[each.key] = Storage(each, task.name, ())
                sent.append(by_key[each.key])
                continue
            frees = []
            while in_flight and nbytes + each.nbytes > window:
                _, oldest = in_flight.popitem(last=False)
                nbytes -= oldest.sent.nbytes
                frees.append(oldest)
            by_key[each.key] = in_flight[each.key] = Storage(each, task.name, tuple(frees))
            sent.append(by_key[each.key])
            nbytes += each.nbytes
        for key in task.drops:
            if by_key.pop(key, None) is not None and (storage := in_flight.pop(key, None)) is not None:
                nbytes -= storage.sent.nbytes
    return sent, taken


class _Walk:
    """One walk through a program. See NOTE [ The simulated step ]."""

    def __init__(self, program: Program, rates: Rates, spans: bool) -> None:
        self._rates = rates
        sent, self._taken = storages_of(program, rates.window)
        self._to_send = iter(sent)
        self._spans: list[Span] | None = [] if spans else None
        self._free = {"out": 0.0, "back": 0.0, "disk": 0.0}
        """When each stream of copies is free."""
        self._now = 0.0
        self._queued = 0.0
        """When the CPU has queued all tasks up to this place of the program."""
        self._stall = self._host_wait = 0.0
        self._device = self._peak = program.static_bytes
        self._peak_task: str | None = None
        self._stored = {False: 0, True: 0}
        """Bytes in CPU memory and on the disk."""
        self._most_stored = dict(self._stored)
        self._by_key: dict[int, Storage] = {}
        self._wanted: list[int] = []
        """A heap: turns of freed storages whose reload is not queued, and that will be taken."""
        self._returning = 0
        """Bytes that are prefetched and not used yet."""
        needed = (task.weights for task in program.tasks if task.weights is not None)
        self._needed = deque(weights for weights, _ in groupby(needed))
        """Streamed parameters that are needed from here on, in order."""
        self._weights: Weights | None = None
        """Those that are in use."""
        self._fetched: float | None = None
        """When the copy of the next needed ones ends, once it is queued."""
        self._held = {"static": program.static_bytes}
        self._levels: list[Level] = []
        self._note_level()

    def visit(self, task: Task) -> None:
        if task.weights != self._weights:
            self._change_weights(task.weights, task.name)
        for key in task.takes:
            if key in self._by_key:
                self._take(self._by_key[key], task.name)
        self._queued += task.host_seconds * self._rates.host
        self._host_wait += self._wait(self._queued - task.seconds, "host", task.name)
        begin, before = self._now, self._device
        self._now = begin + task.seconds
        self._device = before + task.change_bytes
        most = before + max(task.peak_bytes, task.change_bytes)
        if most > self._peak or self._peak_task is None:
            self._peak, self._peak_task = most, task.name
        if self._spans is not None:
            self._levels.append(self._level(begin, task.peak_bytes))
            self._spans.append(Span("compute", task.name, begin, self._now, peak_bytes=most))
            self._hold_results(task)
        end = self._now
        for _ in task.sends:
            self._send(end, task.name)
        for key in task.drops:
            if key in self._by_key:
                self._drop(self._by_key.pop(key))

    def ended(self) -> Timeline:
        return Timeline(
            seconds=self._now,
            stall_seconds=self._stall,
            host_wait_seconds=self._host_wait,
            peak_bytes=self._peak,
            peak_task=self._peak_task or "",
            host_bytes=self._most_stored[False],
            disk_bytes=self._most_stored[True],
            # The sort is stable: the spans of one instant stay in order.
            spans=tuple(sorted(self._spans or (), key=attrgetter("start"))),
            levels=tuple(self._levels),
        )

    def _take(self, storage: Storage, task: str) -> None:
        if storage.is_away:
            if storage.back_at is None:
                # All earlier takes have come, so this one's turn is next.
                heapq.heappop(self._wanted)
                self._fetch(storage)
            assert storage.back_at is not None
            self._stall += self._wait(storage.back_at, "disk" if storage.sent.on_disk else "back", task)
            storage.is_away = False
            self._returning -= storage.sent.nbytes
            self._hold("returning", -storage.sent.nbytes)
            self._hold("returned", storage.sent.nbytes)
        wanted = self._wanted
        while wanted:
            ahead = self._taken[wanted[0]]
            if self._returning + ahead.sent.nbytes > self._rates.window:
                break
            heapq.heappop(wanted)
            self._fetch(ahead)

    def _change_weights(self, weights: Weights | None, task: str) -> None:
        """Free the streamed parameters that were in use, and wait for others."""
        before, self._weights = self._weights, weights
        if before is not None:
            self._device -= before.nbytes
            self._hold("returned", -before.nbytes)
            self._note_level()
        if weights is None:
            return
        if self._fetched is None:
            self._fetch_weights(weights, task)
        assert self._fetched is not None
        self._stall += self._wait(self._fetched, "back", task)
        self._fetched = None
        self._returning -= weights.nbytes
        self._hold("returning", -weights.nbytes)
        self._hold("returned", weights.nbytes)
        self._needed.popleft()
        if self._needed and self._needed[0].is_replay is weights.is_replay:
            self._fetch_weights(self._needed[0], task)

    def _fetch_weights(self, weights: Weights, task: str) -> None:
        self._fetched = self._copy("back", task, self._now, self._seconds(weights))
        self._returning += weights.nbytes
        self._device += weights.nbytes
        self._hold("returning", weights.nbytes)
        self._note_level()

    def _fetch(self, storage: Storage) -> None:
        sent, ready = storage.sent, self._now
        if sent.on_disk:
            ready = self._copy("disk", storage.sender, ready, sent.nbytes / self._rates.disk_read, sent.key)
        storage.back_at = self._copy("back", storage.sender, ready, self._seconds(sent), sent.key)
        self._returning += sent.nbytes
        self._device += sent.nbytes
        self._hold("returning", sent.nbytes)
        self._note_level()

    def _seconds(self, copied: Sent | Weights) -> float:
        """Time of a copy to the GPU."""
        return max(copied.nbytes / self._rates.back, copied.read_seconds)

    def _send(self, ready: float, task: str) -> None:
        """Offload the next storage, whose bytes are complete at ``ready``."""
        storage = next(self._to_send)
        for oldest in storage.frees:
            self._stall += self._wait(oldest.gone_at, "out", task)
            oldest.is_away = True
            if oldest.turn is not None:
                heapq.heappush(self._wanted, oldest.turn)
            self._device -= oldest.sent.nbytes
            self._hold("leaving", -oldest.sent.nbytes)
            self._note_level()
        sent = storage.sent
        self._by_key[sent.key] = storage
        if storage.is_reused:
            return
        if sent.is_weight:
            storage.is_away = True
            if storage.turn is not None:
                heapq.heappush(self._wanted, storage.turn)
            return
        storage.gone_at = self._copy("out", task, ready, sent.nbytes / self._rates.out, sent.key)
        if sent.on_disk:
            storage.gone_at = self._copy("disk", task, storage.gone_at, sent.nbytes / self._rates.disk_write, sent.key)
        self._store(sent, 1)
        self._hold("kept", -sent.nbytes)
        self._hold("leaving", sent.nbytes)
        self._note_level()

    def _drop(self, storage: Storage) -> None:
        nbytes = storage.sent.nbytes
        if not (storage.is_reused or storage.sent.is_weight):
            self._store(storage.sent, -1)
        if not storage.is_away:
            self._device -= nbytes
            copied = "leaving" if storage.back_at is None else "returned"
            self._hold("kept" if storage.is_reused else copied, -nbytes)
        self._note_level()

    def _store(self, sent: Sent, sign: int) -> None:
        tier = sent.on_disk
        self._stored[tier] += sign * sent.nbytes
        self._most_stored[tier] = max(self._most_stored[tier], self._stored[tier])

    def _copy(self, stream: str, name: str, ready: float, seconds: float, key: int | None = None) -> float:
        """Copy when the bytes are ready and the stream is free; returns the end."""
        start = max(ready, self._free[stream])
        self._free[stream] = end = start + seconds
        if self._spans is not None:
            self._spans.append(Span(stream, name, start, end, key=key))
        return end

    def _wait(self, until: float, reason: str, task: str) -> float:
        """Compute pauses until then; returns for how long."""
        begin = self._now
        if until <= begin:
            return 0.0
        if self._spans is not None:
            self._spans.append(Span("compute", task, begin, until, reason))
        self._now = until
        return until - begin

    def _hold_results(self, task: Task) -> None:
        self._hold("gradients", task.gradient_bytes)
        self._hold("recomputed", task.recomputed_bytes)
        rest = task.change_bytes - task.gradient_bytes - task.recomputed_bytes
        # A storage that is sent is kept, whichever task sends it.
        kept = sum(each.nbytes for each in task.sends) if task.phase is Phase.OUTSIDE else rest
        self._hold("outside", rest - kept)
        self._hold("kept", kept)
        self._note_level()

    def _hold(self, holder: str, nbytes: int) -> None:
        if self._spans is not None:
            self._held[holder] = self._held.get(holder, 0) + nbytes

    def _note_level(self) -> None:
        if self._spans is not None:
            self._levels.append(self._level(self._now))

    def _level(self, seconds: float, working: int = 0) -> Level:
        return Level(seconds, Holders(**self._held, working=working), self._stored[False], self._stored[True])


def settled(shares: Sequence[int]) -> list[int]:
    """The same sum with no share below zero, but for the first: a deficit is taken from the share before it.

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
