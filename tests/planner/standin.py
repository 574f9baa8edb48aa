"""A plain simulation of a step, for tests of what chooses: it follows the notes in ``spillway.planner.tasks``.

It is written to be read, not to be fast, and knows neither spans nor levels.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from spillway.planner.tasks import Program, Rates, Sent
from spillway.planner.timeline import Timeline


class Where(enum.Enum):
    LEAVING = 1
    AWAY = 2
    RETURNING = 3
    HERE = 4


@dataclass
class Stored:
    sent: Sent
    where: Where = Where.LEAVING
    settled: float = 0.0
    """When its copy out has ended, or its copy back."""
    counted: bool = False
    """Whether the host or the disk has its bytes."""


def simulate(program: Program, rates: Rates) -> Timeline:
    """Twice, for what is taken before the window let go of it is never copied, which only a whole walk can tell."""
    return Walk(program, rates, Walk(program, rates, set()).reused).timeline()


class Walk:
    def __init__(self, program: Program, rates: Rates, never_copied: set[int]) -> None:
        self.program, self.rates, self.never_copied = program, rates, never_copied
        self.reused: set[int] = set()
        self.stored: dict[int, Stored] = {}
        self.leaving: deque[Stored] = deque()
        self.to_come = list(dict.fromkeys(key for task in program.tasks for key in task.takes))
        self.now = self.stall = self.queued = self.waited_for_host = 0.0
        self.out = self.back = self.disk = 0.0
        self.leaving_bytes = self.returning_bytes = 0
        self.device, self.host_bytes, self.disk_bytes = program.static_bytes, 0, 0
        self.peak, self.peak_task, self.host_peak, self.disk_peak = self.device, "", 0, 0
        for task in program.tasks:
            for key in task.takes:
                self.take(key)
            self.level(task.name, task.peak_bytes)
            self.queued += task.host_seconds * rates.host
            # It ends when the host has queued it, and begins late for that.
            late = max(0.0, self.queued - program.lead - (self.now + task.seconds))
            self.waited_for_host += late
            self.now += task.seconds + late
            self.device += task.change_bytes
            for sent in task.sends:
                self.send(sent)
                self.level(task.name)
            for key in task.drops:
                self.drop(key)
            self.level(task.name)
        # The next step has no larger lead than this one.
        late = max(0.0, self.queued - self.now)
        self.waited_for_host += late
        self.now += late

    def timeline(self) -> Timeline:
        return Timeline(
            self.now,
            self.stall,
            self.waited_for_host,
            self.peak,
            self.peak_task,
            self.host_peak,
            self.disk_peak,
        )

    def level(self, name: str, above: int = 0) -> None:
        if self.device + above > self.peak:
            self.peak, self.peak_task = self.device + above, name

    def wait(self, until: float) -> None:
        if until > self.now:
            self.stall += until - self.now
            self.now = until

    def send(self, sent: Sent) -> None:
        stored = self.stored[sent.key] = Stored(sent)
        while self.leaving and self.leaving_bytes + sent.nbytes > self.rates.window:
            oldest = self.leaving.popleft()
            self.wait(oldest.settled)
            oldest.where = Where.AWAY
            self.leaving_bytes -= oldest.sent.nbytes
            self.device -= oldest.sent.nbytes
        self.leaving.append(stored)
        self.leaving_bytes += sent.nbytes
        if sent.key in self.never_copied:
            return
        stored.settled = self.out = max(self.out, self.now) + sent.nbytes / self.rates.out
        if sent.on_disk:
            stored.settled = self.disk = max(self.disk, self.out) + sent.nbytes / self.rates.disk_write
        self.count(stored, 1)

    def count(self, stored: Stored, sign: int) -> None:
        stored.counted = sign > 0
        if stored.sent.on_disk:
            self.disk_bytes += sign * stored.sent.nbytes
        else:
            self.host_bytes += sign * stored.sent.nbytes
        self.host_peak = max(self.host_peak, self.host_bytes)
        self.disk_peak = max(self.disk_peak, self.disk_bytes)

    def fetch(self, stored: Stored) -> None:
        begin = self.now
        if stored.sent.on_disk:
            begin = self.disk = max(self.disk, self.now) + stored.sent.nbytes / self.rates.disk_read
        stored.settled = self.back = max(self.back, begin) + stored.sent.nbytes / self.rates.back
        stored.where = Where.RETURNING
        self.returning_bytes += stored.sent.nbytes
        self.device += stored.sent.nbytes

    def take(self, key: int) -> None:
        stored = self.stored[key]
        if stored.where is Where.LEAVING:
            self.leaving.remove(stored)
            self.leaving_bytes -= stored.sent.nbytes
            self.reused.add(key)
        elif stored.where is not Where.HERE:
            if stored.where is Where.AWAY:
                self.fetch(stored)
            self.wait(stored.settled)
            self.returning_bytes -= stored.sent.nbytes
        stored.where = Where.HERE
        most = self.rates.window if self.rates.ahead is None else self.rates.ahead
        for next_key in self.to_come:
            ahead = self.stored.get(next_key)
            if ahead is None or ahead.where is not Where.AWAY:
                continue
            if self.returning_bytes + ahead.sent.nbytes > most:
                break
            self.fetch(ahead)

    def drop(self, key: int) -> None:
        stored = self.stored.pop(key)
        self.to_come = [other for other in self.to_come if other != key]
        if stored.where is Where.LEAVING:
            self.leaving.remove(stored)
            self.leaving_bytes -= stored.sent.nbytes
        if stored.where is not Where.AWAY:
            self.device -= stored.sent.nbytes
        if stored.where is Where.RETURNING:
            self.returning_bytes -= stored.sent.nbytes
        if stored.counted:
            self.count(stored, -1)
