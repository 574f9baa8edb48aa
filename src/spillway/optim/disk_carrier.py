"""The way between the spill file and host memory: tasks that read and write pieces of a load."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from spillway.errors import SessionError, TierError
from spillway.optim.belt import Carrier, Trip
from spillway.optim.layout import Layout, Place, State
from spillway.optim.loads import Load
from spillway.optim.traffic import Traffic
from spillway.runtime.arena import Block, pages
from spillway.runtime.backend import Event, Several
from spillway.runtime.bytes import Bytes
from spillway.runtime.cpu import anonymous_pages
from spillway.runtime.disk import Extent, SpillFile
from spillway.runtime.disk_tiers import PIECE_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer


class DiskPlace:
    """Extents for a load, one behind the other. They are given back when nobody holds this any more.

    Args:
        file: the spill file.
        nbytes: of the load.

    Raises:
        TierFullError: if there is no room for them.
    """

    def __init__(self, file: SpillFile, nbytes: int) -> None:
        self.extents: list[Extent] = []
        weakref.finalize(self, _give_back, file, self.extents).atexit = False
        for start in range(0, nbytes, PIECE_BYTES):
            self.extents.append(file.allocate(min(PIECE_BYTES, nbytes - start)))


def _give_back(file: SpillFile, extents: Sequence[Extent]) -> None:
    # With the session closed, they are gone already.
    with contextlib.suppress(SessionError):
        for extent in extents:
            file.free(extent)


class DiskCarrier(Carrier):
    """Brings loads from the spill file to blocks of the arena.

    What parameters are comes from the device: see NOTE [ The parameter is the truth ].

    Args:
        traffic: of the device.
        file: the spill file.
    """

    def __init__(self, traffic: Traffic, file: SpillFile) -> None:
        self._traffic = traffic
        self._backend = traffic.backend
        self._arena = traffic.arena
        self._file = file
        self.read_bytes = 0
        self.written_bytes = 0

    def nbytes(self, trip: Trip) -> int:
        goal = trip.goal()
        total = pages(trip.load.layout.nbytes) if trip.load.is_away else 0
        total += 0 if goal is None else pages(goal.nbytes)
        return total + sum(pages(trip.load.parts[index].nbytes) for index in trip.turns)

    def reserve(self, load: Load, layout: Layout) -> DiskPlace:
        return DiskPlace(self._file, layout.nbytes)

    def bring(self, trip: Trip) -> None:
        load = trip.load
        assert trip.ready is not None
        with contextlib.ExitStack() as unless_queued:
            unless_queued.callback(self.drop, trip)
            values = [load.parts[index].of(load.parts[index].held.local()) for index in trip.turns]
            trip.values = dict(zip(trip.turns, self._traffic.fetch(values, trip.ready), strict=True))
            goal = trip.goal()
            if goal is not None:
                trip.room = self.memory(goal.nbytes)
            if load.is_away:
                trip.memory = self.memory(load.layout.nbytes)
                trip.arrived = self._each(load.place, trip.memory, self._file.read, write=True)
                self.read_bytes += load.layout.nbytes
            unless_queued.pop_all()

    def wait(self, trip: Trip) -> None:
        if trip.arrived is not None:
            trip.arrived.synchronize()

    def memory(self, nbytes: int) -> Bytes:
        block = self._traffic.pinned(nbytes)
        self._backend.host_access(block, write=True)
        return block

    def relieve(self) -> bool:
        return self._traffic.unstage_oldest()

    def release(self, memory: Bytes) -> None:
        assert isinstance(memory, Block)
        self._arena.free(memory)

    def stay(self, trip: Trip) -> None:
        # The block that they lie in is given back.
        trip.load.states = [
            {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
            for state in trip.states
        ]

    def drop(self, trip: Trip) -> None:
        for sent in trip.values.values():
            self._traffic.give_back(sent)
        trip.values.clear()
        trip.states = []
        for memory in (trip.memory, trip.room):
            if memory is not None:
                self.release(memory)
        trip.memory = trip.room = None

    def put(self, trip: Trip, place: DiskPlace, layout: Layout) -> None:
        if layout.places:
            assert trip.memory is not None
            trip.left = self._each(place, trip.memory, self._file.write, write=False)
            self.written_bytes += layout.nbytes

    def let_go(self, trip: Trip) -> None:
        with contextlib.ExitStack() as at_last:
            at_last.callback(self.drop, trip)
            if trip.left is not None:
                try:
                    trip.left.synchronize()
                except TierError:
                    self.stay(trip)
                    raise

    def host_states(self, load: Load) -> list[State]:
        if not load.is_away:
            return load.opened(None)
        memory = _pages(load.layout.nbytes)
        self._each(load.place, memory, self._file.read, write=True).synchronize()
        return load.opened(memory)

    def opened(self, load: Load, index: int, state: State) -> None:
        # What came of the file is a copy: the next step has it from there.
        part = load.parts[index]
        load.states[index] = {
            name: part.of(state[name]) if isinstance(value, Place) else value
            for name, value in load.states[index].items()
        }

    def write(self, load: Load, states: list[State], layout: Layout, place: DiskPlace) -> None:
        if not layout.places:
            return
        memory = _pages(layout.nbytes)
        for each in layout.places:
            each.view(memory).copy_(states[each.part][each.name])
        self._backend.host_access(memory, write=True)
        self._each(place, memory, self._file.write, write=False).synchronize()

    def _each(
        self,
        place: DiskPlace,
        memory: Bytes,
        move: Callable[[Extent, Buffer], None],
        *,
        write: bool,
    ) -> Event:
        """Have each extent written from memory, or read into it."""
        moves = []
        for number, extent in enumerate(place.extents):
            start = number * PIECE_BYTES
            part = Bytes(memory.storage, memory.start + start, min(PIECE_BYTES, memory.nbytes - start))

            def task(extent: Extent = extent, part: Bytes = part) -> None:
                self._backend.host_access(part, write=write)
                move(extent, part.buffer())

            moves.append(self._backend.run(task))
        return Several(moves)


def _pages(nbytes: int) -> Bytes:
    memory: torch.Tensor = anonymous_pages(pages(nbytes))
    return Bytes.of(memory)
