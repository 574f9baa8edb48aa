"""What the shelves have in common from which loads are brought to be stepped."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.optim.belt import Belt, Carrier, Trip
from spillway.optim.forecast import Forecast
from spillway.optim.held import Held
from spillway.optim.host_step import Turn
from spillway.optim.inner import Inner
from spillway.optim.layout import Layout, Place, State, moves
from spillway.optim.loads import Load, Part, formed, most_elements
from spillway.optim.shared import Shared
from spillway.optim.shelf import Loading, Settings, Shelf
from spillway.optim.states import MASTER, follow_first
from spillway.runtime.bytes import over


class LoadShelf(Shelf):
    """See NOTE [ Shelves ].

    Args:
        optimizer_class: the user's.
        given: what the user gave for it, as it is for where parameters are stepped.
        settings: of a parameter's group, as they are for there.
        forecast: of the class.
    """

    def __init__(
        self, optimizer_class: type[Optimizer], given: Mapping[str, Any], settings: Settings, forecast: Forecast
    ) -> None:
        self._inner = Inner(optimizer_class, given)
        self._settings = settings
        self._forecast = forecast
        self._new: list[Held] = []
        self._loads: dict[Held, list[Load]] = {}
        self._carriers: dict[Shared, Carrier] = {}

    def add(self, held: Held) -> None:
        self._new.append(held)
        # Now, since no spill file may be had.
        self._carrier(held.shared)

    def shown(self, held: Held) -> State | None:
        states = [load.states[index] for load, index in self._parts_of(held)]
        return dict(states[0]) if states and states[0] else None

    def opened(self, held: Held) -> State:
        (state,) = self.whole([held])
        for load, index in self._parts_of(held):
            self._carrier(held.shared).opened(load, index, state)
        return state

    def prepare(self, held: Iterable[Held]) -> None:
        self._form()
        stepped: dict[Load, set[int]] = {}
        for one in held:
            one.check()
            for load, index in self._parts_of(one):
                stepped.setdefault(load, set()).add(index)
        for load, indices in stepped.items():
            first = load.parts[0].held
            settings = self._settings(first)
            states = [
                self._expected(load, index, settings)
                if index in indices
                else {name: _without_memory(value) for name, value in load.states[index].items()}
                for index in range(len(load.parts))
            ]
            layout = Layout.of(states)
            if layout == load.layout:
                load.target = None
            elif load.target is None or load.target[0] != layout:
                load.target = (layout, self._carrier(first.shared).reserve(load, layout))

    def whole(self, held: Sequence[Held]) -> list[State]:
        seen: dict[Load, list[State]] = {}
        whole = []
        for one in held:
            parts = self._parts_of(one)
            for load, _ in parts:
                if load not in seen:
                    seen[load] = self._carrier(one.shared).host_states(load)
            pieces = [seen[load][index] for load, index in parts]
            whole.append({name: _joined(one, [piece[name] for piece in pieces]) for name in (pieces or [{}])[0]})
            for load, _ in parts:
                if load.is_cut:
                    # It is of this parameter alone, and was copied.
                    del seen[load]
        return whole

    def put(self, loading: Sequence[Loading]) -> None:
        self._form()
        coming = dict(loading)
        done: set[Load] = set()
        for held in coming:
            # All loads of a parameter that is cut, or the one that it shares with others.
            loads = [load for load in self._loads[held] if load not in done]
            converted = {
                part.held: {key: self._converted(key, value, part.held) for key, value in coming[part.held].items()}
                for part in (part for load in loads[:1] for part in load.parts)
                if part.held in coming
            }
            for load in loads:
                self._put_load(load, converted)
            done.update(loads)

    def begin(self, held: Sequence[Held]) -> None:
        for one in held:
            like = torch.empty_strided(*one.form, dtype=one.work_dtype, device="cpu")
            self.put([Loading(one, self._inner.begun(like, self._settings(one)))])

    def refresh(self, held: Held) -> None:
        for load, index in self._parts_of(held):
            load.states[index].pop(MASTER, None)

    def discard(self, held: Held) -> None:
        for load, index in self._parts_of(held):
            # Whoever shares the load keeps it, and has it laid out anew.
            load.states[index] = {}
            load.begun[index] = False
        self._loads.pop(held, None)

    def close(self) -> None:
        self._loads.clear()
        self._new.clear()
        self._carriers.clear()

    @abstractmethod
    def _make_carrier(self, shared: Shared) -> Carrier:
        """The way to and from the parameters of a device."""

    @abstractmethod
    def _converted(self, key: Any, value: Any, held: Held) -> Any:
        """A value of a state that is loaded: tensors of the parameter's shape as it lies in memory, on the host."""

    def _carrier(self, shared: Shared) -> Carrier:
        if shared not in self._carriers:
            self._carriers[shared] = self._make_carrier(shared)
        return self._carriers[shared]

    def _parts_of(self, held: Held) -> list[tuple[Load, int]]:
        return [
            (load, index)
            for load in self._loads.get(held, ())
            for index, part in enumerate(load.parts)
            if part.held is held
        ]

    def _form(self) -> None:
        """Have loads for all parameters."""
        by_device: dict[Shared, list[Held]] = {}
        for held in self._new:
            by_device.setdefault(held.shared, []).append(held)
        self._new.clear()
        for shared, some in by_device.items():
            for load in formed(some, most_elements(shared.traffic.window)):
                for part in load.parts:
                    self._loads.setdefault(part.held, []).append(load)

    def _trips(self, turns: Iterable[Turn]) -> dict[Shared, list[Trip]]:
        """The loads that a step needs, by device, in the order of the turns."""
        by_load: dict[Load, dict[int, Turn]] = {}
        for turn in turns:
            parts = self._parts_of(turn.held)
            follow_first([load.states[index] for load, index in parts])
            for load, index in parts:
                by_load.setdefault(load, {})[index] = turn
        trips: dict[Shared, list[Trip]] = {}
        for load, here in by_load.items():
            first = load.parts[0].held
            trips.setdefault(first.shared, []).append(Trip(load, here, self._settings(first)))
        return trips

    def _expected(self, load: Load, index: int, settings: Mapping[str, Any]) -> State:
        """A part's state after a step, in tensors without memory."""
        part = load.parts[index]
        if load.begun[index]:
            found: State = {name: _without_memory(value) for name, value in load.states[index].items()}
        else:
            found = self._forecast.state(*part.form, part.held.work_dtype, settings)
        if part.held.has_master:
            found[MASTER] = torch.empty_strided(*part.form, dtype=part.held.work_dtype, device="meta")
        return found

    def _step_parts(self, trip: Trip, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        """Step the parts of a load that have a gradient.

        Args:
            trip: it is here, its states are open.
            parameters: what is stepped, by the numbers of the parts.
        """
        load, states = trip.load, trip.states
        given = [_without_master(states[index]) if load.begun[index] else None for index in parameters]
        after = self._inner.step(list(parameters.values()), given, trip.settings)
        for (index, parameter), state in zip(parameters.items(), after, strict=True):
            if load.parts[index].held.has_master:
                state[MASTER] = parameter.detach()
            states[index] = state
            load.begun[index] = True

    def _send_off(self, trip: Trip, carrier: Carrier, belt: Belt) -> None:
        """Have a load go back that was stepped.

        Raises:
            TierFullError: if there is no room for what the class has made of its states. They stay here then.
        """
        with contextlib.ExitStack() as unless_packed:
            unless_packed.callback(belt.drop, trip)
            unless_packed.callback(carrier.stay, trip)
            layout, place = self._packed(trip, carrier, belt)
            unless_packed.pop_all()
        trip.load.shut(trip.states, layout, place)
        belt.put(trip, place, layout)

    def _packed(self, trip: Trip, carrier: Carrier, belt: Belt) -> tuple[Layout, Any]:
        """Have all tensors of the states in the trip's memory, as they will lie in their place."""
        load, states = trip.load, trip.states
        layout = Layout.of(states)
        place = load.place
        if layout != load.layout:
            foreseen = load.target is not None and layout == load.target[0]
            place = load.target[1] if load.target is not None and foreseen else carrier.reserve(load, layout)
        memory = trip.memory
        if layout.nbytes and (layout != load.layout or not load.is_away):
            if trip.room is None or layout != trip.goal():
                if trip.room is not None:
                    carrier.release(trip.room)
                    trip.room = None
                trip.room = belt.with_room(lambda: carrier.memory(layout.nbytes))
            memory = trip.room
        for each in layout.places:
            assert memory is not None
            view, value = each.view(memory), states[each.part][each.name]
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
            states[each.part][each.name] = view
        if memory is trip.room and memory is not None:
            if trip.memory is not None:
                carrier.release(trip.memory)
            trip.memory, trip.room = memory, None
        return layout, place

    def _put_load(self, load: Load, converted: Mapping[Held, State]) -> None:
        carrier = self._carrier(load.parts[0].held.shared)
        loaded = [index for index, part in enumerate(load.parts) if part.held in converted]
        # What others keep, who share the load.
        keeps = len(loaded) < len(load.parts)
        states: list[State] = carrier.host_states(load) if keeps else [{} for _ in load.parts]
        for index in loaded:
            part = load.parts[index]
            state = {key: _part_of(value, part) for key, value in converted[part.held].items()}
            master = state.pop(MASTER, None)
            # Last, as after a step.
            states[index] = {**state, MASTER: master} if part.held.has_master and master is not None else state
        layout = Layout.of(states)
        place = load.place if layout == load.layout and load.place is not None else carrier.reserve(load, layout)
        carrier.write(load, states, layout, place)
        load.shut(states, layout, place)
        for index in loaded:
            load.begun[index] = bool(_without_master(states[index]))


def _without_master(state: State) -> State:
    return {name: value for name, value in state.items() if name != MASTER}


def _without_memory(value: Any) -> Any:
    if isinstance(value, Place):
        return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device="meta")
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _part_of(value: Any, part: Part) -> Any:
    """A piece's part of a tensor, or all of it; numbers are each piece's own."""
    if not isinstance(value, torch.Tensor) or part.numel == part.held.numel:
        return value
    return part.of(value) if value.numel() == part.held.numel else value.clone()


def _joined(held: Held, pieces: Sequence[Any]) -> Any:
    """A tensor of which there are pieces: without a copy where they are neighbours in the same memory."""
    first = pieces[0]
    if len(pieces) == 1 or not moves(first):
        return first
    storage = first.untyped_storage()
    end = first.data_ptr()
    adjacent = True
    for piece in pieces:
        adjacent = adjacent and piece.data_ptr() == end
        end += piece.nbytes
    if adjacent and end <= storage.data_ptr() + storage.nbytes():
        return over(storage, first.dtype, int(first.storage_offset()), *held.form)
    whole = held.new_host_tensor(first.dtype)
    flat = whole.as_strided((held.numel,), (1,))
    start = 0
    for piece in pieces:
        flat[start : start + piece.numel()].copy_(piece)
        start += piece.numel()
    return whole
