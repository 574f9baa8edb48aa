"""A step as a machine would go through it, event by event: what ``simulate_program`` is held against.

A host reads the program from the first task to the last. It keeps the books, which need no clock, by counting anew
whenever it wants to know something, and gives jobs to streams. Then the streams run: each does its jobs one after the
other, and a job begins when those it comes after have ended. As in the engine, which storages are asked for before the
window lets go of them is learned in a first step, and the copies of these are left out in a second one.

The time of the host depends on no stream: it has queued a task when it has done so with all before it. A clock
of the task's own rings so long before that as the task takes, and compute waits for it.

Seconds are fractions, and so exact.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction

from spillway.planner.tasks import Program, Rates, Sent


@dataclass(eq=False)
class Job:
    stream: str
    name: str
    seconds: Fraction
    after: tuple[Job, ...] = ()
    reason: str = ""
    """Of a wait of compute."""
    before: Fraction | None = None
    """When its stream was free for it."""
    begun: Fraction | None = None
    ended: Fraction | None = None


class Streams:
    """Queues of jobs, and a clock that goes from event to event."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def add(self, *args: object, **more: object) -> Job:
        self.jobs.append(Job(*args, **more))
        return self.jobs[-1]

    def run(self) -> None:
        queues: dict[str, deque[Job]] = {}
        for job in self.jobs:
            queues.setdefault(job.stream, deque()).append(job)
        clock = Fraction(0)
        free = dict.fromkeys(queues, clock)
        ends: list[tuple[Fraction, int, Job]] = []
        while True:
            for stream, queue in queues.items():
                if queue and queue[0].begun is None and all(job.ended is not None for job in queue[0].after):
                    queue[0].before, queue[0].begun = free[stream], clock
                    heapq.heappush(ends, (clock + queue[0].seconds, id(queue[0]), queue[0]))
            if not ends:
                break
            clock, _, job = heapq.heappop(ends)
            job.ended = free[job.stream] = clock
            queues[job.stream].popleft()
        assert not any(queues.values()), "jobs wait for each other in a circle"


@dataclass(eq=False)
class Storage:
    sent: Sent
    where: tuple[int, int]
    """The task that sends it, and its place among what this one sends."""
    name: str
    held: bool
    state: str = "LEAVING"
    out: Job | None = None
    back: Job | None = None

    @property
    def on_device(self) -> bool:
        return self.state in {"LEAVING", "RETURNING", "RESIDENT"}


@dataclass
class Host:
    """Reads a program. ``held``: where storages are sent that it knows to be asked for in time."""

    program: Program
    rates: Rates
    held: set[tuple[int, int]]
    streams: Streams = field(default_factory=Streams)
    storages: list[Storage] = field(default_factory=list)
    changed: int = 0
    queued: Fraction = Fraction(0)
    peak: int = -1
    peak_task: str = ""
    most_host: int = 0
    most_disk: int = 0
    reused: set[tuple[int, int]] = field(default_factory=set)

    def live(self, key: int) -> Storage | None:
        found = [each for each in self.storages if each.sent.key == key and each.state != "DROPPED"]
        assert len(found) <= 1
        return found[0] if found else None

    def total(self, *states: str) -> int:
        return sum(each.sent.nbytes for each in self.storages if each.state in states)

    @property
    def device(self) -> int:
        gone = sum(each.sent.nbytes for each in self.storages if not each.on_device)
        return self.program.static_bytes + self.changed - gone

    def stored(self, on_disk: bool) -> int:
        return sum(
            each.sent.nbytes
            for each in self.storages
            if each.sent.on_disk == on_disk and each.state != "DROPPED" and not each.held
        )

    def look(self, name: str, more: int = 0) -> None:
        if self.device + more > self.peak:
            self.peak, self.peak_task = self.device + more, name
        self.most_host = max(self.most_host, self.stored(False))
        self.most_disk = max(self.most_disk, self.stored(True))

    def read(self) -> None:
        for number, task in enumerate(self.program.tasks):
            for place, key in enumerate(task.takes):
                storage = self.live(key)
                if storage is None:
                    continue
                self.take(storage, task.name)
                self.look_ahead(number, place + 1)
                self.look(task.name)
            self.look(task.name, task.peak_bytes)
            self.queued += Fraction(task.host_seconds) * Fraction(self.rates.host)
            early = max(Fraction(0), self.queued - Fraction(task.seconds))
            clock = self.streams.add(f"clock of task {number}", "", early)
            self.streams.add("compute", task.name, Fraction(0), (clock,), "host")
            work = self.streams.add("compute", task.name, Fraction(task.seconds))
            self.changed += task.change_bytes
            # What is sent in a moment counts as on the device: change_bytes has it.
            self.look(task.name)
            for place, sent in enumerate(task.sends):
                self.send(sent, (number, place), task.name, work)
                self.look(task.name)
            for key in task.drops:
                if (storage := self.live(key)) is not None:
                    storage.state = "DROPPED"
                self.look(task.name)

    def take(self, storage: Storage, name: str) -> None:
        if storage.state == "LEAVING":
            self.reused.add(storage.where)
            storage.state = "RESIDENT"
        if storage.state == "AWAY":
            self.fetch(storage)
        if storage.state == "RETURNING":
            assert storage.back is not None
            reason = "disk" if storage.sent.on_disk else "back"
            self.streams.add("compute", name, Fraction(0), (storage.back,), reason)
            storage.state = "RESIDENT"

    def fetch(self, storage: Storage) -> None:
        here = self.streams.add("compute", "", Fraction(0))
        nbytes, source = storage.sent.nbytes, here
        if storage.sent.on_disk:
            read = Fraction(nbytes) / Fraction(self.rates.disk_read)
            source = self.streams.add("disk", storage.name, read, (here,))
        copy = Fraction(nbytes) / Fraction(self.rates.back)
        storage.back = self.streams.add("back", storage.name, copy, (here, source))
        storage.state = "RETURNING"

    def look_ahead(self, number: int, place: int) -> None:
        """From this take on, read what the program will take, and fetch it as long as there is room."""
        over: set[int] = set()
        for task in self.program.tasks[number:]:
            for key in task.takes[place:]:
                storage = self.live(key)
                if key in over or storage is None or storage.state != "AWAY":
                    continue
                if self.total("RETURNING") + storage.sent.nbytes > self.rates.window:
                    return
                self.fetch(storage)
            over.update(task.drops)
            place = 0

    def send(self, sent: Sent, where: tuple[int, int], name: str, work: Job) -> None:
        while self.total("LEAVING") + sent.nbytes > self.rates.window:
            oldest = next((each for each in self.storages if each.state == "LEAVING"), None)
            if oldest is None:
                break
            assert oldest.out is not None, "what was held back has been let go of"
            self.streams.add("compute", name, Fraction(0), (oldest.out,), "out")
            oldest.state = "AWAY"
        storage = Storage(sent, where, name, where in self.held)
        self.storages.append(storage)
        if not storage.held:
            copy = Fraction(sent.nbytes) / Fraction(self.rates.out)
            storage.out = self.streams.add("out", name, copy, (work,))
            if sent.on_disk:
                write = Fraction(sent.nbytes) / Fraction(self.rates.disk_write)
                storage.out = self.streams.add("disk", name, write, (storage.out,))


@dataclass(frozen=True)
class Outcome:
    seconds: Fraction
    stall_seconds: Fraction
    host_wait_seconds: Fraction
    peak_bytes: int
    peak_task: str
    host_bytes: int
    disk_bytes: int
    spans: list[tuple[str, str, Fraction, Fraction, str]]
    """Of all streams, stream by stream: stream, name, start, end, what is waited for."""
    end_bytes: int


def simulate(program: Program, rates: Rates) -> Outcome:
    learning = Host(program, rates, set())
    learning.read()
    host = Host(program, rates, learning.reused)
    host.read()
    assert host.reused == learning.reused
    streams = host.streams
    streams.run()
    spans = []
    stalled = waited_for_host = Fraction(0)
    for job in streams.jobs:
        assert job.before is not None and job.begun is not None and job.ended is not None
        if job.reason and job.begun > job.before:
            spans.append((job.stream, job.name, job.before, job.begun, job.reason))
            if job.reason == "host":
                waited_for_host += job.begun - job.before
            else:
                stalled += job.begun - job.before
        elif job.name and not job.reason:
            spans.append((job.stream, job.name, job.begun, job.ended, ""))
    return Outcome(
        seconds=max(
            (job.ended for job in host.streams.jobs if job.stream == "compute" and job.ended), default=Fraction(0)
        ),
        stall_seconds=stalled,
        host_wait_seconds=waited_for_host,
        peak_bytes=max(host.peak, program.static_bytes),
        peak_task=host.peak_task,
        host_bytes=host.most_host,
        disk_bytes=host.most_disk,
        # Jobs of a stream were given in order.
        spans=sorted(spans, key=lambda span: span[0]),
        end_bytes=host.device,
    )
