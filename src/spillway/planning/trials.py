"""Choices that were simulated, and which of them is the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from spillway.planning.tasks import Problem, Program, Rates
from spillway.planning.timeline import Timeline

Simulate: TypeAlias = Callable[[Program, Rates], Timeline]
Chosen: TypeAlias = tuple[int, ...]
"""An option's number for each block."""
Rank: TypeAlias = tuple[float, float, float, Chosen]
"""Less is better."""

DIGITS = 9
"""Seconds are compared to a nanosecond: the same sum in another order is the same."""


class Trials:
    """Simulates choices, each once.

    Args:
        problem: whose choices they are.
        simulate: what a program comes to.
    """

    def __init__(self, problem: Problem, simulate: Simulate) -> None:
        self._problem = problem
        self._simulate = simulate
        self._known: dict[Chosen, Timeline] = {}
        self.tasks = 0
        """How many were simulated: the measure of work, since a clock would give each rank another answer."""

    @property
    def known(self) -> dict[Chosen, Timeline]:
        """What was simulated, in order."""
        return self._known

    def timeline(self, chosen: Sequence[int]) -> Timeline:
        """What a choice comes to."""
        key = tuple(int(number) for number in chosen)
        found = self._known.get(key)
        if found is None:
            program = self._problem.program(key)
            self.tasks += len(program.tasks)
            found = self._known[key] = self._simulate(program, self._problem.rates)
        return found

    def excess(self, timeline: Timeline) -> int:
        """Bytes beyond the host's and the disk's budgets."""
        problem = self._problem
        pairs = ((timeline.host_bytes, problem.host_budget), (timeline.disk_bytes, problem.disk_budget))
        return sum(max(0, nbytes - budget) for nbytes, budget in pairs if budget is not None)

    def fits(self, timeline: Timeline) -> bool:
        """Whether it is within all budgets."""
        return timeline.peak_bytes <= self._problem.budget and not self.excess(timeline)

    def by_seconds(self, chosen: Chosen) -> Rank:
        """Its place among choices that are to be fast: those that fit come first."""
        timeline = self.timeline(chosen)
        over = max(0, timeline.peak_bytes - self._problem.budget) + self.excess(timeline)
        return over, round(timeline.seconds, DIGITS), timeline.peak_bytes, chosen

    def by_peak(self, chosen: Chosen) -> Rank:
        """Its place among choices that are to be small: those within the host's and the disk's budgets come first."""
        timeline = self.timeline(chosen)
        return self.excess(timeline), timeline.peak_bytes, round(timeline.seconds, DIGITS), chosen
