"""A range of bytes of a storage: what lanes copy, tiers store and host work reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class Bytes:
    """``nbytes`` bytes of a storage from byte ``start``. Holding it holds the storage.

    No tensor, because one is made for every copy, and a view of a storage costs as much as all the rest of a copy's
    bookkeeping.
    """

    __slots__ = ("nbytes", "start", "storage")

    def __init__(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> None:
        self.storage = storage
        self.start = start
        self.nbytes = nbytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Bytes:
        """All bytes of a contiguous tensor."""
        return cls(tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes)

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self.storage.data_ptr() + self.start

    def first(self, nbytes: int) -> Bytes:
        """The first ``nbytes`` of them."""
        return self if nbytes == self.nbytes else Bytes(self.storage, self.start, nbytes)

    def tensor(self) -> torch.Tensor:
        """The same bytes as a flat ``torch.uint8`` tensor."""
        flat = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return flat.set_(self.storage, self.start, (self.nbytes,), (1,))


class Form(Protocol):
    """What a tensor that covers a storage from end to end looks like."""

    @property
    def size(self) -> Sequence[int]: ...

    @property
    def stride(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class Flat(NamedTuple):
    """The form of plain bytes."""

    size: tuple[int]
    stride: tuple[int] = (1,)
    dtype: torch.dtype = torch.uint8
