"""States and fp32 master weights in pinned memory, streamed to the GPU to be stepped there.

NOTE [ Steps beside compute ]

The GPU steps chunks on a stream of its own, the *step stream*, beside the user's compute stream. The CPU worker thread
queues everything: copies in, the step, copies out. If the CPU steps other parameters, a thread of its own does so. A
gradient that was summed on the CPU is copied in before the next one is added there. So ``step()`` and hooks of backward
only queue tasks, and the GPU computes the rest of backward or the next forward meanwhile. The order is kept by these
waits:

1. The step stream waits for what the caller's compute stream had been given when the step was queued: kernels that
   read or write the parameter, its gradient, and a factor of clipping.
2. The copy stream in waits for the step stream before it writes memory that was allocated there, and for the arrival
   of an offloaded gradient in pinned memory. It does not wait for compute: states come in before the gradient is there.
3. The step stream waits for a chunk's copy in, before its step. The copy stream out waits for the step. The home of a
   streamed parameter is read and written by these copies. This one copy in does wait for compute, which may write it.
4. The step stream waits for a chunk's copy out before its memory is freed, and at the end of the step for all of them.
   So the next copy in of the same chunk comes after its copy out.
5. Compute waits for the tasks of a parameter, and for its new values, before ``step()`` returns; with
   ``overlap_forward`` in the block that has the parameter. The task has bumped no version: the caller's thread did.

The step stream reads memory that compute allocated: factors, settings that are tensors, gradients that are plain
tensors. They are kept until compute has waited for the step. A user may write a plain gradient at any time: it is lent
to the step (``GradientInUse``), or ``step()`` waits. Writes to an offloaded gradient are queued behind the step.

A step during backward reads the gradient as autograd left it, and not the copy that is on its way to the CPU. These
gradients stay on the GPU until compute has waited for their steps. Past the in-flight limit it waits for the oldest.

A step's short kernels wait for long kernels of the model, which hold all multiprocessors, whatever the stream's
priority. So chunks are as large as the default in-flight limit allows.

During backward a chunk is stepped when the gradients of all its parameters have arrived. If the user sets another one
by hand afterwards, ``step()`` loads the chunk again, after its copy out.

NOTE [ Master weights cross whole ]

A ``bfloat16`` parameter has the upper half of its master weight, rounded. Sixteen more bits do not give the master: to
an even upper half both ties round, so 65,537 values, and many NaNs. Nor would they show that the parameter was
overwritten through ``.data`` (NOTE [ A step reads the parameter ] in ``host_parameter.py``).

NOTE [ The ring on the GPU ]

Parameters without a master weight are stepped where they are. The GPU's memory for all chunks that are under way is
within the in-flight limit (512 MiB by default). Exceptions are a parameter that is larger and cannot be cut, and a
parameter's first step, in which the class makes the state. Half of the limit is for chunks that arrive.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from spillway.errors import TierFullError
from spillway.optim.chunks import ChunkPart, ChunkTier, ChunkTransfer, Layout, Slot, StateChunk, TransferPipeline, moves
from spillway.optim.gradient import DeviceContext, Snapshot
from spillway.optim.host_parameter import HostParameter
from spillway.optim.optimizer_class import ClassTraits, State
from spillway.optim.state_store import SettingsOf, StateStore, StepCost
from spillway.optim.states import STEP
from spillway.optim.transfers import aligned
from spillway.runtime.arena import Pinned
from spillway.runtime.backend import Event, Stream, TaskEnd, on_error
from spillway.runtime.bytes import Bytes, Cells, over
from spillway.units import format_bytes

_LINE = 512
"""Gradients beside a chunk begin at a multiple of this many bytes."""


class _Streams(NamedTuple):
    incoming: Stream
    outgoing: Stream
    stepping: Stream


class _Range(NamedTuple):
    """Bytes of a chunk, and their place in pinned memory."""

    start: int
    nbytes: int
    pinned: Pinned
    offset: int

    def bytes(self) -> Bytes:
        return self.pinned.block.part(self.offset, self.nbytes)


class PinnedTier(ChunkTier):
    """Stores chunks in pinned memory, and streams them to the GPU.

    A chunk is stored in one range of bytes. If a parameter is cut, every tensor of its state has a range of its own, in
    which the pieces are neighbours. So the CPU sees it whole without a copy.
    """

    def __init__(self) -> None:
        self._streams: dict[DeviceContext, _Streams] = {}
        self._wholes: weakref.WeakValueDictionary[Hashable, Pinned] = weakref.WeakValueDictionary()

    def nbytes(self, transfer: ChunkTransfer) -> int:
        return _loaded_bytes(transfer, _beside(transfer)) + transfer.made_bytes

    def reserve(self, chunk: StateChunk, layout: Layout) -> tuple[_Range, ...]:
        if chunk.is_cut:
            return tuple(self._neighbour(chunk.parts[slot.part], slot) for slot in layout.slots)
        arena = chunk.context.transfers.arena
        return (_Range(0, layout.nbytes, Pinned(arena, layout.nbytes), 0),) if layout.slots else ()

    def load(self, transfer: ChunkTransfer) -> None:
        chunk, context = transfer.chunk, transfer.chunk.context
        backend, incoming = context.transfers.backend, self.streams_of(context).incoming
        beside = list(_beside(transfer))
        nbytes = _loaded_bytes(transfer, beside)
        if not (chunk.is_stored or beside):
            return
        memory = transfer.memory = self.memory(context, nbytes)
        # The step stream has waited until all that is stored is there.
        backend.wait(incoming, backend.record(backend.compute()))
        ranges: tuple[_Range, ...] = chunk.place if chunk.is_stored else ()
        for one in ranges:
            self._copy_in(context, memory.part(one.start, one.nbytes), one.bytes())
        start = aligned(transfer.stored_bytes, _LINE)
        for into, index, (source, dtype), after in beside:
            if after is not None:
                backend.wait(incoming, after)
            target = memory.part(start, source.nbytes)
            self._copy_in(context, target, source)
            into[index] = Cells(target, dtype).tensor(chunk.parts[index].form)
            start += aligned(source.nbytes, _LINE)
        transfer.arrived = backend.record(incoming)
        for one in ranges:
            one.pinned.after("in", transfer.arrived)
        for index in transfer.homes:
            chunk.parts[index].home_until(transfer.arrived)
        for step in map(transfer.steps.__getitem__, transfer.gradients):
            # The next owners of the gradient's memory come after.
            if step.sum is not None and step.sum.pinned is not None:
                step.sum.pinned.after("in", transfer.arrived)
            elif step.raw is not None:
                step.raw.batch.copies = [transfer.arrived]

    def wait(self, transfer: ChunkTransfer) -> None:
        if transfer.arrived is not None:
            backend = transfer.chunk.context.transfers.backend
            backend.wait(backend.compute(), transfer.arrived)

    def memory(self, context: DeviceContext, nbytes: int) -> Bytes:
        # It belongs to the step stream, which has waited for all copies when the memory is dropped.
        try:
            return context.transfers.backend.empty(nbytes)
        except torch.OutOfMemoryError as error:
            # Chunks that are being stored are freed first, and prefetched ones are given up.
            raise TierFullError(
                f"the GPU has no {format_bytes(nbytes)} for a chunk of optimizer state; leave more of its memory free, "
                f"by a smaller batch or budget"
            ) from error

    def keep(self, transfer: ChunkTransfer) -> None:
        # Tensors hold their memory.
        transfer.chunk.states = transfer.states

    def drop(self, transfer: ChunkTransfer) -> None:
        if transfer.left is not None:
            backend = transfer.chunk.context.transfers.backend
            backend.wait(backend.compute(), transfer.left)
        transfer.memory = None
        transfer.states = []
        transfer.gradients.clear()
        transfer.homes.clear()

    def store(self, transfer: ChunkTransfer, place: tuple[_Range, ...], layout: Layout) -> None:
        if not place:
            return
        backend, memory = transfer.chunk.context.transfers.backend, transfer.memory
        assert memory is not None
        for one in place:
            for event in one.pinned.before_write():
                backend.wait(self.streams_of(transfer.chunk.context).outgoing, event)
        sources = [memory.part(one.start, one.nbytes) for one in place]
        end = self._copy_out(transfer, [(one.bytes(), source) for one, source in zip(place, sources, strict=True)])
        for one in place:
            one.pinned.after("out", end)

    def store_homes(self, transfer: ChunkTransfer) -> Event:
        """Queue the copies of streamed parameters that were stepped to their homes; gives their end."""
        parts = transfer.chunk.parts
        copies = [(parts[index].home().memory, Bytes.of(values)) for index, values in transfer.homes.items()]
        end = self._copy_out(transfer, copies)
        for index in transfer.homes:
            parts[index].home_until(end)
        return end

    def host_states(self, chunk: StateChunk) -> list[State]:
        views = {} if not chunk.is_stored else dict(_views(chunk.layout, chunk.place))

        def on_host(index: int, name: Hashable, value: object) -> object:
            if isinstance(value, Slot):
                return views[index, name]
            return value.cpu() if isinstance(value, torch.Tensor) and value.ndim > 0 else value

        for one in chunk.place if views else ():
            chunk.context.transfers.backend.host_access(one.pinned.bytes, write=False)
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
            # A step's kernels are short, and the next copy in waits for their memory.
            stepping = backend.new_stream("optimizer step", first=True)
            incoming, outgoing = backend.new_stream("states in"), backend.new_stream("states out")
            self._streams[context] = _Streams(incoming, outgoing, stepping)
        return self._streams[context]

    def _neighbour(self, part: ChunkPart, slot: Slot) -> _Range:
        """A piece's part of the memory of a whole tensor."""
        key = (part.held, slot.name, slot.dtype)
        whole = self._wholes.get(key)
        if whole is None:
            arena = part.held.context.transfers.arena
            whole = self._wholes[key] = Pinned(arena, part.held.numel * slot.dtype.itemsize)
        return _Range(slot.start, slot.nbytes, whole, part.start * slot.dtype.itemsize)

    def _copy_out(self, transfer: ChunkTransfer, copies: Sequence[tuple[Bytes, Bytes]]) -> Event:
        """Queue copies to pinned memory after the step; gives their end."""
        transfers, outgoing = transfer.chunk.context.transfers, self.streams_of(transfer.chunk.context).outgoing
        backend = transfers.backend
        backend.wait(outgoing, backend.record(backend.compute()))
        with on_error(lambda: backend.wait(backend.compute(), backend.record(outgoing))):
            for target, source in copies:
                if source.nbytes:
                    backend.copy(outgoing, target, source)
                    transfers.count(sent=source.nbytes)
        transfer.left = backend.record(outgoing)
        return transfer.left

    def _copy_in(self, context: DeviceContext, target: Bytes, source: Bytes) -> None:
        if source.nbytes:
            context.transfers.backend.copy(self.streams_of(context).incoming, target, source)
            context.transfers.count(received=source.nbytes)


class GpuStore(StateStore):
    """Streams chunks from pinned memory to the GPU, and steps them there."""

    tier: PinnedTier
    steps_on_device = True

    def __init__(self, optimizer_class: type[Optimizer], given: dict[str, Any], settings: SettingsOf) -> None:
        super().__init__(PinnedTier(), optimizer_class, given, settings)
        self._fused = ClassTraits.of(optimizer_class).fused
        self._streamed: dict[DeviceContext, _Streamed] = {}

    def may_cut(self, held: HostParameter) -> bool:
        # A class with a fused kernel computes each element by itself: an accelerator gives the same bits.
        is_fused = held.local().device.type != "cpu" or bool(self._settings(held).get("fused"))
        return held.work_dtype in self._fused and is_fused

    def step(self, steps: Sequence[Snapshot], cost: StepCost, *, overlapped: bool) -> None:
        ends: dict[HostParameter, list[Event]] = {}
        by_context = self.transfers_of(steps, cost)
        cost.kept += (step.factors for step in steps)
        for transfers in by_context.values():
            for transfer in transfers:
                cost.kept += transfer.settings.values()
        # From here on, every chunk that the pipeline expects gets its task.
        for context, transfers in by_context.items():
            streamed = self._streamed.setdefault(context, _Streamed(context, self.tier))
            streamed.has_sums |= any(step.sum is not None for one in transfers for step in one.steps.values())
            if streamed.has_sums:
                # In the thread: a task before it must not read sums that later additions make.
                context.stepper.run(partial(streamed.expect_sums, transfers, context.last_task()))
            else:
                streamed.pipeline.expect(transfers)
            for transfer in transfers:
                end = transfer.chunk.stepped = context.stepper.run(
                    partial(self._step_chunk, transfer, streamed.pipeline)
                )
                for step in transfer.steps.values():
                    ends.setdefault(step.held, []).append(end)
        cost.streamed += self.note_queued(ends)

    def settle(self, cost: StepCost) -> None:
        for context, streamed in self._streamed.items():
            cost.closing.append(context.stepper.run(streamed.settle))
        self._streamed = {}

    def complete(self, waiting: Sequence[HostParameter]) -> list[HostParameter]:
        self._form_chunks()
        there = set(waiting)

        def comes(held: HostParameter) -> bool:
            return held not in there and (held.parameter.requires_grad or held.parameter.grad is not None)

        # A parameter that is cut has its chunks for itself.
        first = {one: self._chunks[one][0][0] for one in waiting}
        full = {chunk for chunk in set(first.values()) if not any(comes(part.held) for part in chunk.parts)}
        return [one for one in waiting if first[one] in full]

    def converted(self, key: Any, value: Any, held: HostParameter) -> Any:
        value = super().converted(key, value, held)
        if not isinstance(value, torch.Tensor) or moves(value):
            return value
        settings = self._settings(held)
        stays = key == STEP and not settings.get("capturable") and not settings.get("fused")
        return value if stays else value.to(held.local().device)

    # All below is for the thread that queues the steps.

    def _step_chunk(self, transfer: ChunkTransfer, pipeline: TransferPipeline) -> Event:
        context = transfer.chunk.context
        backend = context.transfers.backend
        stepping = self.tier.streams_of(context).stepping
        with torch.no_grad(), backend.compute_on(stepping):
            pipeline.take(transfer)
            # After an error compute waits for nothing, and some of the step may be queued.
            with on_error(lambda: backend.record(backend.compute()).synchronize()):
                with on_error(pipeline.drop, transfer):
                    # Not before, so that states are copied in while compute is still busy with the gradient.
                    backend.wait(backend.compute(), transfer.ready)
                    self._wait_for_offload(transfer)
                    transfer.states = transfer.chunk.opened(transfer.memory)
                    parameters = {index: self._parameter(transfer, index) for index in transfer.steps}
                    self.step_parts(transfer, parameters)
                for index, parameter in parameters.items():
                    part, values = transfer.chunk.parts[index], _values(transfer, index)
                    if part.held.has_master:
                        values.copy_(parameter)
                    backend.compute_access(Bytes.of(values))
                    if part.held.streamed is None:
                        # The model may be gone before the step stream has written it.
                        backend.hand_back(Bytes.of(values), (stepping,))
                # Copies to homes come after the step.
                end = self.tier.store_homes(transfer) if transfer.homes else backend.record(backend.compute())
                self.send_back(transfer, pipeline)
        return end

    def _wait_for_offload(self, transfer: ChunkTransfer) -> None:
        """Wait for copies of gradients to the CPU: an optimizer's class may write a gradient."""
        backend = transfer.chunk.context.transfers.backend
        for step in transfer.steps.values():
            if step.on_device is not None and step.raw is not None:
                assert step.raw.batch.arrived is not None
                backend.wait(backend.compute(), step.raw.batch.arrived)
                backend.compute_access(Bytes.of(step.on_device))

    def _parameter(self, transfer: ChunkTransfer, index: int) -> torch.nn.Parameter:
        """The tensor that is stepped for a part, with its gradient."""
        part = transfer.chunk.parts[index]
        parameter = self.parameter(transfer, index, _values(transfer, index))
        snapshot = transfer.steps[index]
        found = transfer.gradients.pop(index) if snapshot.on_device is None else part.of(snapshot.on_device)
        dtype = part.held.work_dtype
        found = found.to(torch.promote_types(found.dtype, dtype))
        for factor in snapshot.factors:
            factor.apply(found, on_device=True)
        parameter.grad = found.to(dtype)
        return parameter


class _Streamed:
    """The chunks of one GPU that are under way in a step."""

    def __init__(self, context: DeviceContext, tier: PinnedTier) -> None:
        self.pipeline = TransferPipeline(tier, context.transfers.window, ())
        self.has_sums = False
        """Whether copies in read gradients that were summed on the CPU."""
        self._backend = context.transfers.backend
        self._stepping = tier.streams_of(context).stepping

    # All below is for the thread that queues the steps.

    def expect_sums(self, transfers: Sequence[ChunkTransfer], added: TaskEnd) -> None:
        """More chunks are to be stepped, by gradients that were summed on the CPU."""
        added.finish()
        self.pipeline.expect(transfers)

    def settle(self) -> None:
        """The step stream waits for all chunks that are being stored."""
        with self._backend.compute_on(self._stepping):
            self.pipeline.settle()


def _values(transfer: ChunkTransfer, index: int) -> torch.Tensor:
    """A part's elements of its parameter on the GPU: its own, or the copy of its home."""
    return transfer.homes[index] if index in transfer.homes else transfer.chunk.parts[index].values()


_Beside = tuple[dict[int, torch.Tensor], int, Cells, Event | None]
"""Elements that are loaded beside the states of a chunk: whose tensors, for which part, and the event to wait for."""


def _beside(transfer: ChunkTransfer) -> Iterator[_Beside]:
    """Gradients in pinned memory, and then homes, whose copies in wait for compute."""
    parts = {index: transfer.chunk.parts[index] for index in transfer.steps}
    for index, step in transfer.steps.items():
        part, raw, total = parts[index], step.raw, step.sum
        if step.on_device is not None:
            continue
        if total is not None:
            assert total.pinned is not None
            yield transfer.gradients, index, part.cells(total.pinned.block, total.dtype), None
        elif raw is not None:
            yield transfer.gradients, index, part.cells(*raw.cells), raw.batch.arrived
    for index, part in parts.items():
        if part.held.streamed is not None:
            # The user's writes come before. So do the copies of the step before, which compute has waited for.
            yield transfer.homes, index, part.home(), transfer.ready


def _loaded_bytes(transfer: ChunkTransfer, beside: Iterable[_Beside]) -> int:
    """Bytes of a chunk's memory on the GPU, each tensor beside the states aligned."""
    sizes = [transfer.stored_bytes, *(cells.memory.nbytes for _, _, cells, _ in beside)]
    return sum(aligned(size, _LINE) for size in sizes)


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
