"""Who watches the first run of a region: a profiler."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from spillway.regions.packs import Packs
from spillway.regions.trace import Trace


class Observer(Protocol):
    """Sees what a region does, and changes nothing."""

    def watching(self, trace: Trace) -> AbstractContextManager[object]:
        """A context around the function, inside of the mode that writes the trace."""
        ...

    def ended(self, trace: Trace, packs: Packs, given: Collection[int]) -> None:
        """The function has returned, and the trace is whole; ``given``: the values that its caller has now."""
        ...

    def asked(self, place: int, tensor: torch.Tensor, handle: object) -> None:
        """Backward has been given what autograd saved after so many operators, by a handle that autograd holds."""
        ...
