"""The homes of streamed parameters: pinned memory or a mapped file, and copies of it on the device.

NOTE [ Lifetimes of a home ]

The home is freed with its last owner, after its last copy. Owners are the parameter at rest, and the entries that a
graph holds. So :meth:`StreamedModel.remove` takes no memory from a graph that waits for its backward. Destinations on
the device are allocated on the compute stream that uses them, and freed by reference: a view that the program keeps
stays valid.

NOTE [ Weights in their files ]

A frozen parameter may stay in its safetensors file, as a private mapping of it: a CPU tensor whose pages the system
reads when they are used, and drops when it needs memory. This is its home at rest, so it is then a parameter of the
CPU. Tasks copy the mapping to the device in pieces, through blocks of pinned memory. The system's cache of files is the
only cache. Forward and backward read blocks in opposite orders, so pages that were used last are used first.

A write at rest makes private pages in CPU memory, and leaves the file as it is. A file that another program changes in
place would change weights: each use looks at its time and size. A file that is replaced or deleted stays as it was.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from spillway._torch import at_end_of_backward, in_backward, version_of
from spillway.errors import UsageError
from spillway.runtime.arena import Arena, Pinned
from spillway.runtime.backend import Backend, Event, Stream
from spillway.runtime.bytes import Bytes, over
from spillway.runtime.device import DeviceRuntime
from spillway.runtime.entry import ByteCounters, State
from spillway.runtime.tiers import StagedReads, Tier, cut
from spillway.saved_tensors.identity import SavedStorage, unset_streamed


class WeightFile:
    """A file that weights are mapped from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = self._now()

    def check(self, name: str) -> None:
        """Raise an error if the file of this parameter was changed in place."""
        before, now = self._state, self._now()
        # Another file of this name, or none, leaves the mapping as it was.
        if now is not None and before is not None and now[:2] == before[:2] and now != before:
            raise UsageError(
                f"{name} is streamed from {self.path}, and the file was changed, so its weights are not those that "
                f"were loaded. Load the model again, and save other weights to another file"
            )

    def _now(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class FileHome:
    """A mapping of a file. See NOTE [ Weights in their files ]."""

    def __init__(self, storage: torch.UntypedStorage, file: WeightFile) -> None:
        self.nbytes = storage.nbytes()
        self.block = self.bytes = Bytes(storage, 0, self.nbytes)
        self.file = file

    def before_write(self) -> Sequence[Event]:
        return ()

    def mapped(self, backend: Backend) -> torch.Tensor:
        """Its bytes, as a tensor of the CPU."""
        return self.alias()

    def alias(self) -> torch.Tensor:
        return self.bytes.tensor()


Home = Pinned | FileHome


class HomeTier(Tier):
    """The homes of parameters. A slot is a :class:`~spillway.runtime.arena.Pinned`, which the mover never frees."""

    last: Event | None = None
    """The end of the copies that were queued last."""
    at_end: Callable[[], None]
    """Called at the end of a backward that has copied."""

    def reserve(self, source: Bytes) -> Home:
        raise AssertionError("homes are written at rest, not by copies out")

    def store(self, slots: Sequence[Home], sources: Sequence[Bytes]) -> Sequence[Event]:
        raise AssertionError("homes are written at rest, not by copies out")

    def load(self, slots: Sequence[Any], destinations: Sequence[Bytes]) -> Sequence[Event]:
        if in_backward():
            at_end_of_backward(self.at_end)
        return self._copy(slots, destinations)

    def _copy(self, slots: Sequence[Pinned], destinations: Sequence[Bytes]) -> Sequence[Event]:
        try:
            for home, destination in zip(slots, destinations, strict=True):
                self._backend.copy(self._back, destination, home.block.part(0, destination.nbytes))
        finally:
            # Also after a failure: the other copies are under way.
            self.last = copied = self._backend.record(self._back)
            for home in slots:
                # Copies in are ordered by their stream: the last one says when all are done.
                home.after("load", copied)
        return [copied] * len(slots)

    def free(self, slot: Home) -> None:
        """The slot's owners free it. See NOTE [ Lifetimes of a home ]."""

    def settle(self) -> None:
        """Let compute wait until no copy reads a home. See NOTE [ Writes at rest ] in ``streamed.py``."""
        last, self.last = self.last, None
        if last is not None:
            self._backend.wait(self._backend.compute(), last)


class FileTier(HomeTier):
    """The homes of parameters in files. A slot is a :class:`FileHome`.

    A read that is under way when its home is written is never used: its entry is dropped, or a version refuses it.
    """

    def __init__(self, backend: Backend, arena: Arena, *, out: Stream, back: Stream) -> None:
        super().__init__(backend, arena, out=out, back=back)
        self._reads = StagedReads(backend, arena, back)
        self._lock = threading.Lock()
        self._under_way = self._nbytes = 0
        """Reads that are under way, and the bytes of those that have ended."""
        self._since = self._seconds = 0.0
        """When the first of these began, and the time in which others were under way."""
        self._before = 0.0

    def measure(self) -> None:
        """Measure reads from here on. Until one has ended, the former measurement counts."""
        with self._lock:
            self._before = self._latest()
            self._nbytes, self._seconds, self._since = 0, 0.0, time.perf_counter()

    @property
    def seconds_per_byte(self) -> float:
        """As measured; 0: no read has ended."""
        with self._lock:
            return self._latest()

    def _latest(self) -> float:
        return self._seconds / self._nbytes if self._nbytes else self._before

    @contextmanager
    def _measured(self, nbytes: int) -> Iterator[None]:
        with self._lock:
            if not self._under_way:
                self._since = time.perf_counter()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._nbytes += nbytes
                if not self._under_way:
                    self._seconds += time.perf_counter() - self._since

    def _copy(self, slots: Sequence[FileHome], destinations: Sequence[Bytes]) -> Sequence[Event]:  # type: ignore[override]
        ready = self._backend.record(self._back)
        return [
            self._backend.all_of(
                [
                    self._backend.run(partial(self._read, *pieces, ready))
                    for pieces in zip(cut(home.bytes), cut(destination), strict=True)
                ]
            )
            for home, destination in zip(slots, destinations, strict=True)
        ]

    def _read(self, source: Bytes, destination: Bytes, ready: Event) -> Event | None:
        with self._measured(source.nbytes):
            if not self._backend.direct_disk:
                return self._reads.read(partial(_copy, source), destination)
            ready.synchronize()
            self._backend.host_access(destination, write=True)
            _copy(source, destination)
            return None


def _copy(source: Bytes, destination: Bytes) -> None:
    # Without the interpreter's lock, which the pages of a file would hold for long.
    ctypes.memmove(destination.address, source.address, source.nbytes)


class StreamedEntry(SavedStorage):
    """A parameter's content for one use of its block, and for the graph of that use."""

    __slots__ = ()

    def __init__(self, parameter: StreamedParameter, runtime: DeviceRuntime, tier: Tier, ledger: ByteCounters) -> None:
        home = parameter.home
        super().__init__(parameter.own(), home.block.storage, 0, home.nbytes, next(runtime.mover.numbers), ledger)
        # It begins in its slot, not on the device.
        self.release()
        self.state, self.tier, self.slot, self.alive = State.AWAY, tier, home, _nowhere
        runtime.mover.see(self)


class Use:
    """One use of a parameter by a call of its block, or one that is expected. It is over when this object dies."""

    round = -1
    """That of the entry when it was taken."""

    def __init__(self, parameter: StreamedParameter, entry: StreamedEntry) -> None:
        self.entry = entry
        self.parameter = parameter

    def __del__(self) -> None:
        # It runs also if the rest of the constructor was interrupted.
        if hasattr(self, "entry"):
            self.entry.mover.forget(self.entry, self.round)


class StreamedParameter:
    """A parameter with its home."""

    def __init__(self, name: str, parameter: Parameter, home: Home, backend: Backend, device: torch.device) -> None:
        self.name = name
        self._parameter = weakref.ref(parameter)
        self._backend = backend
        self.home = home
        self._form = parameter.dtype, parameter.shape, parameter.stride()
        self.device = device
        """The device that it was on."""
        self.latest: weakref.ref[SavedStorage] | None = None
        """The entry that was made last, which a graph may hold."""
        self.before_fetch: Callable[[], None] = _nowhere
        """An optimizer waits here for steps that write the home."""
        self._version = -1
        """Its version after its last use by a block."""
        self.has_left = False
        self.is_in_use = False
        """Whether its data is a copy in the device's own memory."""
        if home.block.address != parameter.data_ptr():
            content = parameter.detach()
            # A file's pages that are written take CPU memory.
            if not (isinstance(home, FileHome) and torch.equal(Bytes.of(content.cpu()).tensor(), home.alias())):
                self._on_cpu(write=True).copy_(content)
        self.at_rest = self._over(home.mapped(backend).untyped_storage())
        """The parameter's content between uses: pinned memory as a tensor of the device, or a file's as one of the
        CPU."""
        parameter.data = self.at_rest

    @property
    def is_alive(self) -> bool:
        return not self.has_left and self._parameter() is not None

    def own(self) -> Parameter:
        parameter = self._parameter()
        assert parameter is not None
        return parameter

    def check(self) -> None:
        """Raise an error for a parameter that was moved or cast."""
        own = self.own()
        if not self._is_home() or (own.dtype, own.shape, own.stride()) != self._form:
            raise UsageError(
                f"{self.name} is streamed, and was moved or cast, or got other memory (.data = ...): got {own.dtype} "
                f"{tuple(own.shape)} on {own.device} in other memory, expected {self._form[0]} "
                f"{tuple(self._form[1])} in its own CPU memory. Call attached.remove(), change the model, and attach "
                f"again; or write in place by copy_()"
            )
        if isinstance(self.home, FileHome):
            self.home.file.check(self.name)
            if own.requires_grad:
                raise UsageError(
                    f"{self.name} is streamed from a file, and requires a gradient now: got requires_grad=True, "
                    f"expected a frozen parameter. Call attached.remove() before you unfreeze it, and attach again"
                )

    def is_written(self) -> bool:
        """Whether it was written at rest since its last use, as far as versions tell. A step may be writing it."""
        return version_of(self.own()) != self._version

    def use(self, storage: torch.UntypedStorage) -> None:
        self.own().data = self._over(storage)
        self.is_in_use = True

    def rest(self, entry: StreamedEntry) -> None:
        """The parameter's data is its home, which gets what the block wrote meanwhile."""
        own = self.own()
        if own.untyped_storage() is not entry.origin() or version_of(own) != entry.version:
            if (own.dtype, own.shape) != self._form[:2]:
                raise UsageError(
                    f"{self.name} is streamed, and its block gave it other data: got {own.dtype} {tuple(own.shape)}, "
                    f"expected {self._form[0]} {tuple(self._form[1])}. Call attached.remove() first"
                )
            for event in self.home.before_write():
                self._backend.wait(self._backend.compute(), event)
            self.at_rest.copy_(own.detach())
        own.data = self.at_rest
        self._version = version_of(own)
        self.is_in_use = False

    def leave(self, device: torch.device | None = None) -> None:
        """The parameter gets memory of its own on a device; ``None``: where it was. One that was moved or cast has it.

        The device has done all that writes the home.
        """
        if self.is_alive:
            own = self.own()
            if device is None and isinstance(self.home, FileHome):
                own.data = self.at_rest
            elif self.is_in_use or self._is_home():
                move(own, self._on_cpu(write=False).to(device or self.device, copy=True))
            unset_streamed(own)
        self.has_left = True

    def _is_home(self) -> bool:
        own = self.own()
        return own.device == self.at_rest.device and own.untyped_storage().data_ptr() == self.home.block.address

    def _on_cpu(self, *, write: bool) -> torch.Tensor:
        self._backend.host_access(self.home.bytes, write=write)
        return self._over(self.home.alias().untyped_storage())

    def _over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        dtype, size, stride = self._form
        return over(storage, dtype, 0, size, stride)


def move(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Give a tensor other data. Its gradient follows to the same device."""
    gradient = tensor.grad
    if gradient is None or gradient.device == content.device:
        tensor.data = content
        return
    tensor.grad = None
    tensor.data = content
    # A gradient whose optimizer is gone has no bytes.
    with suppress(UsageError):
        tensor.grad = gradient.detach().to(content.device)


def _nowhere() -> None:
    return None
