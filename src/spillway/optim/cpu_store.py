"""Steps on the CPU, of states in CPU memory or in the spill file. See NOTE [ A step ] in ``__init__.py``."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.errors import SessionError, UnsupportedError
from spillway.optim.chunks import ChunkPart, ChunkTier, ChunkTransfer, Layout, Slot, StateChunk, TransferPipeline, moves
from spillway.optim.gradient import DeviceContext, Snapshot
from spillway.optim.host_parameter import HostParameter
from spillway.optim.optimizer_class import MASTER, ClassTraits, GroupWrites, Settings, State, for_cpu
from spillway.optim.state_store import SettingsOf, StateStore, StepCost, in_order
from spillway.optim.states import with_tensors
from spillway.optim.tensors import local_of, scratch_of
from spillway.optim.transfers import Upload
from spillway.runtime.arena import Block, Pinned, anonymous_pages, pages
from spillway.runtime.backend import Backend, Event, Several, on_error
from spillway.runtime.bytes import Bytes, Cells, over
from spillway.runtime.spill_file import Extent, SpillFile
from spillway.runtime.tiers import PIECE_BYTES, cut


class CpuTier(ChunkTier):
    """A tier whose chunks the CPU steps. With a chunk it loads the parameters, which are copied to CPU memory."""

    def nbytes(self, transfer: ChunkTransfer) -> int:
        return sum(pages(part.nbytes) for part in _read_parts(transfer).values())

    def load(self, transfer: ChunkTransfer) -> None:
        values = {index: part.of(part.held.local()) for index, part in _read_parts(transfer).items()}
        sent = transfer.chunk.context.transfers.fetch(list(values.values()), transfer.ready)
        transfer.values = dict(zip(values, sent, strict=True))

    def drop(self, transfer: ChunkTransfer) -> None:
        for sent in transfer.values.values():
            # Without its step nothing else waits for this copy, and compute may write the parameter.
            transfer.chunk.context.transfers.read(sent)
            transfer.chunk.context.transfers.give_back(sent)
        transfer.values.clear()
        transfer.states = []


class MemoryTier(CpuTier):
    """Keeps chunks in CPU memory, where they are stepped. Master weights are in pinned memory.

    If a parameter is cut, the states of its pieces are parts of whole tensors, which users see.
    """

    streams = False

    def __init__(self) -> None:
        self._wholes: defaultdict[HostParameter, State] = defaultdict(dict)
        self._pinned: dict[HostParameter, Pinned] = {}
        self._lock = threading.Lock()

    def discard(self, held: HostParameter) -> None:
        self._pinned.pop(held, None)
        self._wholes.pop(held, None)

    def make_master(self, held: HostParameter) -> None:
        """Reserve memory for a parameter's master weight. Raises ``TierFullError``."""
        with self._lock:
            if held not in self._pinned:
                pinned = Pinned(held.context.transfers.arena, held.numel * held.work_dtype.itemsize)
                pinned.synchronize()
                # A state dict that has it keeps the memory, too.
                storage = pinned.alias().untyped_storage()
                self._wholes[held][MASTER] = over(storage, held.work_dtype, 0, *held.form)
                self._pinned[held] = pinned

    def master(self, part: ChunkPart) -> torch.Tensor:
        self.make_master(part.held)
        # Its last copy to the GPU.
        self._pinned[part.held].synchronize(part.start)
        part.held.context.transfers.backend.host_access(self.master_cells(part).memory, write=True)
        return part.of(self._wholes[part.held][MASTER])

    def master_cells(self, part: ChunkPart) -> Cells:
        return part.cells(self._pinned[part.held].block, part.held.work_dtype)

    def uploaded(self, part: ChunkPart, end: Event) -> None:
        """A part's master weight is being copied to the GPU, until this event."""
        self._pinned[part.held].after(part.start, end)

    def set_state(self, chunk: StateChunk, index: int, state: State) -> None:
        """Set a part's state, of which new tensors become parts of whole ones."""
        part = chunk.parts[index]
        for name, value in state.items() if chunk.is_cut else ():
            if moves(value) and value.numel() == part.numel:
                with self._lock:
                    wholes = self._wholes[part.held]
                    if name not in wholes:
                        wholes[name] = part.held.new_host_tensor(value.dtype)
                if value.data_ptr() != wholes[name].data_ptr() + part.start * value.itemsize:
                    state[name] = part.of(wholes[name]).copy_(value)
        chunk.states[index] = state

    def host_states(self, chunk: StateChunk) -> list[State]:
        return chunk.opened(None)

    def write(self, chunk: StateChunk, states: list[State], layout: Layout, place: Any) -> None:
        for index, (part, state) in enumerate(zip(chunk.parts, states, strict=True)):
            if MASTER in state:
                state[MASTER] = self.master(part).copy_(state[MASTER])
            self.set_state(chunk, index, state)


class DiskPlace:
    """Consecutive extents of a chunk in the spill file. They are freed with the last reference."""

    def __init__(self, file: SpillFile, nbytes: int) -> None:
        self.file = file
        self.extents: list[Extent] = []
        weakref.finalize(self, _free, file, self.extents).atexit = False
        for start in range(0, nbytes, PIECE_BYTES):
            self.extents.append(file.allocate(min(PIECE_BYTES, nbytes - start)))


def _free(file: SpillFile, extents: Sequence[Extent]) -> None:
    # A closed session has freed them.
    with contextlib.suppress(SessionError):
        for extent in extents:
            file.free(extent)


class DiskTier(CpuTier):
    """Stores chunks in the spill file, and streams them to CPU memory."""

    def add(self, held: HostParameter) -> None:
        # Raises if no spill file can be made.
        held.context.transfers.spill_file()

    def nbytes(self, transfer: ChunkTransfer) -> int:
        return pages(transfer.stored_bytes) + pages(transfer.made_bytes) + super().nbytes(transfer)

    def reserve(self, chunk: StateChunk, layout: Layout) -> DiskPlace:
        return DiskPlace(chunk.context.transfers.spill_file(), layout.nbytes)

    def load(self, transfer: ChunkTransfer) -> None:
        chunk, context = transfer.chunk, transfer.chunk.context
        with on_error(self.drop, transfer):
            super().load(transfer)
            if chunk.is_stored:
                transfer.memory = self.memory(context, chunk.layout.nbytes)
                transfer.arrived = _move(context.transfers.backend, chunk.place, transfer.memory, read=True)
                transfer.cost.read_bytes += chunk.layout.nbytes

    def wait(self, transfer: ChunkTransfer) -> None:
        if transfer.arrived is not None:
            transfer.arrived.synchronize()

    def memory(self, context: DeviceContext, nbytes: int) -> Bytes:
        block = context.transfers.pinned(nbytes)
        context.transfers.backend.host_access(block, write=True)
        return block

    def release(self, context: DeviceContext, memory: Bytes) -> None:
        assert isinstance(memory, Block)
        context.transfers.arena.free(memory)

    def keep(self, transfer: ChunkTransfer) -> None:
        # The block in which they are is freed.
        transfer.chunk.states = [
            {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
            for state in transfer.states
        ]

    def drop(self, transfer: ChunkTransfer) -> None:
        super().drop(transfer)
        if transfer.memory is not None:
            self.release(transfer.chunk.context, transfer.memory)
            transfer.memory = None

    def store(self, transfer: ChunkTransfer, place: DiskPlace, layout: Layout) -> None:
        if layout.slots:
            assert transfer.memory is not None
            transfer.left = _move(transfer.chunk.context.transfers.backend, place, transfer.memory, read=False)
            transfer.cost.written_bytes += layout.nbytes

    def finish(self, transfer: ChunkTransfer) -> None:
        try:
            if transfer.left is not None:
                with on_error(self.keep, transfer):
                    transfer.left.synchronize()
        finally:
            self.drop(transfer)

    def host_states(self, chunk: StateChunk) -> list[State]:
        if not chunk.is_stored:
            return chunk.opened(None)
        memory = Bytes.of(anonymous_pages(pages(chunk.layout.nbytes)))
        _move(chunk.context.transfers.backend, chunk.place, memory, read=True).synchronize()
        return chunk.opened(memory)

    def set_opened(self, chunk: StateChunk, index: int, state: State) -> None:
        # The tensors are copies of what is stored. The next step has them from here.
        part = chunk.parts[index]
        chunk.states[index] = {
            name: part.of(state[name]) if isinstance(value, Slot) else value
            for name, value in chunk.states[index].items()
        }

    def write(self, chunk: StateChunk, states: list[State], layout: Layout, place: DiskPlace) -> None:
        if not layout.slots:
            return
        backend, memory = chunk.context.transfers.backend, Bytes.of(anonymous_pages(pages(layout.nbytes)))
        for slot in layout.slots:
            slot.view(memory).copy_(states[slot.part][slot.name])
        backend.host_access(memory, write=True)
        _move(backend, place, memory, read=False).synchronize()


def _move(backend: Backend, place: DiskPlace, memory: Bytes, *, read: bool) -> Event:
    """Have each extent read into memory, or written from there."""
    move = place.file.read if read else place.file.write
    moves = []
    for extent, part in zip(place.extents, cut(memory), strict=True):

        def task(extent: Extent = extent, part: Bytes = part) -> None:
            backend.host_access(part, write=read)
            move(extent, part.buffer())

        moves.append(backend.run(task))
    return Several(moves)


class CpuStore(StateStore):
    """Steps chunks on the CPU.

    Chunks in CPU memory are given to workers, which have one or two CPUs each. So a chunk's cast, step and upload stay
    in one core's caches, no team of threads has to be woken, and a parameter that is waited for keeps no worker from
    another. The worker thread itself steps chunks of parameters that may not be cut (NOTE [ Pieces ]), and streamed
    ones, by all CPUs together.
    """

    def __init__(
        self,
        tier: CpuTier,
        optimizer_class: type[Optimizer],
        given: dict[str, Any],
        settings: SettingsOf,
        *,
        workers: int,
    ) -> None:
        super().__init__(tier, optimizer_class, for_cpu(given), settings)
        self._name = optimizer_class.__name__
        self._in_memory = tier if isinstance(tier, MemoryTier) else None
        self._traits = ClassTraits.of(optimizer_class)
        self._workers = workers
        self._lock = threading.Lock()

    def may_cut(self, held: HostParameter) -> bool:
        return self._traits.is_fused(self._settings(held), held.work_dtype)

    def converted(self, key: Any, value: Any, held: HostParameter) -> Any:
        if self._traits.steps_alone:
            return super().converted(key, value, held)
        return with_tensors(value, lambda one: local_of(one).to("cpu"))

    def step(self, steps: Sequence[Snapshot], cost: StepCost, *, overlapped: bool) -> None:
        # The next forward needs the first parameters first.
        by_context = self.transfers_of(steps if overlapped else in_order(steps), cost)
        ends: dict[HostParameter, list[Event]] = {step.held: [] for step in steps}
        if steps and not self._traits.steps_alone:
            together = [transfer for transfers in by_context.values() for transfer in transfers]
            end = steps[0].held.context.lane.run(partial(self._step_chunks, together))
            ends = {held: [end] for held in ends}
        for context, transfers in by_context.items() if self._traits.steps_alone else ():
            pipeline = TransferPipeline(self.tier, context.transfers.window, transfers, cost.given_out)
            for transfer in transfers:
                end = context.lane.run(partial(self._step_chunk, transfer, pipeline))
                for step in transfer.steps.values():
                    ends[step.held].append(end)
            cost.closing.append(context.lane.run(pipeline.settle))
        cost.on_host += self.note_queued(ends)

    # All below is for the CPU worker thread.

    def _step_chunk(self, transfer: ChunkTransfer, pipeline: TransferPipeline) -> Event:
        chunk, memory = transfer.chunk, self._in_memory
        with torch.no_grad():
            pipeline.wait_for_workers(2 * self._workers - 1)
            pipeline.take(transfer)
            with on_error(pipeline.drop, transfer):
                for step in transfer.steps.values():
                    step.wait()
                    if memory is not None and step.held.has_master:
                        # Parameters that were read ahead are dropped if they leave no memory.
                        pipeline.freeing_memory(partial(memory.make_master, step.held))
                if memory is None:
                    end = self._step_chunks([transfer])
            if memory is None:
                # If the chunk cannot be stored, compute gets that error, and waits for nothing.
                with on_error(end.synchronize):
                    self.send_back(transfer, pipeline)
                return end
            if not chunk.parts[0].held.cut:
                return self._step_chunks([transfer])
            end = chunk.context.workers.run(partial(self._step_chunks, [transfer]))
            transfer.cost.given_out.append(end)
            return end

    # In any thread.

    def _step_chunks(self, transfers: Sequence[ChunkTransfer]) -> Event:
        """Step the parts of chunks, and queue their uploads; gives the end of those."""
        parameters: dict[ChunkTransfer, dict[int, torch.nn.Parameter]] = {transfer: {} for transfer in transfers}
        with torch.no_grad(), on_error(self._abandon, parameters):
            for transfer, mine in parameters.items():
                if not self._traits.steps_alone:
                    self.tier.load(transfer)
                transfer.states = transfer.chunk.opened(transfer.memory)
                for index in transfer.steps:
                    mine[index] = self._parameter(transfer, index)
            began, used = time.perf_counter(), 0
            for transfer, mine in parameters.items():
                for index, parameter in mine.items():
                    step, part = transfer.steps[index], transfer.chunk.parts[index]
                    # A class of the user's own may keep a gradient.
                    uses_scratch = step.needs_scratch and self._traits.steps_alone
                    scratch = scratch_of(step.held.work_dtype)[used:] if uses_scratch else None
                    parameter.grad = step.exact(part.start, part.form, scratch).to(step.held.work_dtype)
                    used += 0 if scratch is None else parameter.numel()
            if self._traits.steps_alone:
                for transfer, mine in parameters.items():
                    self.step_parts(transfer, mine)
            else:
                transfers[0].cost.written = self._step_together(parameters)
            ends = [self._upload(transfer, mine) for transfer, mine in parameters.items()]
            self._count(transfers[0], time.perf_counter() - began)
            return transfers[0].chunk.context.transfers.backend.all_of(ends)

    def _step_together(
        self, parameters: Mapping[ChunkTransfer, dict[int, torch.nn.Parameter]]
    ) -> dict[int, GroupWrites]:
        """Step parameters of any group and GPU in one call. Gives what the class changed in the groups."""
        groups: dict[int, Settings] = {}
        places: dict[torch.nn.Parameter, tuple[object, ...]] = {}
        lent: defaultdict[torch.Tensor, State] = defaultdict(dict)
        new = set()
        for transfer, mine in parameters.items():
            begun = {}
            for index, made in mine.items():
                held = transfer.chunk.parts[index].held
                own = mine[index] = held.own = made if held.own is None else held.own
                own.data, own.grad = made.data, made.grad
                places[own] = _place_of(made)
                groups.setdefault(held.group, {**transfer.settings, "params": []})["params"].append(own)
                if transfer.chunk.begun[index]:
                    begun[index] = own
                else:
                    new.add(own)
            lent.update(self.lend(transfer, begun))
        lent.update(self._optimizer.begin(list(groups.values()), new))
        written = {index: GroupWrites(group) for index, group in groups.items()}
        self._optimizer.step(list(groups.values()), lent)
        if any(_place_of(own) != place for own, place in places.items()):
            raise UnsupportedError(
                f"{self._name} gave a parameter other memory (p.data = ...) in step(), expected that it writes the "
                f"memory that is there: p.copy_(...). Parameters that it wrote in place may have changed."
            )
        for transfer, mine in parameters.items():
            for own in mine.values():
                own.grad = None
            self.take_back(transfer, mine, lent)
        return written

    def _abandon(self, parameters: Mapping[ChunkTransfer, Mapping[int, torch.nn.Parameter]]) -> None:
        """A step has failed. The frames of its error, which the user may keep, hold these objects."""
        for transfer, mine in parameters.items():
            self.tier.drop(transfer)
            for parameter in mine.values():
                parameter.data, parameter.grad = parameter.new_empty(0), None

    def _parameter(self, transfer: ChunkTransfer, index: int) -> torch.nn.Parameter:
        """The tensor that is stepped for a part, updated from the parameter."""
        part, sent, memory = transfer.chunk.parts[index], transfer.values.get(index), self._in_memory
        transfers = part.held.context.transfers
        if part.held.streamed is not None:
            # Blocks have read it by then, and the user has written it.
            transfer.ready.synchronize()
            values = _home(part)
        else:
            values = part.values() if sent is None else transfers.read(sent).as_strided(*part.form)
        parameter = self.parameter(transfer, index, values)
        if sent is not None and part.held.has_master and memory is not None:
            transfers.give_back(transfer.values.pop(index))
        elif sent is not None:
            transfers.backend.host_access(sent.cells.memory, write=True)
        return parameter

    def _upload(self, transfer: ChunkTransfer, parameters: Mapping[int, torch.nn.Parameter]) -> Event:
        """Take over the states, and queue the copies of parameters to the GPU; gives their end."""
        memory, context = self._in_memory, transfer.chunk.context
        uploads, pinned = [], []
        for index, parameter in parameters.items():
            part, sent = transfer.chunk.parts[index], transfer.values.get(index)
            if memory is not None:
                memory.set_state(transfer.chunk, index, transfer.states[index])
            if part.held.streamed is not None or part.held.in_place:
                if part.held.streamed is not None and part.held.has_master:
                    _home(part).copy_(parameter)
                continue
            local = part.held.local()
            if sent is None:
                # The GPU casts the master weight.
                assert memory is not None
                pinned.append(part)
                source = memory.master_cells(part)
            else:
                source = sent.cells
                if part.held.has_master:
                    values = context.transfers.host_view(source, write=True)
                    values.as_strided(*part.form).copy_(parameter)
            uploads.append(Upload(local, part.start, source))
        end = context.transfers.receive(uploads, transfer.ready) if uploads else transfer.ready
        for part in pinned:
            assert memory is not None
            memory.uploaded(part, end)
        for sent in transfer.values.values():
            sent.batch.copies.append(end)
            context.transfers.give_back(sent)
        transfer.values.clear()
        return end

    def _count(self, transfer: ChunkTransfer, seconds: float) -> None:
        """Count the CPU's time: the mean of the workers."""
        divides = self._in_memory is not None and self._traits.steps_alone and transfer.chunk.parts[0].held.cut
        with self._lock:
            transfer.cost.host_seconds += seconds / self._workers if divides else seconds


def _read_parts(transfer: ChunkTransfer) -> dict[int, ChunkPart]:
    """The parts whose parameters are copied from the GPU to be stepped."""
    parts = {index: transfer.chunk.parts[index] for index in transfer.steps}
    return {index: part for index, part in parts.items() if not part.held.in_place and part.held.streamed is None}


def _home(part: ChunkPart) -> torch.Tensor:
    """The pinned memory of a streamed parameter, where the CPU reads and writes it."""
    cells = part.home()
    part.held.context.transfers.backend.host_access(cells.memory, write=True)
    return cells.tensor(part.form)


def _place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
