"""Who watches the calls of a checkpointed function: a profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from spillway.checkpointing.recorder import Recorder


class Observer(Protocol):
    """Sees what a call does, and changes nothing."""

    @property
    def wants_operators(self) -> bool:
        """Whether the call's operators are to be measured: then the function runs once more, after its forward."""
        ...

    def watching(self, recorder: Recorder) -> AbstractContextManager[object]:
        """A context around that run, inside of the mode that records it."""
        ...

    def ended(self, recorder: Recorder) -> None:
        """That run has ended."""
        ...

    def casts(self, storage: torch.UntypedStorage) -> None:
        """The forward has cast a leaf to this, which is still there."""
        ...

    def asked(self, place: int, tensor: torch.Tensor, handle: object) -> None:
        """Backward is given what autograd saved after so many operators, by a handle that autograd holds."""
        ...
