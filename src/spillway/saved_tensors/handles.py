"""Handles: the objects that autograd holds in place of saved tensors.

NOTE [ Ownership by autograd ]

``pack`` gives autograd a *handle*, and ``unpack`` turns it back into the tensor. Only autograd holds the handle. When
autograd releases it (after backward, with the graph, on an exception), it dies, and its bytes are freed. So there is no
table to clear and no step to end, and any number of graphs may be alive. Unpacking twice gives the same tensor.

A handle must not hold a tensor that has a ``grad_fn``: an output would hold its own node, which holds the handle.

NOTE [ The check that hooks switch off ]

Autograd raises an error if a saved tensor was changed in place, by its version. Under hooks it does not. So each handle
has a *tracker*: an alias that shares the version counter and no storage (``tracker = t.detach(); tracker.data =
nothing``), valid also while the bytes are offloaded. The tensor for backward is made from the tracker and shares the
counter, as autograd's own does: if a backward function writes into it, the next one that reads it raises.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from spillway._torch import disable_dispatch, dispatch_modes, nested_size, version_of
from spillway.errors import InplaceError
from spillway.saved_tensors.identity import Known, SavedStorage, ViewRecipe, is_streamed, reach, version_owner

if TYPE_CHECKING:
    from spillway.session import Session


class Handle(Protocol):
    """The object that autograd holds in place of a saved tensor. See NOTE [ Ownership by autograd ]."""

    def unpack(self) -> Any: ...

    def is_intact(self) -> bool:
        """Whether the tensor was not written since it was saved, according to its version."""


class KeptHandle:
    """A handle of a kept tensor: holds the tensor itself, or an alias without its history. As a hook, it keeps all."""

    __slots__ = ("__weakref__", "_constant", "_version", "alias", "saved")

    def __init__(self, tensor: torch.Tensor, saved: Known | None = None) -> None:
        # A leaf that needs grad has no history and cannot get one. Any other plain tensor is held by an alias: an
        # in-place write may still make a constant part of the graph, and `release` counts aliases. A subclass is held
        # itself, since an alias may lack attributes that only its own code knows. So is no streamed parameter, whose
        # memory changes.
        is_fixed = tensor.is_leaf and not is_streamed(tensor)
        stays_a_leaf = is_fixed and (tensor.requires_grad or type(tensor) is not torch.Tensor)
        self.alias = tensor if stays_a_leaf else tensor.detach()
        self._constant = None
        """A weak reference to a constant: while the object lives, autograd gives it back, and so does the handle."""
        if not stays_a_leaf:
            carry_attributes(tensor, self.alias)
            if is_fixed:
                self._constant = weakref.ref(tensor)
        self._version = -1 if tensor.is_inference() else version_of(tensor)
        self.saved = saved

    def unpack(self) -> torch.Tensor:
        if self._version != -1:
            check_version(self.alias, self._version, self.alias)
        constant = None if self._constant is None else self._constant()
        return self.alias if constant is None or not constant.is_leaf else constant

    def is_intact(self) -> bool:
        return self._version == -1 or version_of(self.alias) == self._version


class TrackedHandle:
    """A handle without the bytes of its tensor: a tracker, and the recipe. ``nothing`` is an empty tensor."""

    __slots__ = ("_recipe", "_tracker", "_version")

    def __init__(self, tensor: torch.Tensor, nothing: torch.Tensor) -> None:
        self._version = version_of(tensor)
        self._recipe = ViewRecipe.of(tensor)
        self._tracker = tensor.detach()
        self._tracker.data = nothing

    def is_intact(self) -> bool:
        return version_of(self._tracker) == self._version

    def _check(self) -> None:
        if version_of(self._tracker) != self._version:
            check_version(self._tracker, self._version, self._recipe)

    def _with_data(self, data: torch.Tensor) -> torch.Tensor:
        """The tensor for backward."""
        tensor = self._tracker.detach()
        tensor.data = data
        return tensor


class OffloadedHandle(TrackedHandle):
    """A handle of an offloaded tensor, whose storage is an entry of the mover."""

    __slots__ = ("_round", "_traversals", "saved")

    def __init__(self, tensor: torch.Tensor, saved: SavedStorage, nothing: torch.Tensor) -> None:
        # First the attributes that the finaliser reads: it runs also if the rest raises.
        self._round = -1
        self.saved = saved
        self._traversals = 0
        super().__init__(tensor, nothing)
        carry_attributes(tensor, self._tracker)

    def unpack(self) -> torch.Tensor:
        self._check()
        if torch.is_inference_mode_enabled():
            # A tensor made inside has no version counter, and could not share the user's.
            with torch.inference_mode(mode=False):
                return self.unpack()
        if dispatch_modes() > 0:
            with disable_dispatch():
                return self._fetch()
        return self._fetch()

    def _fetch(self) -> torch.Tensor:
        saved = self.saved
        order = saved.order
        if order is not None:
            # Read without the lock: whether it was caught before it left is a hint.
            order.ask(saved.place, self._traversals, caught=saved.round == 0 and saved.is_on_device())
            self._traversals += 1
        storage, self._round = saved.mover.take(saved, self._round, order)
        tensor = self._with_data(self._recipe.rebuild(storage, saved.start if self._round else 0))
        carry_attributes(self._tracker, tensor)
        return tensor

    def __del__(self) -> None:
        if dispatch_modes() > 0:
            # Releasing is no operator: an active dispatch mode must not see it.
            with disable_dispatch():
                self.saved.mover.forget(self.saved, self._round)
        else:
            self.saved.mover.forget(self.saved, self._round)


class PartsHandle:
    """A handle of a wrapper subclass: the handles of its parts.

    ``objects`` are parts that are no tensors (a device mesh), or that must be the very object.
    """

    __slots__ = ("_context", "_objects", "_owner", "_parts", "_size", "_stride", "_type", "_version")

    def __init__(self, tensor: torch.Tensor, parts: dict[str, Handle], objects: dict[str, Any], context: Any) -> None:
        # An alias that shares a wrapper's counter shares its parts too. So the owner is checked while it lives; its
        # views keep it alive.
        self._owner = weakref.ref(version_owner(tensor))
        self._version = version_of(tensor)
        self._type: Any = type(tensor)
        self._parts = parts
        self._objects = objects
        self._context = context
        self._size = tensor.size()
        self._stride = tensor.stride() if tensor.layout is torch.strided else None

    def unpack(self) -> torch.Tensor:
        owner = self._owner()
        if owner is not None:
            check_version(owner, self._version, owner)
        parts = {name: handle.unpack() for name, handle in self._parts.items()} | self._objects
        tensor: torch.Tensor = self._type.__tensor_unflatten__(parts, self._context, self._size, self._stride)
        return tensor.detach() if tensor.requires_grad else tensor

    def is_intact(self) -> bool:
        owner = self._owner()
        return owner is None or version_of(owner) == self._version


def alias_handle(handle: object, tensor: torch.Tensor, session: Session) -> Handle:
    """A handle of a tensor that sees the bytes of another one as they were saved. They share an entry if they can."""
    if isinstance(handle, OffloadedHandle) and handle.saved.reaches(*reach(tensor, tensor.untyped_storage().nbytes())):
        # Another pass of this session may have made the other one. An entry of another session is not shared.
        runtime = session.runtime(tensor.device)
        if handle.saved.mover is runtime.mover and runtime.mover.adopt(handle.saved, same_content=True):
            return OffloadedHandle(tensor, handle.saved, runtime.nothing)
    return KeptHandle(tensor)


unpack: Callable[[Handle], torch.Tensor] = operator.methodcaller("unpack")
"""The unpack hook."""


class _Replays(threading.local):
    depth = 0


_replays = _Replays()


def in_replay() -> bool:
    """Whether the calling thread replays a checkpointed function. Tensors saved there are kept."""
    return _replays.depth > 0


@contextmanager
def replaying() -> Iterator[None]:
    """A context in which the calling thread replays a checkpointed function."""
    _replays.depth += 1
    try:
        yield
    finally:
        _replays.depth -= 1


def carry_attributes(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Copy the attributes that Python code has set on a tensor to another one."""
    if tensor.__dict__:
        other.__dict__.update(tensor.__dict__)


def check_version(tracker: torch.Tensor, version: int, like: torch.Tensor | ViewRecipe) -> None:
    """Autograd's own check, in autograd's own words. See NOTE [ The check that hooks switch off ]."""
    if version_of(tracker) != version:
        size: Any = like.size
        if isinstance(like, torch.Tensor):
            # A nested tensor has no single shape.
            size = nested_size(like) if like.is_nested and like.layout is torch.strided else like.shape
        # ``torch.FloatTensor``, ``torch.cuda.HalfTensor``: so autograd names a tensor's type.
        kind = torch.empty(0, dtype=like.dtype, device=like.device).type()
        raise InplaceError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{kind} {list(size)}] is at version {version_of(tracker)}; expected "
            f"version {version} instead. Hint: enable anomaly detection to find the operation that failed to compute "
            f"its gradient, with torch.autograd.set_detect_anomaly(True)."
        )
