"""A store whose chunks are streamed to where they are stepped. See NOTE [ State stores ] in ``state_store.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.optim.chunks import ChunkPart, ChunkTier, ChunkTransfer, Layout, Slot, StateChunk, TransferPipeline, moves
from spillway.optim.gradient import DeviceContext, Snapshot
from spillway.optim.host_parameter import HostParameter
from spillway.optim.optimizer_class import BorrowingOptimizer, State, StatePrediction, for_cpu
from spillway.optim.state_store import Settings, SettingsOf, StateStore, StepCost
from spillway.optim.states import MASTER, follow_first, host_copy, part_of
from spillway.optim.tensors import CHUNK, batches, flat, follow
from spillway.optim.transfers import on_error
from spillway.runtime.backend import finish
from spillway.runtime.bytes import over

_LEAST = 1 << 16
_BYTES_AN_ELEMENT = 16
_IN_FLIGHT = 4


class ChunkedStore(StateStore):
    """A store whose states are streamed in chunks to where they are stepped. A subclass steps them."""

    def __init__(
        self, tier: ChunkTier, optimizer_class: type[Optimizer], given: dict[str, Any], settings: SettingsOf
    ) -> None:
        self.tier = tier
        self._optimizer = BorrowingOptimizer(optimizer_class, given)
        self._settings = settings
        self._prediction = StatePrediction(optimizer_class, for_cpu(given))
        self._new: list[HostParameter] = []
        self._chunks: dict[HostParameter, list[StateChunk]] = {}

    def converted(self, key: Any, value: Any, held: HostParameter) -> Any:
        """A copy of a value of a state that is loaded: for the step, with tensors of elements on the CPU."""
        return host_copy(key, value, held)

    def add(self, held: HostParameter) -> None:
        self._new.append(held)

    def state_of(self, held: HostParameter) -> State:
        states = [chunk.states[index] for chunk, index in self._parts_of(held)]
        return dict(states[0]) if states else {}

    def open(self, held: HostParameter) -> State:
        (state,) = self.load_all([held])
        for chunk, index in self._parts_of(held):
            self.tier.set_opened(chunk, index, state)
        return state

    def prepare(self, held: Iterable[HostParameter]) -> None:
        self._form_chunks()
        stepped: dict[StateChunk, set[int]] = {}
        for one in held:
            one.check()
            for chunk, index in self._parts_of(one):
                stepped.setdefault(chunk, set()).add(index)
        for chunk, indices in stepped.items():
            # A step that is still being queued changes the chunk's states.
            finish(chunk.stepped)
            chunk.stepped = None
            settings = self._settings(chunk.parts[0].held)
            states = [
                self._predicted(chunk, index, settings) if index in indices else _on_meta(chunk.states[index])
                for index in range(len(chunk.parts))
            ]
            layout = Layout.of(states)
            chunk.target = None if layout == chunk.layout else (layout, self._place(chunk, layout))

    def load_all(self, held: Sequence[HostParameter]) -> list[State]:
        seen: dict[StateChunk, list[State]] = {}
        whole = []
        for one in held:
            parts = self._parts_of(one)
            for chunk, _ in parts:
                if chunk not in seen:
                    seen[chunk] = self.tier.host_states(chunk)
            pieces = [seen[chunk][index] for chunk, index in parts]
            whole.append({name: _joined(one, [piece[name] for piece in pieces]) for name in (pieces or [{}])[0]})
            for chunk, _ in parts:
                if chunk.is_cut:
                    # It belongs to this parameter alone, and was copied.
                    del seen[chunk]
        return whole

    def put(self, states: Sequence[tuple[HostParameter, State]]) -> None:
        self._form_chunks()
        given = dict(states)
        done: set[StateChunk] = set()
        for held in given:
            # All chunks of a parameter that is cut, or the one that it shares with others.
            chunks = [chunk for chunk in self._chunks[held] if chunk not in done]
            converted = {
                part.held: {key: self.converted(key, value, part.held) for key, value in given[part.held].items()}
                for part in (part for chunk in chunks[:1] for part in chunk.parts)
                if part.held in given
            }
            for chunk in chunks:
                self._put_states(chunk, converted)
            done.update(chunks)

    def begin(self, held: Sequence[HostParameter]) -> None:
        for one in held:
            like = torch.nn.Parameter(
                torch.empty_strided(*one.form, dtype=one.work_dtype, device="cpu"), requires_grad=False
            )
            self.put([(one, self._optimizer.begin([like], self._settings(one)).get(like, {}))])

    def forget_master(self, held: HostParameter) -> None:
        for chunk, index in self._parts_of(held):
            chunk.states[index].pop(MASTER, None)

    def discard(self, held: HostParameter) -> None:
        for chunk, index in self._parts_of(held):
            # Parameters that share the chunk keep it. It gets another layout.
            chunk.states[index] = {}
            chunk.begun[index] = False
        self._chunks.pop(held, None)

    def close(self) -> None:
        self._chunks.clear()
        self._new.clear()

    def transfers_of(self, steps: Iterable[Snapshot], cost: StepCost) -> dict[DeviceContext, list[ChunkTransfer]]:
        """The transfers of a step, by GPU, in the order of the steps."""
        by_chunk: dict[StateChunk, dict[int, Snapshot]] = {}
        for step in steps:
            parts = self._parts_of(step.held)
            follow_first([chunk.states[index] for chunk, index in parts])
            for chunk, index in parts:
                by_chunk.setdefault(chunk, {})[index] = step
        transfers: dict[DeviceContext, list[ChunkTransfer]] = {}
        for chunk, found in by_chunk.items():
            settings = self._settings(chunk.parts[0].held)
            transfers.setdefault(chunk.context, []).append(ChunkTransfer(chunk, found, settings, cost))
        return transfers

    def parameter(self, transfer: ChunkTransfer, index: int, values: torch.Tensor) -> torch.nn.Parameter:
        """The tensor that is stepped for a part whose parameter has these values: its master weight, if it has one."""
        held, stepped = transfer.chunk.parts[index].held, values
        if held.has_master:
            master = transfer.states[index].get(MASTER)
            if master is not None:
                follow(master, values)
            stepped = values.to(held.work_dtype) if master is None else master
        return torch.nn.Parameter(stepped, requires_grad=False)

    def step_parts(self, transfer: ChunkTransfer, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        """Step the parts of a loaded chunk that have a gradient. ``parameters`` are by the numbers of the parts."""
        chunk, states = transfer.chunk, transfer.states
        lent: defaultdict[torch.Tensor, State] = defaultdict(dict)
        new = [parameter for index, parameter in parameters.items() if not chunk.begun[index]]
        if new:
            lent.update(self._optimizer.begin(new, transfer.settings))
        for index, parameter in parameters.items():
            if chunk.begun[index]:
                lent[parameter] = {name: value for name, value in states[index].items() if name != MASTER}
        try:
            self._optimizer.step_each(list(parameters.values()), transfer.settings, lent)
        finally:
            for parameter in parameters.values():
                parameter.grad = None
        for index, parameter in parameters.items():
            states[index] = lent[parameter]
            if chunk.parts[index].held.has_master:
                states[index][MASTER] = parameter.detach()
            chunk.begun[index] = True

    def send_back(self, transfer: ChunkTransfer, pipeline: TransferPipeline) -> None:
        """Store a chunk that was stepped. Without memory for states that the class has made, they stay here."""
        with on_error(pipeline.drop, transfer), on_error(self.tier.keep, transfer):
            layout, place = self._packed(transfer, pipeline)
            pipeline.put(transfer, place, layout)
        transfer.chunk.set_stored(transfer.states, layout, place)

    def _packed(self, transfer: ChunkTransfer, pipeline: TransferPipeline) -> tuple[Layout, Any]:
        """Move all tensors of the states into the transfer's memory, in the layout of their place."""
        chunk, states = transfer.chunk, transfer.states
        layout = Layout.of(states)
        place = self._place(chunk, layout)
        memory = transfer.memory
        if layout.nbytes and (layout != chunk.layout or not chunk.is_stored):
            if transfer.room is None or layout != transfer.next_layout():
                if transfer.room is not None:
                    self.tier.release(chunk.context, transfer.room)
                    transfer.room = None
                transfer.room = pipeline.with_room(lambda: self.tier.memory(chunk.context, layout.nbytes))
            memory = transfer.room
        for slot in layout.slots:
            view, value = slot.view(memory), states[slot.part][slot.name]
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
            states[slot.part][slot.name] = view
        if memory is transfer.room and memory is not None:
            if transfer.memory is not None:
                self.tier.release(chunk.context, transfer.memory)
            transfer.memory, transfer.room = memory, None
        return layout, place

    def _place(self, chunk: StateChunk, layout: Layout) -> Any:
        """A place for a chunk in this layout: its own, the one that was reserved for the next step, or a new one."""
        for known, place in ((chunk.layout, chunk.place), chunk.target or (None, None)):
            if known == layout and place is not None:
                return place
        return self.tier.reserve(chunk, layout)

    def _put_states(self, chunk: StateChunk, converted: Mapping[HostParameter, State]) -> None:
        loaded = [index for index, part in enumerate(chunk.parts) if part.held in converted]
        # Parameters that share the chunk keep their states.
        shares = len(loaded) < len(chunk.parts)
        states: list[State] = self.tier.host_states(chunk) if shares else [{} for _ in chunk.parts]
        for index in loaded:
            part = chunk.parts[index]
            state = {key: part_of(value, *part) for key, value in converted[part.held].items()}
            master = state.pop(MASTER, None)
            # Last, as after a step.
            states[index] = {**state, MASTER: master} if part.held.has_master and master is not None else state
        layout = Layout.of(states)
        place = self._place(chunk, layout)
        self.tier.write(chunk, states, layout, place)
        chunk.set_stored(states, layout, place)
        for index in loaded:
            chunk.begun[index] = bool(states[index].keys() - {MASTER})

    def _parts_of(self, held: HostParameter) -> list[tuple[StateChunk, int]]:
        return [
            (chunk, index)
            for chunk in self._chunks.get(held, ())
            for index, part in enumerate(chunk.parts)
            if part.held is held
        ]

    def _form_chunks(self) -> None:
        """Make chunks for new parameters, so that a few of them fit the in-flight limit.

        Large parameters are cut, if they may be. Small neighbours that are alike share a chunk.
        """
        for context in {held.context: None for held in self._new}:
            most = min(CHUNK, max(_LEAST, context.transfers.window // (_IN_FLIGHT * _BYTES_AN_ELEMENT)))
            of_device = [held for held in self._new if held.context is context]
            for alike in batches(of_device, most, size=lambda one: one.numel, key=lambda one: one.kind):
                first, size = alike[0], alike[0].numel
                parts = [[ChunkPart(one, 0, one.numel) for one in alike]]
                if first.cut and size > most:
                    parts = [[ChunkPart(first, at, min(most, size - at))] for at in range(0, size, most)]
                chunks = [StateChunk(some) for some in parts]
                self._chunks.update((one, chunks) for one in alike)
        self._new.clear()

    def _predicted(self, chunk: StateChunk, index: int, settings: Settings) -> State:
        """A part's state after a step, in meta tensors."""
        part = chunk.parts[index]
        if chunk.begun[index]:
            state = _on_meta(chunk.states[index])
        else:
            state = self._prediction.state(*part.form, part.held.work_dtype, settings)
        if part.held.has_master:
            state[MASTER] = torch.empty_strided(*part.form, dtype=part.held.work_dtype, device="meta")
        return state


def _on_meta(state: State) -> State:
    def on_meta(value: Any) -> Any:
        if isinstance(value, Slot):
            return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device="meta")
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    return {name: on_meta(value) for name, value in state.items()}


def _joined(held: HostParameter, pieces: Sequence[Any]) -> Any:
    """A tensor made of its pieces, without a copy if they are neighbours in the same memory."""
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
    torch.cat(list(pieces), out=flat(whole))
    return whole
