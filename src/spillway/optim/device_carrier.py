"""The way between pinned memory and the device: two lanes.

Memory on the device is allocated on the compute lane, and lanes wait for compute before they touch it. Since loads are
brought some ahead of their step, what the lane to the device waits for is the step of some loads before. Compute waits
for a load when its step comes, and for its way back before its memory is let go.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch

from spillway.optim.belt import Carrier, Trip
from spillway.optim.layout import Layout, Place, State
from spillway.optim.loads import Load, Part
from spillway.optim.pinned import Pinned
from spillway.optim.traffic import Traffic
from spillway.runtime.backend import Event
from spillway.runtime.bytes import Bytes, Flat, over

_IN, _OUT = "in", "out"
_LINE = 512


class _Range(NamedTuple):
    """Bytes of a load, and where they lie between steps."""

    start: int
    nbytes: int
    pinned: Pinned
    offset: int

    def bytes(self) -> Bytes:
        return self.pinned.range(self.offset, self.nbytes)


class _Gradient(NamedTuple):
    """A part's gradient that is in pinned memory."""

    part: int
    source: Bytes
    dtype: torch.dtype
    after: tuple[Event, ...]

    @property
    def nbytes(self) -> int:
        return self.source.nbytes


class DeviceCarrier(Carrier):
    """Brings loads from pinned memory to the device.

    A load is one range of bytes there. Of a parameter that is cut, every tensor of its state has a range of its own,
    and the pieces of one are neighbours: so the host can see it whole without a copy.

    Args:
        traffic: of the device.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._backend = traffic.backend
        self._arena = traffic.arena
        self._in = self._backend.lane("states in")
        self._out = self._backend.lane("states out")
        self._wholes: weakref.WeakValueDictionary[Hashable, Pinned] = weakref.WeakValueDictionary()

    def nbytes(self, trip: Trip) -> int:
        state = trip.load.layout.nbytes if trip.load.is_away else 0
        goal = trip.goal()
        total = _lines(state) + sum(_lines(gradient.nbytes) for gradient in _away(trip))
        return total + (0 if goal is None else goal.nbytes)

    def reserve(self, load: Load, layout: Layout) -> tuple[_Range, ...]:
        if load.is_cut:
            return tuple(self._neighbour(load.parts[place.part], place) for place in layout.places)
        return (_Range(0, layout.nbytes, Pinned(self._arena, layout.nbytes), 0),) if layout.places else ()

    def bring(self, trip: Trip) -> None:
        load = trip.load
        state = load.layout.nbytes if load.is_away else 0
        gradients = list(_away(trip))
        goal = trip.goal()
        if goal is not None:
            trip.room = self.memory(goal.nbytes)
        nbytes = _lines(state) + sum(_lines(each.nbytes) for each in gradients)
        if not state and not gradients:
            return
        memory = trip.memory = self.memory(nbytes)
        # Compute has waited for all that lies between steps to be there.
        self._backend.wait(self._in, self._backend.record(self._backend.compute()))
        places: tuple[_Range, ...] = load.place if state else ()
        for each in places:
            self._copy_in(Bytes(memory.storage, memory.start + each.start, each.nbytes), each.bytes())
        start = memory.start + _lines(state)
        for gradient in gradients:
            for event in gradient.after:
                self._backend.wait(self._in, event)
            self._copy_in(Bytes(memory.storage, start, gradient.nbytes), gradient.source)
            trip.gradients[gradient.part] = over(
                memory.storage, gradient.dtype, start // gradient.dtype.itemsize, *load.parts[gradient.part].form
            )
            start += _lines(gradient.nbytes)
        trip.arrived = self.brought()
        for each in places:
            each.pinned.after(_IN, trip.arrived)

    def brought(self) -> Event:
        """The end of all that is brought by now."""
        return self._backend.record(self._in)

    def expect(self, event: Event) -> None:
        """What is brought from now on is there after an event."""
        self._backend.wait(self._in, event)

    def wait(self, trip: Trip) -> None:
        if trip.arrived is not None:
            self._traffic.wait(trip.arrived)

    def memory(self, nbytes: int) -> Bytes:
        return Bytes(self._backend.empty(Flat((nbytes,))).untyped_storage(), 0, nbytes)

    def release(self, memory: Bytes) -> None:
        """It is compute's own, and compute has waited for all copies."""

    def stay(self, trip: Trip) -> None:
        # Tensors hold the memory that they lie in.
        trip.load.states = trip.states

    def drop(self, trip: Trip) -> None:
        trip.memory = trip.room = None
        trip.states = []
        trip.gradients.clear()

    def put(self, trip: Trip, place: tuple[_Range, ...], layout: Layout) -> None:
        if not place:
            return
        memory = trip.memory
        assert memory is not None
        self._backend.wait(self._out, self._backend.record(self._backend.compute()))
        for each in place:
            for event in each.pinned.before_write():
                self._backend.wait(self._out, event)
            if each.nbytes:
                here = Bytes(memory.storage, memory.start + each.start, each.nbytes)
                self._backend.copy(self._out, each.bytes(), here)
                self._traffic.sent_bytes += each.nbytes
        trip.left = self._backend.record(self._out)
        for each in place:
            each.pinned.after(_OUT, trip.left)

    def let_go(self, trip: Trip) -> None:
        if trip.left is not None:
            self._traffic.wait(trip.left)
        self.drop(trip)

    def host_states(self, load: Load) -> list[State]:
        views = {} if not load.is_away else dict(self._views(load.layout, load.place))

        def found(index: int, name: Hashable, value: object) -> object:
            if isinstance(value, Place):
                return views[index, name]
            return value.cpu() if isinstance(value, torch.Tensor) and value.ndim > 0 else value

        return [
            {name: found(index, name, value) for name, value in state.items()}
            for index, state in enumerate(load.states)
        ]

    def write(self, load: Load, states: list[State], layout: Layout, place: tuple[_Range, ...]) -> None:
        for each in place:
            each.pinned.synchronize()
            self._backend.host_access(each.bytes(), write=True)
        for (index, name), view in self._views(layout, place):
            value = states[index][name]
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)

    def _views(self, layout: Layout, place: tuple[_Range, ...]) -> Iterator[tuple[tuple[int, Hashable], torch.Tensor]]:
        aliases: dict[Pinned, torch.Tensor] = {}
        for number, each in enumerate(layout.places):
            # All in one range, or each in its own.
            found = place[number if len(place) > 1 else 0]
            if found.pinned not in aliases:
                found.pinned.synchronize()
                self._backend.host_access(found.pinned.range(0, found.pinned.nbytes), write=False)
                aliases[found.pinned] = found.pinned.alias()
            start = (found.offset + each.start - found.start) // each.dtype.itemsize
            storage = aliases[found.pinned].untyped_storage()
            yield (each.part, each.name), over(storage, each.dtype, start, each.shape, each.strides)

    def _neighbour(self, part: Part, place: Place) -> _Range:
        """A piece's part of the memory that a whole tensor has."""
        key = (part.held, place.name, place.dtype)
        whole = self._wholes.get(key)
        if whole is None:
            whole = self._wholes[key] = Pinned(self._arena, part.held.numel * place.dtype.itemsize)
        return _Range(place.start, place.nbytes, whole, part.start * place.dtype.itemsize)

    def _copy_in(self, target: Bytes, source: Bytes) -> None:
        if source.nbytes:
            self._backend.copy(self._in, target, source)
            self._traffic.received_bytes += source.nbytes


def _away(trip: Trip) -> Iterator[_Gradient]:
    """The gradients that have to be brought with a load."""
    for index, turn in trip.turns.items():
        part = trip.load.parts[index]
        raw, total = turn.gradient.raw, turn.gradient.sum
        if total is not None:
            assert total.pinned is not None
            itemsize = total.dtype.itemsize
            source = total.pinned.range(part.start * itemsize, part.numel * itemsize)
            yield _Gradient(index, source, total.dtype, ())
        elif raw is not None:
            arrived = raw.parcel.arrived
            assert arrived is not None
            itemsize = raw.dtype.itemsize
            memory = raw.memory
            source = Bytes(memory.storage, memory.start + part.start * itemsize, part.numel * itemsize)
            yield _Gradient(index, source, raw.dtype, (arrived,))


def _lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
