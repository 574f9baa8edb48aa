"""The store of states and fp32 master weights between steps, which also steps parameters.

NOTE [ The state store ]

The unit of the store is a *chunk*: a piece of a large parameter or several small parameters, with master weights and
states side by side. A *tier* is the place of the chunks between steps:

* :class:`~spillway.optim.cpu_store.MemoryTier`: CPU memory.
* :class:`~spillway.optim.cpu_store.DiskTier`: the session's spill file.
* :class:`~spillway.optim.gpu_store.PinnedTier`: pinned memory.

The store steps the chunks on the CPU (:class:`~spillway.optim.cpu_store.CpuStore`), or on the GPU
(:class:`~spillway.optim.gpu_store.GpuStore`). A transfer takes one chunk to its step and back. A pipeline prefetches
what the next steps need, and stores the chunks of earlier steps. In CPU memory chunks are stepped where they are, and
only parameters are prefetched.

A state is stored once. While it is stored elsewhere, its tensors are ``Slot``s. Numbers, like a count of steps, are not
moved. If a chunk cannot be written back, for example to a full disk, it stays where it was stepped. The user gets the
error, and the next step uses the chunk from there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.optim.chunks import ChunkPart, ChunkTier, ChunkTransfer, Layout, Slot, StateChunk, TransferPipeline, moves
from spillway.optim.gradient import DeviceContext, Snapshot
from spillway.optim.host_parameter import HostParameter
from spillway.optim.optimizer_class import (
    MASTER,
    BorrowingOptimizer,
    GroupWrites,
    Settings,
    State,
    StatePrediction,
    for_cpu,
)
from spillway.optim.options import StepTimes
from spillway.optim.states import follow_first, host_copy, part_of
from spillway.optim.tensors import CHUNK, flat, follow
from spillway.runtime.backend import Event, Several, Stalls, TaskEnd, finish, on_error
from spillway.runtime.bytes import over
from spillway.types import OptimizerStats

_LEAST = 1 << 16
_BYTES_AN_ELEMENT = 16
_IN_FLIGHT = 4
_LINE = 64
"""Pieces are multiples of so many elements. See NOTE [ Pieces ] in ``__init__.py``."""

_TOGETHER = 1 << 20
"""Least elements that are stepped at once in backward. Small parameters wait for each other, or for ``step``."""

SettingsOf = Callable[[HostParameter], Settings]
"""Gives the settings of a parameter's group, for the place of its step."""


def in_order(steps: Sequence[Snapshot]) -> Sequence[Snapshot]:
    """Steps in the order in which their gradients arrive, unless a factor needs all of them."""
    return steps if any(step.factors for step in steps) else sorted(steps, key=lambda step: step.number)


@dataclass(eq=False)
class StepCost:
    """The cost of one step, counted from the end of the step before."""

    on_host: int = 0
    """Elements that the CPU steps."""
    streamed: int = 0
    """Elements that the GPU steps with streamed state."""
    host_seconds: float = 0.0
    """How long the CPU computes."""
    read_bytes: int = 0
    """Bytes read from the spill file."""
    written_bytes: int = 0
    """Bytes written there."""
    closing: list[Event] = field(default_factory=list)
    """When all state is back in its place."""
    written: dict[int, GroupWrites] = field(default_factory=dict)
    """Entries that the class changed in its groups, by their numbers; complete when the step is done."""
    given_out: deque[TaskEnd] = field(default_factory=deque)
    """Chunks that workers of the CPU step, and that may not be done: they hold pinned memory."""
    kept: list[object] = field(default_factory=list)
    """Owners of memory that the step reads on another stream. Compute waits for it before they are dropped."""
    _began: float = field(default_factory=time.perf_counter)
    _seconds: float = 0.0
    _counts: list[tuple[Stalls, int, int]] = field(default_factory=list)
    _reserved: int = 0

    def finish(self) -> None:
        """Wait until all state is back in its place. Raises what went wrong with that."""
        closing, self.closing = self.closing, []
        Several(closing).synchronize()

    def end(self, contexts: Iterable[DeviceContext]) -> None:
        """The compute streams wait for all that was queued: the step ends."""
        self._seconds = time.perf_counter() - self._began
        self.kept.clear()
        self.written.clear()
        # All are done. They may hold an error.
        self.given_out.clear()
        for context in contexts:
            context.transfers.settle()
            context.end_step()
            self._counts.append(context.transfers.take_counts())
            self._reserved += context.transfers.arena.reserved_bytes

    def stats(self) -> OptimizerStats:
        return OptimizerStats(
            stepped_on_host=self.on_host,
            streamed=self.streamed,
            host_seconds=self.host_seconds,
            stall_seconds=sum(stalls.seconds() for stalls, _, _ in self._counts),
            sent_bytes=sum(sent for _, sent, _ in self._counts),
            received_bytes=sum(received for _, _, received in self._counts),
            host_bytes=self._reserved,
            read_bytes=self.read_bytes,
            written_bytes=self.written_bytes,
        )

    def times(self) -> StepTimes:
        stats = self.stats()
        return StepTimes(self._seconds, stats.stall_seconds, stats.host_seconds)


class StateStore(ABC):
    """Stores states and master weights between steps. A subclass steps them. See NOTE [ The state store ]."""

    steps_on_device: bool = False
    """Whether the GPU steps the parameters. Gradients that are on the GPU then stay there."""

    def __init__(
        self, tier: ChunkTier, optimizer_class: type[Optimizer], given: dict[str, Any], settings: SettingsOf
    ) -> None:
        self.tier = tier
        self._optimizer = BorrowingOptimizer(optimizer_class, given)
        self._settings = settings
        self._prediction = StatePrediction(optimizer_class, for_cpu(given))
        self._new: list[HostParameter] = []
        self._chunks: dict[HostParameter, list[tuple[StateChunk, int]]] = {}
        """The chunks of each parameter, with its number in them."""

    @abstractmethod
    def may_cut(self, held: HostParameter) -> bool:
        """Whether a parameter may be stepped in pieces."""

    @abstractmethod
    def step(self, steps: Sequence[Snapshot], cost: StepCost, *, overlapped: bool) -> None:
        """Step parameters by their gradients, or queue that. ``overlapped``: blocks wait in the next forward."""

    def settle(self, cost: StepCost) -> None:  # noqa: B027
        """All parameters of a step are queued: complete it, or queue that."""

    def complete(self, waiting: Sequence[HostParameter]) -> list[HostParameter]:
        """Those parameters that may be stepped during backward, of some whose gradients have arrived."""
        # Small parameters wait for each other.
        return list(waiting) if sum(one.numel for one in waiting) >= _TOGETHER else []

    def converted(self, key: Any, value: Any, held: HostParameter) -> Any:
        """A value of a state that is put: for the step, with tensors of elements on the CPU."""
        return host_copy(key, value, held)

    def add(self, held: HostParameter) -> None:
        self.tier.add(held)
        self.take_over(held)
        self._new.append(held)

    def take_over(self, held: HostParameter) -> None:
        """From now on a parameter of this store is stepped here."""
        held.store, held.cut = self, self.may_cut(held)

    def state_of(self, held: HostParameter) -> State:
        """A parameter's state, with slots for tensors that are elsewhere."""
        pieces = [chunk.states[index] for chunk, index in self._parts_of(held)]
        state = {}
        for name in _common(pieces):
            values = [piece[name] for piece in pieces]
            # Some pieces may be stored, if others could not be.
            stored = next((value for value in values if isinstance(value, Slot)), None)
            state[name] = _joined(held, values) if stored is None else stored
        return state

    def open(self, held: HostParameter) -> State:
        """All of a parameter's state, on the CPU. The next step begins with what is written there."""
        (state,) = self.load_all([held])
        for chunk, index in self._parts_of(held):
            self.tier.set_opened(chunk, index, state)
        return state

    def others_in_chunks(self, held: Collection[HostParameter]) -> list[HostParameter]:
        """Further parameters whose states are in the chunks of these, and are stored again with them."""
        chunks = {chunk: None for one in held for chunk, _ in self._parts_of(one)}
        known = set(held)
        return [part.held for chunk in chunks for part in chunk.parts if part.held not in known]

    def prepare(self, held: Iterable[HostParameter]) -> None:
        """Reserve memory for what the next step of these parameters makes.

        Raises:
            TierFullError: if there is none. Nothing was stepped then, and no gradient changed.
            UsageError: if a parameter was moved, cast or resized.
        """
        self._form_chunks()
        stepped: dict[StateChunk, set[int]] = {}
        for one in held:
            one.check()
            for chunk, index in self._parts_of(one):
                if self.tier.streams:
                    stepped.setdefault(chunk, set()).add(index)
        for chunk, indices in stepped.items():
            # A step that is still being queued changes the chunk's states.
            finish(chunk.stepped)
            chunk.stepped = None
            if chunk.is_whole(indices):
                # A class makes its state in the first step.
                chunk.target = None
                continue
            layout = Layout.of(self._predicted(chunk, indices))
            chunk.target = None if layout == chunk.layout else (layout, self._place(chunk, layout))

    def load_all(self, held: Sequence[HostParameter]) -> list[State]:
        """All of the parameters' states with their master weights, on the CPU."""
        seen: dict[StateChunk, list[State]] = {}
        whole = []
        for one in held:
            parts = self._parts_of(one)
            for chunk, _ in parts:
                if chunk not in seen:
                    seen[chunk] = self.tier.host_states(chunk)
            pieces = [seen[chunk][index] for chunk, index in parts]
            whole.append({name: _joined(one, [piece[name] for piece in pieces]) for name in _common(pieces)})
            for chunk, _ in parts:
                if chunk.is_cut:
                    # It belongs to this parameter alone, and was copied.
                    del seen[chunk]
        return whole

    def put(self, states: Sequence[tuple[HostParameter, State]]) -> None:
        """Set parameters' states, as they were saved, with their master weights if they have some."""
        self._form_chunks()
        given = dict(states)
        done: set[StateChunk] = set()
        for held in given:
            # All chunks of a parameter that is cut, or the one that it shares with others.
            chunks = [chunk for chunk, _ in self._chunks[held] if chunk not in done]
            converted = {
                part.held: {key: self.converted(key, value, part.held) for key, value in given[part.held].items()}
                for part in (part for chunk in chunks[:1] for part in chunk.parts)
                if part.held in given
            }
            for chunk in chunks:
                self._put_states(chunk, converted)
            done.update(chunks)

    def begin(self, held: Sequence[HostParameter]) -> None:
        """Give new parameters the states that the class's constructor makes."""
        for one in held:
            like = torch.nn.Parameter(
                torch.empty_strided(*one.form, dtype=one.work_dtype, device="cpu"), requires_grad=False
            )
            group = {**self._settings(one), "params": [like]}
            self.put([(one, self._optimizer.begin([group], {like}).get(like, {}))])

    def forget_master(self, held: HostParameter) -> None:
        """The next step takes a parameter's master weight from the parameter."""
        for chunk, index in self._parts_of(held):
            chunk.states[index].pop(MASTER, None)

    def discard(self, held: HostParameter) -> None:
        for chunk, index in self._chunks.pop(held, ()):
            # Parameters that share the chunk keep it. It gets another layout.
            chunk.states[index] = {}
            chunk.begun[index] = False
        self.tier.discard(held)

    def close(self) -> None:
        """Free everything that parameters do not free themselves."""
        for held in list(self._chunks):
            self.discard(held)
        self._new.clear()

    def transfers_of(self, steps: Sequence[Snapshot], cost: StepCost) -> dict[DeviceContext, list[ChunkTransfer]]:
        """The transfers of a step, by GPU, in the order of the steps."""
        by_chunk: dict[StateChunk, dict[int, Snapshot]] = {}
        for step in steps:
            parts = self._parts_of(step.held)
            follow_first([chunk.states[index] for chunk, index in parts])
            for chunk, index in parts:
                by_chunk.setdefault(chunk, {})[index] = step
        transfers: dict[DeviceContext, list[ChunkTransfer]] = {}
        settings: dict[Hashable, Settings] = {}
        ready = {context: self._ready(context, steps) for context in {step.held.context: None for step in steps}}
        for chunk, found in by_chunk.items():
            held = chunk.parts[0].held
            if held.kind not in settings:
                settings[held.kind] = self._settings(held)
            transfer = ChunkTransfer(chunk, found, settings[held.kind], cost, ready[chunk.context])
            transfers.setdefault(chunk.context, []).append(transfer)
        return transfers

    def _ready(self, context: DeviceContext, steps: Sequence[Snapshot]) -> Event:
        """The event after which a step may read parameters and gradients of a GPU, and write the parameters.

        Compute may have read and written parameters since the last step.
        """
        mine = [step for step in steps if step.held.context is context]
        for step in mine:
            step.held.wait_for_home()
        # One that was offloaded, too, is still being read by the copy.
        gradients = [step.on_device for step in mine if step.on_device is not None and step.raw is None]
        return context.transfers.ready([*(step.held.local() for step in mine), *gradients])

    def note_queued(self, ends: Mapping[HostParameter, Sequence[Event]]) -> int:
        """Steps of parameters are queued, which end with these events. Gives the number of their elements."""
        for held, some in ends.items():
            held.mark_written()
            held.gradient.reader = held.updated = held.context.transfers.backend.all_of(some)
        return sum(held.numel for held in ends)

    def parameter(self, transfer: ChunkTransfer, index: int, values: torch.Tensor) -> torch.nn.Parameter:
        """The tensor that is stepped for a part whose parameter has these values: its master weight, if it has one."""
        part, stepped = transfer.chunk.parts[index], values
        if part.held.has_master:
            place, master = self.tier.master(part), transfer.states[index].get(MASTER)
            if master is not None:
                follow(master, values)
            else:
                master = values.to(part.held.work_dtype) if place is None else place.copy_(values)
            stepped = master
        return torch.nn.Parameter(stepped, requires_grad=False)

    def step_parts(self, transfer: ChunkTransfer, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        """Step the parts of a loaded chunk that have a gradient. ``parameters`` are by the numbers of the parts."""
        lent = self.lend(transfer, parameters)
        try:
            self._optimizer.step_each(list(parameters.values()), transfer.settings, lent)
        finally:
            for parameter in parameters.values():
                parameter.grad = None
        self.take_back(transfer, parameters, lent)

    def lend(
        self, transfer: ChunkTransfer, parameters: Mapping[int, torch.nn.Parameter]
    ) -> defaultdict[torch.Tensor, State]:
        """The states of some parts, for a step of the class's."""
        chunk = transfer.chunk
        lent: defaultdict[torch.Tensor, State] = defaultdict(dict)
        new = [parameter for index, parameter in parameters.items() if not chunk.begun[index]]
        if new:
            lent.update(self._optimizer.begin([{**transfer.settings, "params": new}], set(new)))
        for index, parameter in parameters.items():
            if chunk.begun[index]:
                lent[parameter] = {name: value for name, value in transfer.states[index].items() if name != MASTER}
        return lent

    def take_back(
        self,
        transfer: ChunkTransfer,
        parameters: Mapping[int, torch.nn.Parameter],
        lent: defaultdict[torch.Tensor, State],
    ) -> None:
        chunk, states = transfer.chunk, transfer.states
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
        chunk, states, before = transfer.chunk, transfer.states, transfer.memory
        layout = Layout.of(states)
        place = self._place(chunk, layout)
        if layout.nbytes and (layout != chunk.layout or not chunk.is_stored):
            transfer.memory = pipeline.freeing_memory(lambda: self.tier.memory(chunk.context, layout.nbytes))
        for slot in layout.slots:
            view, value = slot.view(transfer.memory), states[slot.part][slot.name]
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
            states[slot.part][slot.name] = view
        if before is not None and before is not transfer.memory:
            self.tier.release(chunk.context, before)
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
        layout = Layout.of(states) if self.tier.streams else Layout()
        place = self._place(chunk, layout)
        self.tier.write(chunk, states, layout, place)
        chunk.set_stored(states, layout, place)
        for index in loaded:
            chunk.begun[index] = bool(states[index].keys() - {MASTER})

    def _parts_of(self, held: HostParameter) -> list[tuple[StateChunk, int]]:
        return self._chunks.get(held, [])

    def _form_chunks(self) -> None:
        """Make chunks for new parameters. If they are streamed, a few of them fit the in-flight limit.

        Large parameters are cut, if they may be. Small neighbours that are alike share a chunk.
        """
        for context in {held.context: None for held in self._new}:
            most = CHUNK
            if self.tier.streams:
                fits = context.transfers.window // (_IN_FLIGHT * _BYTES_AN_ELEMENT)
                # Each costs kernels and waits. On the CPU caches count more.
                most = min(2 * CHUNK if self.steps_on_device else CHUNK, max(_LEAST, fits // _LINE * _LINE))
            together: list[list[ChunkPart]] = []
            for held in (one for one in self._new if one.context is context):
                size, last = held.numel, together[-1] if together else []
                if held.cut and size > most:
                    together += [[ChunkPart(held, at, min(most, size - at))] for at in range(0, size, most)]
                elif (
                    last
                    and last[0].held.kind == held.kind
                    and not last[0].is_cut
                    and sum(part.numel for part in last) + size <= most
                ):
                    last.append(ChunkPart(held, 0, size))
                else:
                    together.append([ChunkPart(held, 0, size)])
            for chunk in map(StateChunk, together):
                for index, part in enumerate(chunk.parts):
                    self._chunks.setdefault(part.held, []).append((chunk, index))
        self._new.clear()

    def _predicted(self, chunk: StateChunk, stepped: Iterable[int]) -> list[State]:
        """The states of a chunk after a step of some of its parts, in meta tensors."""
        states = [{name: _on_meta(value) for name, value in state.items()} for state in chunk.states]
        settings = self._settings(chunk.parts[0].held)
        for index in stepped:
            part = chunk.parts[index]
            if not chunk.begun[index]:
                states[index] = self._prediction.state(*part.form, part.held.work_dtype, settings)
            if part.held.has_master:
                states[index][MASTER] = torch.empty_strided(*part.form, dtype=part.held.work_dtype, device="meta")
        return states


def _common(pieces: Sequence[State]) -> list[Hashable]:
    """The names that all pieces of a parameter's state have."""
    return [name for name in (pieces[0] if pieces else ()) if all(name in piece for piece in pieces)]


def _on_meta(value: Any) -> Any:
    if isinstance(value, Slot):
        return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device="meta")
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _joined(held: HostParameter, pieces: Sequence[Any]) -> Any:
    """A tensor made of its pieces, without a copy if they are neighbours in the same memory."""
    first = pieces[0]
    if len(pieces) == 1 or not moves(first):
        return first
    storage = first.untyped_storage()
    ends = [piece.data_ptr() + piece.nbytes for piece in pieces]
    adjacent = all(piece.data_ptr() == end for piece, end in zip(pieces[1:], ends[:-1], strict=True))
    if adjacent and ends[-1] <= storage.data_ptr() + storage.nbytes():
        return over(storage, first.dtype, int(first.storage_offset()), *held.form)
    whole = held.new_host_tensor(first.dtype)
    torch.cat([piece.cpu() for piece in pieces], out=flat(whole))
    return whole
