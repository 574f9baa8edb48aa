"""Who watches the first run of a region: a profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from spillway.regions.packs import Packs
from spillway.regions.trace import Trace


class Observer(Protocol):
    """Sees what a region does, and changes nothing."""

    def watching(self, trace: Trace) -> AbstractContextManager[object]:
        """A context around the function, inside of the mode that writes the trace."""
        ...

    def ended(self, trace: Trace, packs: Packs) -> None:
        """The function has returned, and the trace is whole."""
        ...

    def asked(self, place: int) -> None:
        """Backward has been given what autograd saved after so many operators."""
        ...
