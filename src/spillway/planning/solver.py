"""The choice of an option for each block that makes a step fast within its budgets.

NOTE [ Exact, or searched ]

Where all choices can be counted, each has a bound of its seconds, and they are simulated in the order of these bounds
until none is left that could be better: the answer is the best of all (``exact.py``). Where there are more, or where
too many would have to be simulated, good ones are searched for (``search.py``), and a linear programme says how far
they may be from the best (``relaxation.py``). Either way the simulation has the last word.

The answer is the same on every rank: no clock is asked, and seconds are compared to a nanosecond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from spillway.errors import BudgetError, UsageError
from spillway.planning import timeline as timelines
from spillway.planning.exact import countable, fastest, smallest
from spillway.planning.forecast import Forecast
from spillway.planning.relaxation import Relaxed, relaxed
from spillway.planning.search import Search
from spillway.planning.tasks import Problem
from spillway.planning.timeline import Timeline
from spillway.planning.trials import DIGITS, Chosen, Simulate, Trials
from spillway.units import format_bytes

TASKS_A_SECOND = 100_000
"""Tasks that are simulated in about a second."""
CELLS_A_SECOND = 5_000_000
"""Choices times blocks that are guessed in about a second."""
_SIMULATED = 0.4
"""The share of a search's time that simulations have."""


@dataclass(frozen=True, slots=True)
class Solution:
    """An option for each block, and what comes of it."""

    chosen: tuple[int, ...]
    """An option's number for each block."""
    timeline: Timeline
    """What the simulation says of it."""
    method: str
    """``"exact"``: there is none better. ``"search"``: none better was found."""
    seconds: float
    """What it was ranked by: see NOTE [ A host that is late ] in ``trials.py``."""
    bound_seconds: float | None
    """No choice that fits takes less. ``None`` where that is not known."""
    shares: Relaxed | None = field(default=None, repr=False, compare=False)
    """Of the linear programme, if one was solved."""


def solve(
    problem: Problem, *, simulate: Simulate | None = None, seconds: float = 4.0, near: Relaxed | None = None
) -> Solution:
    """The fastest choice that fits the budgets; of equally fast ones the smallest, then the first.

    Args:
        problem: the step, and its blocks' options.
        simulate: what a program comes to; :func:`~spillway.planning.timeline.simulate_program` if left out.
        seconds: about how long it may take, counted as work, so that every rank has the same answer.
        near: shares for the same options at other rates, to begin with in place of this problem's own. Then no bound is
            known where choices are searched for: see :func:`bound_of`.

    Raises:
        spillway.BudgetError: no choice fits.
        spillway.UsageError: a block without options, or a time that is not positive.

    Example:
        >>> solution = solve(problem)  # doctest: +SKIP
        >>> [problem.options[block][number].decisions for block, number in enumerate(solution.chosen)]  # doctest: +SKIP
    """
    return _Solver(problem, simulate, seconds).fastest(near)


def better(problem: Problem, solution: Solution, *, simulate: Simulate | None = None, seconds: float = 4.0) -> Solution:
    """A faster choice not far from one that was searched for, or that one.

    Args:
        problem: the step, and its blocks' options.
        solution: of that problem.
        simulate: as for :func:`solve`.
        seconds: about how long it may take, counted as work.
    """
    bound = solution.bound_seconds
    if solution.method == "exact" or (bound is not None and round(solution.seconds - bound, DIGITS) <= 0):
        # There is none.
        return solution
    return _Solver(problem, simulate, seconds).better(solution)


def bound_of(problem: Problem) -> float | None:
    """Seconds than which no choice that fits takes less; ``None``: none fits."""
    found = relaxed(Forecast(problem), problem.budget)
    return None if found is None else found.seconds


def least(problem: Problem, *, simulate: Simulate | None = None, seconds: float = 4.0) -> Solution:
    """The choice with the smallest peak; of equally small ones the fastest, then the first.

    Those within the host's and the disk's budgets come first; the device's budget is not looked at.

    Args:
        problem: the step, and its blocks' options.
        simulate: what a program comes to; :func:`~spillway.planning.timeline.simulate_program` if left out.
        seconds: about how long it may take, counted as work.

    Raises:
        spillway.UsageError: a block without options, or a time that is not positive.
    """
    return _Solver(problem, simulate, seconds).smallest()


class _Solver:
    """One problem's."""

    def __init__(self, problem: Problem, simulate: Simulate | None, seconds: float) -> None:
        _check(problem, seconds)
        if simulate is None:
            simulate = timelines.simulate_program
        self._problem = problem
        self._forecast = Forecast(problem)
        self._trials = Trials(problem, simulate)
        self._tasks = int(seconds * TASKS_A_SECOND)
        self._search_tasks = int(seconds * _SIMULATED * TASKS_A_SECOND)
        self._cells = int(seconds * (1 - _SIMULATED) * CELLS_A_SECOND)

    def fastest(self, near: Relaxed | None) -> Solution:
        """Of the choices that fit."""
        bound = 0.0
        if countable(self._forecast):
            outcome = fastest(self._forecast, self._trials, self._tasks)
            if outcome.certain:
                if outcome.chosen is None:
                    raise self._too_small(self.smallest())
                return self._solution(outcome.chosen, "exact", outcome.bound_seconds)
            bound = outcome.bound_seconds
        hint = relaxed(self._forecast, self._problem.budget) if near is None else near
        # Without a solution hardly anything fits: the smallest choice tells, for HiGHS has tolerances.
        found = None if hint is None else self._searched(hint)
        if found is None or not self._trials.fits(self._trials.timeline(found)):
            smallest = self.smallest()
            if not self._trials.fits(smallest.timeline):
                raise self._too_small(smallest)
            # It fits, and is a place to begin at.
            found = self._searched(hint)
        if near is None and hint is not None:
            bound = max(bound, hint.seconds)
        return replace(self._solution(found, "search", bound or None), shares=hint)

    def better(self, solution: Solution) -> Solution:
        """One that is not far from it, if there is one."""
        search = Search(self._forecast, self._trials, most_tasks=self._search_tasks, most_cells=self._cells)
        chosen = search.better(solution.chosen, solution.shares)
        return replace(self._solution(chosen, "search", solution.bound_seconds), shares=solution.shares)

    def smallest(self) -> Solution:
        """Of all choices."""
        if countable(self._forecast):
            outcome = smallest(self._forecast, self._trials, self._trials.tasks + self._tasks)
            if outcome.certain and outcome.chosen is not None:
                return self._solution(outcome.chosen, "exact", None)
        return self._solution(self._searched(None, small=True), "search", None)

    def _searched(self, hint: Relaxed | None, *, small: bool = False) -> Chosen:
        search = Search(
            self._forecast, self._trials, most_tasks=self._search_tasks, most_cells=self._cells, small=small
        )
        return search.best(hint)

    def _solution(self, chosen: Chosen, method: str, bound: float | None) -> Solution:
        return Solution(chosen, self._trials.timeline(chosen), method, self._trials.seconds(chosen), bound)

    def _too_small(self, smallest: Solution) -> BudgetError:
        problem, timeline = self._problem, smallest.timeline
        known = "can be" if smallest.method == "exact" else "was found"
        message = (
            f"no choice of options for {len(problem.options)} blocks fits {format_bytes(problem.budget)} on the device"
            f"{_tier('in host memory', problem.host_budget)}{_tier('on the disk', problem.disk_budget)}: the smallest "
            f"peak that {known} is {format_bytes(timeline.peak_bytes)} ({timeline.peak_bytes} bytes), in the task "
            f"{timeline.peak_task!r}, of which {format_bytes(problem.static_bytes)} are parameters, optimizer state "
            f"and what else is there when the step begins; with it {format_bytes(timeline.host_bytes)} are in host "
            f"memory and {format_bytes(timeline.disk_bytes)} on the disk. Give it that much, make the batch or the "
            "static part smaller, or allow more to leave or to be computed again"
        )
        return BudgetError(message, budget=problem.budget, least=timeline.peak_bytes)


def _check(problem: Problem, seconds: float) -> None:
    for name, options in zip(problem.names, problem.options, strict=True):
        if not options:
            raise UsageError(f"the block {name!r} has no options: expected one at least, such as one that keeps all")
    if not (seconds > 0 and math.isfinite(seconds)):
        raise UsageError(f"seconds is {seconds!r}: expected a positive number of seconds, such as 4.0")


def _tier(where: str, budget: int | None) -> str:
    return "" if budget is None else f", {format_bytes(budget)} {where}"
