"""Tensors that leave a device together: small ones share a block of pinned memory, a wait and an event."""

from __future__ import annotations

import torch

from spillway.runtime.arena import Block
from spillway.runtime.backend import Event, Lane
from spillway.runtime.bytes import Bytes

_ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """Bytes, rounded up so that what follows begins at a cache line."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Parcel:
    """Some tensors of one compute lane.

    Args:
        compute: whose they are.
    """

    __slots__ = ("arrived", "block", "compute", "copies", "nbytes", "number", "parts", "sources")

    def __init__(self, compute: Lane) -> None:
        self.compute = compute
        self.sources: list[tuple[int, Bytes]] = []
        self.nbytes = 0
        self.parts = 0
        """How many of them somebody needs."""
        self.block: Block | None = None
        """Where they are, once they are sent."""
        self.arrived: Event | None = None
        self.copies: list[Event] = []
        """The ends of what copies them elsewhere."""
        self.number = 0
        """When it was sent, among all."""

    def add(self, source: Bytes) -> int:
        """One more; where it begins."""
        start = aligned(self.nbytes)
        self.sources.append((start, source))
        self.nbytes = start + source.nbytes
        self.parts += 1
        return start


class Sent:
    """One tensor of a parcel.

    Args:
        parcel: which.
        start: the byte at which it begins.
        tensor: it.
    """

    __slots__ = ("dtype", "numel", "parcel", "start")

    def __init__(self, parcel: Parcel, start: int, tensor: torch.Tensor) -> None:
        self.parcel = parcel
        self.start = start
        self.dtype = tensor.dtype
        self.numel = tensor.numel()

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def memory(self) -> Bytes:
        """Where it is, once it is sent."""
        block = self.parcel.block
        assert block is not None
        return Bytes(block.storage, block.start + self.start, self.nbytes)
