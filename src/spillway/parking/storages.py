"""One storage that is parked: its copy in a tier, its way out and back, and the copies that stay for the next time.

NOTE [ One parked storage ]

A storage is parked, not a tensor. So views, tied weights and gradients that share it need no care, and the objects stay
the same ones: parameters, their nodes of autograd, their version counters. ::

    HERE --out--> PARKED --back--> RETURNING --use--> HERE

* **Out.** The stream ``out`` waits for compute and copies each storage into a slot of a tier. The CPU waits for the
  last copy, and for the disk's writes. Only then are the storages emptied, in place (``resize_(0)``). So no copy reads
  memory that has another owner, on whatever stream it was allocated, and an error before that changes nothing.
* **Back.** All storages get memory on the compute stream (``resize_(n)``), or none does. The stream ``back`` waits for
  compute, which may have used that memory before, and copies. Each storage has an event of its own.
* **Use.** The first use lets two streams wait for the event: the user's, and that of the ``unpark`` call. A module's
  hook lets every stream that calls it wait, until the copy is done.

Between out and back, data pointers change. Version counters do not: the copies are no operations of autograd. So a
graph from before may have its backward afterwards.

NOTE [ Copies that stay ]

With ``reuse=True`` the slot stays after the way back. The next parking copies nothing if the storage still has the same
bytes. Two checks must agree:

* The version counters of all of its tensors. They miss writes through ``.data``, and, as of torch 2.13, all fused
  optimizer steps.
* A fingerprint: the sums of its 64-bit words in 1,021 columns. It reads the GPU's
  memory once, in a few percent of the time of a copy. One changed word always changes it. Changes that cancel out in
  each column do not: training makes no such changes, but code could. So it is no proof, and ``reuse`` no default.

A storage of less than 1 MiB is copied each time: that takes no longer than its fingerprint.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from spillway._torch import holders_of, version_of
from spillway.errors import ParkedError, TierError, UnsupportedError
from spillway.parking import guards
from spillway.runtime.bytes import Bytes, over
from spillway.runtime.entry import ByteCounters, Entry
from spillway.runtime.entry import State as EntryState
from spillway.saved_tensors.identity import version_owner
from spillway.units import format_bytes

if TYPE_CHECKING:
    from spillway.runtime.backend import Event, Stream
    from spillway.runtime.device import DeviceRuntime
    from spillway.runtime.tiers import Slot, Tier

_COLUMNS = 1021
"""A prime, so that words that change places change their columns."""
_ROW = 8 * _COLUMNS
FINGERPRINTED = 1 << 20
"""Bytes of a storage from which on it has a fingerprint."""
_PART = 64
"""Storages whose fingerprints are computed together."""
_POISON = 0xA5


class State(enum.Enum):
    """The place of a storage's bytes. See NOTE [ One parked storage ]."""

    HERE = enum.auto()
    """On the device."""
    PARKED = enum.auto()
    """In the tier only. The storage has no bytes."""
    RETURNING = enum.auto()
    """In the tier, and a copy back is queued."""


class Copy:
    """A storage's bytes in a tier. The slot is freed with this object, after the copies that are queued."""

    def __init__(self, runtime: DeviceRuntime, tier: Tier, source: Bytes) -> None:
        self._mover = runtime.mover
        self.tier = tier
        self.nbytes = source.nbytes
        self.slot: Slot = tier.reserve(source)
        # The mover frees slots of dead entries where no lock is held: see NOTE [ Handles die anywhere ].
        self._entry = Entry(next(self._mover.numbers), source.storage, 0, source.nbytes, ByteCounters())
        self._entry.release()
        self._entry.state, self._entry.tier, self._entry.slot = EntryState.AWAY, tier, self.slot
        self.versions: Versions | None = None
        """Those of the tensors, when it was made; ``None``: unknown."""
        self.fingerprint: Tensor | None = None

    def __del__(self) -> None:
        # Not if the tier was full.
        if hasattr(self, "_entry"):
            self._mover.forget(self._entry, -1)

    def write(self, source: Bytes, versions: Versions | None, fingerprint: Tensor | None) -> None:
        """Queue the copy of a storage with these."""
        # If this fails, it is a copy of nothing.
        self.fingerprint = None
        self.tier.store([self.slot], [source])
        self.versions, self.fingerprint = versions, fingerprint

    def is_content(self, versions: Versions | None, fingerprint: Tensor | None) -> bool:
        """Whether a storage with these has the same bytes. See NOTE [ Copies that stay ]."""
        if versions is None or fingerprint is None or self.versions is None or self.fingerprint is None:
            return False
        # A tensor has one weak reference. Their own comparison would compare the tensors.
        known, now = ([(id(owner), version) for owner, version in each] for each in (self.versions, versions))
        return known == now and torch.equal(fingerprint, self.fingerprint)


class ParkedStorage:
    """A storage that is parked, with the tensors over it that are known."""

    def __init__(self, name: str, storage: torch.UntypedStorage, runtime: DeviceRuntime) -> None:
        self.name = name
        """That of its first tensor."""
        self._storage = weakref.ref(storage)
        self.nbytes = storage.nbytes()
        self.runtime = runtime
        self.state = State.HERE
        self.copy: Copy | None = None
        """Its bytes in the tier, while it is parked."""
        self.is_gradient = False
        """Whether a backward may add to it, which asks neither hooks nor guards."""
        self._tensors: list[tuple[TensorWeakRef, int]] = []
        """Each with how many hold it if no graph does; 0 for a wrapper."""
        self._event: Event | None = None
        """The end of the copy back, until it is known to be done."""
        self._home: Stream | None = None
        """The compute stream of the ``unpark`` call."""
        self._lock = threading.RLock()

    def add(self, tensor: Tensor, holders: int) -> None:
        """A plain tensor over it, which so many hold if no graph does, or a wrapper around one, with 0."""
        self._tensors.append((TensorWeakRef(tensor), holders))

    def is_shared(self) -> bool:
        """Whether a graph has it, or a tensor that is not known: neither hooks nor guards see how these use it."""
        plain = [(tensor, usual) for reference, usual in self._tensors if usual and (tensor := reference()) is not None]
        counts = [(*holders_of(tensor), usual) for tensor, usual in plain]
        return any(of_storage > 1 + len(plain) or of_tensor > usual for of_storage, of_tensor, usual in counts)

    def storage(self) -> torch.UntypedStorage | None:
        """``None``: it is gone, with all of its tensors."""
        return self._storage()

    def whole(self) -> Bytes:
        """All of its bytes on the device."""
        storage = self.storage()
        assert storage is not None
        return Bytes(storage, 0, self.nbytes)

    def versions(self) -> Versions | None:
        """The version counters of its tensors, with their owners; ``None``: one has none."""
        found: Versions = []
        for tensor in self._alive():
            if tensor.is_inference():
                return None
            found.append((weakref.ref(version_owner(tensor)), version_of(tensor)))
        return found

    def empty(self) -> None:
        """Give its memory on the device back. All copies and kernels that use it are done."""
        storage = self.storage()
        if storage is not None:
            # First, so that an interrupt leaves nothing that looks as if it were here.
            self.state = State.PARKED
            for tensor in self._alive():
                guards.guard(tensor, self)
            storage.resize_(0)
            guards.refuse(storage, self._text("an operator"))

    def fill(self) -> None:
        """Give it memory on the device, unwritten. Raises torch's error if there is none."""
        storage = self.storage()
        if storage is not None:
            guards.allow(storage)
            storage.resize_(self.nbytes)
            if self.runtime.backend.poisons:
                self.whole().tensor().fill_(_POISON)

    def reload(self, home: Stream, back: Stream) -> None:
        """Queue the copy back, on the stream ``back``, which waits for compute already."""
        storage = self.storage()
        if storage is not None and self.copy is not None:
            whole = self.whole()
            (self._event,) = self.copy.tier.load([self.copy.slot], [whole])
            # It may be dropped before any stream has waited.
            self.runtime.backend.hand_back(whole, [back])
            self._home, self.state = home, State.RETURNING

    def refuse(self) -> None:
        """Refuse access by code that does not wait, until a stream has waited."""
        storage = self.storage()
        if storage is not None and self.state is State.RETURNING:
            guards.refuse(storage, f"{self.name} is being copied back to the GPU. Call synchronize() of the parking")

    def use(self, what: str) -> None:
        """Something is about to use it on the thread's compute stream. Raises ``ParkedError`` if it is parked."""
        with self._lock:
            if self.state is State.PARKED and self.storage() is not None:
                raise ParkedError(self._text(what))
            self.arrive()

    def arrive(self) -> bool:
        """Let compute wait for the copy back; says whether that is known to be done."""
        with self._lock:
            event, backend = self._event, self.runtime.backend
            if event is None:
                return True
            if backend.is_capturing():
                raise UnsupportedError(
                    f"{self.name} is being copied back to the GPU, and a graph that is captured cannot wait for that. "
                    f"Call synchronize() of the parking before the capture"
                )
            compute = backend.compute()
            backend.wait(compute, event)
            if self.state is State.RETURNING:
                if compute != self._home and self._home is not None:
                    backend.wait(self._home, event)
                storage = self.storage()
                if storage is not None:
                    guards.allow(storage)
                for tensor in self._alive():
                    guards.release(tensor, self)
                # Last, so that an interrupt leaves nothing that looks as if it were here.
                self.state = State.HERE
            if event.query():
                self._event = self._home = None
            return self._event is None

    def stay(self) -> None:
        """Its copy back has failed, or was interrupted: it is parked as before."""
        failed = self._event
        if self.state is State.RETURNING and failed is not None:
            with suppress(TierError):
                failed.synchronize()
            self._event = None
            self.empty()

    def is_back(self) -> bool:
        """Whether it is on the device, and known to be complete for every stream; or gone."""
        event = self._event
        return self.storage() is None or (self.state is State.HERE and (event is None or event.query()))

    def synchronize(self) -> None:
        """Block until the copy back is done."""
        event = self._event
        if event is not None:
            event.synchronize()
            self.arrive()

    def _alive(self) -> list[Tensor]:
        return [tensor for reference, _ in self._tensors if (tensor := reference()) is not None]

    def _text(self, what: str) -> str:
        return (
            f"{self.name} is parked: its {format_bytes(self.nbytes)} are in CPU memory or on disk, and {what} needs "
            f"them on {self.runtime.backend.device}. Call unpark() first, or leave `with spillway.parked(...)`"
        )


Versions = list[tuple[weakref.ref[Tensor], int]]


def fingerprints(storages: Sequence[ParkedStorage]) -> dict[ParkedStorage, Tensor]:
    """Those of storages of one device that are large enough, on the CPU. See NOTE [ Copies that stay ]."""
    large = [each for each in storages if each.nbytes >= FINGERPRINTED]
    # In parts: parking must not need much memory itself.
    parts = (large[start : start + _PART] for start in range(0, len(large), _PART))
    rows = (row for part in parts for row in _rows_of(part, part[0].runtime.backend.device))
    return dict(zip(large, rows, strict=True))


def _rows_of(storages: Sequence[ParkedStorage], device: torch.device) -> Sequence[Tensor]:
    table = torch.zeros(len(storages), 2, _ROW, dtype=torch.uint8, device=device)
    for (sums, rest), each in zip(table, storages, strict=True):
        memory = each.whole()
        rows = memory.nbytes // _ROW
        words = over(memory.storage, torch.int64, 0, (rows, _COLUMNS), (_COLUMNS, 1))
        torch.sum(words, 0, out=sums.view(torch.int64))
        # They do not fill a row of words.
        rest[: memory.nbytes - rows * _ROW].copy_(memory.tensor()[rows * _ROW :])
    return table.view(torch.int64).sum(1).cpu().unbind()
