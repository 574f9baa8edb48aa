"""The best of all choices, where there are few enough to have a bound of each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy

from spillway.planning.forecast import Choices, Forecast
from spillway.planning.trials import DIGITS, Chosen, Trials

MOST_CHOICES = 100_000
"""More are not looked at one by one."""
SLACK_SECONDS = 1e-11
"""Sums of seconds in another order differ by less."""
_HALF = 0.5 * 10.0**-DIGITS


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a search."""

    chosen: Chosen | None
    """The best choice that fits, or ``None``: there is none, or none was found."""
    certain: bool
    """Whether there is none better."""
    bound_seconds: float
    """No choice that fits takes less. Infinite: no choice fits."""


def countable(forecast: Forecast) -> bool:
    """Whether all choices can be looked at."""
    return math.prod(int(count) for count in forecast.counts) <= MOST_CHOICES


def every_choice(forecast: Forecast) -> Choices:
    """All of them, in lexicographic order."""
    if not len(forecast.counts):
        return numpy.empty((1, 0), dtype=numpy.int64)
    grids = numpy.indices(tuple(int(count) for count in forecast.counts))
    return grids.reshape(len(forecast.counts), -1).T.astype(numpy.int64)


def fastest(forecast: Forecast, trials: Trials, most_tasks: int) -> Outcome:
    """The choice that fits with the least seconds: simulated in the order of their bounds, until no bound is better.

    Args:
        forecast: bounds of the choices.
        trials: simulates them.
        most_tasks: to simulate; then the outcome is not certain.
    """
    choices = every_choice(forecast)
    bounds = forecast.bounds(choices)
    problem = forecast.problem
    may_fit = (bounds.peak_bytes <= problem.budget) & (bounds.excess(problem) <= 0)
    order = [index for index in numpy.lexsort((bounds.peak_bytes, bounds.seconds)) if may_fit[index]]
    best = None
    for index in order:
        least_seconds = float(bounds.seconds[index]) - SLACK_SECONDS
        if best is not None:
            if least_seconds > best[1] + _HALF:
                break
            if least_seconds >= best[1] - _HALF and bounds.peak_bytes[index] > best[2]:
                continue  # As fast at best, and larger for sure.
        if trials.tasks > most_tasks:
            return Outcome(None if best is None else best[3], False, min(least_seconds, _least_known(trials)))
        rank = trials.by_seconds(_numbers(choices, index))
        if rank[0] == 0 and (best is None or rank < best):
            best = rank
    if best is None:
        return Outcome(None, True, math.inf)
    return Outcome(best[3], True, min(trials.seconds(best[3]), _least_known(trials)))


def _least_known(trials: Trials) -> float:
    """Seconds of the fastest that was simulated and fits: with a late host, another one may be the best."""
    return min((timeline.seconds for timeline in trials.known.values() if trials.fits(timeline)), default=math.inf)


def smallest(forecast: Forecast, trials: Trials, most_tasks: int) -> Outcome:
    """The choice with the smallest peak: as :func:`fastest` does it.

    Args:
        forecast: bounds of the choices.
        trials: simulates them.
        most_tasks: to simulate; then the outcome is not certain.
    """
    choices = every_choice(forecast)
    bounds = forecast.bounds(choices)
    excess = bounds.excess(forecast.problem)
    best = None
    for index in numpy.lexsort((bounds.seconds, bounds.peak_bytes, excess)):
        if best is not None:
            least = (float(excess[index]), float(bounds.peak_bytes[index]))
            if least > best[:2]:
                break
            if least == best[:2] and float(bounds.seconds[index]) - SLACK_SECONDS > best[2] + _HALF:
                continue
        if trials.tasks > most_tasks:
            return Outcome(None if best is None else best[3], False, 0.0)
        rank = trials.by_peak(_numbers(choices, index))
        if best is None or rank < best:
            best = rank
    return Outcome(None if best is None else best[3], True, 0.0)


def _numbers(choices: Choices, index: int) -> Chosen:
    return tuple(int(number) for number in choices[index])
