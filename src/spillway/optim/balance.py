"""How much of the parameters the host can step without slowing a step down too much: measured, then chosen."""

from __future__ import annotations

import statistics
from typing import NamedTuple

WARM_UP = 3
"""Steps that are not looked at: one that is not over, the one a choice is made in, and one that makes memory."""
LOOKED_AT = 5
"""Steps that a choice is made from."""
MOST_CHOICES = 6
ENOUGH = 3
"""How often a fraction has to be cheap enough to be kept for good."""
_MARGIN = 0.97


class Seen(NamedTuple):
    """One step."""

    step_seconds: float
    """From one step's end to the next one's."""
    stall_seconds: float
    """Of these, how long the device waited for the optimizer."""
    host_seconds: float
    """How long the host computed."""


class Balance:
    """Finds the fraction of elements to step on the host.

    The host's work grows with the fraction; a part of it is hidden behind the device's own, and the rest is waited for.
    So from one fraction's figures follows the largest one that costs no more than is allowed. What is chosen is
    measured again, and lowered where it costs more after all.

    Args:
        slowdown: of a step, at most: 0.05 for 5 %.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._seen: list[Seen] = []
        self._choices = 0
        self._cheap = 0
        """How often a choice turned out cheap enough, one time after the other."""
        self._skip = WARM_UP

    def note(self, seen: Seen, fraction: float) -> float | None:
        """A step has been, with a fraction on the host; the fraction for the next ones, if it is to be another."""
        if self._choices >= MOST_CHOICES or self._cheap >= ENOUGH or fraction == 0:
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._seen.append(seen)
        if len(self._seen) < LOOKED_AT:
            return None
        middle = Seen(*(statistics.median(values) for values in zip(*self._seen, strict=True)))
        self._seen = []
        chosen = affordable(middle, fraction, self._slowdown)
        if chosen >= fraction:
            self._cheap += 1
            return None
        self._cheap, self._skip = 0, WARM_UP
        self._choices += 1
        return chosen


def affordable(seen: Seen, fraction: float, slowdown: float) -> float:
    """The largest fraction that slows a step down by no more.

    Args:
        seen: a step with ``fraction`` on the host.
        fraction: of all elements, more than 0.
        slowdown: 0.05 for 5 %.

    Example:
        >>> affordable(Seen(step_seconds=1.5, stall_seconds=0.5, host_seconds=0.8), 1.0, 0.05)
        0.4243...
    """
    own = seen.step_seconds - seen.stall_seconds
    allowed = slowdown * own
    if seen.stall_seconds <= allowed:
        return fraction
    hidden = max(0.0, seen.host_seconds - seen.stall_seconds)
    return min(fraction, _MARGIN * fraction * (hidden + allowed) / max(seen.host_seconds, 1e-9))
