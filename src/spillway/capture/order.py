"""The order in which backward asks for what forward saved, learned from use.

A *course* is the list of entries of one pass, in packing order, and the order in which they were asked for. The first
pass knows nothing, and guesses: backward asks in reverse. A later pass over code of the same signature (the tag, and
shape and dtype of the first tensor saved) knows the order of the one before, and what of its tail had not left when it
was asked for: that is not sent the next time.

All of this is a hint. A wrong guess fetches something too early; what is asked for is fetched all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator

from spillway.capture.gain import Gain
from spillway.groups import PastGroup
from spillway.runtime.entry import Entry

Signature = Hashable

_REMEMBERED = 64


class Course:
    """One pass: what was saved, and the order in which it was asked for.

    Args:
        previous: the last finished pass of the same signature.
        window: bytes that may be LEAVING at once.
        on_backward: called when backward asks for the first of them.
        then: gives the course whose backward is expected next, if that pass has ended.
    """

    def __init__(
        self,
        previous: Course | None = None,
        window: int = 0,
        on_backward: Callable[[], object] | None = None,
        then: Callable[[], Course | None] | None = None,
    ) -> None:
        self._window = window
        self._then = then
        self._on_backward = on_backward
        self._sizes: list[int] = []
        self._entries: list[Callable[[], Entry | None]] = []
        self._asked: dict[int, None] = {}
        self._caught: set[int] = set()
        self._fetched = 0
        self._sequence: list[int] | None = None
        self._place: dict[int, int] = {}
        self._expected = previous.sequence() if previous is not None else []
        self._tail = previous.tail_to_come() if previous is not None else frozenset()
        self.total_bytes = 0
        """Distinct bytes saved, once the pass has ended."""
        self.groups: list[PastGroup] = []
        """Its groups, once the pass has ended."""

    def add(self, reference: Callable[[], Entry | None], nbytes: int) -> int:
        """The next entry saved, weakly referred to, takes the next place in packing order, which this gives."""
        self._entries.append(reference)
        self._sizes.append(nbytes)
        return len(self._entries) - 1

    @property
    def was_asked(self) -> bool:
        """Whether backward has asked for any of them."""
        return bool(self._asked)

    def in_tail(self, place: int) -> bool:
        """Whether backward will ask for the entry there before it could have left."""
        return place in self._tail

    def ask(self, place: int, *, caught: bool) -> None:
        """Backward asks for the entry at ``place``; ``caught`` if it has not left yet."""
        if self._on_backward is not None:
            # Let go of first: a course is remembered, and whoever is called need not be.
            begin, self._on_backward = self._on_backward, None
            begin()
        if place not in self._asked:
            self._asked[place] = None
            if caught:
                self._caught.add(place)
        sequence = self._sequence
        if sequence is None or len(sequence) != len(self._entries):
            self._sequence = self._predict()
        position = self._place.get(place)
        if position is None:
            # Another thread predicted for fewer entries just now. All this is a hint.
            return
        # Backward asks for the first of them again when it runs a second time over the same graph.
        if position == 0:
            self._fetched = 1
        elif position >= self._fetched:
            self._fetched = position + 1

    def upcoming(self) -> Iterator[Entry | None]:
        """The entries that are expected to be asked for next, and that were not :meth:`fetched`.

        After the last of this course come those of the next one.
        """
        sequence = self._sequence
        if sequence is None:
            sequence = self._sequence = self._predict()
        own = (self._entries[sequence[index]]() for index in range(self._fetched, len(sequence)))
        then = self._next()
        return own if then is None else itertools.chain(own, then.upcoming())

    def fetched(self, count: int) -> None:
        """So many of the upcoming ones need not be named again."""
        assert self._sequence is not None
        own = min(count, len(self._sequence) - self._fetched)
        self._fetched += own
        then = self._next()
        if count > own and then is not None:
            then.fetched(count - own)

    def _next(self) -> Course | None:
        """The next course, whose backward has not begun."""
        then = None if self._then is None else self._then()
        return None if then is None or then.was_asked else then

    def sequence(self) -> list[int]:
        """Places in the order of asking; those that nobody asked for come last."""
        if not self._asked and len(self._expected) == len(self._entries):
            # Nobody asked, in an evaluation say: what was learned before still stands.
            return self._expected
        # One look at it: another thread's backward may be adding to it.
        asked = list(self._asked)
        done = set(asked)
        return [*asked, *(place for place in reversed(range(len(self._entries))) if place not in done)]

    def tail_to_come(self) -> frozenset[int]:
        """The tail for the next pass.

        It is learned once: with the tail held back, what comes before it is in the window when backward begins, and
        would be taken for the tail in its turn. Only a pass of another length is looked at anew.
        """
        if len(self._expected) == len(self._entries) and (self._tail or not self._asked):
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

    def _predict(self) -> list[int]:
        count = len(self._entries)
        sequence = self._expected if len(self._expected) == count else list(reversed(range(count)))
        self._place = {place: index for index, place in enumerate(sequence)}
        self._fetched = 0
        return sequence


class Memory:
    """What is known of a tag: the last finished course of each signature, and whether moving it gains anything.

    Old signatures are forgotten.
    """

    def __init__(self) -> None:
        self.gain = Gain()
        self._courses: dict[Signature, Course] = {}

    @property
    def total_bytes(self) -> int:
        """Distinct bytes that the last finished pass saved; 0 before there is one."""
        return next((course.total_bytes for course in reversed(self._courses.values())), 0)

    def recall(self, signature: Signature) -> Course | None:
        return self._courses.get(signature)

    def keep(self, signature: Signature, course: Course) -> None:
        self._courses.pop(signature, None)
        self._courses[signature] = course
        if len(self._courses) > _REMEMBERED:
            del self._courses[next(iter(self._courses))]

    def __len__(self) -> int:
        return len(self._courses)
