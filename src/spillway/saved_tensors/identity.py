"""The registry of saved bytes: which bytes a tensor is made of, and whether they were saved before.

NOTE [ One storage, many tensors ]

A tenth to a quarter of saved tensors are saved more than once: ``x`` by three projections, ``qkv`` by its chunks. The
unit of offloading is the storage, so an alias of registered bytes gets a handle of the same entry.

An address does not identify a storage: the allocator reuses it as soon as it is free. A weak reference to the storage
does. A storage does not identify a content: it may have been written since. Two cases:

* The copy out has not been taken. It will hold what all aliases see, as autograd itself would: share it.
* It has been taken. The alias must be known to see the same content: the same version *of the same counter*. Views
  share the counter of their base, so base and version show it. A ``.data`` alias has its own counter, and gets its own
  entry and copy. So does a ``detach()``, which shares the counter without showing it: correct, only not free.

NOTE [ Bytes that a view reaches ]

Only the bytes that a tensor reaches are offloaded: one element per repeated row of a broadcast tensor, one row of a
data set. If the tensor reaches half of the storage or more (as chunks of ``qkv`` do), the whole storage is, so that the
other half needs no second copy. Offloaded bytes start at a multiple of ``ALIGNMENT``, as the allocator's storages do:
kernels choose their code, and so their last bits, by the alignment of their operands. A storage at another address is
kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from spillway._torch import base_of, is_declared, set_conj, set_neg, storage_key, storage_parts, version_of
from spillway.runtime.bytes import over
from spillway.runtime.entry import ByteCounters, Entry

if TYPE_CHECKING:
    from spillway.saved_tensors.order import AccessOrder

ALIGNMENT = 512
"""The coarsest alignment that an allocator of torch gives (the CUDA caching allocator's)."""

_FIRST_SWEEP = 4096
Mark = TypeVar("Mark")

# Named tensors are gone from the newest torch.
_HAS_NAMES = hasattr(torch.Tensor, "has_names")


class SavedStorage(Entry):
    """Bytes that autograd saved: alive as long as one of the handles that share them.

    It is the runtime's entry with more fields: one object, since there is one for every saved tensor.
    """

    __slots__ = ("counter", "order", "origin", "place", "reference", "version")

    def __init__(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        start: int,
        nbytes: int,
        number: int,
        ledger: ByteCounters,
    ) -> None:
        Entry.__init__(self, number, storage, start, nbytes, ledger)
        self.origin = self.alive
        """The storage that was saved."""
        self.version = version_of(tensor)
        self.counter = weakref.ref(version_owner(tensor))
        self.reference = weakref.ref(self)
        self.order: AccessOrder | None = None
        self.place = 0
        """Its place in the order."""

    def is_content_of(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is known to see the same content. See NOTE [ One storage, many tensors ]."""
        return version_of(tensor) == self.version and self.counter() is version_owner(tensor)

    def reaches(self: SavedStorage | KeptStorage, start: int, nbytes: int) -> bool:
        """Whether all of these bytes of the storage are among them."""
        return self.start <= start and start + nbytes <= self.start + self.nbytes


class KeptStorage:
    """Saved bytes that are kept. The runtime does not know them."""

    __slots__ = ("__weakref__", "nbytes", "origin", "reference", "start")

    handles = 1
    """They are registered while this object lives."""

    def __init__(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> None:
        self.origin: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        self.start = start
        self.nbytes = nbytes
        self.reference = weakref.ref(self)

    reaches = SavedStorage.reaches


Known = SavedStorage | KeptStorage


class Identity:
    """The registry of saved bytes. One per session."""

    def __init__(self) -> None:
        # A plain dictionary of weak references, swept now and then, costs a third of a WeakValueDictionary.
        self._known: dict[int, tuple[weakref.ref[SavedStorage] | weakref.ref[KeptStorage], ...]] = {}
        self._sweep_at = _FIRST_SWEEP

    def find(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Known | None:
        """The latest record that covers all of these bytes."""
        for reference in self._known.get(storage_key(storage), ()):
            saved = reference()
            if saved is not None and saved.origin() is storage and saved.reaches(start, nbytes):
                return saved
        return None

    def known(self, tensor: torch.Tensor) -> Known | None:
        """The record of a tensor's bytes, if they were saved and a handle of them is alive."""
        if why_unmovable(tensor) is not None:
            return None
        storage = tensor.untyped_storage()
        return self.find(storage, *reach(tensor, storage.nbytes()))

    def add(self, storage: torch.UntypedStorage, saved: Known) -> None:
        key = storage_key(storage)
        # Other parts of the same storage stay registered.
        others = [
            reference
            for reference in self._known.get(key, ())
            if (other := reference()) is not None
            and other.origin() is storage
            and (other.start, other.nbytes) != (saved.start, saved.nbytes)
        ]
        self._known[key] = (saved.reference, *others)
        if len(self._known) >= self._sweep_at:
            self._known = {key: parts for key, parts in list(self._known.items()) if _any_alive(parts)}
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._known))

    def __len__(self) -> int:
        return sum(_any_alive(parts) for parts in list(self._known.values()))


def _any_alive(parts: tuple[weakref.ref[SavedStorage] | weakref.ref[KeptStorage], ...]) -> bool:
    return any((saved := reference()) is not None and saved.handles > 0 for reference in parts)


class StorageMarks(Generic[Mark]):
    """Marked storages, while they live."""

    def __init__(self) -> None:
        self._marks: weakref.WeakKeyDictionary[torch.UntypedStorage, Mark] = weakref.WeakKeyDictionary()
        self.any = False
        """Whether a storage was ever marked."""

    def set(self, tensor: torch.Tensor, mark: Mark) -> None:
        """Mark the tensor's storage, or those of a wrapper's parts."""
        self.any = True
        for part in storage_parts(tensor):
            self._marks[part.untyped_storage()] = mark

    def get(self, storage: torch.UntypedStorage) -> Mark | None:
        return self._marks.get(storage) if self.any else None


_streamed: Any = WeakIdKeyDictionary()
"""Streamed parameters, each with the entry of its copy on the device, if there is one."""


def set_streamed(parameter: torch.Tensor, entry: SavedStorage | None) -> None:
    """The parameter is streamed. ``entry`` is that of its copy on the device, if there is one."""
    _streamed[parameter] = entry


def unset_streamed(parameter: torch.Tensor) -> None:
    """The parameter is streamed no more."""
    _streamed.pop(parameter, None)


def is_streamed(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter whose memory changes with each use."""
    # The dictionary inside is asked whether it is empty: the other one does that in Python.
    return bool(_streamed.data) and tensor in _streamed


def streamed_entry(tensor: torch.Tensor) -> SavedStorage | None:
    """The entry of a streamed parameter in use, or of the one that the tensor is a view of."""
    found: SavedStorage | None = _streamed.get(version_owner(tensor)) if _streamed.data else None
    return found


def version_owner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose version counter this one shares: its base, if it is a view."""
    base = base_of(tensor)
    return tensor if base is None else base


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or buffer, or a view of one."""
    base = base_of(tensor)
    return is_declared(tensor) or (base is not None and is_declared(base))


def why_unmovable(tensor: torch.Tensor) -> str | None:
    """Why the tensor cannot be rebuilt exactly from a storage and a view recipe, or ``None`` if it can."""
    if type(tensor) is not torch.Tensor:
        return f"its class is {type(tensor).__name__}, which only its own code can rebuild"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"its layout is {'nested' if tensor.is_nested else tensor.layout}, not strided"
    if tensor.is_quantized:
        return "it is quantized, and its scales are not in its storage"
    if tensor.is_inference():
        return "it was made in inference mode, and has no version"
    if tensor.numel() == 0:
        return "it has no element"
    if _HAS_NAMES and tensor.has_names():  # type: ignore[attr-defined]
        return "its dimensions are named"
    try:
        address = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        # Wrappers of functorch and of tracers raise one or the other.
        return "it has no storage of its own"
    if address == 0:
        return "its storage has no memory"
    return None


def reach(tensor: torch.Tensor, storage_nbytes: int) -> tuple[int, int]:
    """The bytes to offload for a tensor: the first, and how many. See NOTE [ Bytes that a view reaches ]."""
    if tensor.nbytes == storage_nbytes and tensor.is_contiguous():
        return 0, storage_nbytes
    itemsize = tensor.itemsize
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = first * itemsize // ALIGNMENT * ALIGNMENT
    end = (last + 1) * itemsize
    if (end - start) * 2 >= storage_nbytes:
        return 0, storage_nbytes
    return start, end - start


class ViewRecipe(NamedTuple):
    """The recipe of a view: turns a storage back into the saved tensor."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    conj: bool
    neg: bool
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ViewRecipe:
        conj, neg = tensor.dtype.is_complex and tensor.is_conj(), tensor.is_neg()
        return cls(tensor.dtype, tensor.device, tensor.shape, tensor.stride(), conj, neg, int(tensor.storage_offset()))

    def rebuild(self, storage: torch.UntypedStorage, low: int) -> torch.Tensor:
        """The tensor over ``storage``, which lacks the first ``low`` bytes of the original."""
        tensor = over(storage, self.dtype, self.offset - low // self.dtype.itemsize, self.size, self.stride)
        if self.conj:
            set_conj(tensor, True)
        if self.neg:
            set_neg(tensor, True)
        return tensor
