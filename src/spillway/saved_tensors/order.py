"""The order in which backward asks for saved tensors, learned from use, so that they can be prefetched.

NOTE [ Learned order ]

An *access order* lists the entries of one pass in packing order, and the orders in which backward asked for them: one
for each *traversal*. A backward may run over a graph again, or in two halves, and each may differ. The first pass knows
nothing and predicts reverse packing order. A later pass of the same signature (the tag, and shape and dtype of the
first saved tensor) predicts the orders of the one before.

The tail of a pass are the entries whose bytes were still on the device when backward asked for them. The next pass
defers its tail. But if another pass had come between forward and backward, the tail would have been
offloaded. So a tail is learned per turn: in a pipeline, perhaps only the last micro-batch has one.

A pass is learned from when backward has asked for it. Until a pass of a signature has had a backward, the last one
whose backward can still come is used (gradients may be accumulated). A pass whose graph was dropped before backward
asked was an evaluation, say, and is forgotten.

NOTE [ The next pass ]

With micro-batches in a pipeline, or forwards first and backwards after, a pass waits while others begin and end. When
backward has gone through one pass it asks for another's tensors, and the ``back`` stream is idle until it does.
Schedules repeat. So passes are told apart by tag and traversal, and those alike by their age among the waiting ones.
The pass that followed on the last few the last time is predicted again. A second traversal of a pass (the other half of
a split backward, say) waits like the first.

NOTE [ Offloading without a gain ]

A context without options is disabled, hooks and all, where a pass saves less than a :data:`SHARE` of the device's
memory and many times as much is free. Free memory is checked again before each pass, in one driver call. If it shrinks,
the next pass is offloaded and judged again.

All of this is a hint. A wrong prediction prefetches a tensor too early. Every tensor that backward asks for is fetched.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from spillway.runtime.backend import Backend
from spillway.runtime.entry import Entry
from spillway.units import format_bytes

Signature = Hashable

SHARE = 64
"""Less than one in so many bytes of the device is little."""
_MULTIPLE = 8  # So many times as much has to be free.
_SIGNATURES = 64  # Remembered for a tag.
_TURNS = 1024  # Remembered for a tag, of all signatures.
_MOST_TRAVERSALS = 8
_PAST = 512  # Beginnings of traversals that a predictor remembers.
_LONGEST = 6
_FIRST_SWEEP = 64


class PastGroup(NamedTuple):
    """One group of a pass that has ended, and the bytes saved in it that could be offloaded."""

    name: str
    nbytes: int


class Benefit(NamedTuple):
    """Whether offloading a pass gains memory that matters."""

    why_none: str | None = None
    """Why it gains nothing, if so."""
    least_free: tuple[tuple[Backend, int], ...] = ()
    """Free bytes of each device below which this no longer holds."""

    def is_none(self) -> bool:
        """Whether it still gains nothing."""
        if self.why_none is None:
            return False
        free = [(backend.memory_info(), least) for backend, least in self.least_free]
        return all(info is not None and info[0] >= least for info, least in free)


def offload_benefit(saved_bytes: int, backends: Iterable[Backend]) -> Benefit:
    """The benefit of offloading a pass that saved so many bytes on these devices."""
    least_free = []
    for backend in backends:
        info = backend.memory_info()
        if info is None or saved_bytes * SHARE >= info[1] or saved_bytes * _MULTIPLE > info[0]:
            return Benefit()
        least_free.append((backend, info[0] - info[1] // SHARE))
    return Benefit(
        f"Offloading is disabled: a forward pass saves {format_bytes(saved_bytes)}, less than a {SHARE}th of the "
        f"device's memory, and enough is free. Pass ratio=1.0 to offload all the same.",
        tuple(least_free),
    )


_Key = tuple[str | None, int, int]
"""Tag, traversal, and age among those alike that wait."""


class NextPassPredictor:
    """The passes on one device that wait for their backward, and which followed which. See NOTE [ The next pass ]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, list[weakref.ref[AccessOrder]]] = {}
        self._past: deque[_Key] = deque(maxlen=_PAST)
        self._sweep_at = _FIRST_SWEEP
        self._turn = 0
        self._next: _Key | None = None
        self._found: weakref.ref[AccessOrder] | None = None
        """The pass of that key."""
        self._looked = False
        """Whether it was looked for since the waiting passes changed."""

    def turn(self) -> int:
        """The turn of a pass that begins now: how many have ended since no pass waited."""
        with self._lock:
            if next(self._alike(0), None) is None:
                self._turn = 0
            return self._turn

    def add(self, waiter: AccessOrder, traversal: int = 0) -> None:
        """A pass waits for a traversal: after its end, or after the start of the one before."""
        with self._lock:
            if not traversal:
                # Capped, since a pass may wait for ever.
                self._turn = min(self._turn + 1, _PAST)
            waiting = self._waiting.setdefault(traversal, [])
            waiting.append(weakref.ref(waiter))
            if len(waiting) >= self._sweep_at:
                waiting[:] = [weakref.ref(each) for each in self._alike(traversal)]
                self._sweep_at = max(_FIRST_SWEEP, 2 * len(waiting))
            self._looked = False

    def begin(self, waiter: AccessOrder, traversal: int) -> None:
        """Backward starts a traversal of a pass."""
        with self._lock:
            waiting, age = self._waiting.get(traversal, []), 0
            for place, reference in enumerate(waiting):
                each = reference()
                if each is waiter:
                    del waiting[place]
                    break
                age += each is not None and each.tag == waiter.tag and each.is_alive()
            self._past.append((waiter.tag, traversal, age))
            self._next = self._expected()
        self.add(waiter, traversal + 1)

    def after(self, waiter: AccessOrder, traversal: int) -> tuple[AccessOrder, int] | None:
        """The pass and traversal expected to begin next, if this one was the last that began."""
        if self._looked and self._found is None:
            return None
        with self._lock:
            if self._next is None or self._past[-1][:2] != (waiter.tag, traversal):
                return None
            tag, following_traversal, age = self._next
            if not self._looked:
                # Once, since this is called for every tensor.
                alike = (each for each in self._alike(following_traversal) if each.tag == tag)
                found = next(itertools.islice(alike, age, None), None)
                self._found, self._looked = None if found is None else weakref.ref(found), True
            following = None if self._found is None else self._found()
            return None if following is None else (following, following_traversal)

    def _alike(self, traversal: int) -> Iterator[AccessOrder]:
        waiting = (reference() for reference in self._waiting.get(traversal, ()))
        return (each for each in waiting if each is not None and each.is_alive())

    def _expected(self) -> _Key | None:
        """The key that followed on the longest matching past."""
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


class Traversal:
    """One traversal of a pass by a backward, with the predicted order of places, if there is one."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.asked: dict[int, None] = {}
        """Places that backward asked for, in order."""
        self.fetched = 0
        """How many of the sequence are fetched or asked for."""
        self._expected = expected
        self._sequence: Sequence[int] | None = None
        self._place: dict[int, int] = {}

    def ask(self, place: int, count: int) -> None:
        """Backward asks for the entry at ``place``, of ``count``."""
        if place not in self.asked:
            self.asked[place] = None
        self.sequence(count)
        position = self._place.get(place)
        # Missing if another thread predicted for fewer entries just now.
        if position is not None and position >= self.fetched:
            self.fetched = position + 1

    def sequence(self, count: int) -> Sequence[int]:
        """The places in the predicted order."""
        sequence = self._sequence
        if sequence is None or len(sequence) != count:
            expected = self._expected
            self._sequence = sequence = expected if len(expected) == count else list(reversed(range(count)))
            self._place = {place: index for index, place in enumerate(sequence)}
            self.fetched = 0
        return sequence

    def learned(self, count: int) -> list[int]:
        """The places in the order of asking, then the rest."""
        # Copied: another thread's backward may add to it.
        asked = list(self.asked)
        done = set(asked)
        return [*asked, *(place for place in reversed(range(count)) if place not in done)]


class AccessOrder:
    """The entries of one pass on one device, and the orders of asking. See NOTE [ Learned order ].

    Args:
        previous: that of the last finished pass of the same signature.
        alike: that of the last one that had the same turn as well.
        window: bytes that may be LEAVING at once.
        on_backward: called when backward asks for the first entry.
        predictor: predicts whose backward comes next.
        tag: of the pass.
    """

    def __init__(
        self,
        previous: AccessOrder | None = None,
        alike: AccessOrder | None = None,
        window: int = 0,
        on_backward: Callable[[], object] | None = None,
        predictor: NextPassPredictor | None = None,
        tag: str | None = None,
    ) -> None:
        self.tag = tag
        self._window = window
        self._on_backward = on_backward
        self._predictor = predictor
        self._sizes: list[int] = []
        self._entries: list[Callable[[], Entry | None]] = []
        self._caught: set[int] = set()
        self._traversals: list[Traversal] = []
        self._begun = 0
        """How many traversals have begun; of many, only the last ones are told apart."""
        self._here = 0
        self._next: tuple[int, Traversal] | None = None
        """A traversal that has not begun, with its number: it knows what was prefetched of it."""
        self._expected = previous.sequences() if previous is not None else []
        self.tail = alike.tail_to_come() if alike is not None else frozenset()
        """Places of entries in the tail of the pass that this one follows."""
        # Known once the pass has ended:
        self.total_bytes = 0
        """Distinct bytes saved."""
        self.groups: list[PastGroup] = []
        self.benefit: Benefit | None = None

    def add(self, reference: Callable[[], Entry | None], nbytes: int) -> int:
        """Add an entry, weakly referenced, and give its place in packing order."""
        self._entries.append(reference)
        self._sizes.append(nbytes)
        return len(self._entries) - 1

    @property
    def was_asked(self) -> bool:
        return self._begun > 0

    @property
    def was_dropped(self) -> bool:
        """Whether the graph is gone before backward asked for an entry."""
        return not self._traversals and not self.is_empty and not self.is_alive()

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def is_alive(self) -> bool:
        """Whether backward may still ask for an entry."""
        return any((entry := reference()) is not None and entry.handles > 0 for reference in self._entries)

    def ask(self, place: int, traversal: int, *, caught: bool) -> None:
        """Backward asks for the entry at ``place``, whose handle has asked ``traversal`` times before.

        ``caught``: the entry was still on the device.
        """
        if self._on_backward is not None:
            # Released first: an order is remembered, and the callback need not be.
            begin, self._on_backward = self._on_backward, None
            begin()
        number = traversal if traversal < _MOST_TRAVERSALS else _MOST_TRAVERSALS - 1
        if traversal >= self._begun:
            self._begin(number)
            self._begun = traversal + 1
        self._here = number
        if caught and traversal == 0:
            self._caught.add(place)
        self._traversals[number].ask(place, len(self._entries))

    def upcoming(self) -> Iterator[Entry | None]:
        """The entries expected next and not :meth:`fetched`: of this pass, then of the predicted one."""
        yield from self._rest(self._traversal(self._here))
        following = self._following()
        if following is not None:
            order, traversal = following
            yield from order._rest(traversal)

    def fetched(self, count: int) -> None:
        """The first ``count`` upcoming entries need not be named again."""
        traversal = self._traversals[self._here]
        here = min(count, len(self._entries) - traversal.fetched)
        traversal.fetched += here
        if count > here and (following := self._following()) is not None:
            # Until that traversal begins: entries that were not offloaded by now are looked at again.
            following[1].fetched += count - here

    def sequences(self) -> list[list[int]]:
        """The places in the order of asking, for each traversal."""
        if not self._traversals and self._expected and len(self._expected[0]) == len(self._entries):
            # Backward did not ask, in an evaluation say: the earlier orders are still the best.
            return self._expected
        count = len(self._entries)
        return [traversal.learned(count) for traversal in list(self._traversals)] or [Traversal(()).learned(count)]

    def tail_to_come(self) -> frozenset[int]:
        """The tail for the next pass."""
        if not self._traversals:
            return self.tail
        # Deferred entries count towards the in-flight limit: of more than fit, the first would be offloaded after all.
        tail: set[int] = set()
        nbytes = 0
        for place in sorted(self._caught, reverse=True):
            nbytes += self._sizes[place]
            if tail and nbytes > self._window:
                break
            tail.add(place)
        return frozenset(tail)

    def _begin(self, traversal: int) -> None:
        if traversal < len(self._traversals):
            # Endless backwards over a retained graph keep only a few traversals.
            self._traversals[traversal] = Traversal(self._expected_in(traversal))
        while len(self._traversals) <= traversal:
            self._traversals.append(Traversal(self._expected_in(len(self._traversals))))
        if self._predictor is not None:
            self._predictor.begin(self, traversal)

    def _expected_in(self, traversal: int) -> Sequence[int]:
        return self._expected[min(traversal, len(self._expected) - 1)] if self._expected else ()

    def _traversal(self, number: int) -> Traversal:
        """The traversal of this number, also if it has not begun."""
        if number < len(self._traversals):
            return self._traversals[number]
        following = self._next
        if following is None or following[0] != number:
            following = self._next = number, Traversal(self._expected_in(number))
        return following[1]

    def _following(self) -> tuple[AccessOrder, Traversal] | None:
        """The pass whose backward is predicted next, and its traversal."""
        following = None if self._predictor is None else self._predictor.after(self, self._here)
        return None if following is None else (following[0], following[0]._traversal(following[1]))

    def _rest(self, traversal: Traversal) -> Iterator[Entry | None]:
        """The entries that a traversal has still to ask for, in predicted order."""
        count = len(self._entries)
        sequence = traversal.sequence(count)
        return (self._entries[sequence[index]]() for index in range(traversal.fetched, count))


class LearnedOrders:
    """The learned state of one tag: the last order of each signature, and whether offloading gains anything.

    Old signatures are forgotten. Its length is how many are known.
    """

    def __init__(self) -> None:
        self.benefit = Benefit()
        """The benefit of the last pass that was judged."""
        self._orders: dict[Signature, AccessOrder] = {}
        self._turns: dict[tuple[Signature, int], AccessOrder] = {}
        """The last order of each turn."""
        self._waiting: list[tuple[Signature, int, AccessOrder]] = []
        self._lock = threading.RLock()

    @property
    def total_bytes(self) -> int:
        """Distinct bytes that the last finished pass saved; 0 before there is one."""
        with self._lock:
            self._sort()
            last = self._waiting[-1][2] if self._waiting else next(reversed(self._orders.values()), None)
            return 0 if last is None else last.total_bytes

    def gains_nothing(self) -> bool:
        """Whether the next pass without options can be disabled."""
        with self._lock:
            self._sort()
        return self.benefit.is_none()

    def recall(self, signature: Signature, turn: int) -> tuple[AccessOrder | None, AccessOrder | None]:
        """The last order of the signature, and that of the signature and turn.

        The last with a backward; for the signature, if there is none, the last whose backward can come.
        """
        with self._lock:
            self._sort()
            waiting = (order for known, _, order in reversed(self._waiting) if known == signature)
            return self._orders.get(signature) or next(waiting, None), self._turns.get((signature, turn))

    def keep(self, signature: Signature, turn: int, order: AccessOrder) -> None:
        with self._lock:
            self._sort()
            self._waiting = [*self._waiting[1 - _SIGNATURES :], (signature, turn, order)]

    def _sort(self) -> None:
        """Learn from the waiting orders that have had their backward, and forget those that never will."""
        waiting = []
        for signature, turn, order in self._waiting:
            if order.was_asked or order.is_empty:
                _put_last(self._orders, signature, order, most=_SIGNATURES)
                _put_last(self._turns, (signature, turn), order, most=_TURNS)
                if order.benefit is not None:
                    self.benefit = order.benefit
            elif not order.was_dropped:
                waiting.append((signature, turn, order))
        self._waiting = waiting


def _put_last(orders: dict[Any, AccessOrder], key: Hashable, order: AccessOrder, *, most: int) -> None:
    orders.pop(key, None)
    orders[key] = order
    while len(orders) > most:
        del orders[next(iter(orders))]
