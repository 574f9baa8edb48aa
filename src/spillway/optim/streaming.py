"""Streaming of states in chunks: to where they are stepped, and back. See NOTE [ State stores ]."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim import Optimizer

from spillway.errors import TierError, TierFullError
from spillway.optim.gradient import DeviceContext
from spillway.optim.host_parameter import HostParameter
from spillway.optim.optimizer_class import BorrowingOptimizer, State, StatePrediction, for_cpu
from spillway.optim.state_store import ParamStep, Settings, SettingsOf, StateStore, StepCost
from spillway.optim.states import MASTER, Layout, Slot, follow_first, moves, part_of
from spillway.optim.tensors import CHUNK, batches, flat, follow, on_error
from spillway.optim.transfers import SentTensor
from spillway.runtime.backend import Event, raise_again
from spillway.runtime.bytes import Bytes, over

_LEAST = 1 << 16
_BYTES_AN_ELEMENT = 16
_IN_FLIGHT = 4

_Made = TypeVar("_Made")


class ChunkPart(NamedTuple):
    """Elements of a parameter, in memory order."""

    held: HostParameter
    start: int
    numel: int

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of its tensors: the parameter's own, or those of a flat piece."""
        return self.held.form if self.numel == self.held.numel else ((self.numel,), (1,))

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter's own elements."""
        return self.numel * self.held.local().itemsize

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor in the parameter's memory layout."""
        return whole.as_strided(*self.form, int(whole.storage_offset()) + self.start)


class StateChunk:
    """States and masters that move together: of a piece of one parameter, or of several whole parameters.

    A stored tensor is a :class:`~spillway.optim.states.Slot` in its state. A tensor that could not be stored is in the
    state itself, where it was stepped.
    """

    def __init__(self, parts: Sequence[ChunkPart]) -> None:
        self.parts = parts
        self.states: list[State] = [{} for _ in parts]
        """Of each part, with its master."""
        self.begun = [False] * len(parts)
        """Which parts have a state of the class's."""
        self.layout = Layout()
        """Of what is stored."""
        self.place: Any = None
        """Where it is stored; for the store alone."""
        self.target: tuple[Layout, Any] | None = None
        """The layout after the next step, and a place for it, if it differs."""

    @property
    def context(self) -> DeviceContext:
        return self.parts[0].held.context

    @property
    def is_cut(self) -> bool:
        """Whether it is a piece of a parameter."""
        return self.parts[0].numel < self.parts[0].held.numel

    @property
    def is_stored(self) -> bool:
        """Whether there is something to load."""
        return any(isinstance(value, Slot) for state in self.states for value in state.values())

    def opened(self, memory: Bytes | None) -> list[State]:
        """The states with all their tensors. Those that were stored are in memory now."""
        return [
            {name: value.view(memory) if isinstance(value, Slot) else value for name, value in state.items()}
            for state in self.states
        ]

    def set_stored(self, states: Sequence[State], layout: Layout, place: Any) -> None:
        """These are the states now, and their tensors are stored."""
        slots = {(slot.part, slot.name): slot for slot in layout.slots}
        self.layout, self.place, self.target = layout, place, None
        self.states = [
            {name: slots.get((index, name), value) for name, value in state.items()}
            for index, state in enumerate(states)
        ]


@dataclass(eq=False, slots=True)
class ChunkTransfer:
    """One chunk's way to its step, and back."""

    chunk: StateChunk
    steps: Mapping[int, ParamStep]
    """Of the parts that are stepped, by their numbers."""
    settings: Settings
    cost: StepCost
    memory: Bytes | None = None
    """The chunk's bytes while it is here."""
    room: Bytes | None = None
    """Memory for its bytes after the step, if their layout differs."""
    arrived: Event | None = None
    left: Event | None = None
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients that were loaded with it, by the numbers of the parts."""
    values: dict[int, SentTensor] = field(default_factory=dict)
    """Parameters that were read for it, likewise."""
    states: list[State] = field(default_factory=list)
    """The states, until they are safely stored."""
    ready: Event | None = None
    """When the parameters may be read and written."""
    nbytes: int = 0
    """Its bytes within the in-flight limit."""

    def next_layout(self) -> Layout | None:
        """The layout after the step, as far as it is known, if it is not the one that is loaded."""
        chunk = self.chunk
        if chunk.target is not None:
            return chunk.target[0]
        return None if chunk.is_stored or not chunk.layout.nbytes else chunk.layout


class TransferPipeline:
    """Loads chunks in order, ahead of their steps, and stores them again.

    Half of the in-flight limit is for chunks that arrive ahead. A chunk larger than the limit is transferred alone.
    """

    def __init__(self, store: ChunkedStore, window: int, transfers: Iterable[ChunkTransfer]) -> None:
        self._store = store
        self._window = window
        self._expected = deque(transfers)
        self._arriving: deque[ChunkTransfer] = deque()
        self._leaving: deque[ChunkTransfer] = deque()
        self._arriving_bytes = 0
        self._nbytes = 0
        self._error: TierError | None = None

    def take(self, transfer: ChunkTransfer) -> None:
        """Wait for the next chunk, and let those behind it arrive meanwhile.

        Raises:
            TierError: if the chunk cannot be loaded, or one could not be stored. Nothing is loaded from then on:
                unstored chunks need memory that nobody can foresee.
        """
        if self._error is not None:
            self._expected.clear()
            raise_again(self._error)
        if not self._arriving:
            with on_error(self._expected.popleft):
                self.with_room(self._load)
        self._load_ahead()
        assert self._arriving[0] is transfer
        self._arriving.popleft()
        self._arriving_bytes -= transfer.nbytes
        with on_error(self.drop, transfer):
            self._store.wait(transfer)

    def with_room(self, make: Callable[[], _Made]) -> _Made:
        """Do something that needs memory. If there is none, chunks that leave or arrive ahead make room.

        Raises:
            TierFullError: if that is not enough.
        """
        while True:
            try:
                return make()
            except TierFullError:
                if self._leaving:
                    self._finish_oldest()
                elif self._arriving:
                    transfer = self._arriving.pop()
                    self._arriving_bytes -= transfer.nbytes
                    self._cancel(transfer)
                    self._expected.appendleft(transfer)
                else:
                    raise
                if self._error is not None:
                    raise_again(self._error)

    def put(self, transfer: ChunkTransfer, place: Any, layout: Layout) -> None:
        """Store a chunk that was stepped."""
        self._store.put_chunk(transfer, place, layout)
        self._leaving.append(transfer)

    def drop(self, transfer: ChunkTransfer) -> None:
        """Free the memory of a chunk that was not stepped."""
        self._nbytes -= transfer.nbytes
        self._store.drop(transfer)

    def settle(self) -> None:
        """Wait for all chunks that leave, and for those that arrived without being taken.

        Raises:
            TierError: the first error.
        """
        self._expected.clear()
        with contextlib.ExitStack() as stack:
            for _ in self._leaving:
                stack.callback(self._finish_oldest)
            while self._arriving:
                stack.callback(self._cancel, self._arriving.pop())
        if self._error is not None:
            raise_again(self._error)

    def _load_ahead(self) -> None:
        while self._expected and self._arriving_bytes + self._store.nbytes(self._expected[0]) <= self._window // 2:
            try:
                self._load()
            except TierFullError:
                # There may be memory when it is taken.
                return

    def _load(self) -> None:
        transfer = self._expected[0]
        transfer.nbytes = self._store.nbytes(transfer)
        while self._leaving and self._nbytes + transfer.nbytes > self._window:
            self._finish_oldest()
            if self._error is not None:
                raise_again(self._error)
        self._store.load(transfer)
        self._expected.popleft()
        self._arriving.append(transfer)
        self._arriving_bytes += transfer.nbytes
        self._nbytes += transfer.nbytes

    def _finish_oldest(self) -> None:
        transfer = self._leaving.popleft()
        self._nbytes -= transfer.nbytes
        try:
            self._store.finish(transfer)
        except TierError as error:
            self._error = self._error or error

    def _cancel(self, transfer: ChunkTransfer) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.drop, transfer)
            self._store.wait(transfer)


class ChunkedStore(StateStore):
    """A store whose states are streamed in chunks to where they are stepped.

    A subclass says where chunks are stored and how they move.
    """

    def __init__(self, optimizer_class: type[Optimizer], given: dict[str, Any], settings: SettingsOf) -> None:
        self._optimizer = BorrowingOptimizer(optimizer_class, given)
        self._settings = settings
        self._prediction = StatePrediction(optimizer_class, for_cpu(given))
        self._new: list[HostParameter] = []
        self._chunks: dict[HostParameter, list[StateChunk]] = {}

    # How chunks move.

    @abstractmethod
    def nbytes(self, transfer: ChunkTransfer) -> int:
        """Bytes that a transfer takes of the in-flight limit."""

    @abstractmethod
    def reserve(self, chunk: StateChunk, layout: Layout) -> Any:
        """A place to store a chunk in this layout. It is freed with its last reference.

        Raises:
            TierFullError: if there is no room.
        """

    @abstractmethod
    def load(self, transfer: ChunkTransfer) -> None:
        """Queue the copy of a chunk to where it is stepped."""

    @abstractmethod
    def wait(self, transfer: ChunkTransfer) -> None:
        """Let the step wait for the chunk."""

    @abstractmethod
    def memory(self, context: DeviceContext, nbytes: int) -> Bytes:
        """Memory that the step may write now."""

    def release(self, context: DeviceContext, memory: Bytes) -> None:
        """Free memory that no copy uses."""

    @abstractmethod
    def keep(self, transfer: ChunkTransfer) -> None:
        """The chunk cannot be stored. Its states stay here for the next step."""

    @abstractmethod
    def drop(self, transfer: ChunkTransfer) -> None:
        """Free all memory of a transfer whose chunk is here, or will not arrive."""

    @abstractmethod
    def put_chunk(self, transfer: ChunkTransfer, place: Any, layout: Layout) -> None:
        """Queue the copy of a chunk to its place."""

    @abstractmethod
    def finish(self, transfer: ChunkTransfer) -> None:
        """Wait until the chunk is stored, and free the transfer's memory.

        Raises:
            TierError: if it could not be stored. It is still here then.
        """

    @abstractmethod
    def host_states(self, chunk: StateChunk) -> list[State]:
        """All states of a chunk in CPU memory, while no transfer is under way."""

    def set_opened(self, chunk: StateChunk, index: int, state: State) -> None:
        """The user may write to a part's state, which :meth:`host_states` gave."""

    @abstractmethod
    def write(self, chunk: StateChunk, states: list[State], layout: Layout, place: Any) -> None:
        """Store states of CPU memory, while no transfer is under way."""

    @abstractmethod
    def converted(self, key: Any, value: Any, held: HostParameter) -> Any:
        """A copy of a value of a state that is loaded: for the step, with tensors of elements on the CPU."""

    # What all chunked stores do alike.

    def add(self, held: HostParameter) -> None:
        self._new.append(held)

    def state_of(self, held: HostParameter) -> State:
        states = [chunk.states[index] for chunk, index in self._parts_of(held)]
        return dict(states[0]) if states else {}

    def open(self, held: HostParameter) -> State:
        (state,) = self.load_all([held])
        for chunk, index in self._parts_of(held):
            self.set_opened(chunk, index, state)
        return state

    def prepare(self, held: Iterable[HostParameter]) -> None:
        self._form_chunks()
        stepped: dict[StateChunk, set[int]] = {}
        for one in held:
            one.check()
            for chunk, index in self._parts_of(one):
                stepped.setdefault(chunk, set()).add(index)
        for chunk, indices in stepped.items():
            settings = self._settings(chunk.parts[0].held)
            states = [
                self._predicted(chunk, index, settings) if index in indices else _on_meta(chunk.states[index])
                for index in range(len(chunk.parts))
            ]
            layout = Layout.of(states)
            if layout == chunk.layout:
                chunk.target = None
            elif chunk.target is None or chunk.target[0] != layout:
                chunk.target = (layout, self.reserve(chunk, layout))

    def load_all(self, held: Sequence[HostParameter]) -> list[State]:
        seen: dict[StateChunk, list[State]] = {}
        whole = []
        for one in held:
            parts = self._parts_of(one)
            for chunk, _ in parts:
                if chunk not in seen:
                    seen[chunk] = self.host_states(chunk)
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

    def transfers_of(self, steps: Iterable[ParamStep], cost: StepCost) -> dict[DeviceContext, list[ChunkTransfer]]:
        """The transfers of a step, by device, in the order of the steps."""
        by_chunk: dict[StateChunk, dict[int, ParamStep]] = {}
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
        """The tensor that is stepped for a part whose parameter has these values: its master, if it has one."""
        held, stepped = transfer.chunk.parts[index].held, values
        if held.has_master:
            master = transfer.states[index].get(MASTER)
            if master is not None:
                follow(master, values)
            stepped = values.to(held.work_dtype) if master is None else master
        return torch.nn.Parameter(stepped, requires_grad=False)

    def step_parts(self, transfer: ChunkTransfer, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        """Step the parts of a chunk that have a gradient.

        Args:
            transfer: its chunk is here, and its states are open.
            parameters: the tensors that are stepped, by the numbers of the parts.
        """
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
        """Store a chunk that was stepped.

        Raises:
            TierFullError: if there is no room for what the class has made of its states. They stay here then.
        """
        with on_error(pipeline.drop, transfer), on_error(self.keep, transfer):
            layout, place = self._packed(transfer, pipeline)
        transfer.chunk.set_stored(transfer.states, layout, place)
        pipeline.put(transfer, place, layout)

    def _packed(self, transfer: ChunkTransfer, pipeline: TransferPipeline) -> tuple[Layout, Any]:
        """Move all tensors of the states into the transfer's memory, in the layout of their place."""
        chunk, states = transfer.chunk, transfer.states
        layout = Layout.of(states)
        if layout == chunk.layout:
            place = chunk.place
        elif chunk.target is not None and layout == chunk.target[0]:
            place = chunk.target[1]
        else:
            place = self.reserve(chunk, layout)
        memory = transfer.memory
        if layout.nbytes and (layout != chunk.layout or not chunk.is_stored):
            if transfer.room is None or layout != transfer.next_layout():
                if transfer.room is not None:
                    self.release(chunk.context, transfer.room)
                    transfer.room = None
                transfer.room = pipeline.with_room(lambda: self.memory(chunk.context, layout.nbytes))
            memory = transfer.room
        for slot in layout.slots:
            view, value = slot.view(memory), states[slot.part][slot.name]
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
            states[slot.part][slot.name] = view
        if memory is transfer.room and memory is not None:
            if transfer.memory is not None:
                self.release(chunk.context, transfer.memory)
            transfer.memory, transfer.room = memory, None
        return layout, place

    def _put_states(self, chunk: StateChunk, converted: Mapping[HostParameter, State]) -> None:
        loaded = [index for index, part in enumerate(chunk.parts) if part.held in converted]
        # Parameters that share the chunk keep their states.
        shares = len(loaded) < len(chunk.parts)
        states: list[State] = self.host_states(chunk) if shares else [{} for _ in chunk.parts]
        for index in loaded:
            part = chunk.parts[index]
            state = {key: part_of(value, *part) for key, value in converted[part.held].items()}
            master = state.pop(MASTER, None)
            # Last, as after a step.
            states[index] = {**state, MASTER: master} if part.held.has_master and master is not None else state
        layout = Layout.of(states)
        place = chunk.place if layout == chunk.layout and chunk.place is not None else self.reserve(chunk, layout)
        self.write(chunk, states, layout, place)
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
