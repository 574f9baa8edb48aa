"""Which bytes a saved tensor is made of, and who has saved them before.

NOTE [ One storage, many tensors ]

A tenth to a quarter of what autograd saves is saved more than once: ``x`` by three projections, ``qkv`` by the chunks
of it. The unit that moves is the storage, so an alias of bytes that are known already gets a handle of the same entry.

An address does not name a storage, because the allocator hands it out again as soon as it is free; a weak reference to
the storage does. And a storage does not name a content: it may have been written since. Two cases:

* The copy out has not been taken yet. Then it will hold what all aliases see, as autograd itself would: share it.
* It has. Then the alias must be known to see the same content: the same version *of the same counter*. Views share the
  counter of their base, so base and version say it. A ``.data`` alias has a counter of its own, whose numbers mean
  nothing to the other's: it gets an entry, and a copy, of its own. So does a ``detach()``, which shares the counter but
  does not show it: right, only not free.

NOTE [ What a view reaches ]

Of a storage, only what the tensor reaches has to move. A broadcast tensor reaches one element of each row that it
repeats; a row of a data set, that row. Where the tensor reaches half of the storage or more (the chunks of ``qkv`` do),
all of it moves, so that the other half need not be moved apart. What moves starts at a multiple of ``ALIGNMENT``, as
the allocator's own storages do, because kernels choose their code by the alignment of their operands, and their last
bits with it. For the same reason a storage at an odd address (memory that came from elsewhere) is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spillway.capture.order import Course
from spillway.runtime.bytes import over
from spillway.runtime.entry import Entry
from spillway.runtime.ledger import Ledger

ALIGNMENT = 512
"""The coarsest alignment that an allocator of torch gives (the CUDA caching allocator's)."""


_FIRST_SWEEP = 4096

# Named tensors are gone from the newest torch.
_HAS_NAMES = hasattr(torch.Tensor, "has_names")


class Saved(Entry):
    """Bytes that autograd saved: alive as long as one of the handles that share them.

    The runtime's entry and what capture knows of it are one object, since there is one for every saved tensor.
    """

    __slots__ = ("counter", "course", "in_tail", "origin", "place", "reference", "version")

    def __init__(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        start: int,
        nbytes: int,
        number: int,
        ledger: Ledger,
    ) -> None:
        Entry.__init__(self, number, storage, start, nbytes, ledger)
        self.origin = self.alive
        """The storage that was saved."""
        self.version = tensor._version
        self.counter = weakref.ref(version_owner(tensor))
        self.reference = weakref.ref(self)
        self.course: Course | None = None
        self.place = 0
        """Its place in the course."""
        self.in_tail = False
        """Whether backward will ask for it before it could have left."""

    def is_content_of(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is known to see what this was made from. See NOTE [ One storage, many tensors ]."""
        return tensor._version == self.version and self.counter() is version_owner(tensor)

    def reaches(self, start: int, nbytes: int) -> bool:
        """Whether all of these bytes of the storage are among them."""
        return self.start <= start and start + nbytes <= self.start + self.nbytes


class Staying:
    """Bytes that autograd saved, and of which it was decided that they stay. The runtime never hears of them."""

    __slots__ = ("__weakref__", "nbytes", "origin", "reference", "start")

    handles = 1
    """They are known for as long as anybody has this."""

    def __init__(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> None:
        self.origin: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        self.start = start
        self.nbytes = nbytes
        self.reference = weakref.ref(self)

    def reaches(self, start: int, nbytes: int) -> bool:
        """Whether all of these bytes of the storage are among them."""
        return self.start <= start and start + nbytes <= self.start + self.nbytes


Known = Saved | Staying


class Identity:
    """Finds the bytes that are known already. One per session."""

    def __init__(self) -> None:
        # A plain dictionary of weak references, swept now and then, costs a third of a WeakValueDictionary.
        self._known: dict[int, tuple[weakref.ref[Saved] | weakref.ref[Staying], ...]] = {}
        self._sweep_at = _FIRST_SWEEP

    def find(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Known | None:
        """What is known of these bytes, if all of them are. The latest counts."""
        for reference in self._known.get(storage._cdata, ()):
            saved = reference()
            if saved is not None and saved.origin() is storage and saved.reaches(start, nbytes):
                return saved
        return None

    def add(self, storage: torch.UntypedStorage, saved: Known) -> None:
        key = storage._cdata
        # Other parts of the same storage stay known.
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


def _any_alive(parts: tuple[weakref.ref[Saved] | weakref.ref[Staying], ...]) -> bool:
    return any((saved := reference()) is not None and saved.handles > 0 for reference in parts)


class Marks:
    """Storages that the user said something of, for as long as they live."""

    def __init__(self) -> None:
        self._marks: weakref.WeakKeyDictionary[torch.UntypedStorage, bool] = weakref.WeakKeyDictionary()
        self.any = False
        """Whether anything was ever said."""

    def set(self, tensor: torch.Tensor, *, offload: bool) -> None:
        self.any = True
        for part in storage_parts(tensor):
            self._marks[part.untyped_storage()] = offload

    def get(self, storage: torch.UntypedStorage) -> bool | None:
        """True: offload it; False: keep it; ``None``: nobody said."""
        return self._marks.get(storage) if self.any else None


def version_owner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose version counter this one shares: its base, if it is a view."""
    base = tensor._base
    return tensor if base is None else base


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or buffer, or a view of one."""
    base = tensor._base
    return _is_declared(tensor) or (base is not None and _is_declared(base))


def _is_declared(tensor: torch.Tensor) -> bool:
    # `isinstance` asks a metaclass, which costs a microsecond, and a plain tensor is no parameter.
    if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
        return True
    return bool(getattr(tensor, "_is_buffer", False))


def storage_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of: itself, or the parts of a wrapper subclass."""
    if not is_wrapper(tensor):
        return [tensor]
    parts = (getattr(tensor, name) for name in flatten(tensor)[0])
    return [plain for part in parts if isinstance(part, torch.Tensor) for plain in storage_parts(part)]


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it is made of other tensors, and says which (``__tensor_flatten__``)."""
    return type(tensor) is not torch.Tensor and bool(is_traceable_wrapper_subclass(tensor))


def flatten(tensor: torch.Tensor) -> tuple[list[str], Any]:
    """The names of a wrapper's parts, and what else it takes to rebuild it."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return names, context


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
    """The bytes that move for a tensor: the first, and how many. See NOTE [ What a view reaches ]."""
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
    """What turns a storage back into the saved tensor."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ViewRecipe:
        dtype = tensor.dtype
        # By the tuple's own constructor: a named tuple's is a Python function, three times as slow.
        recipe = tuple.__new__(
            cls,
            (
                dtype,
                tensor.device,
                tensor.shape,
                tensor.stride(),
                int(tensor.storage_offset()),
                dtype.is_complex and tensor.is_conj(),
                tensor.is_neg(),
            ),
        )
        if len(_recipes) >= _MOST_RECIPES:
            _recipes.clear()
        return _recipes.setdefault(recipe, recipe)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it is the recipe of this one, of whose size and type that is known."""
        return (
            tensor.stride() == self.stride
            and tensor.storage_offset() == self.offset
            and tensor.device == self.device
            and tensor.is_neg() is self.neg
            and (not self.dtype.is_complex or tensor.is_conj() is self.conj)
        )

    def rebuild(self, storage: torch.UntypedStorage, low: int) -> torch.Tensor:
        """The tensor over ``storage``, which lacks the first ``low`` bytes of the original."""
        tensor = over(storage, self.dtype, self.offset - low // self.dtype.itemsize, self.size, self.stride)
        if self.conj:
            torch._C._set_conj(tensor, True)
        if self.neg:
            torch._C._set_neg(tensor, True)
        return tensor


# Like tensors have one recipe: of many small objects, Python's collector would have to look at each.
_recipes: dict[ViewRecipe, ViewRecipe] = {}
_MOST_RECIPES = 4096
