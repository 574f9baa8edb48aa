"""What autograd holds for a tensor that a call computes again."""

from __future__ import annotations

from typing import Protocol

import torch


class Computing(Protocol):
    """A call of a function of which some is computed again."""

    def compute(self, place: int) -> torch.Tensor:
        """What autograd saved at a place."""

    def forget(self, place: int) -> None:
        """Nobody will ask for it."""


class CallHandle(tuple[Computing, int]):
    """Stands for a tensor that is computed again when it is asked for: by its call, and its place.

    What of it is written later is not what is computed again: as it was saved, it comes back.
    """

    __slots__ = ()

    def unpack(self) -> torch.Tensor:
        call, place = self
        return call.compute(place)

    def is_intact(self) -> bool:
        return True

    def __del__(self) -> None:
        call, place = self
        call.forget(place)
