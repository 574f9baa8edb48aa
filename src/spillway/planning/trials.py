"""Choices that were simulated, and which of them is the best.

NOTE [ A host that is late ]

What the host takes is measured when it has nothing else to do, and it is not the same from one step to the next. The
fastest plan for a host that was measured leaves it no time to spare: by simulation (transformers' Llama of width 2048,
8192 tokens, within checkpointing's peak, with what the hosts of an H200 and an H100 were seen to take), where the host
takes a tenth more, such a plan takes 8 % more. So choices are ranked by the mean of two steps, one of them with a host
that takes a fifth more: such plans take 0 to 2 % more where the host takes a tenth more, and are 2 % slower where it is
as it was measured (``benchmarks/late_hosts.py``). What a plan foretells is the step with the host as it was measured.

NOTE [ Where all choices wait for the host ]

Of a host that may be ahead, no step takes less than what it needs, and many choices may take just that. The host may be
quicker some day, or was slow for once when it was measured. So what a step takes without waiting for it counts, too, a
little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from spillway.planning.tasks import Problem, Program, Rates
from spillway.planning.timeline import Timeline

Simulate: TypeAlias = Callable[[Program, Rates], Timeline]
Chosen: TypeAlias = tuple[int, ...]
"""An option's number for each block."""
LATE = 1.2
"""See NOTE [ A host that is late ]."""
TIE = 1e-3
"""The share of a second that a second without waits for the host counts where the host may be ahead."""
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
        self._late: dict[Chosen, float] = {}
        """Seconds of steps whose host is late."""
        self._rates = replace(problem.rates, host=problem.rates.host * problem.late)
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

    def seconds(self, chosen: Sequence[int]) -> float:
        """What a choice is ranked by. See the notes at the top of this file."""
        key = tuple(int(number) for number in chosen)
        timeline = self.timeline(key)
        tie = TIE * (timeline.seconds - timeline.host_wait_seconds) if self._problem.lead else 0.0
        return self._mean_seconds(key, timeline.seconds) + tie

    def _mean_seconds(self, key: Chosen, seconds: float) -> float:
        """Of the step and that of a late host."""
        if self._rates.host == self._problem.rates.host:
            return seconds
        late = self._late.get(key)
        if late is None:
            program = self._problem.program(key)
            self.tasks += len(program.tasks)
            late = self._late[key] = self._simulate(program, self._rates).seconds
        return (seconds + late) / 2

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
        return over, round(self.seconds(chosen), DIGITS), timeline.peak_bytes, chosen

    def by_peak(self, chosen: Chosen) -> Rank:
        """Its place among choices that are to be small: those within the host's and the disk's budgets come first."""
        timeline = self.timeline(chosen)
        return self.excess(timeline), timeline.peak_bytes, round(timeline.seconds, DIGITS), chosen
