"""Objects that autograd holds in place of the saved tensors and outputs of a checkpointed function.

NOTE [ Dropped outputs ]

With ``drop_output`` the output of a checkpointed function is dropped once its consumer has run. No storage is resized.
When the consumer saves the output, its storage is looked up, and autograd gets a reference to the call instead. So the
storage dies with the last name that the model has for it. An output that is still alive in backward is used as it is,
unless there are several ranks: NOTE [ Collectives ] in ``recorder.py``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from spillway._torch import version_of
from spillway.checkpointing.collector import alias_of
from spillway.checkpointing.tensors import below_modes, is_plain, tensor_without_memory
from spillway.runtime.system import many_processes
from spillway.saved_tensors.handles import TrackedHandle, check_version

if TYPE_CHECKING:
    from spillway.checkpointing.call import CheckpointedCall

_weak = weakref.ref


class SavedSlot:
    """Stands for a tensor that a checkpointed function saved."""

    __slots__ = ("__weakref__", "call", "number", "seen", "tracked", "value")

    def __init__(self, call: CheckpointedCall, number: int) -> None:
        self.call = call
        self.number = number
        self.value: tuple[torch.Tensor, int] | None = None
        """The replayed tensor, and its version when the replay saved it."""
        self.seen: Callable[[], torch.Tensor | None] | None = None
        """The tensor that autograd got last, if it is alive: some nodes unpack several times."""
        self.tracked: tuple[torch.Tensor, int] | None = None
        """An alias without memory that shares the version counter of the saved tensor, and the version at that time."""

    def track(self, tensor: torch.Tensor) -> None:
        """Notice in-place writes from now on, as autograd does."""
        if is_plain(tensor) and not tensor.is_inference():
            self.tracked = tensor_without_memory(tensor), version_of(tensor)

    def keep(self, tensor: torch.Tensor) -> None:
        with below_modes(tensor):
            self.value = alias_of(tensor), -1 if tensor.is_inference() else version_of(tensor)

    def unpack(self) -> torch.Tensor:
        if self.tracked is not None:
            tracker, version = self.tracked
            if version_of(tracker) != version:
                check_version(tracker, version, tracker)
        value = self.value
        if value is None or self.call.holds_values:
            return self.call.value_of(self)
        # The replay has just been here.
        tensor, version = value
        if version != -1 and version_of(tensor) != version:
            check_version(tensor, version, tensor)
        self.value, self.seen = None, _weak(tensor)
        return tensor


class OutputSlot(SavedSlot):
    """Stands for the storage of an output that is dropped. See NOTE [ Dropped outputs ]."""

    __slots__ = ("_lock", "_recomputed", "_storage", "_version", "index")

    def __init__(self, call: CheckpointedCall, number: int, index: int, output: torch.Tensor) -> None:
        super().__init__(call, number)
        self.index = index
        self._version = version_of(output)
        self._storage = _weak(output.untyped_storage())
        self._recomputed: torch.UntypedStorage | None = None
        """Held as long as a handle lives: backward frees each handle after the node that needs it."""
        self._lock = threading.Lock()

    def is_dropped(self) -> bool:
        """Whether the output must be recomputed. Ranks recompute the same, whichever of them holds it."""
        return self._storage() is None or many_processes()

    def pack(self, tensor: torch.Tensor, nothing: torch.Tensor) -> OutputHandle | None:
        """A handle for a view of the output; ``None`` if the output was written since."""
        return OutputHandle(self, tensor, nothing) if version_of(tensor) == self._version else None

    def storage(self) -> torch.UntypedStorage:
        """The storage, recomputed if it was dropped."""
        with self._lock:
            if self._recomputed is None and self.is_dropped():
                self._recomputed = self.unpack().untyped_storage()
            storage = self._storage() if self._recomputed is None else self._recomputed
            assert storage is not None
            return storage


class OutputHandle(TrackedHandle):
    """Stands for a view of an output of a checkpointed function."""

    __slots__ = ("_output",)

    def __init__(self, output: OutputSlot, tensor: torch.Tensor, nothing: torch.Tensor) -> None:
        super().__init__(tensor, nothing)
        self._output = output

    def unpack(self) -> torch.Tensor:
        self._check()
        return self._with_data(self._recipe.rebuild(self._output.storage(), 0))
