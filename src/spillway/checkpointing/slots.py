"""What autograd holds in place of what a checkpointed function saved, and gave."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from spillway.capture.handles import check_version
from spillway.checkpointing.collector import alias_of
from spillway.regions.tensors import PLAIN, below_modes, is_strided, tensor_without_memory

if TYPE_CHECKING:
    from spillway.checkpointing.call import CheckpointedCall

_weak = weakref.ref


class SavedSlot:
    """What autograd holds in place of a tensor that a checkpointed function saved."""

    __slots__ = ("__weakref__", "call", "number", "seen", "tracked", "value")

    def __init__(self, call: CheckpointedCall, number: int) -> None:
        self.call = call
        self.number = number
        self.value: tuple[torch.Tensor, int] | None = None
        """The replayed tensor, and its version when the replay saved it."""
        self.seen: Callable[[], torch.Tensor | None] | None = None
        """The tensor that autograd was given last, if it is alive: some nodes ask several times."""
        self.tracked: tuple[torch.Tensor, int] | None = None
        """Shares the version counter of the saved tensor, and not its memory; and the version at that time."""

    def track(self, tensor: torch.Tensor) -> None:
        """Notice in-place writes from now on, as autograd does for tensors that it holds itself."""
        if type(tensor) in PLAIN and is_strided(tensor) and not tensor.is_inference():
            self.tracked = tensor_without_memory(tensor), tensor._version

    def keep(self, tensor: torch.Tensor) -> None:
        """Hold the tensor."""
        with below_modes(tensor):
            self.value = alias_of(tensor), -1 if tensor.is_inference() else tensor._version

    def unpack(self) -> torch.Tensor:
        if self.tracked is not None:
            tracker, version = self.tracked
            if tracker._version != version:
                check_version(tracker, version, tracker)
        value = self.value
        if value is None or self.call.holds_values:
            return self.call.value_of(self)
        # The replay has just been here.
        tensor, version = value
        if version != -1 and tensor._version != version:
            check_version(tensor, version, tensor)
        self.value, self.seen = None, _weak(tensor)
        return tensor


class OutputSlot(SavedSlot):
    """What stands for an output that is dropped: see ``regions/outputs.py``."""

    __slots__ = ("_storage", "index")

    def __init__(self, call: CheckpointedCall, number: int, index: int, output: torch.Tensor) -> None:
        super().__init__(call, number)
        self.index = index
        """Which of the tensors in the output it is."""
        self._storage = _weak(output.untyped_storage())

    def is_dropped(self) -> bool:
        """Whether the output has to be computed if it is asked for."""
        return self._storage() is None
