"""The order in which loads come, are stepped and leave, as lists of events; on a carrier that only writes down."""

from __future__ import annotations

from typing import Any

import pytest

from spillway.errors import CorruptError, TierFullError, TransferError
from spillway.optim.belt import Belt, Carrier, Trip
from spillway.optim.layout import Layout, State
from spillway.optim.loads import Load
from spillway.runtime.bytes import Bytes


class Written(Carrier):
    """Writes down what it is asked."""

    def __init__(self, sizes: list[int]) -> None:
        self.trips = [Trip(Load([]), {}, {}) for _ in sizes]
        self.sizes = dict(zip(self.trips, sizes, strict=True))
        self.events: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.room: int | None = None

    def note(self, what: str, trip: Trip) -> None:
        event = f"{what} {self.trips.index(trip)}"
        self.events.append(event)
        if event in self.fails:
            raise self.fails.pop(event)

    def nbytes(self, trip: Trip) -> int:
        return self.sizes[trip]

    def bring(self, trip: Trip) -> None:
        if self.room is not None and self.sizes[trip] > self.room:
            raise TierFullError("full")
        self.note("bring", trip)
        if self.room is not None:
            self.room -= self.sizes[trip]

    def wait(self, trip: Trip) -> None:
        self.note("wait", trip)

    def put(self, trip: Trip, place: Any, layout: Layout) -> None:
        self.note("put", trip)

    def let_go(self, trip: Trip) -> None:
        if self.room is not None:
            self.room += self.sizes[trip]
        self.note("let go", trip)

    def drop(self, trip: Trip) -> None:
        if self.room is not None:
            self.room += self.sizes[trip]
        self.note("drop", trip)

    def stay(self, trip: Trip) -> None:
        raise NotImplementedError

    def reserve(self, load: Load, layout: Layout) -> Any:
        raise NotImplementedError

    def memory(self, nbytes: int) -> Bytes:
        raise NotImplementedError

    def release(self, memory: Bytes) -> None:
        raise NotImplementedError

    def host_states(self, load: Load) -> list[State]:
        raise NotImplementedError

    def write(self, load: Load, states: list[State], layout: Layout, place: Any) -> None:
        raise NotImplementedError


def run(carrier: Written, window: int) -> list[str]:
    belt = Belt(carrier, window, carrier.trips)
    for trip in carrier.trips:
        belt.take(trip)
        carrier.note("step", trip)
        belt.put(trip, None, Layout())
    belt.settle()
    return carrier.events


def test_without_a_window_one_comes_when_the_one_before_has_left() -> None:
    assert run(Written([4, 4, 4]), 0) == [
        *("bring 0", "wait 0", "step 0", "put 0", "let go 0"),
        *("bring 1", "wait 1", "step 1", "put 1", "let go 1"),
        *("bring 2", "wait 2", "step 2", "put 2", "let go 2"),
    ]


def test_half_of_the_window_is_for_what_comes() -> None:
    # 8 bytes of 16 come ahead: two. The first that leaves is let go when a fourth wants its place.
    assert run(Written([4] * 5), 16) == [
        *("bring 0", "bring 1", "wait 0", "step 0", "put 0"),
        *("bring 2", "wait 1", "step 1", "put 1"),
        *("bring 3", "wait 2", "step 2", "put 2"),
        *("let go 0", "bring 4", "wait 3", "step 3", "put 3"),
        *("wait 4", "step 4", "put 4"),
        *("let go 1", "let go 2", "let go 3", "let go 4"),
    ]


def test_one_that_is_larger_than_the_window_is_alone() -> None:
    assert run(Written([4, 40, 4]), 8) == [
        *("bring 0", "wait 0", "step 0", "put 0", "let go 0"),
        *("bring 1", "wait 1", "step 1", "put 1", "let go 1"),
        *("bring 2", "wait 2", "step 2", "put 2", "let go 2"),
    ]


def test_where_memory_does_not_do_what_leaves_makes_room() -> None:
    carrier = Written([4, 4, 4])
    carrier.room = 5
    assert run(carrier, 1000) == [
        *("bring 0", "wait 0", "step 0", "put 0", "let go 0"),
        *("bring 1", "wait 1", "step 1", "put 1", "let go 1"),
        *("bring 2", "wait 2", "step 2", "put 2", "let go 2"),
    ]


def test_what_never_fits_is_said_and_the_next_comes() -> None:
    carrier = Written([4, 40, 4])
    carrier.room = 5
    belt = Belt(carrier, 1000, carrier.trips)
    first, second, third = carrier.trips
    belt.take(first)
    belt.put(first, None, Layout())
    with pytest.raises(TierFullError):
        belt.take(second)
    belt.take(third)
    belt.put(third, None, Layout())
    belt.settle()


def test_one_that_cannot_be_read_is_dropped_and_the_next_comes() -> None:
    carrier = Written([4, 4])
    carrier.fails["wait 0"] = CorruptError("wrong")
    belt = Belt(carrier, 1000, carrier.trips)
    with pytest.raises(CorruptError):
        belt.take(carrier.trips[0])
    belt.take(carrier.trips[1])
    belt.put(carrier.trips[1], None, Layout())
    belt.settle()
    assert carrier.events == ["bring 0", "bring 1", "wait 0", "drop 0", "wait 1", "put 1", "let go 1"]


def test_after_one_that_could_not_be_put_back_nothing_more_comes() -> None:
    carrier = Written([4] * 4)
    carrier.fails["let go 0"] = TransferError("broken")
    belt = Belt(carrier, 8, carrier.trips)
    first, second, third, fourth = carrier.trips
    belt.take(first)
    belt.put(first, None, Layout())
    belt.take(second)
    belt.put(second, None, Layout())
    for trip in (third, fourth):
        with pytest.raises(TransferError):
            belt.take(trip)
    with pytest.raises(TransferError):
        belt.settle()
    assert carrier.events == [
        *("bring 0", "wait 0", "put 0", "bring 1", "wait 1", "put 1", "let go 0", "let go 1"),
    ]


def test_what_came_in_vain_is_waited_for_and_dropped() -> None:
    carrier = Written([4, 4, 4])
    belt = Belt(carrier, 16, carrier.trips)
    belt.take(carrier.trips[0])
    belt.drop(carrier.trips[0])
    belt.settle()
    assert carrier.events == ["bring 0", "bring 1", "wait 0", "drop 0", "wait 1", "drop 1"]


def test_what_came_ahead_makes_room_for_what_is_stepped_and_comes_again() -> None:
    carrier = Written([4, 4, 4])
    carrier.room = 12
    belt = Belt(carrier, 1000, carrier.trips)
    first, second, third = carrier.trips
    belt.take(first)

    def staged() -> str:
        assert carrier.room is not None
        if carrier.room < 8:
            raise TierFullError("full")
        return "room"

    assert belt.with_room(staged) == "room"
    belt.put(first, None, Layout())
    for trip in (second, third):
        belt.take(trip)
        belt.put(trip, None, Layout())
    belt.settle()
    assert carrier.events == [
        *("bring 0", "bring 1", "bring 2", "wait 0"),
        *("wait 2", "drop 2", "wait 1", "drop 1", "put 0"),
        *("bring 1", "bring 2", "wait 1", "put 1", "wait 2", "put 2"),
        *("let go 0", "let go 1", "let go 2"),
    ]
