"""Bytes that a recomputed function reads and did not make.

A replay must read what the first run read. So an alias of each such tensor is held until backward, without its history:
backward goes through the graph of the first run. Where the replay reads another tensor (an attribute was replaced, a
mask was made again), the held one is handed in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NoReturn

import torch

from spillway.capture.identity import is_parameter
from spillway.errors import RecomputeError
from spillway.regions.tensors import aliases_of, is_hollow, is_strided, tensor_without_memory
from spillway.runtime.bytes import Bytes


class Outside:
    """Bytes that the region did not make.

    Args:
        tensor: as the region reads it first.
        is_input: whether it is made anew for each run: an input, or a cast.
    """

    __slots__ = (
        *("_object", "_storage", "before", "has_gradient", "held", "is_input", "is_leaf", "is_parameter", "tracker"),
        *("version",),
    )

    def __init__(self, tensor: torch.Tensor, *, is_input: bool) -> None:
        self.version = _version(tensor)
        self.is_input = is_input
        self.is_parameter = is_parameter(tensor)
        self.has_gradient = tensor.requires_grad
        self.is_leaf = tensor.is_leaf
        self._storage: Callable[[], torch.UntypedStorage | None] = _none
        self._object: Callable[[], torch.Tensor | None] = _none
        if is_strided(tensor):
            self._storage = weakref.ref(tensor.untyped_storage())
        else:
            # No reference to plain tensors: torch.utils.swap_tensors would refuse them.
            self._object = weakref.ref(tensor)
        self.held: torch.Tensor | None = None if is_input else _held(tensor)
        """What is handed in where a replay reads another tensor."""
        self.tracker: torch.Tensor = tensor_without_memory(tensor) if self.held is None else self.held
        """An alias on the same counter of versions."""
        self.before: torch.Tensor | None = None
        """All bytes of the storage before the region wrote any. See NOTE [ What is written outside ]."""

    def save(self, tensor: torch.Tensor) -> None:
        if self.before is None:
            storage = tensor.untyped_storage()
            # No operator of an outer region.
            with torch._C._DisableTorchDispatch():
                self.before = Bytes(storage, 0, storage.nbytes()).tensor().clone()

    def is_another(self, tensor: torch.Tensor) -> bool:
        """Whether it is known not to be this one."""
        if self.is_input:
            return False
        storage = self._storage()
        if storage is not None:
            return not is_strided(tensor) or tensor.untyped_storage() is not storage
        return self.held is not None and self._object() is not tensor

    def stands_for(self, tensor: torch.Tensor) -> bool:
        """Whether what is held can be handed in where a replay reads this tensor."""
        held = self.held
        if held is None or held.dtype is not tensor.dtype or held.device != tensor.device:
            return False
        if is_hollow(held):
            return type(held) is type(tensor) and held.shape == tensor.shape
        if not is_strided(held) or not is_strided(tensor):
            return (
                held.layout is tensor.layout and not (held.is_nested or tensor.is_nested) and held.shape == tensor.shape
            )
        return (held.shape, held.stride(), held.storage_offset()) == (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
        )

    def let_go(self) -> None:
        """Hold its memory no longer."""
        if self.held is not None:
            self.tracker = tensor_without_memory(self.held)
            self.held = None

    def storage(self) -> torch.UntypedStorage | None:
        """Its memory, if that is alive."""
        return self._storage()

    def is_dead(self) -> bool:
        """Whether its memory is gone."""
        return self._storage() is None

    def changed(self) -> bool:
        """Whether it was written since the region first read it, by somebody else."""
        return self.before is None and _version(self.tracker) != self.version


def refuse_written(tensor: torch.Tensor, version: int) -> NoReturn:
    """What a region has read was written since."""
    raise RecomputeError(
        f"got a tensor of shape {list(tensor.shape)} and dtype {tensor.dtype} that was written in place (version "
        f"{tensor._version}, expected {version}) after a recomputed region had read it, expected it unchanged until "
        f"backward; write a copy, or save or offload what the region computes from it"
    )


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """An alias; of what has no memory, an alias would lack all that its own code knows: itself, without a history."""
    return tensor if is_hollow(tensor) and not tensor.requires_grad else aliases_of([tensor])[0]


def _none() -> None:
    return None


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
