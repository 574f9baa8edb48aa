"""Copies of gradients and parameters to CPU memory, and of parameters back to their GPU.

A gradient that is offloaded is kept alive until its copy is done. The session's in-flight limit (``window``) bounds
those bytes: past it, the gradient's compute stream waits for the oldest copy, and frees that gradient. This goes by
program order, not by the clock, so that the peak is the same in every step.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from spillway.runtime.arena import Block
from spillway.runtime.backend import Event, Stalls, Stream, label
from spillway.runtime.bytes import Bytes, Cells
from spillway.runtime.device import DeviceRuntime

_TOGETHER = 1 << 20
"""Smaller tensors share a batch, up to this many bytes."""
_ALIGNMENT = 64

_batch_numbers = itertools.count(1)


def aligned(nbytes: int, to: int = _ALIGNMENT) -> int:
    """Bytes, rounded up so that the next tensor begins at a multiple."""
    return -(-nbytes // to) * to


@dataclass(eq=False, slots=True)
class TransferBatch:
    """Tensors of one stream that are copied together: small ones share a block, a wait and an event."""

    stream: Stream
    sources: list[tuple[int, Bytes]] = field(default_factory=list)
    nbytes: int = 0
    parts: int = 0
    """How many of the tensors are still needed."""
    block: Block | None = None
    """The pinned memory, once the copy is queued."""
    arrived: Event | None = None
    copies: list[Event] = field(default_factory=list)
    """Ends of copies that read the block."""
    number: int = 0
    """The order in which batches were sent."""

    @property
    def source_bytes(self) -> int:
        """Bytes of the tensors that are alive for the copy."""
        return sum(source.nbytes for _, source in self.sources)

    def add(self, tensor: torch.Tensor) -> SentTensor:
        source = Bytes.of(tensor)
        start = aligned(self.nbytes)
        self.sources.append((start, source))
        self.nbytes = start + source.nbytes
        self.parts += 1
        return SentTensor(self, start, tensor.dtype, tensor.numel())


class SentTensor(NamedTuple):
    """One tensor of a batch."""

    batch: TransferBatch
    start: int
    """Its first byte in the block."""
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def cells(self) -> Cells:
        """Its place in pinned memory, once the copy is queued."""
        assert self.batch.block is not None
        return Cells(self.batch.block.part(self.start, self.nbytes), self.dtype)


class Upload(NamedTuple):
    """Elements that are copied to the GPU."""

    target: torch.Tensor
    """A dense tensor."""
    start: int
    """Its first element that is written, in memory order."""
    source: Cells
    """Pinned memory, of the target's type or of one that the GPU converts."""


class Transfers:
    """The copy streams of one GPU: gradients to the CPU, parameters to the CPU, and parameters back.

    The caller's thread queues the gradients of a whole backward while the GPU has hardly begun it. A parameter that is
    read for the first step must not wait behind them.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.backend = runtime.backend
        self.arena = runtime.arena
        self.window = runtime.mover.window
        self.spill_file = runtime.spill_file
        self._out = self.backend.new_stream("gradients")
        self._reads = self.backend.new_stream("parameters out")
        self._back = self.backend.new_stream("parameters")
        self._open: TransferBatch | None = None
        """A batch of small tensors that is not full yet."""
        self._leaving: deque[TransferBatch] = deque()
        """Batches whose tensors are kept alive until they are copied."""
        self._leaving_bytes = 0
        self._followed: Event | None = None
        """The last event that the stream back was told to wait for."""
        # Reentrant: a factor gives its memory back when it dies, in whatever thread the collector runs.
        self._lock = threading.RLock()
        self.waits = Stalls()
        """How long the GPU waited for gradients and parameters."""
        self.sent_bytes = 0
        self.received_bytes = 0

    def send(self, tensor: torch.Tensor) -> SentTensor:
        """Queue the copy of a dense tensor to the CPU. A small tensor waits for others, or for :meth:`flush`."""
        with label("gradient offload"), self._lock:
            stream = self.backend.compute()
            if self._open is not None and self._open.stream != stream:
                self.flush()
            if tensor.numel() * tensor.itemsize >= _TOGETHER:
                batch = TransferBatch(stream)
                sent = batch.add(tensor)
                self._dispatch(batch)
                return sent
            if self._open is None:
                self._open = TransferBatch(stream)
            self.backend.compute_access(Bytes.of(tensor))
            sent = self._open.add(tensor)
            if self._open.nbytes >= _TOGETHER:
                self.flush()
            return sent

    def flush(self) -> None:
        """Queue the copy of small tensors that wait for others."""
        # Without the lock, which a thread that pins memory may hold for long.
        if self._open is None:
            return
        with self._lock:
            if self._open is not None:
                # It stays open if there is no memory: a later call may find some.
                self._dispatch(self._open)
                self._open = None

    def fetch(self, tensors: Sequence[torch.Tensor], after: Event) -> list[SentTensor]:
        """Copy tensors that stay on the GPU, after an event; for the CPU worker thread."""
        batch = TransferBatch(self._reads)
        sent = [batch.add(tensor) for tensor in tensors]
        if sent:
            with self._lock:
                self.backend.wait(self._reads, after)
                self._copy_out(batch, self._reads)
        return sent

    def read(self, sent: SentTensor) -> torch.Tensor:
        """Wait for a tensor's copy, and give it flat; for the CPU's threads."""
        arrived = sent.batch.arrived
        assert arrived is not None
        arrived.synchronize()
        return self.host_view(sent.cells, write=False)

    def receive(self, uploads: Sequence[Upload], after: Event) -> Event:
        """Queue copies to the GPU, after an event; gives their end. The targets may be dropped meanwhile."""
        with self._lock:
            if after is not self._followed:
                self.backend.wait(self._back, after)
                self._followed = after
            for tensor, start, source in uploads:
                memory = source.memory
                if memory.nbytes == 0:
                    continue
                size = tensor.itemsize
                target = Bytes.of(tensor).part(start * size, memory.nbytes // source.dtype.itemsize * size)
                if source.dtype == tensor.dtype:
                    self.backend.copy(self._back, target, memory)
                else:
                    self.backend.convert(self._back, Cells(target, tensor.dtype), source)
                self.received_bytes += memory.nbytes
            end = self.backend.record(self._back)
        for upload in uploads:
            self.backend.hand_back(Bytes.of(upload.target), (self._back,))
        return end

    def pinned(self, nbytes: int) -> Block:
        """Pinned memory that the CPU may write now."""
        block = self.arena.allocate(max(nbytes, 1))
        for event in block.after:
            event.synchronize()
        return block

    def ready(self, tensors: Iterable[torch.Tensor] = ()) -> Event:
        """The end of all that the caller's compute stream was given by now, which may write these tensors."""
        for tensor in tensors:
            self.backend.compute_access(Bytes.of(tensor))
        return self.backend.record(self.backend.compute())

    def wait(self, event: Event) -> None:
        self.backend.timed_wait(self.backend.compute(), event, self.waits)

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        """Count bytes that others have copied."""
        with self._lock:
            self.sent_bytes += sent
            self.received_bytes += received

    def take_counts(self) -> tuple[Stalls, int, int]:
        """Waits, and bytes sent and received, since the last call."""
        counted = self.waits, self.sent_bytes, self.received_bytes
        self.waits, self.sent_bytes, self.received_bytes = Stalls(), 0, 0
        return counted

    def settle(self) -> None:
        """Free all gradients that are being copied: the compute stream waits for the copies."""
        with self._lock:
            self.flush()
            while self._leaving:
                self._free_oldest()

    def give_back(self, sent: SentTensor) -> None:
        """A tensor is no longer needed."""
        batch = sent.batch
        with self._lock:
            batch.parts -= 1
            if batch.parts == 0 and batch is self._open:
                self._open = None
            self._free_unneeded(batch)

    def host_view(self, cells: Cells, *, write: bool) -> torch.Tensor:
        """Pinned memory as a flat tensor, for the CPU's threads."""
        self.backend.host_access(cells.memory, write=write)
        return cells.tensor()

    def _free_unneeded(self, batch: TransferBatch) -> None:
        if batch.parts == 0 and batch.block is not None and batch.arrived is not None:
            self.arena.free(batch.block, (batch.arrived, *batch.copies))

    def _dispatch(self, batch: TransferBatch) -> None:
        nbytes = batch.source_bytes
        while self._leaving and self._leaving_bytes + nbytes > self.window:
            self._free_oldest()
        self.backend.wait(self._out, self.backend.record(batch.stream))
        self._copy_out(batch, self._out)
        self._leaving.append(batch)
        self._free_unneeded(batch)
        self._leaving_bytes += nbytes

    def _copy_out(self, batch: TransferBatch, stream: Stream) -> None:
        block = self.arena.allocate(max(batch.nbytes, 1))
        for event in block.after:
            self.backend.wait(stream, event)
        for start, source in batch.sources:
            if source.nbytes:
                self.backend.copy(stream, block.part(start, source.nbytes), source)
        batch.block, batch.arrived = block, self.backend.record(stream)
        batch.number = next(_batch_numbers)
        self.sent_bytes += batch.source_bytes

    def _free_oldest(self) -> None:
        oldest = self._leaving.popleft()
        assert oldest.arrived is not None
        self._leaving_bytes -= oldest.source_bytes
        self.backend.timed_wait(oldest.stream, oldest.arrived, self.waits)
        for _, source in oldest.sources:
            self.backend.hand_back(source, (oldest.stream,))
        oldest.sources.clear()
