"""Bytes that a region did not make."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from spillway.errors import RecomputeError
from spillway.regions.tensors import aliases_of, is_strided
from spillway.runtime.bytes import Bytes

_SMALL = 64


class Outside:
    """Bytes that the region did not make."""

    __slots__ = ("_storage", "before", "content", "has_gradient", "held", "is_input", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, *, is_input: bool, holds: bool) -> None:
        self.tensor: Callable[[], torch.Tensor | None] = weakref.ref(tensor)
        self.version = _version(tensor)
        self.is_input = is_input
        """Whether it is made anew for each run: an input, or a cast."""
        self.has_gradient = tensor.requires_grad
        storage = None if is_input or not is_strided(tensor) else tensor.untyped_storage()
        self._storage: Callable[[], torch.UntypedStorage | None] = _none if storage is None else weakref.ref(storage)
        self.held = tensor if holds and storage is not None and not self.has_gradient else None
        """The tensor itself, if it might be made anew (from a list, from an array) and have another content then."""
        self.content: list[Any] | None = None
        """What a small constant of the host's holds, where nothing can stand for it."""
        if not holds and not is_input and not self.has_gradient and is_strided(tensor):
            with torch._C._DisableTorchDispatch():
                self.tensor = _tracker(tensor)
                if tensor.device.type == "cpu" and tensor.numel() <= _SMALL:
                    self.content = tensor.tolist()
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
        storage = self._storage()
        if storage is not None:
            return tensor.untyped_storage() is not storage
        return self.before is None and self.content is not None and repr(self.content) != repr(_content(tensor))

    def storage(self) -> torch.UntypedStorage | None:
        """Its memory, if that is alive."""
        if not self.is_input:
            return self._storage()
        tensor = self.tensor()
        return None if tensor is None else tensor.untyped_storage()

    def is_dead(self) -> bool:
        """Whether its memory is gone."""
        return self._storage() is None

    def changed(self) -> bool:
        """Whether it was written since the region first read it, by somebody else."""
        tensor = self.tensor()
        return tensor is not None and self.before is None and _version(tensor) != self.version


def refuse_written(tensor: torch.Tensor, version: int) -> NoReturn:
    """What a region has read was written since."""
    raise RecomputeError(
        f"got a tensor of shape {list(tensor.shape)} and dtype {tensor.dtype} that was written in place (version "
        f"{tensor._version}, expected {version}) after a recomputed region had read it, expected it unchanged until "
        f"backward; write a copy, or save or offload what the region computes from it"
    )


def _tracker(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Gives a tensor without memory on the same counter of versions."""
    tracker = aliases_of([tensor])[0]
    tracker.data = torch.empty(0, device=tensor.device)
    return lambda: tracker


def _content(tensor: torch.Tensor) -> Any:
    with torch._C._DisableTorchDispatch():
        return tensor.tolist()


def _none() -> None:
    return None


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
