"""Whose backward comes next, where several passes are alive: learned from whose came next before.

With micro-batches in a pipeline, or forwards first and backwards after, a pass that has ended waits while others begin
and end. When backward has been through one of them, it will ask for another's, and the way back is idle until it does.
Schedules repeat: so passes are told by their tags, those of one tag by their age among those that wait, and what
followed on the last few the last time is expected again. A backward that goes over a pass a second time (the other half
of a split one, say) is another lap, and waits as the first one did.

This is a hint, like all orders.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Generic, Protocol, TypeVar

_REMEMBERED = 512
_LONGEST = 6

_Key = tuple[str | None, int, int]
"""Tag, lap, and age among those alike that wait."""


class Waiter(Protocol):
    """A pass, as far as it matters here."""

    @property
    def tag(self) -> str | None: ...

    def is_alive(self) -> bool:
        """Whether anything of it may still be asked for."""
        ...


_Pass = TypeVar("_Pass", bound=Waiter)


class Succession(Generic[_Pass]):
    """The passes of a session that wait for a backward to come to them, and which came after which."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, list[weakref.ref[_Pass]]] = {}
        self._past: deque[_Key] = deque(maxlen=_REMEMBERED)
        self._next: _Key | None = None

    def add(self, course: _Pass, lap: int = 0) -> None:
        """A pass has ended, or a lap through it has begun: it waits for that lap, or for the next."""
        with self._lock:
            self._waiting[lap] = [*map(weakref.ref, self._alike(lap)), weakref.ref(course)]

    def begin(self, course: _Pass, lap: int) -> None:
        """Backward asks for something of a pass for the first time in a lap."""
        with self._lock:
            alike = self._alike(lap)
            age = sum(each.tag == course.tag for each in alike[: _index(alike, course)])
            self._past.append((course.tag, lap, age))
            self._waiting[lap] = [weakref.ref(each) for each in alike if each is not course]
            self._next = self._expected()
        self.add(course, lap + 1)

    def after(self, course: _Pass, lap: int) -> tuple[_Pass, int] | None:
        """The pass and its lap that are expected to begin next, if this was the last that began."""
        with self._lock:
            if self._next is None or self._past[-1][:2] != (course.tag, lap):
                return None
            tag, next_lap, age = self._next
            alike = [each for each in self._alike(next_lap) if each.tag == tag]
            return (alike[age], next_lap) if age < len(alike) else None

    def _alike(self, lap: int) -> list[_Pass]:
        """Those that wait for a lap."""
        waiting = [each for reference in self._waiting.get(lap, ()) if (each := reference()) is not None]
        return [each for each in waiting if each.is_alive()]

    def _expected(self) -> _Key | None:
        """What followed the last time that the same ones had begun before, as many of them as can be found."""
        past = list(self._past)
        for length in range(min(_LONGEST, len(past) - 1), 0, -1):
            context = past[-length:]
            for place in range(len(past) - length - 1, -1, -1):
                if past[place : place + length] == context:
                    return past[place + length]
        return None


def _index(waiting: list[_Pass], course: _Pass) -> int:
    return next((index for index, each in enumerate(waiting) if each is course), len(waiting))
