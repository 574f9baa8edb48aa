"""A range of bytes of a storage: the unit that streams copy and tiers store."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from spillway._torch import disable_dispatch, dispatch_modes


class Bytes:
    """``nbytes`` bytes of a storage from byte ``start``. Holding it holds the storage.

    It is no tensor, because a view of a storage costs as much as all other bookkeeping of a copy. The first copy makes
    the view, and the next one reuses it.
    """

    __slots__ = ("_flat", "nbytes", "start", "storage")

    def __init__(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> None:
        self.storage = storage
        self.start = start
        self.nbytes = nbytes
        self._flat: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Bytes:
        """All bytes of a dense tensor, whatever its strides."""
        return cls(tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes)

    @property
    def address(self) -> int:
        return self.storage.data_ptr() + self.start

    def is_there(self) -> bool:
        """Whether the storage still has them: its owner may have resized it."""
        return self.storage.nbytes() >= self.start + self.nbytes

    def buffer(self) -> ctypes.Array[ctypes.c_ubyte]:
        """Their memory, for reading and writing files. It does not hold the storage."""
        # Not through numpy, after which the user's storage could never be resized.
        return (ctypes.c_ubyte * self.nbytes).from_address(self.address)

    def owned_by(self, owner: object) -> torch.Tensor:
        """The same bytes of CPU memory as a storage of its own, which keeps ``owner`` alive."""
        memory = self.buffer()
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def part(self, start: int, nbytes: int) -> Bytes:
        """Some of the bytes, from byte ``start`` of these."""
        return self if nbytes == self.nbytes else Bytes(self.storage, self.start + start, nbytes)

    def tensor(self) -> torch.Tensor:
        """The same bytes as a flat ``torch.uint8`` tensor."""
        if self._flat is not None:
            return self._flat
        flat = over(self.storage, torch.uint8, self.start, (self.nbytes,), (1,))
        if not flat.is_inference():
            # A tensor made in inference mode cannot be written outside of it.
            self._flat = flat
        return flat


def over(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor over a storage.

    It computes nothing, so dispatch modes do not see it: a user's counter of operators, or the sanitizer of CUDA
    streams, would take it for a kernel.
    """
    if dispatch_modes() > 0:
        with disable_dispatch():
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


class Cells(NamedTuple):
    """Bytes that are elements of a dtype."""

    memory: Bytes
    dtype: torch.dtype

    def tensor(self, form: tuple[Sequence[int], Sequence[int]] | None = None) -> torch.Tensor:
        """The elements as a flat tensor, or in a size and strides."""
        size = self.dtype.itemsize
        form = form or ((self.memory.nbytes // size,), (1,))
        return over(self.memory.storage, self.dtype, self.memory.start // size, *form)
