"""What a master becomes when its parameter was written to by somebody else, and what tells that it was."""

from __future__ import annotations

import weakref

import torch

from spillway.optim.sharding import local_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def take(master: torch.Tensor, said: torch.Tensor) -> None:
    """Let a master say what its parameter says. Where it does so already, rounded, it stays, since it says more.

    Args:
        master: written.
        said: the parameter's values, of the same shape and a narrower type.

    Example:
        >>> master = torch.tensor([1.001, 2.0])
        >>> take(master, torch.tensor([1.0, 3.0], dtype=torch.bfloat16))
        >>> master
        tensor([1.0010, 3.0000])
    """
    bits = _BITS[said.dtype.itemsize]
    same = master.to(said.dtype).view(bits) == said.view(bits)
    if not same.all():
        master.copy_(torch.where(same, master, said.to(master.dtype)))


class Stamp:
    """What tells that somebody wrote to a parameter: its versions, and where its bytes are.

    Args:
        parameter: as it is now.
    """

    __slots__ = ("_offset", "_storage", "_versions")

    def __init__(self, parameter: torch.Tensor) -> None:
        local = local_of(parameter)
        self._versions = parameter._version, local._version
        self._offset = local.storage_offset()
        # Not the address: that of memory that is gone is handed out again.
        self._storage = weakref.ref(local.untyped_storage())

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether nobody wrote to it since."""
        local = local_of(parameter)
        return (
            self._versions == (parameter._version, local._version)
            and self._offset == local.storage_offset()
            and self._storage() is local.untyped_storage()
        )
