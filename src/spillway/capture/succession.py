"""Whose backward comes next, where several passes are alive: learned from whose came next before.

With micro-batches in a pipeline, or forwards first and backwards after, a pass that has ended waits while others begin
and end. When backward has been through one of them, it will ask for another's, and the way back is idle until it does.
Schedules repeat: so passes are told by their tags, those of one tag by their age among those that wait, and what
followed on the last few the last time is expected again. A backward that goes over a pass a second time (the other half
of a split one, say) is another lap, and waits as the first one did.

This is a hint, like all orders.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

_REMEMBERED = 512
_LONGEST = 6
_FIRST_SWEEP = 64

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
    """The passes on one device that wait for a backward to come to them, and which came after which."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, list[weakref.ref[_Pass]]] = {}
        self._past: deque[_Key] = deque(maxlen=_REMEMBERED)
        self._sweep_at = _FIRST_SWEEP
        self._turn = 0
        self._next: _Key | None = None
        self._found: weakref.ref[_Pass] | None = None
        """Who that is."""
        self._looked = False
        """Whether it was looked for since anything began to wait, or waits no more."""

    def turn(self) -> int:
        """Of a pass that begins now: how many have ended since none waited for its backward. Schedules repeat."""
        with self._lock:
            if next(self._alike(0), None) is None:
                self._turn = 0
            return self._turn

    def add(self, course: _Pass, lap: int = 0) -> None:
        """A pass has ended, or a lap through it has begun: it waits for that lap, or for the next."""
        with self._lock:
            if not lap:
                # One that waits for ever would have it count on.
                self._turn = min(self._turn + 1, _REMEMBERED)
            waiting = self._waiting.setdefault(lap, [])
            waiting.append(weakref.ref(course))
            if len(waiting) >= self._sweep_at:
                waiting[:] = [weakref.ref(each) for each in self._alike(lap)]
                self._sweep_at = max(_FIRST_SWEEP, 2 * len(waiting))
            self._looked = False

    def begin(self, course: _Pass, lap: int) -> None:
        """Backward asks for something of a pass for the first time in a lap."""
        with self._lock:
            waiting, age = self._waiting.get(lap, []), 0
            for place, reference in enumerate(waiting):
                each = reference()
                if each is course:
                    del waiting[place]
                    break
                age += each is not None and each.tag == course.tag and each.is_alive()
            self._past.append((course.tag, lap, age))
            self._next = self._expected()
        self.add(course, lap + 1)

    def after(self, course: _Pass, lap: int) -> tuple[_Pass, int] | None:
        """The pass and its lap that are expected to begin next, if this was the last that began."""
        if self._looked and self._found is None:
            return None
        with self._lock:
            if self._next is None or self._past[-1][:2] != (course.tag, lap):
                return None
            if not self._looked:
                # Not each time: whoever asks asks for every tensor.
                self._found, self._looked = self._find(*self._next), True
            following = None if self._found is None else self._found()
            return None if following is None else (following, self._next[1])

    def _find(self, tag: str | None, lap: int, age: int) -> weakref.ref[_Pass] | None:
        alike = (each for each in self._alike(lap) if each.tag == tag)
        found = next(itertools.islice(alike, age, None), None)
        return None if found is None else weakref.ref(found)

    def _alike(self, lap: int) -> Iterator[_Pass]:
        """Those that wait for a lap."""
        waiting = (reference() for reference in self._waiting.get(lap, ()))
        return (each for each in waiting if each is not None and each.is_alive())

    def _expected(self) -> _Key | None:
        """What followed the last time that the same ones had begun before, as many of them as can be found."""
        past = list(self._past)
        longest, expected = 0, None
        for last in range(len(past) - 2, -1, -1):
            length = 0
            while length <= min(last, _LONGEST - 1) and past[last - length] == past[-1 - length]:
                length += 1
            if length > longest:
                longest, expected = length, past[last + 1]
            if longest == _LONGEST:
                break
        return expected
