"""States and fp32 master weights in the session's spill file, streamed to CPU memory to be stepped there.

The CPU worker thread steps chunk after chunk. Tasks read those that come next, and write those that were stepped.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence

import torch

from spillway.errors import SessionError
from spillway.optim.chunks import ChunkTransfer, Layout, Slot, StateChunk
from spillway.optim.cpu_store import CpuTier
from spillway.optim.gradient import DeviceContext
from spillway.optim.host_parameter import HostParameter
from spillway.optim.optimizer_class import State
from spillway.runtime.arena import Block, anonymous_pages, pages
from spillway.runtime.backend import Backend, Event, Several, on_error
from spillway.runtime.bytes import Bytes
from spillway.runtime.disk_tier import PIECE_BYTES, cut
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
