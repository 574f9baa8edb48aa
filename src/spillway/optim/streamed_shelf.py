"""Masters and states that lie in pinned memory, and come to the device to be stepped there.

All is queued by the thread that calls ``step``, on its compute lane and two others; it waits for nothing but gradients
that add up on the host. What has no master is stepped where it is. The device's memory for it is within the session's
window, but for one parameter that is larger, and for a parameter's first step, where the class makes the state itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from spillway.optim.belt import Belt, Trip
from spillway.optim.device_carrier import DeviceCarrier
from spillway.optim.held import Held
from spillway.optim.host_step import Turn
from spillway.optim.layout import moves
from spillway.optim.load_shelf import LoadShelf
from spillway.optim.masters import take
from spillway.optim.shared import Shared
from spillway.optim.states import MASTER, STEP, host_copy
from spillway.optim.tally import Tally


class StreamedShelf(LoadShelf):
    """Has the device step what lies in pinned memory. See :class:`LoadShelf`."""

    steps_on_device = True

    def tally(self) -> Tally:
        return Tally()

    def step(self, turns: Sequence[Turn], now: Tally, *, overlapped: bool) -> None:
        trips = self._trips(turns)
        for one, some in trips.items():
            self._step_all(one, some)
        for turn in turns:
            turn.held.coming = None
            now.streamed += turn.held.numel

    def _make_carrier(self, shared: Shared) -> DeviceCarrier:
        return DeviceCarrier(shared.traffic)

    def _converted(self, key: Any, value: Any, held: Held) -> Any:
        value = host_copy(key, value, held)
        if not isinstance(value, torch.Tensor) or moves(value):
            return value
        settings = self._settings(held)
        stays = key == STEP and not settings.get("capturable") and not settings.get("fused")
        return value if stays else value.to(held.local().device)

    def _step_all(self, shared: Shared, trips: Sequence[Trip]) -> None:
        carrier = self._carrier(shared)
        assert isinstance(carrier, DeviceCarrier)
        away = [turn for trip in trips for turn in trip.turns.values() if turn.gradient.here is None]
        if away:
            # What is queued for gradients on the host is done before they are read.
            carrier.expect(shared.lane.run(_nothing))
        belt = Belt(carrier, shared.traffic.window, trips)
        with contextlib.ExitStack() as at_last:
            at_last.callback(belt.settle)
            if away:
                at_last.callback(_lend, shared, carrier, away)
            for trip in trips:
                self._step_trip(trip, carrier, belt)

    def _step_trip(self, trip: Trip, carrier: DeviceCarrier, belt: Belt) -> None:
        belt.take(trip)
        with contextlib.ExitStack() as unless_stepped:
            unless_stepped.callback(belt.drop, trip)
            trip.states = trip.load.opened(trip.memory)
            parameters = {index: self._parameter(trip, index) for index in trip.turns}
            self._step_parts(trip, parameters)
            unless_stepped.pop_all()
        for index, parameter in parameters.items():
            part = trip.load.parts[index]
            if part.held.has_master:
                part.of(part.held.local().detach()).copy_(parameter)
            part.held.written()
        self._send_off(trip, carrier, belt)

    def _parameter(self, trip: Trip, index: int) -> torch.nn.Parameter:
        """What is stepped for a part, with its gradient."""
        part = trip.load.parts[index]
        stepped = values = part.of(part.held.local().detach())
        if part.held.has_master:
            master = trip.states[index].get(MASTER)
            if master is None:
                master = values.to(part.held.work_dtype)
            else:
                take(master, values)
            stepped = master
        parameter = torch.nn.Parameter(stepped, requires_grad=False)
        gradient = trip.turns[index].gradient
        found = trip.gradients.pop(index) if gradient.here is None else part.of(gradient.here)
        found = found.to(part.held.work_dtype)
        for factor in gradient.factors:
            factor.apply_there(found)
        parameter.grad = found
        return parameter


def _lend(shared: Shared, carrier: DeviceCarrier, turns: Sequence[Turn]) -> None:
    """Gradients on the host are read until now: what is queued for them, and who gets their memory, comes after."""
    end = carrier.brought()
    for turn in turns:
        raw, total = turn.gradient.raw, turn.gradient.sum
        if raw is not None:
            raw.parcel.copies = [end]
        if total is not None and total.pinned is not None:
            total.pinned.after("in", end)
    shared.lane.run(end.synchronize)


def _nothing() -> None:
    return None
