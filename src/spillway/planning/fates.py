"""What becomes of each storage that a program sends: whether it is copied, for whom it is let go of, when it is wanted.

NOTE [ Bytes before seconds ]

What is LEAVING is counted in the order of tasks (NOTE [ Program order ] in ``tasks.py``), so no clock is needed to say
which storages the window lets go of, and which are taken while they are LEAVING still. The latter are never copied: the
engine learns in a step which ones they are, and holds them back in the next. A lane that is to know where a copy has
its place must know of every earlier one whether there is a copy at all, and that may turn out long after. So this is
found first, in a walk of its own, which also sees that the program is one.

A key that no task sends stands for what stays on the device: taking or dropping it means nothing here. A key that was
dropped may be sent again, and is another storage then: so storages are not told by their keys, but by numbers, from 0
in the order in which they are sent.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from spillway.errors import UsageError
from spillway.planning.tasks import Program, Sent, Task

NEVER = -1
"""The turn of a storage that nobody takes."""


@dataclass(frozen=True, slots=True)
class Fates:
    """What becomes of the storages of a program. Lists go by a storage's number, except for ``taken``."""

    sent: list[Sent]
    senders: list[str]
    """Names of the tasks that send them."""
    room: list[tuple[int, ...]]
    """Which ones are let go of so that this one has room in the window, oldest first."""
    reused: list[bool]
    """Whether it is taken while it is LEAVING: then it is never copied."""
    turns: list[int]
    """Its place in ``taken``, or ``NEVER``."""
    taken: list[int]
    """Numbers of the storages that are taken, in the order in which each is for the first time."""

    @classmethod
    def of(cls, program: Program, window: int) -> Fates:
        """Walk through the program.

        Args:
            program: a step.
            window: bytes that may be LEAVING at once.

        Raises:
            UsageError: if the program is none: negative seconds or bytes; a key that is sent while it stands for a
                storage already, or taken or dropped while it does not, though a task sends it.
        """
        if program.static_bytes < 0:
            raise UsageError(f"static_bytes: got {program.static_bytes}, expected at least 0 bytes")
        walk = _Walk(window)
        for task in program.tasks:
            walk.visit(task)
        return walk.fates


class _Walk:
    """One walk through a program. ``window``: bytes."""

    def __init__(self, window: int) -> None:
        self.fates = Fates([], [], [], [], [], [])
        self._window = window
        self._numbers: dict[int, int] = {}
        """What keys stand for at this place of the program."""
        self._leaving: OrderedDict[int, int] = OrderedDict()
        """Bytes of what is LEAVING, oldest first."""
        self._leaving_bytes = 0
        self._dropped: set[int] = set()
        """Keys that stood for something once."""
        self._kept: dict[int, str] = {}
        """Keys that seem to be sent by no task, and who asked for them."""

    def visit(self, task: Task) -> None:
        """One task: its takes, sends and drops."""
        if not (0 <= task.seconds < math.inf and 0 <= task.host_seconds < math.inf and task.peak_bytes >= 0):
            raise UsageError(
                f"task {task.name!r}: got {task.seconds} s, {task.host_seconds} s of the host and a peak of "
                f"{task.peak_bytes} bytes, expected finite seconds and none to be negative; measure the task again"
            )
        for key in task.takes:
            number = self._numbers.get(key)
            if number is None:
                self._note_kept(key, task, "takes")
            elif self.fates.turns[number] == NEVER:
                self.fates.turns[number] = len(self.fates.taken)
                self.fates.taken.append(number)
                if number in self._leaving:
                    self.fates.reused[number] = True
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
                f"{self.fates.senders[self._numbers[key]]!r} has sent and nobody has dropped, expected one that stands "
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
        fates = self.fates
        number = len(fates.sent)
        self._numbers[key] = number
        self._leaving[number] = nbytes
        self._leaving_bytes += nbytes
        fates.sent.append(sent)
        fates.senders.append(task.name)
        fates.room.append(room)
        fates.reused.append(False)
        fates.turns.append(NEVER)

    def _note_kept(self, key: int, task: Task, does: str) -> None:
        if key in self._dropped:
            raise UsageError(
                f"task {task.name!r} {does} key {key}: got a key that was dropped, expected one that was sent and not "
                f"dropped since; drop it later"
            )
        self._kept.setdefault(key, task.name)
