"""States and fp32 master weights in pinned memory, streamed to the GPU to be stepped there.

The thread that calls ``step`` queues everything, on its compute stream and two copy streams. It waits only for
gradients that are summed on the CPU. Memory on the GPU is allocated on the compute stream, and copy streams wait for
compute before they touch it. Since chunks arrive some ahead of their step, the incoming stream waits for the step of
some chunks before. Compute waits for a chunk when its step comes, and for its way back before its memory is freed.

Parameters without a master weight are stepped where they are. The GPU's memory for all of this is within the in-flight
limit. Exceptions are a parameter that is larger, and a parameter's first step, in which the class makes the state.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from spillway.optim.chunked_store import ChunkedStore
from spillway.optim.chunks import ChunkPart, ChunkTier, ChunkTransfer, Layout, Slot, StateChunk, TransferPipeline, moves
from spillway.optim.gradient import DeviceContext, Snapshot
from spillway.optim.host_parameter import HostParameter
from spillway.optim.optimizer_class import State
from spillway.optim.state_store import SettingsOf, StepCost
from spillway.optim.states import STEP
from spillway.optim.transfers import Pinned, aligned, on_error
from spillway.runtime.backend import Event, Stream
from spillway.runtime.bytes import Bytes, Cells, Flat, over

_LINE = 512
"""Gradients beside a chunk begin at a multiple of this many bytes."""


class _Streams(NamedTuple):
    incoming: Stream
    outgoing: Stream


class _Range(NamedTuple):
    """Bytes of a chunk, and their place in pinned memory."""

    start: int
    nbytes: int
    pinned: Pinned
    offset: int

    def bytes(self) -> Bytes:
        return self.pinned.range(self.offset, self.nbytes)


class PinnedTier(ChunkTier):
    """Stores chunks in pinned memory, and streams them to the GPU.

    A chunk is stored in one range of bytes. If a parameter is cut, every tensor of its state has a range of its own, in
    which the pieces are neighbours. So the CPU sees it whole without a copy.
    """

    def __init__(self) -> None:
        self._streams: dict[DeviceContext, _Streams] = {}
        self._wholes: weakref.WeakValueDictionary[Hashable, Pinned] = weakref.WeakValueDictionary()

    def nbytes(self, transfer: ChunkTransfer) -> int:
        stored = transfer.chunk.layout.nbytes if transfer.chunk.is_stored else 0
        gradients = sum(aligned(cells.memory.nbytes, _LINE) for _, cells, _ in _pinned_gradients(transfer))
        layout = transfer.next_layout()
        return aligned(stored, _LINE) + gradients + (0 if layout is None else layout.nbytes)

    def reserve(self, chunk: StateChunk, layout: Layout) -> tuple[_Range, ...]:
        if chunk.is_cut:
            return tuple(self._neighbour(chunk.parts[slot.part], slot) for slot in layout.slots)
        arena = chunk.context.transfers.arena
        return (_Range(0, layout.nbytes, Pinned(arena, layout.nbytes), 0),) if layout.slots else ()

    def load(self, transfer: ChunkTransfer) -> None:
        chunk, context = transfer.chunk, transfer.chunk.context
        backend, incoming = context.transfers.backend, self.streams_of(context).incoming
        stored = chunk.layout.nbytes if chunk.is_stored else 0
        gradients = list(_pinned_gradients(transfer))
        nbytes, layout = transfer.nbytes, transfer.next_layout()
        if layout is not None:
            transfer.room = self.memory(context, layout.nbytes)
            nbytes -= layout.nbytes
        if not stored and not gradients:
            return
        memory = transfer.memory = self.memory(context, nbytes)
        # Compute has waited until all that is stored is there.
        backend.wait(incoming, backend.record(backend.compute()))
        ranges: tuple[_Range, ...] = chunk.place if stored else ()
        for one in ranges:
            self._copy_in(context, Bytes(memory.storage, memory.start + one.start, one.nbytes), one.bytes())
        start = memory.start + aligned(stored, _LINE)
        for index, (source, dtype), arrived in gradients:
            if arrived is not None:
                backend.wait(incoming, arrived)
            self._copy_in(context, Bytes(memory.storage, start, source.nbytes), source)
            transfer.gradients[index] = over(memory.storage, dtype, start // dtype.itemsize, *chunk.parts[index].form)
            start += aligned(source.nbytes, _LINE)
        transfer.arrived = backend.record(incoming)
        for one in ranges:
            one.pinned.after("in", transfer.arrived)

    def wait(self, transfer: ChunkTransfer) -> None:
        if transfer.arrived is not None:
            transfer.chunk.context.transfers.wait(transfer.arrived)

    def memory(self, context: DeviceContext, nbytes: int) -> Bytes:
        # It belongs to the compute stream, which has waited for all copies when the memory is dropped.
        return Bytes(context.transfers.backend.empty(Flat((nbytes,))).untyped_storage(), 0, nbytes)

    def keep(self, transfer: ChunkTransfer) -> None:
        # Tensors hold their memory.
        transfer.chunk.states = transfer.states

    def drop(self, transfer: ChunkTransfer) -> None:
        transfer.memory = transfer.room = None
        transfer.states = []
        transfer.gradients.clear()

    def store(self, transfer: ChunkTransfer, place: tuple[_Range, ...], layout: Layout) -> None:
        if not place:
            return
        transfers, outgoing = transfer.chunk.context.transfers, self.streams_of(transfer.chunk.context).outgoing
        backend, memory = transfers.backend, transfer.memory
        assert memory is not None
        backend.wait(outgoing, backend.record(backend.compute()))
        for one in place:
            for event in one.pinned.before_write():
                backend.wait(outgoing, event)
            if one.nbytes:
                source = Bytes(memory.storage, memory.start + one.start, one.nbytes)
                backend.copy(outgoing, one.bytes(), source)
                transfers.sent_bytes += one.nbytes
        transfer.left = backend.record(outgoing)
        for one in place:
            one.pinned.after("out", transfer.left)

    def finish(self, transfer: ChunkTransfer) -> None:
        if transfer.left is not None:
            transfer.chunk.context.transfers.wait(transfer.left)
        self.drop(transfer)

    def host_states(self, chunk: StateChunk) -> list[State]:
        views = {} if not chunk.is_stored else dict(_views(chunk.layout, chunk.place))

        def on_host(index: int, name: Hashable, value: object) -> object:
            if isinstance(value, Slot):
                return views[index, name]
            return value.cpu() if isinstance(value, torch.Tensor) and value.ndim > 0 else value

        for one in chunk.place if views else ():
            whole = one.pinned.range(0, one.pinned.nbytes)
            chunk.context.transfers.backend.host_access(whole, write=False)
        return [
            {name: on_host(index, name, value) for name, value in state.items()}
            for index, state in enumerate(chunk.states)
        ]

    def write(self, chunk: StateChunk, states: list[State], layout: Layout, place: tuple[_Range, ...]) -> None:
        for one in place:
            one.pinned.synchronize()
            chunk.context.transfers.backend.host_access(one.bytes(), write=True)
        for (index, name), view in _views(layout, place):
            value = states[index][name]
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)

    def streams_of(self, context: DeviceContext) -> _Streams:
        if context not in self._streams:
            backend = context.transfers.backend
            self._streams[context] = _Streams(backend.new_stream("states in"), backend.new_stream("states out"))
        return self._streams[context]

    def _neighbour(self, part: ChunkPart, slot: Slot) -> _Range:
        """A piece's part of the memory of a whole tensor."""
        key = (part.held, slot.name, slot.dtype)
        whole = self._wholes.get(key)
        if whole is None:
            arena = part.held.context.transfers.arena
            whole = self._wholes[key] = Pinned(arena, part.held.numel * slot.dtype.itemsize)
        return _Range(slot.start, slot.nbytes, whole, part.start * slot.dtype.itemsize)

    def _copy_in(self, context: DeviceContext, target: Bytes, source: Bytes) -> None:
        if source.nbytes:
            context.transfers.backend.copy(self.streams_of(context).incoming, target, source)
            context.transfers.received_bytes += source.nbytes


class GpuStore(ChunkedStore):
    """Streams chunks from pinned memory to the GPU, and steps them there."""

    tier: PinnedTier
    steps_on_device = True

    def __init__(self, optimizer_class: type[Optimizer], given: dict[str, Any], settings: SettingsOf) -> None:
        super().__init__(PinnedTier(), optimizer_class, given, settings)

    def step(self, steps: Sequence[Snapshot], cost: StepCost, *, overlapped: bool) -> None:
        for context, transfers in self.transfers_of(steps, cost).items():
            self._step_all(context, transfers)
        for step in steps:
            step.held.updated = None
            cost.streamed += step.held.numel

    def converted(self, key: Any, value: Any, held: HostParameter) -> Any:
        value = super().converted(key, value, held)
        if not isinstance(value, torch.Tensor) or moves(value):
            return value
        settings = self._settings(held)
        stays = key == STEP and not settings.get("capturable") and not settings.get("fused")
        return value if stays else value.to(held.local().device)

    def _step_all(self, context: DeviceContext, transfers: Sequence[ChunkTransfer]) -> None:
        backend, incoming = context.transfers.backend, self.tier.streams_of(context).incoming
        on_host = [step for one in transfers for step in one.steps.values() if step.on_device is None]
        if on_host:
            # Tasks that sum gradients on the CPU end before the sums are loaded.
            backend.wait(incoming, context.last_task())
        pipeline = TransferPipeline(self.tier, context.transfers.window, transfers)
        with contextlib.ExitStack() as at_last:
            at_last.callback(pipeline.settle)
            if on_host:
                at_last.callback(self._lend, context, on_host)
            for transfer in transfers:
                self._step_chunk(transfer, pipeline)

    def _step_chunk(self, transfer: ChunkTransfer, pipeline: TransferPipeline) -> None:
        pipeline.take(transfer)
        with on_error(pipeline.drop, transfer):
            transfer.states = transfer.chunk.opened(transfer.memory)
            parameters = {index: self._parameter(transfer, index) for index in transfer.steps}
            self.step_parts(transfer, parameters)
        for index, parameter in parameters.items():
            part = transfer.chunk.parts[index]
            if part.held.has_master:
                part.of(part.held.local().detach()).copy_(parameter)
            part.held.mark_written()
        self.send_back(transfer, pipeline)

    def _parameter(self, transfer: ChunkTransfer, index: int) -> torch.nn.Parameter:
        """The tensor that is stepped for a part, with its gradient."""
        part = transfer.chunk.parts[index]
        parameter = self.parameter(transfer, index, part.of(part.held.local().detach()))
        snapshot = transfer.steps[index]
        found = transfer.gradients.pop(index) if snapshot.on_device is None else part.of(snapshot.on_device)
        found = found.to(part.held.work_dtype)
        for factor in snapshot.factors:
            factor.apply(found, on_device=True)
        parameter.grad = found
        return parameter

    def _lend(self, context: DeviceContext, steps: Sequence[Snapshot]) -> None:
        """Copies read gradients on the CPU until now. Later tasks, and the memory's next owners, come after."""
        end = context.transfers.backend.record(self.tier.streams_of(context).incoming)
        for step in steps:
            raw, total = step.raw, step.sum
            if raw is not None:
                raw.batch.copies = [end]
            if total is not None and total.pinned is not None:
                total.pinned.after("in", end)
        context.lane.run(end.synchronize)


def _pinned_gradients(transfer: ChunkTransfer) -> Iterator[tuple[int, Cells, Event | None]]:
    """The gradients that are loaded with a chunk: the part, its elements, and the event after which they are there."""
    for index, step in transfer.steps.items():
        part = transfer.chunk.parts[index]
        raw, total = step.raw, step.sum
        if total is not None:
            assert total.pinned is not None
            size = total.dtype.itemsize
            yield index, Cells(total.pinned.range(part.start * size, part.numel * size), total.dtype), None
        elif raw is not None:
            size, memory = raw.dtype.itemsize, raw.memory
            source = Bytes(memory.storage, memory.start + part.start * size, part.numel * size)
            yield index, Cells(source, raw.dtype), raw.batch.arrived


def _views(layout: Layout, place: tuple[_Range, ...]) -> Iterator[tuple[tuple[int, Hashable], torch.Tensor]]:
    """The tensors of a stored chunk, as views of its memory."""
    aliases: dict[Pinned, torch.Tensor] = {}
    for number, slot in enumerate(layout.slots):
        # All are in one range, or each in its own.
        one = place[number if len(place) > 1 else 0]
        if one.pinned not in aliases:
            one.pinned.synchronize()
            aliases[one.pinned] = one.pinned.alias()
        start = (one.offset + slot.start - one.start) // slot.dtype.itemsize
        storage = aliases[one.pinned].untyped_storage()
        yield (slot.part, slot.name), over(storage, slot.dtype, start, slot.shape, slot.strides)
