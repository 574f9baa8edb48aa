"""The order in which backward asks for what forward saved, learned from use.

A *course* is the list of entries of one pass, in packing order, and the orders in which they were asked for: one for
each *lap*, since a backward may run over a graph again, or in two halves, and each may go its own way. The first pass
knows nothing, and guesses: backward asks in reverse. A later pass over code of the same signature (the tag, and shape
and dtype of the first tensor saved) knows the orders of the one before. Whose backward comes next, where several passes
are alive, is in ``succession.py``.

What of a pass's tail had not left when it was asked for is not sent the next time. But it would have left if another
pass had come between its forward and its backward. So a tail is that of a pass with the same turn: of a pipeline's
micro-batches it may be the last alone that has one.

A forward counts what it saves, and its backward shows the order. As long as no pass of a signature has had a backward,
the last one counts whose backward can still come (gradients may be accumulated). One whose graph was dropped before
backward asked for anything was an evaluation, say, and is forgotten: the training that comes after it is not like it.

All of this is a hint. A wrong guess fetches something too early; what is asked for is fetched all the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence

from spillway.capture.gain import Gain, Verdict
from spillway.capture.succession import Succession
from spillway.groups import PastGroup
from spillway.runtime.entry import Entry

Signature = Hashable

_REMEMBERED = 64
_TURNS = 1024
"""Turns of all signatures that are remembered."""
_MOST_LAPS = 8


class Lap:
    """One time through a course.

    Args:
        expected: the places in the order in which they will be asked for, as far as that is known.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self.asked: dict[int, None] = {}
        """The places that were asked for, in order."""
        self.fetched = 0
        """How many of the sequence need not be named again."""
        self._expected = expected
        self._sequence: Sequence[int] | None = None
        self._place: dict[int, int] = {}

    def ask(self, place: int, count: int) -> None:
        """The entry at ``place``, of so many, is asked for."""
        if place not in self.asked:
            self.asked[place] = None
        self.sequence(count)
        position = self._place.get(place)
        # Another thread predicted for fewer entries just now, or there is none. All this is a hint.
        if position is not None and position >= self.fetched:
            self.fetched = position + 1

    def sequence(self, count: int) -> Sequence[int]:
        """The places in the order that is expected."""
        sequence = self._sequence
        if sequence is None or len(sequence) != count:
            expected = self._expected
            self._sequence = sequence = expected if len(expected) == count else list(reversed(range(count)))
            self._place = {place: index for index, place in enumerate(sequence)}
            self.fetched = 0
        return sequence

    def learned(self, count: int) -> list[int]:
        """The places in the order in which they were asked for; those that nobody asked for come last."""
        # One look at it: another thread's backward may be adding to it.
        asked = list(self.asked)
        done = set(asked)
        return [*asked, *(place for place in reversed(range(count)) if place not in done)]


class Course:
    """One pass: what was saved, and the orders in which it was asked for.

    Args:
        previous: the last finished pass of the same signature.
        alike: the last one that had the same turn as well.
        window: bytes that may be LEAVING at once.
        on_backward: called when backward asks for the first of them.
        succession: whose backward comes next.
        tag: of the pass.
    """

    def __init__(
        self,
        previous: Course | None = None,
        alike: Course | None = None,
        window: int = 0,
        on_backward: Callable[[], object] | None = None,
        succession: Succession[Course] | None = None,
        tag: str | None = None,
    ) -> None:
        self.tag = tag
        self._window = window
        self._on_backward = on_backward
        self._succession = succession
        self._sizes: list[int] = []
        self._entries: list[Callable[[], Entry | None]] = []
        self._caught: set[int] = set()
        self._laps: list[Lap] = []
        self._begun = 0
        """How many laps have begun; of many, only the last ones are told apart."""
        self._here = 0
        self._next: tuple[int, Lap] | None = None
        """A lap that has not begun, and what of it was fetched ahead, with its number."""
        self._expected = previous.sequences() if previous is not None else []
        self._tail = alike.tail_to_come() if alike is not None else frozenset()
        self.total_bytes = 0
        """Distinct bytes saved, once the pass has ended."""
        self.groups: list[PastGroup] = []
        """Its groups, once the pass has ended."""
        self.verdict: Verdict | None = None
        """What was to be gained from it, once the pass has ended, if that was a question."""

    def add(self, reference: Callable[[], Entry | None], nbytes: int) -> int:
        """The next entry saved, weakly referred to, takes the next place in packing order, which this gives."""
        self._entries.append(reference)
        self._sizes.append(nbytes)
        return len(self._entries) - 1

    @property
    def was_asked(self) -> bool:
        """Whether backward has asked for any of them."""
        return self._begun > 0

    @property
    def was_dropped(self) -> bool:
        """Whether nobody has asked for any of them, or ever will: their graph is gone."""
        return not self._laps and not self.is_empty and not self.is_alive()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to ask for."""
        return not self._entries

    def in_tail(self, place: int) -> bool:
        """Whether backward will ask for the entry there before it could have left."""
        return place in self._tail

    def ask(self, place: int, lap: int, *, caught: bool) -> None:
        """Backward asks for the entry at ``place``.

        Args:
            place: of the entry.
            lap: how often the same handle has asked before.
            caught: whether the entry has not left yet.
        """
        if self._on_backward is not None:
            # Let go of first: a course is remembered, and whoever is called need not be.
            begin, self._on_backward = self._on_backward, None
            begin()
        number = lap if lap < _MOST_LAPS else _MOST_LAPS - 1
        if lap >= self._begun:
            self._begin(number)
            self._begun = lap + 1
        self._here = number
        if caught and lap == 0:
            self._caught.add(place)
        self._laps[number].ask(place, len(self._entries))

    def upcoming(self) -> Iterator[Entry | None]:
        """The entries that are expected to be asked for next, and that were not :meth:`fetched`, of this pass first."""
        yield from self._rest(self._lap(self._here))
        following = self._following()
        if following is not None:
            course, lap = following
            yield from course._rest(lap)

    def fetched(self, count: int) -> None:
        """So many of the upcoming ones need not be named again."""
        lap = self._laps[self._here]
        here = min(count, len(self._entries) - lap.fetched)
        lap.fetched += here
        if count > here and (following := self._following()) is not None:
            # Until that lap begins: then what had not left by now is looked at again.
            following[1].fetched += count - here

    def sequences(self) -> list[list[int]]:
        """For each lap, places in the order of asking."""
        if not self._laps and self._expected and len(self._expected[0]) == len(self._entries):
            # Nobody asked, in an evaluation say: what was learned before still stands.
            return self._expected
        return [lap.learned(len(self._entries)) for lap in list(self._laps)] or [Lap(()).learned(len(self._entries))]

    def tail_to_come(self) -> frozenset[int]:
        """The tail for the next pass.

        It is learned once: with the tail held back, what comes before it is in the window when backward begins, and
        would be taken for the tail in its turn. Only a pass of another length is looked at anew.
        """
        if self._expected and len(self._expected[0]) == len(self._entries) and (self._tail or not self._laps):
            return self._tail
        # What is held back takes room in the window: of more than fits, the first would be sent after all, and late.
        tail: set[int] = set()
        nbytes = 0
        for place in sorted(self._caught, reverse=True):
            nbytes += self._sizes[place]
            if tail and nbytes > self._window:
                break
            tail.add(place)
        return frozenset(tail)

    def is_alive(self) -> bool:
        """Whether anything of it may still be asked for."""
        return any((entry := reference()) is not None and entry.handles > 0 for reference in self._entries)

    def _begin(self, lap: int) -> None:
        """A lap begins."""
        if lap < len(self._laps):
            # Whoever goes on and on over a graph that is retained leaves no more behind than a few laps.
            self._laps[lap] = Lap(self._expected_in(lap))
        while len(self._laps) <= lap:
            self._laps.append(Lap(self._expected_in(len(self._laps))))
        if self._succession is not None:
            self._succession.begin(self, lap)

    def _expected_in(self, lap: int) -> Sequence[int]:
        return self._expected[min(lap, len(self._expected) - 1)] if self._expected else ()

    def _lap(self, number: int) -> Lap:
        """The lap of this number, also if it has not begun."""
        if number < len(self._laps):
            return self._laps[number]
        following = self._next
        if following is None or following[0] != number:
            following = self._next = number, Lap(self._expected_in(number))
        return following[1]

    def _following(self) -> tuple[Course, Lap] | None:
        """The pass whose backward is expected next, and its lap."""
        following = None if self._succession is None else self._succession.after(self, self._here)
        return None if following is None else (following[0], following[0]._lap(following[1]))

    def _rest(self, lap: Lap) -> Iterator[Entry | None]:
        """The entries that a lap has still to ask for, in the order that is expected."""
        count = len(self._entries)
        sequence = lap.sequence(count)
        return (self._entries[sequence[index]]() for index in range(lap.fetched, count))


class Memory:
    """What is known of a tag: the last course of each signature, and whether moving it gains anything.

    Old signatures are forgotten. Its length is how many are known.
    """

    def __init__(self) -> None:
        self.gain = Gain()
        self._courses: dict[Signature, Course] = {}
        self._turns: dict[tuple[Signature, int], Course] = {}
        """The last of each turn."""
        self._waiting: list[tuple[Signature, int, Course]] = []
        self._lock = threading.RLock()

    @property
    def total_bytes(self) -> int:
        """Distinct bytes that the last finished pass saved; 0 before there is one."""
        with self._lock:
            self._sort()
            last = self._waiting[-1][2] if self._waiting else next(reversed(self._courses.values()), None)
            return 0 if last is None else last.total_bytes

    def gains_nothing(self) -> bool:
        """Whether the next pass that is told nothing can be left alone."""
        with self._lock:
            self._sort()
        return self.gain.is_none()

    def recall(self, signature: Signature) -> Course | None:
        """The last course of the signature that backward has asked for, or else the last whose backward can come."""
        with self._lock:
            self._sort()
            waiting = (course for known, _, course in reversed(self._waiting) if known == signature)
            return self._courses.get(signature) or next(waiting, None)

    def recall_turn(self, signature: Signature, turn: int) -> Course | None:
        """The last course of the signature that had the same turn, and that backward has asked for."""
        with self._lock:
            self._sort()
            return self._turns.get((signature, turn))

    def keep(self, signature: Signature, turn: int, course: Course) -> None:
        """A pass has ended."""
        with self._lock:
            self._sort()
            self._waiting = [*self._waiting[1 - _REMEMBERED :], (signature, turn, course)]

    def _sort(self) -> None:
        """Of the courses that wait for their backward, those that have had it are learned from; dropped ones go."""
        waiting = []
        for signature, turn, course in self._waiting:
            if course.was_asked or course.is_empty:
                self._courses.pop(signature, None)
                self._courses[signature] = course
                self._turns.pop((signature, turn), None)
                self._turns[signature, turn] = course
                if course.verdict is not None:
                    self.gain.learn(course.verdict)
            elif not course.was_dropped:
                waiting.append((signature, turn, course))
        self._waiting = waiting
        while len(self._courses) > _REMEMBERED:
            del self._courses[next(iter(self._courses))]
        while len(self._turns) > _TURNS:
            del self._turns[next(iter(self._turns))]

    def __len__(self) -> int:
        return len(self._courses)
