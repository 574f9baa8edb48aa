"""The search for the option of each block that makes a step fast within its budgets.

NOTE [ How a choice is found ]

A few choices are polished: neighbours are ranked by estimates (``estimates.py``), the first ones are simulated, and the
search goes on from the first that is better. An estimate is corrected by the difference between the simulation of the
current choice and its own estimate.

The simulation decides. Each pure way (one option for all blocks) is simulated, unless its estimate is far worse than
the best choice: so no solution is slower than a pure way that fits. If there are few choices, all are simulated.

The answer is the same on every rank: work is counted, no clock is read, and seconds are compared to a nanosecond.

NOTE [ A slower CPU ]

The fastest plan for the measured CPU times has no spare CPU time, and stalls as soon as the CPU is a little slower. So
choices are ranked by the mean of two steps, one of them with a CPU that takes a fifth more. A plan predicts the step
with the measured CPU times. By simulation of profiles of an earlier engine (2026-11-25), the step is 2 % longer on the
measured CPU, and 4 to 5 % shorter on one that takes a tenth more: see ``late-hosts`` in ``benchmarks/results``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy
from numpy.typing import NDArray

from spillway.errors import BudgetError
from spillway.planner.estimates import Choices, CostModel, Estimates, excess
from spillway.planner.tasks import Option, Problem, Rates, in_words
from spillway.planner.timeline import Timeline, simulate_program
from spillway.units import format_bytes

Chosen: TypeAlias = tuple[int, ...]
"""An option's number for each block."""
Rank: TypeAlias = tuple[float, float, float, float, Chosen]
"""Less is better."""
Correction: TypeAlias = tuple[float, float]
"""Seconds and peak bytes that are added to an estimate."""
LATE = 1.2
"""See NOTE [ A slower CPU ]."""
DIGITS = 9
"""Seconds are compared to a nanosecond: the same sum in another order is the same."""
_MOST_SPARE = 256 << 20
_TASKS_A_SECOND = 150_000
"""Tasks that are simulated in about a second."""
_CELLS_A_TASK = 150
"""Choices times blocks whose estimates take as long as the simulation of a task."""
_MARGIN = 0.9
"""A step whose estimate is less than that of another one is hardly the slower one."""
_TRIED = 16
"""Neighbours that are simulated before a choice counts as polished."""
_STARTS = 8
"""Choices that are polished at first."""
_FEW = 512
"""So many choices are all simulated."""
_EIGHTHS = numpy.arange(1, 8)[:, None]
"""Parts of the blocks that have one of two options."""


@dataclass(frozen=True, slots=True)
class Solution:
    """An option for each block, and the step that follows."""

    chosen: Chosen
    timeline: Timeline
    seconds: float
    """The seconds that it was ranked by. See NOTE [ A slower CPU ]."""
    problem: Problem = field(repr=False, compare=False)

    @property
    def options(self) -> list[Option]:
        return [each[number] for each, number in zip(self.problem.options, self.chosen, strict=True)]


def solve(problem: Problem, *, seconds: float = 3.0, near: Solution | None = None) -> Solution:
    """The fastest choice that fits the budgets; of equally fast ones the smallest, then the first.

    The search takes about so many ``seconds``, counted as work, so that every rank has the same answer. It also begins
    ``near`` a solution of the same blocks and options, as with another window.
    """
    search = _Search(problem, seconds)
    found = search.run(near)
    if within(problem, found.timeline):
        return found
    least = smallest(problem, seconds=seconds, near=found)
    if not within(problem, least.timeline):
        raise _too_small(problem, least)
    return search.run(least)


def smallest(problem: Problem, *, seconds: float = 3.0, near: Solution | None = None) -> Solution:
    """The choice with the smallest peak; of equally small ones the fastest, then the first.

    The choices within the budgets of CPU memory and the disk come first. The GPU's budget does not count. The arguments
    are those of :func:`solve`.
    """
    return _Search(replace(problem, budget=0), seconds).run(near)


def within(problem: Problem, timeline: Timeline) -> bool:
    """Whether a step is within all budgets."""
    return timeline.peak_bytes <= problem.budget and not excess(problem, timeline.host_bytes, timeline.disk_bytes)


class _Search:
    """Looks for the fastest choice that fits, or for the one nearest to that. See NOTE [ How a choice is found ]."""

    def __init__(self, problem: Problem, seconds: float) -> None:
        self._problem = problem
        self._slower = replace(problem.rates, host=problem.rates.host * problem.late)
        self._model = CostModel(problem)
        self._work, self._most_work = 0.0, seconds * _TASKS_A_SECOND
        """Tasks that were simulated, and may be."""
        self._known: dict[Chosen, Solution] = {}
        self._leader: Solution | None = None
        self._kinds = [id(options) for options in problem.options]

    def run(self, near: Solution | None) -> Solution:
        for start in self._starts(near):
            self._polish(start)
        self._try_pure_ways()
        self._polish(self._best().chosen)
        counts = [len(options) for options in self._problem.options]
        if math.prod(counts) <= _FEW:
            for chosen in itertools.product(*map(range, counts)):
                self._solution(chosen)
        return self._best()

    # Simulations and their ranks.

    def _solution(self, chosen: Chosen) -> Solution:
        """The simulated step of a choice. See NOTE [ A slower CPU ]."""
        found = self._known.get(chosen)
        if found is None:
            timeline = self._simulate(chosen, self._problem.rates)
            seconds = timeline.seconds
            if self._slower != self._problem.rates:
                seconds = (seconds + self._simulate(chosen, self._slower).seconds) / 2
            found = self._known[chosen] = Solution(chosen, timeline, seconds, self._problem)
            if self._leader is None or self._rank(chosen) < self._rank(self._leader.chosen):
                self._leader = found
        return found

    def _simulate(self, chosen: Chosen, rates: Rates) -> Timeline:
        program = self._problem.program(chosen)
        self._work += len(program.tasks)
        return simulate_program(program, rates)

    def _best(self) -> Solution:
        assert self._leader is not None
        return self._leader

    def _rank(self, chosen: Chosen) -> Rank:
        """Its place among all choices: those that fit come first."""
        found = self._solution(chosen)
        timeline, peak = found.timeline, found.timeline.peak_bytes
        over = int(excess(self._problem, timeline.host_bytes, timeline.disk_bytes))
        return over, max(0, peak - self._problem.budget), round(found.seconds, DIGITS), peak, chosen

    def _spent(self) -> bool:
        return self._work > self._most_work

    def _keys(self, found: Estimates, correction: Correction) -> tuple[NDArray[numpy.float64], ...]:
        """The numbers of ranks."""
        seconds, peak = numpy.round(found.seconds + correction[0], DIGITS), found.peak_bytes + correction[1]
        over = excess(self._problem, found.host_bytes, found.disk_bytes) + numpy.zeros(len(peak))
        return over, numpy.maximum(0.0, peak - self._problem.budget), seconds, peak

    def _try_pure_ways(self) -> None:
        """Simulate those whose estimates are not far worse than the best choice."""
        ways = self._pure_ways()
        found = self._model.estimates(ways)
        keys = self._keys(replace(found, seconds=_MARGIN * found.seconds), (0.0, 0.0))
        for index in numpy.lexsort(keys[::-1]):
            if tuple(key[index] for key in keys) > self._rank(self._best().chosen)[:4]:
                return
            self._solution(tuple(ways[index].tolist()))

    # Starts.

    def _starts(self, near: Solution | None) -> list[Chosen]:
        """The given solution, and the mixtures of two options with the best estimates; the best first."""
        mixtures = self._mixtures()
        nearest = tuple(mixtures[self._order(mixtures, (0.0, 0.0))[0]].tolist())
        order = self._order(mixtures, self._correction(nearest))
        starts = {tuple(row) for row in mixtures[order[:_STARTS]].tolist()}
        return sorted(starts if near is None else starts | {near.chosen}, key=self._rank)

    def _mixtures(self) -> Choices:
        """Pure ways, and two of them with their blocks spread evenly, each with so many eighths of all blocks."""
        pure = self._pure_ways()
        blocks = numpy.arange(pure.shape[1])
        is_first = (blocks + 1) * _EIGHTHS // 8 > blocks * _EIGHTHS // 8
        pairs = numpy.array(list(itertools.combinations(range(len(pure)), 2)), dtype=numpy.int64).reshape(-1, 2)
        mixed = numpy.where(is_first[:, None], pure[pairs[:, 0]], pure[pairs[:, 1]])
        return numpy.concatenate([pure, mixed.reshape(len(pairs) * len(_EIGHTHS), pure.shape[1])])

    def _pure_ways(self) -> Choices:
        """For every block the same option's number, or its last one."""
        counts = numpy.array([len(options) for options in self._problem.options], dtype=numpy.int64)
        return numpy.minimum(numpy.arange(counts.max(initial=1))[:, None], counts - 1)

    # Moves.

    def _polish(self, here: Chosen) -> None:
        """Go on to a neighbour whose simulation is better, until none of those that seem best is."""
        on_the_way: Chosen | None = None
        while on_the_way != here and not self._spent():
            on_the_way = here
            rows = self._neighbours(here)
            for index in self._order(rows, self._correction(here))[:_TRIED]:
                chosen = tuple(rows[index].tolist())
                if self._rank(chosen) < self._rank(here):
                    here = chosen
                    break
                if self._spent():
                    return

    def _correction(self, chosen: Chosen) -> Correction:
        """How far the simulation of a choice is from its estimate."""
        estimate, found = self._ranked(numpy.array([chosen], dtype=numpy.int64)), self._solution(chosen)
        peak = found.timeline.peak_bytes
        return found.seconds - float(estimate.seconds[0]), peak - float(estimate.peak_bytes[0])

    def _order(self, rows: Choices, correction: Correction) -> NDArray[numpy.intp]:
        self._work += rows.size * max(1, len(self._problem.turns) // 2) / _CELLS_A_TASK
        return numpy.lexsort(self._keys(self._ranked(rows), correction)[::-1])

    def _ranked(self, rows: Choices) -> Estimates:
        """Estimates with the seconds that choices are ranked by. See NOTE [ A slower CPU ]."""
        # The mean of two steps is about a step with the mean of two CPUs.
        return self._model.estimates(rows, slower=(self._problem.late - 1) / 2)

    def _neighbours(self, chosen: Chosen) -> Choices:
        """A run of blocks of one kind with equal options changed: all of it, or one block."""
        rows: list[list[int]] = []
        last = 0
        for (_, here), run in itertools.groupby(zip(self._kinds, chosen, strict=True)):
            first, last = last, last + len(list(run))
            places = (*range(first, last, max(1, (last - first) // 8)), last - 1)
            parts = {(first, last), *((place, place + 1) for place in places)}
            for begin, end in sorted(parts):
                others = set(range(len(self._problem.options[first]))) - {here}
                rows += [[*chosen[:begin], *[number] * (end - begin), *chosen[end:]] for number in sorted(others)]
        return numpy.array(rows, dtype=numpy.int64).reshape(len(rows), len(chosen))


def aim_at(budget: int) -> int:
    """The bytes to plan for at first within the budget of an attached model.

    In another step, the CPU may free memory a moment later, and the allocator may give blocks that are a little larger
    than asked for: the more tensors a plan keeps, the more.
    """
    return budget - min(budget // 200, _MOST_SPARE)


def budget_for(nbytes: int) -> int:
    """The smallest budget of which so many bytes are planned for: the inverse of :func:`aim_at`.

    Example:
        >>> budget_for(995), aim_at(999)
        (999, 995)
    """
    return nbytes + min(max(nbytes - 1, 0) // 199, _MOST_SPARE)


def _too_small(problem: Problem, least: Solution) -> BudgetError:
    timeline, peak = least.timeline, least.timeline.peak_bytes
    budget, needed = problem.budget, peak
    if problem.spare is not None:
        # In the numbers of the user, who gives a budget of which a little stays free.
        budget, needed = budget + problem.spare, budget_for(peak)
    # Other tiers count if the smallest plan takes some of them.
    tiers = (
        ("CPU memory", problem.host_budget, timeline.host_bytes),
        ("disk", problem.disk_budget, timeline.disk_bytes),
    )
    limits = [(tier, limit, used) for tier, limit, used in tiers if limit is not None and used]
    most = [format_bytes(budget), *(f"{format_bytes(limit)} of {tier}" for tier, limit, _ in limits)]
    text = f"No plan fits {' and '.join(most)}. "
    if peak > problem.budget:
        spare = "" if needed == peak else f"{format_bytes(needed - peak)} that stay free, "
        text += (
            f"The smallest feasible budget that was found is {format_bytes(needed)} ({needed} bytes): {spare}"
            f"{format_bytes(problem.static_bytes)} in use when the step begins (weights, optimizer state; on a CPU, "
            f"the whole process), and {format_bytes(peak - problem.static_bytes)} more at the peak, in "
            f"{in_words(timeline.peak_task)}. "
        )
    if limits:
        uses = " and ".join(f"{format_bytes(used)} to {tier}" for tier, _, used in limits)
        text += f"The smallest plan offloads {uses}. "
    text += "Raise the budget, reduce the batch size, or allow more: allow=, host_budget=, disk_budget=."
    return BudgetError(text, budget=budget, least=needed)
