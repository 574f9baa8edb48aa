"""The way of gradients off a device and of parameters back: lanes, windows, and pinned memory.

A gradient that leaves is held until its copy is done. The window bounds the bytes that are held so: past it, the stream
that the gradient came from waits for the oldest copy, and lets it go. That goes by program order, not by the clock, so
that a step's peak is the same every time.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from spillway.optim.parcels import Parcel, Sent
from spillway.runtime.arena import Block
from spillway.runtime.backend import Event, Lane
from spillway.runtime.bytes import Bytes, Cells
from spillway.runtime.device import DeviceRuntime
from spillway.runtime.labels import label
from spillway.runtime.ledger import Stalls

STAGING = 64 << 20
"""Bytes that wait for the lane to the device at once."""


_TOGETHER = 1 << 20


_sendings = itertools.count(1)


class _Leaving(NamedTuple):
    sources: list[Bytes]
    nbytes: int
    copied: Event
    compute: Lane


class Way(NamedTuple):
    """Elements that go to the device."""

    target: torch.Tensor
    """A dense tensor."""
    start: int
    """The first of its elements that are written, in the order in which they lie."""
    source: Cells
    """In pinned memory; of the same type, or of one that is converted on the device."""


class Traffic:
    """Both ways of one device.

    Args:
        runtime: of the device.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.backend = runtime.backend
        self.arena = runtime.arena
        self.window = runtime.window
        self.spill_file = runtime.spill_file
        self._out = self.backend.lane("gradients")
        self._back = self.backend.lane("parameters")
        self._open: Parcel | None = None
        """Small tensors that wait for others."""
        self._leaving: deque[_Leaving] = deque()
        self._leaving_bytes = 0
        self._staged: deque[tuple[Block, Event]] = deque()
        self._staged_bytes = 0
        self._followed: Event | None = None
        """The last event that the lane back was told to wait for."""
        # A factor that dies gives its memory back, in whatever thread the collector runs.
        self._lock = threading.RLock()
        self.waits = Stalls()
        """How long the device waited for gradients to leave, and for parameters."""
        self.sent_bytes = 0
        self.received_bytes = 0

    def send(self, tensor: torch.Tensor) -> Sent:
        """A dense tensor's bytes leave, in the order in which they lie, behind what computes it.

        A small one waits for others, or for :meth:`flush`.
        """
        source = memory_of(tensor)
        with label("gradient leaves"), self._lock:
            compute = self.backend.compute()
            if self._open is not None and self._open.compute != compute:
                self._dispatch_open()
            if source.nbytes >= _TOGETHER:
                parcel = Parcel(compute)
                sent = Sent(parcel, parcel.add(source), tensor)
                self._dispatch(parcel)
                return sent
            if self._open is None:
                self._open = Parcel(compute)
            self.backend.compute_access(source)
            sent = Sent(self._open, self._open.add(source), tensor)
            if self._open.nbytes >= _TOGETHER:
                self._dispatch_open()
            return sent

    def flush(self) -> None:
        """What waits for others leaves."""
        if self._open is not None:
            with self._lock:
                self._dispatch_open()

    def fetch(self, tensors: Sequence[torch.Tensor], after: Event) -> list[Sent]:
        """Copy tensors that stay, once ``after`` is reached; from the host lane."""
        parcel = Parcel(self._out)
        sent = [Sent(parcel, parcel.add(memory_of(tensor)), tensor) for tensor in tensors]
        if sent:
            with self._lock:
                self.backend.wait(self._out, after)
                self._copy_out(parcel)
                self.sent_bytes += sum(one.nbytes for one in sent)
        return sent

    def fetch_into(self, pairs: Sequence[tuple[Bytes, Bytes]], after: Event) -> Event:
        """Copy bytes of tensors that stay into pinned memory, once ``after`` is reached; from the host lane."""
        with self._lock:
            self.backend.wait(self._out, after)
            for target, source in pairs:
                if source.nbytes:
                    self.backend.copy(self._out, target, source)
                    self.sent_bytes += source.nbytes
            return self.backend.record(self._out)

    def read(self, sent: Sent) -> torch.Tensor:
        """What was sent, flat, when it is there; for the host."""
        arrived = sent.parcel.arrived
        assert arrived is not None
        arrived.synchronize()
        return self.host_view(sent.memory, sent.dtype, sent.numel, write=False)

    def receive(self, ways: Sequence[Way], after: Event) -> Event:
        """Queue the ways of elements to the device, once ``after`` is reached."""
        with self._lock:
            if after is not self._followed:
                self.backend.wait(self._back, after)
                self._followed = after
            for tensor, start, source in ways:
                memory = source.memory
                if memory.nbytes == 0:
                    continue
                whole, size = memory_of(tensor), tensor.itemsize
                nbytes = memory.nbytes // source.dtype.itemsize * size
                target = Bytes(whole.storage, whole.start + start * size, nbytes)
                if source.dtype == tensor.dtype:
                    self.backend.copy(self._back, target, memory)
                else:
                    self.backend.convert(self._back, Cells(target, tensor.dtype), source)
                self.received_bytes += memory.nbytes
            return self.backend.record(self._back)

    def pinned(self, nbytes: int) -> Block:
        """Pinned memory that may be written now; for the host."""
        block = self.arena.allocate(max(nbytes, 1))
        for event in block.after:
            event.synchronize()
        return block

    def stage(self, nbytes: int) -> Block:
        """The same, for what is on its way to the device at once; past a few of them the oldest is waited for."""
        while True:
            with self._lock:
                full = self._staged and self._staged_bytes + nbytes > STAGING
            if not full:
                return self.pinned(nbytes)
            self.unstage_oldest()

    def unstage_oldest(self) -> bool:
        """Wait for what was staged first, and give it back; whether there was any."""
        with self._lock:
            oldest = self._staged.popleft() if self._staged else None
            if oldest is not None:
                self._staged_bytes -= oldest[0].nbytes
        if oldest is None:
            return False
        oldest[1].synchronize()
        self.arena.free(oldest[0])
        return True

    def staged(self, block: Block, copied: Event) -> None:
        """What was staged is on its way."""
        with self._lock:
            self._staged.append((block, copied))
            self._staged_bytes += block.nbytes

    def unstage(self) -> None:
        """Nothing more comes: give back what is staged, after its copies."""
        with self._lock:
            for block, copied in self._staged:
                self.arena.free(block, (copied,))
            self._staged.clear()
            self._staged_bytes = 0

    def ready(self, tensors: Iterable[torch.Tensor]) -> Event:
        """All that the calling thread's compute lane was given by now, which writes some tensors, among others."""
        for tensor in tensors:
            self.backend.compute_access(memory_of(tensor))
        return self.now()

    def now(self) -> Event:
        """All that the calling thread's compute lane was given by now."""
        return self.backend.record(self.backend.compute())

    def wait(self, event: Event) -> None:
        """The calling thread's compute lane waits."""
        self.backend.timed_wait(self.backend.compute(), event, self.waits)

    def count_anew(self) -> tuple[Stalls, int, int]:
        """What was waited, sent and received since this was asked for last."""
        counted = self.waits, self.sent_bytes, self.received_bytes
        self.waits, self.sent_bytes, self.received_bytes = Stalls(), 0, 0
        return counted

    def settle(self) -> None:
        """Let go of all gradients that are on their way: compute waits for them."""
        with self._lock:
            self._dispatch_open()
            while self._leaving:
                self._let_go()

    def give_back(self, sent: Sent) -> None:
        """Nobody needs it any more."""
        parcel = sent.parcel
        with self._lock:
            parcel.parts -= 1
            if parcel.parts == 0 and parcel is self._open:
                self._open = None
            self._free_unwanted(parcel)

    def _free_unwanted(self, parcel: Parcel) -> None:
        if parcel.parts == 0 and parcel.block is not None and parcel.arrived is not None:
            self.arena.free(parcel.block, (parcel.arrived, *parcel.copies))

    def host_view(self, memory: Bytes, dtype: torch.dtype, numel: int, *, write: bool) -> torch.Tensor:
        """Pinned memory as a flat tensor, for the host."""
        self.backend.host_access(memory, write=write)
        return Cells(memory.first(numel * dtype.itemsize), dtype).tensor()

    def _dispatch_open(self) -> None:
        if self._open is not None:
            # It stays open where there is no memory: whoever asks again may find some.
            self._dispatch(self._open)
            self._open = None

    def _dispatch(self, parcel: Parcel) -> None:
        nbytes = sum(source.nbytes for _, source in parcel.sources)
        while self._leaving and self._leaving_bytes + nbytes > self.window:
            self._let_go()
        self.backend.wait(self._out, self.backend.record(parcel.compute))
        copied = self._copy_out(parcel)
        sources = [source for _, source in parcel.sources]
        self._leaving.append(_Leaving(sources, nbytes, copied, parcel.compute))
        parcel.sources = []
        self._free_unwanted(parcel)
        self._leaving_bytes += nbytes
        self.sent_bytes += nbytes

    def _copy_out(self, parcel: Parcel) -> Event:
        block = self.arena.allocate(max(parcel.nbytes, 1))
        for event in block.after:
            self.backend.wait(self._out, event)
        for start, source in parcel.sources:
            if source.nbytes:
                self.backend.copy(self._out, Bytes(block.storage, block.start + start, source.nbytes), source)
        parcel.block, parcel.arrived = block, self.backend.record(self._out)
        parcel.number = next(_sendings)
        return parcel.arrived

    def _let_go(self) -> None:
        oldest = self._leaving.popleft()
        self._leaving_bytes -= oldest.nbytes
        self.backend.timed_wait(oldest.compute, oldest.copied, self.waits)
        for source in oldest.sources:
            self.backend.hand_back(source, (oldest.compute,))


def memory_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a dense tensor, whatever its strides."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return Bytes(tensor.untyped_storage(), start, tensor.numel() * tensor.itemsize)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a range of bytes, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
