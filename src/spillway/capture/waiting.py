"""What was saved and is to leave, and has not been sent yet."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

import torch

from spillway.capture.identity import Saved
from spillway.runtime.device import Runtime
from spillway.runtime.tiers import Tier

# What waits to leave, where it goes through and to, and whether it is to be held back. A plain tuple: it is made for
# every saved tensor.
_Departure = tuple[Saved, Runtime, Tier, bool]


class Waiting:
    """Entries that will leave together.

    Args:
        window: bytes that may be LEAVING at once on a device.
    """

    def __init__(self, window: Callable[[Runtime], int]) -> None:
        self._window = window
        self._departures: list[_Departure] = []
        self.nbytes = 0
        """Bytes of all of them."""

    def add(self, saved: Saved, runtime: Runtime, tier: Tier, *, hold: bool) -> None:
        """One more; ``hold``: it is only copied if the window wants its room."""
        self._departures.append((saved, runtime, tier, hold))
        self.nbytes += saved.nbytes

    @property
    def is_batch(self) -> bool:
        """Whether they are enough to be sent."""
        return bool(self._departures) and self.nbytes >= self._departures[-1][1].mover.batch

    def send(self) -> None:
        """They leave now. Whoever calls knows that what they hold has been written."""
        departures, self._departures, self.nbytes = self._departures, [], 0
        if not departures:
            return
        # Copies are no operators of the user's, whose modes may still be in force.
        with torch._C._DisableTorchDispatch():
            for (runtime, tier, hold), together in itertools.groupby(departures, key=operator.itemgetter(1, 2, 3)):
                entries = [departure[0] for departure in together]
                runtime.mover.put(entries, tier, window=self._window(runtime), hold=hold)

    def clear(self) -> None:
        """They stay."""
        self._departures.clear()
        self.nbytes = 0

    def members(self) -> list[tuple[Saved, Runtime]]:
        """All of them, and where they go through."""
        return [(saved, runtime) for saved, runtime, _, _ in self._departures]
