"""States and fp32 master weights in the session's spill file, streamed to CPU memory to be stepped there.

The CPU worker thread steps chunk after chunk. Tasks read those that come next, and write those that were stepped.
Gradients are in pinned memory. Parameters are read from the GPU: see NOTE [ A step reads the parameter ].
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.errors import SessionError
from spillway.optim.chunked_store import ChunkedStore
from spillway.optim.chunks import ChunkTier, ChunkTransfer, Layout, Slot, StateChunk, TransferPipeline
from spillway.optim.gradient import DeviceContext, Snapshot
from spillway.optim.host_parameter import HostParameter
from spillway.optim.optimizer_class import State
from spillway.optim.state_store import SettingsOf, StepCost, in_order
from spillway.optim.transfers import Upload, aligned, on_error
from spillway.runtime.arena import Block, pages
from spillway.runtime.backend import Backend, Event, Several
from spillway.runtime.bytes import Bytes, Cells
from spillway.runtime.cpu import anonymous_pages
from spillway.runtime.disk import PIECE_BYTES
from spillway.runtime.spill_file import Extent, SpillFile


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


class DiskTier(ChunkTier):
    """Stores chunks in the spill file, and streams them to CPU memory."""

    def nbytes(self, transfer: ChunkTransfer) -> int:
        chunk, layout = transfer.chunk, transfer.next_layout()
        total = pages(chunk.layout.nbytes) if chunk.is_stored else 0
        total += 0 if layout is None else pages(layout.nbytes)
        return total + sum(pages(chunk.parts[index].nbytes) for index in transfer.steps)

    def reserve(self, chunk: StateChunk, layout: Layout) -> DiskPlace:
        return DiskPlace(chunk.context.transfers.spill_file(), layout.nbytes)

    def load(self, transfer: ChunkTransfer) -> None:
        chunk, context = transfer.chunk, transfer.chunk.context
        assert transfer.ready is not None
        with on_error(self.drop, transfer):
            values = [chunk.parts[index].of(chunk.parts[index].held.local()) for index in transfer.steps]
            sent = context.transfers.fetch(values, transfer.ready)
            transfer.values = dict(zip(transfer.steps, sent, strict=True))
            layout = transfer.next_layout()
            if layout is not None:
                transfer.room = self.memory(context, layout.nbytes)
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
        context = transfer.chunk.context
        for sent in transfer.values.values():
            context.transfers.give_back(sent)
        transfer.values.clear()
        transfer.states = []
        for memory in (transfer.memory, transfer.room):
            if memory is not None:
                self.release(context, memory)
        transfer.memory = transfer.room = None

    def store(self, transfer: ChunkTransfer, place: DiskPlace, layout: Layout) -> None:
        if layout.slots:
            assert transfer.memory is not None
            transfer.left = _move(transfer.chunk.context.transfers.backend, place, transfer.memory, read=False)
            transfer.cost.written_bytes += layout.nbytes

    def finish(self, transfer: ChunkTransfer) -> None:
        with contextlib.ExitStack() as at_last:
            at_last.callback(self.drop, transfer)
            if transfer.left is not None:
                with on_error(self.keep, transfer):
                    transfer.left.synchronize()

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


class DiskStore(ChunkedStore):
    """Streams chunks from the spill file to CPU memory, and steps them there."""

    def __init__(self, optimizer_class: type[Optimizer], given: dict[str, Any], settings: SettingsOf) -> None:
        super().__init__(DiskTier(), optimizer_class, given, settings)

    def add(self, held: HostParameter) -> None:
        super().add(held)
        # Raises if no spill file can be made.
        held.context.transfers.spill_file()

    def step(self, steps: Sequence[Snapshot], cost: StepCost, *, overlapped: bool) -> None:
        ends: dict[HostParameter, list[Event]] = {}
        for context, transfers in self.transfers_of(in_order(steps), cost).items():
            parts = (part for transfer in transfers for part in transfer.chunk.parts)
            ready = context.transfers.ready(part.held.local() for part in parts)
            pipeline = TransferPipeline(self.tier, context.transfers.window, transfers)
            for transfer in transfers:
                # All of them before the first step begins, because it loads others ahead.
                transfer.ready = ready
            for transfer in transfers:
                end = context.lane.run(functools.partial(self._step_chunk, transfer, pipeline))
                for step in transfer.steps.values():
                    ends.setdefault(step.held, []).append(end)
            cost.closing.append(context.lane.run(pipeline.settle))
        for step in steps:
            held = step.held
            held.mark_written()
            held.updated = held.context.transfers.backend.all_of(ends[held])
            held.gradient.reader = held.context.last_task()
            cost.on_host += held.numel

    # All below is for the CPU worker thread.

    def _step_chunk(self, transfer: ChunkTransfer, pipeline: TransferPipeline) -> Event:
        transfers = transfer.chunk.context.transfers
        with torch.no_grad(), contextlib.ExitStack() as undo:
            pipeline.take(transfer)
            undo.callback(pipeline.drop, transfer)
            for step in transfer.steps.values():
                step.wait()
            transfer.states = transfer.chunk.opened(transfer.memory)
            began = time.perf_counter()
            parameters = {index: self._parameter(transfer, index) for index in transfer.steps}
            staging = None
            parts = [transfer.chunk.parts[index] for index in transfer.steps]
            if parts[0].held.has_master:
                # Parameters are copied to the GPU from there. Before anything is stepped: there may be no memory.
                staging = pipeline.with_room(lambda: transfers.pinned(sum(aligned(part.nbytes) for part in parts)))
                undo.callback(transfers.arena.free, staging)
            self.step_parts(transfer, parameters)
            undo.pop_all()
            end = self._upload(transfer, parameters, staging)
            transfer.cost.host_seconds += time.perf_counter() - began
            # If the chunk cannot be stored, compute gets that error, and waits for nothing.
            with on_error(end.synchronize):
                self.send_back(transfer, pipeline)
        return end

    def _parameter(self, transfer: ChunkTransfer, index: int) -> torch.nn.Parameter:
        """The tensor that is stepped for a part, with its gradient."""
        part = transfer.chunk.parts[index]
        transfers = part.held.context.transfers
        sent = transfer.values[index]
        values = transfers.read(sent).as_strided(*part.form)
        parameter = self.parameter(transfer, index, values)
        if part.held.has_master:
            transfers.give_back(transfer.values.pop(index))
        else:
            transfers.backend.host_access(sent.memory, write=True)
        gradient = transfer.steps[index].part(part.start, part.numel)
        parameter.grad = gradient.as_strided(*part.form, int(gradient.storage_offset()))
        return parameter

    def _upload(
        self, transfer: ChunkTransfer, parameters: Mapping[int, torch.nn.Parameter], staging: Block | None
    ) -> Event:
        """Queue the copies of parameters to the GPU; gives their end."""
        assert transfer.ready is not None
        transfers = transfer.chunk.context.transfers
        uploads = []
        start = 0
        for index, parameter in parameters.items():
            part = transfer.chunk.parts[index]
            local = part.held.local()
            if staging is None:
                memory = transfer.values[index].memory
            else:
                memory = Bytes(staging.storage, staging.start + start, part.nbytes)
                start += aligned(part.nbytes)
                staged = transfers.host_view(memory, local.dtype, part.numel, write=True)
                staged.as_strided(*part.form, int(staged.storage_offset())).copy_(parameter)
            uploads.append(Upload(local, part.start, Cells(memory, local.dtype)))
        end = transfers.update(uploads, transfer.ready)
        if staging is not None:
            transfers.arena.free(staging, (end,))
        for sent in transfer.values.values():
            sent.batch.copies.append(end)
            transfers.give_back(sent)
        transfer.values.clear()
        return end


def _move(backend: Backend, place: DiskPlace, memory: Bytes, *, read: bool) -> Event:
    """Have each extent read into memory, or written from there."""
    move = place.file.read if read else place.file.write
    moves = []
    for number, extent in enumerate(place.extents):
        start = number * PIECE_BYTES
        part = Bytes(memory.storage, memory.start + start, min(PIECE_BYTES, memory.nbytes - start))

        def task(extent: Extent = extent, part: Bytes = part) -> None:
            backend.host_access(part, write=read)
            move(extent, part.buffer())

        moves.append(backend.run(task))
    return Several(moves)
