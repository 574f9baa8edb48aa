"""Ways to run a script that are compared, by what users call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spillway.errors import UsageError
from spillway.running.asked import POLICIES, Asked

PLAIN = "keep"
_EXPECTED = "keep, recompute, offload, ratio=0.5, budget=20GiB or plan=FILE"


@dataclass(frozen=True, slots=True)
class Way:
    """One of them."""

    name: str
    """As it was written."""

    @property
    def asked(self) -> Asked | None:
        """What is done with each model; ``None``: nothing.

        Raises:
            UsageError: for something that is no way.
        """
        what, sign, value = self.name.partition("=")
        if not sign and self.name == PLAIN:
            return None
        if not sign and self.name in POLICIES:
            return Asked(policy=self.name)
        if sign and what == "budget":
            return Asked(budget=value)
        if sign and what == "plan":
            from spillway.planning.plan import Plan

            return Asked(plan=Plan.load(value))
        if sign and what == "ratio" and _is_number(value):
            return Asked(ratio=float(value))
        raise UsageError(f"--ways: got {self.name!r}, expected {_EXPECTED}")


def parse_ways(names: Sequence[str]) -> list[Way]:
    """The ways of these names, each once.

    Raises:
        UsageError: for a name that is none, and for none at all.
    """
    ways = [Way(name.strip()) for name in dict.fromkeys(names) if name.strip()]
    if not ways:
        raise UsageError(f"--ways: got none, expected at least one of {_EXPECTED}")
    for way in ways:
        _ = way.asked
    return ways


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
