"""What the gradients of one parameter add up to, on the host."""

from __future__ import annotations

from typing import Protocol

import torch

from spillway.optim.pinned import Pinned
from spillway.optim.traffic import Traffic
from spillway.runtime.bytes import Cells


class Counted(Protocol):
    """A parameter, as its gradient's sum knows it."""

    @property
    def numel(self) -> int: ...

    @property
    def work_dtype(self) -> torch.dtype: ...

    def new_flat_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the host for as many elements, unwritten."""
        ...


class Sum:
    """A gradient's sum, in memory of its own; touched by the host lane.

    Args:
        held: whose gradient it is.
        traffic: of its device.
        pinned: whether in pinned memory.
    """

    def __init__(self, held: Counted, traffic: Traffic, *, pinned: bool) -> None:
        self.dtype = held.work_dtype
        self.pinned = Pinned(traffic.arena, held.numel * self.dtype.itemsize) if pinned else None
        self._backend = traffic.backend
        if self.pinned is None:
            self._memory = held.new_flat_tensor(self.dtype)
        else:
            self.pinned.synchronize()
            self._memory = Cells(self.pinned.range(0, self.pinned.nbytes), self.dtype).tensor()

    @property
    def tensor(self) -> torch.Tensor:
        """It, flat."""
        if self.pinned is not None:
            self._backend.host_access(self.pinned.block, write=True)
        return self._memory
