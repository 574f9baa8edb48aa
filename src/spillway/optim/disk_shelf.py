"""Masters and states that lie in the session's spill file, and come to host memory to be stepped there.

The host lane steps load after load; tasks read those that come next, and write those that were stepped. Gradients lie
in pinned memory, as everywhere. A parameter that has no master is asked of the device.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spillway.optim.belt import Belt, Trip
from spillway.optim.disk_carrier import DiskCarrier
from spillway.optim.held import Held
from spillway.optim.host_step import Turn
from spillway.optim.load_shelf import LoadShelf
from spillway.optim.masters import take
from spillway.optim.parcels import aligned
from spillway.optim.shared import Shared
from spillway.optim.states import MASTER, host_copy
from spillway.optim.tally import Tally
from spillway.optim.traffic import Traffic, Way
from spillway.runtime.arena import Block
from spillway.runtime.backend import Event
from spillway.runtime.bytes import Bytes, Cells


class DiskShelf(LoadShelf):
    """Has the host step what lies in the spill file. See :class:`LoadShelf`."""

    def tally(self) -> Spilled:
        return Spilled()

    def step(self, turns: Sequence[Turn], now: Tally, *, overlapped: bool) -> None:
        assert isinstance(now, Spilled)
        if not any(turn.gradient.factors for turn in turns):
            # Whose gradient came first is there first; else all of them have to be, and the first are wanted first.
            turns = sorted(turns, key=lambda turn: turn.gradient.came)
        ends: dict[Held, list[Event]] = {}
        for one, trips in self._trips(turns).items():
            ready = one.traffic.ready(part.held.local() for trip in trips for part in trip.load.parts)
            belt = Belt(self._disk(one), one.traffic.window, trips)
            for trip in trips:
                # All of them before the first begins, since it has others come ahead.
                trip.ready = ready
            for trip in trips:
                end = one.lane.run(functools.partial(self._step_trip, trip, belt, one, now))
                for turn in trip.turns.values():
                    ends.setdefault(turn.held, []).append(end)
            now.closing.append(one.lane.run(belt.settle))
        for turn in turns:
            held = turn.held
            held.written()
            held.coming = held.shared.traffic.backend.all_of(ends[held])
            held.gradient.reader = held.shared.lane.run(_nothing)
            now.on_host += held.numel

    def _make_carrier(self, shared: Shared) -> DiskCarrier:
        return DiskCarrier(shared.traffic, shared.traffic.spill_file())

    def _disk(self, shared: Shared) -> DiskCarrier:
        carrier = self._carrier(shared)
        assert isinstance(carrier, DiskCarrier)
        return carrier

    def _converted(self, key: Any, value: Any, held: Held) -> Any:
        return host_copy(key, value, held)

    # All below is for the host lane.

    def _step_trip(self, trip: Trip, belt: Belt, shared: Shared, now: Tally) -> Event:
        traffic, carrier = shared.traffic, self._disk(shared)
        moved = carrier.read_bytes, carrier.written_bytes
        with torch.no_grad(), contextlib.ExitStack() as unless_gone:
            belt.take(trip)
            unless_gone.callback(belt.drop, trip)
            for turn in trip.turns.values():
                turn.gradient.wait(traffic)
            trip.states = trip.load.opened(trip.memory)
            began = time.perf_counter()
            parameters = {index: self._parameter(trip, index, traffic) for index in trip.turns}
            # Before anything is stepped: there may be no room.
            staging = belt.with_room(lambda: self._staging(trip, traffic))
            if staging is not None:
                unless_gone.callback(traffic.arena.free, staging)
            self._step_parts(trip, parameters)
            unless_gone.pop_all()
            back = self._send_back(trip, parameters, staging, traffic)
            now.host_seconds += time.perf_counter() - began
            # If the load cannot go back, compute hears of that, and waits for nothing.
            unless_gone.callback(back.synchronize)
            self._send_off(trip, carrier, belt)
            unless_gone.pop_all()
        now.read_bytes += carrier.read_bytes - moved[0]
        now.written_bytes += carrier.written_bytes - moved[1]
        return back

    def _parameter(self, trip: Trip, index: int, traffic: Traffic) -> torch.nn.Parameter:
        """What is stepped for a part, with its gradient."""
        part = trip.load.parts[index]
        sent = trip.values[index]
        values = traffic.read(sent).as_strided(*part.form)
        if part.held.has_master:
            stepped = trip.states[index].get(MASTER)
            if stepped is None:
                stepped = values.to(part.held.work_dtype)
            else:
                take(stepped, values)
            traffic.give_back(trip.values.pop(index))
        else:
            stepped = values
            traffic.backend.host_access(sent.memory, write=True)
        parameter = torch.nn.Parameter(stepped, requires_grad=False)
        gradient = part.held.part(trip.turns[index].gradient, part.start, part.numel, None)
        parameter.grad = gradient.as_strided(*part.form, int(gradient.storage_offset()))
        return parameter

    def _staging(self, trip: Trip, traffic: Traffic) -> Block | None:
        """Room for the parameters on their way to the device, where they are of another type than what is stepped."""
        parts = [trip.load.parts[index] for index in trip.turns]
        return traffic.stage(sum(aligned(part.nbytes) for part in parts)) if parts[0].held.has_master else None

    def _send_back(
        self, trip: Trip, parameters: Mapping[int, torch.nn.Parameter], staging: Block | None, traffic: Traffic
    ) -> Event:
        """Queue the parameters' way to the device; the end of it."""
        assert trip.ready is not None
        ways = []
        start = 0
        for index, parameter in parameters.items():
            part = trip.load.parts[index]
            local = part.held.local()
            if staging is None:
                memory = trip.values[index].memory
            else:
                memory = Bytes(staging.storage, staging.start + start, part.nbytes)
                start += aligned(part.nbytes)
                here = traffic.host_view(memory, local.dtype, part.numel, write=True)
                here.as_strided(*part.form, int(here.storage_offset())).copy_(parameter)
            ways.append(Way(local, part.start, Cells(memory, local.dtype)))
        end = traffic.receive(ways, trip.ready)
        if staging is not None:
            traffic.staged(staging, end)
        for sent in trip.values.values():
            sent.parcel.copies.append(end)
            traffic.give_back(sent)
        trip.values.clear()
        return end


class Spilled(Tally):
    """One step, from the spill file and back."""

    def __init__(self) -> None:
        super().__init__()
        self.closing: list[Event] = []
        """When all is in the file."""

    def finish(self) -> None:
        """Wait until all is in the file; raises what went wrong with that."""
        closing, self.closing = self.closing, []
        with contextlib.ExitStack() as stack:
            for event in closing:
                stack.callback(event.synchronize)


def _nothing() -> None:
    return None
