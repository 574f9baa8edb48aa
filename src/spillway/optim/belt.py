"""Loads on their way to a step and back, some at once, within a window of bytes."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from spillway.errors import TierError, TierFullError
from spillway.optim.host_step import Turn
from spillway.optim.layout import Layout, State
from spillway.optim.loads import Load
from spillway.optim.parcels import Sent
from spillway.runtime.backend import Event
from spillway.runtime.bytes import Bytes
from spillway.runtime.tasks import raise_again

_Made = TypeVar("_Made")


class Trip:
    """One load's way to a step, and back.

    Args:
        load: the load.
        turns: of the parts that are stepped, by their numbers.
        settings: of their group.
    """

    def __init__(self, load: Load, turns: Mapping[int, Turn], settings: Mapping[str, Any]) -> None:
        self.load = load
        self.turns = turns
        self.settings = settings
        self.memory: Bytes | None = None
        """Where its bytes are while it is here."""
        self.room: Bytes | None = None
        """Where they will be before they go back, if not there."""
        self.arrived: Event | None = None
        self.left: Event | None = None
        self.gradients: dict[int, torch.Tensor] = {}
        """Those that came with it."""
        self.values: dict[int, Sent] = {}
        """What parameters are, where that had to be asked for."""
        self.states: list[State] = []
        """What the step made of the load's states, until they are safely back."""
        self.ready: Event | None = None
        """When the parameters may be read and written."""
        self.nbytes = 0
        """Bytes that it has of the window."""

    def goal(self) -> Layout | None:
        """How the load will lie before it goes back, as far as is known, if that is not how it comes."""
        load = self.load
        if load.target is not None:
            return load.target[0]
        return None if load.is_away or not load.layout.nbytes else load.layout


class Carrier(ABC):
    """The way between where loads lie and where they are stepped."""

    @abstractmethod
    def nbytes(self, trip: Trip) -> int:
        """Bytes that a trip will have of the window."""

    @abstractmethod
    def reserve(self, load: Load, layout: Layout) -> Any:
        """A place for a load that is laid out so. It is given back when nobody holds it.

        Raises:
            TierFullError: if there is no room.
        """

    @abstractmethod
    def bring(self, trip: Trip) -> None:
        """Queue the way of a load to where it is stepped."""

    @abstractmethod
    def wait(self, trip: Trip) -> None:
        """Whoever steps waits until the load is there."""

    @abstractmethod
    def memory(self, nbytes: int) -> Bytes:
        """Memory where loads are stepped, which may be written now."""

    @abstractmethod
    def release(self, memory: Bytes) -> None:
        """Give memory back that no copy uses."""

    @abstractmethod
    def stay(self, trip: Trip) -> None:
        """A load cannot go back: its states stay here, and the next step has them from here."""

    @abstractmethod
    def drop(self, trip: Trip) -> None:
        """Give back all that a trip has, whose load is here, or will not come."""

    def relieve(self) -> bool:
        """Give back memory that is needed no more, if there is any; whether there was."""
        return False

    @abstractmethod
    def put(self, trip: Trip, place: Any, layout: Layout) -> None:
        """Queue a load's way from the trip's memory to its place."""

    @abstractmethod
    def let_go(self, trip: Trip) -> None:
        """Wait until the load is in its place, and let go of the trip's memory.

        Raises:
            TierError: if it could not be put there. It is still here then.
        """

    @abstractmethod
    def host_states(self, load: Load) -> list[State]:
        """All states of a load, in host memory; for the caller's thread while nothing is under way."""

    def opened(self, load: Load, index: int, state: State) -> None:  # noqa: B027  (they see where it lies)
        """Somebody may write to a parameter's state, which :meth:`host_states` gave."""

    @abstractmethod
    def write(self, load: Load, states: list[State], layout: Layout, place: Any) -> None:
        """Put states that are in host memory in their place; for the caller's thread while nothing is under way."""


class Belt:
    """Has trips come, in order, and takes them back.

    Half of the window is for what comes ahead of its step. One trip may be larger than the window: it is alone then.

    Args:
        carrier: of all of them.
        window: most bytes that they have at once.
        trips: in the order in which they will be taken.
    """

    def __init__(self, carrier: Carrier, window: int, trips: Iterable[Trip]) -> None:
        self._carrier = carrier
        self._window = window
        self._expected = deque(trips)
        self._coming: deque[Trip] = deque()
        self._leaving: deque[Trip] = deque()
        self._coming_bytes = 0
        self._nbytes = 0
        self._error: TierError | None = None

    def take(self, trip: Trip) -> None:
        """The next trip is to be stepped: have it here, and those behind it come meanwhile.

        Raises:
            TierError: if what it carries cannot be had, or something could not be put back: nothing more comes then,
                since there is no knowing how much would have to stay here.
        """
        if self._error is not None:
            self._expected.clear()
            raise_again(self._error)
        if not self._coming:
            with contextlib.ExitStack() as unless_brought:
                unless_brought.callback(self._expected.popleft)
                self.with_room(self._bring)
                unless_brought.pop_all()
        self._bring_ahead()
        assert self._coming[0] is trip
        self._coming.popleft()
        self._coming_bytes -= trip.nbytes
        with contextlib.ExitStack() as unless_there:
            unless_there.callback(self.drop, trip)
            self._carrier.wait(trip)
            unless_there.pop_all()

    def with_room(self, make: Callable[[], _Made]) -> _Made:
        """Do something that needs memory; where there is none, what leaves, and what comes ahead, makes room.

        Raises:
            TierFullError: if that does not do.
        """
        while True:
            try:
                return make()
            except TierFullError:
                if self._leaving:
                    self._let_go()
                elif self._coming:
                    trip = self._coming.pop()
                    self._coming_bytes -= trip.nbytes
                    self._came_in_vain(trip)
                    self._expected.appendleft(trip)
                elif not self._carrier.relieve():
                    raise
                if self._error is not None:
                    raise_again(self._error)

    def put(self, trip: Trip, place: Any, layout: Layout) -> None:
        """It was stepped, and goes back."""
        self._carrier.put(trip, place, layout)
        self._leaving.append(trip)

    def drop(self, trip: Trip) -> None:
        """It was not stepped, and does not go back."""
        self._nbytes -= trip.nbytes
        self._carrier.drop(trip)

    def settle(self) -> None:
        """Wait for all that goes back, and for what came in vain.

        Raises:
            TierError: what went wrong first.
        """
        self._expected.clear()
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave_all)
            while self._coming:
                stack.callback(self._came_in_vain, self._coming.pop())
        if self._error is not None:
            raise_again(self._error)

    def _bring_ahead(self) -> None:
        while self._expected and self._coming_bytes + self._carrier.nbytes(self._expected[0]) <= self._window // 2:
            try:
                self._bring()
            except TierFullError:
                # There may be room when its turn has come.
                return

    def _bring(self) -> None:
        trip = self._expected[0]
        trip.nbytes = self._carrier.nbytes(trip)
        while self._leaving and self._nbytes + trip.nbytes > self._window:
            self._let_go()
            if self._error is not None:
                raise_again(self._error)
        self._carrier.bring(trip)
        self._expected.popleft()
        self._coming.append(trip)
        self._coming_bytes += trip.nbytes
        self._nbytes += trip.nbytes

    def _let_go(self) -> None:
        trip = self._leaving.popleft()
        self._nbytes -= trip.nbytes
        try:
            self._carrier.let_go(trip)
        except TierError as error:
            self._error = self._error or error

    def _leave_all(self) -> None:
        while self._leaving:
            self._let_go()

    def _came_in_vain(self, trip: Trip) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.drop, trip)
            self._carrier.wait(trip)
