"""Numbers for storages.

NOTE [ Values ]

A *value* is a number for the bytes of one storage: an operator that gives a new tensor makes a value, views of it are
the same value, and in-place operators write it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch


class Values:
    """Numbers for storages, for one run of a region."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.opaque: str | None = None
        """Why bytes cannot be told apart here, if they cannot."""

    def find(self, tensor: torch.Tensor) -> int | None:
        """The value of a plain tensor, if it has one."""
        try:
            memory: Any = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            memory = self._memory(tensor)
        known = self._known.get(memory._cdata)
        # An address is handed out again when it is free.
        return known[1] if known is not None and known[0]() is memory else None

    def find_or_name(self, tensor: torch.Tensor, value: int) -> int:
        """The value of a plain tensor, which is this one from now on if it had none."""
        memory = self._memory(tensor)
        known = self._known.get(memory._cdata)
        if known is not None and known[0]() is memory:
            return known[1]
        self._known[memory._cdata] = weakref.ref(memory), value
        return value

    def name(self, tensor: torch.Tensor, value: int) -> None:
        """The tensor's bytes are this value from now on."""
        memory = self._memory(tensor)
        self._known[memory._cdata] = weakref.ref(memory), value

    def forget(self) -> None:
        """No tensor is asked about any more."""
        self._known.clear()

    def shares(self, tensor: torch.Tensor, value: int) -> bool:
        """Whether another storage that is known begins, or ends, in the tensor's."""
        memory = self._memory(tensor)
        if memory.device.type == "meta":
            # There is no memory, and all addresses are 0.
            return False
        start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
        for reference, other in self._known.values():
            storage = reference() if other != value else None
            if isinstance(storage, torch.UntypedStorage) and storage.device == memory.device and start < end:
                first = _address(storage) if storage.nbytes() else None
                if first is not None and first < end and start < first + storage.nbytes():
                    return True
        return False

    def _memory(self, tensor: torch.Tensor) -> Any:
        try:
            return tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            self.opaque = f"a tensor of layout {tensor.layout} and class {type(tensor).__name__}"
            return tensor


def _address(storage: torch.UntypedStorage) -> int | None:
    try:
        return storage.data_ptr()
    except RuntimeError:
        # Of a wrapper without memory torch refuses to tell it.
        return None
