"""Outputs of regions that are dropped after their consumer has run, and computed again before its backward.

Nothing is resized. The consumer's saved input is known by its storage when it is saved: what autograd holds for it is a
reference to the region, so the storage dies with the last name that the model has for it. What is still alive when
backward asks, and was not written, is used as it is.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch

from spillway.capture.handles import check_version
from spillway.capture.identity import ViewRecipe


class Computed(Protocol):
    """Stands for a tensor that is computed again when it is asked for."""

    def unpack(self) -> torch.Tensor: ...


class DroppedOutput:
    """One output of a region that can be computed again.

    Args:
        tensor: the output, which covers its storage.
        computed: by which the region computes it.
    """

    def __init__(self, tensor: torch.Tensor, computed: Computed) -> None:
        self._computed = computed
        self._version = tensor._version
        self._storage: weakref.ref[torch.UntypedStorage] = weakref.ref(tensor.untyped_storage())
        self._held: torch.UntypedStorage | None = None
        self._lock = threading.Lock()
        self._handles = 0
        self._asked = 0

    def pack(self, tensor: torch.Tensor, nothing: torch.Tensor) -> OutputHandle | None:
        """A handle for a tensor that sees the output's storage; ``None`` if that was written since."""
        if tensor._version != self._version:
            return None
        with self._lock:
            self._handles += 1
        return OutputHandle(self, tensor, nothing)

    def storage(self, *, again: bool) -> torch.UntypedStorage:
        """The storage, computed anew if it has died; held until every handle has asked for it."""
        with self._lock:
            storage = self._storage()
            if storage is None:
                storage = self._computed.unpack().untyped_storage()
                self._storage = weakref.ref(storage)
                self._asked = 0
                again = False
            self._asked += not again
            self._held = storage if self._asked < self._handles else None
            return storage

    def forget(self) -> None:
        """A handle has died."""
        # Without the lock: a finaliser may run while its own thread holds it.
        self._handles -= 1
        if self._asked >= self._handles:
            self._held = None


class OutputHandle:
    """Stands for a tensor that sees an output of a region."""

    __slots__ = ("_asked", "_output", "_recipe", "_tracker", "_version")

    def __init__(self, output: DroppedOutput, tensor: torch.Tensor, nothing: torch.Tensor) -> None:
        self._output = output
        self._asked = False
        self._version = tensor._version
        self._recipe = ViewRecipe.of(tensor)
        self._tracker = tensor.detach()
        self._tracker.data = nothing

    def unpack(self) -> torch.Tensor:
        check_version(self._tracker, self._version, self._recipe)
        storage = self._output.storage(again=self._asked)
        self._asked = True
        tensor = self._tracker.detach()
        tensor.data = self._recipe.rebuild(storage, 0)
        return tensor

    def is_intact(self) -> bool:
        return self._tracker._version == self._version

    def __del__(self) -> None:
        self._output.forget()
