"""A good choice where there are too many to look at: from many starts, step by step, by guesses that trials correct.

NOTE [ Guesses and trials ]

A trial costs as much as some thousand guesses. So neighbours are ranked by guesses, and only where no neighbour seems
better, the choice is tried. What the trial says beyond the guess - of seconds, and of bytes - is added to the guesses
of what is near, and the descent goes on with that until it finds nothing new. At last the neighbours that seem best are
tried one by one. Work is bounded by counts: a clock would give each rank another answer.

NOTE [ Where a search has ended ]

It has ended where no neighbour is better, and not for want of time: with ten times as much it gives nearly the same. So
the best choice of the best window is changed in some places at once, at random but by the same numbers each time, and a
descent begins there; if that leads to a better one, this is what is changed next (iterated local search, Lourenço,
Martin and Stützle 2003). For transformers' Llama of width 2048, within checkpointing's peak, with what four searches
had measured on H100s, and a loss of either of two sizes, such plans are 0.9 % faster by the simulation that ranks them:
from 0.02 to 1.8 % (a script that is not committed).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeAlias

import numpy
from numpy.typing import NDArray

from spillway.planning.forecast import Choices, Forecast
from spillway.planning.moves import kicked, neighbours, promising, rounded, splits, uniform
from spillway.planning.relaxation import Relaxed
from spillway.planning.trials import DIGITS, Chosen, Rank, Trials

STARTS = 6
"""Descents that are made."""
UNIFORM = 12
"""Choices of one option for all blocks that are tried. With all of them little is left for the search."""
ROUNDS = 6
"""Corrections of one descent."""
TOGETHER = (1, 2, 4, 8, 16, 32)
"""How many of the best changes are made at once, where that is better still."""
AT_ONCE = 800
"""Neighbours that are guessed before a step is made."""
TRIED = 40
"""Neighbours of the best choice that are tried."""
KICKS = 60
"""Descents from near the best choice."""
Order: TypeAlias = NDArray[numpy.intp]


@dataclass(frozen=True, slots=True)
class Correction:
    """What a trial says beyond a guess."""

    seconds: float = 0.0
    peak_bytes: float = 0.0


class Search:
    """Looks for the fastest choice that fits, or for the smallest one.

    Args:
        forecast: guesses.
        trials: simulates.
        most_tasks: to simulate.
        most_cells: to guess: choices times blocks.
        small: whether the smallest peak is looked for.
    """

    def __init__(
        self, forecast: Forecast, trials: Trials, *, most_tasks: int, most_cells: int, small: bool = False
    ) -> None:
        self._problem = forecast.problem
        self._forecast = forecast
        self._trials = trials
        self._most_tasks = trials.tasks + most_tasks
        self._cells = most_cells
        self._small = small
        self._promising = promising(forecast, None)

    def best(self, hint: Relaxed | None) -> Chosen:
        """The best choice that was found: whether it fits is for the caller to see.

        Args:
            hint: shares to begin with.
        """
        everything = self._promising
        if hint is not None:
            self._promising = promising(self._forecast, hint.shares)
        same = uniform(self._problem)
        self._try(same[self._order(same, Correction())[:UNIFORM]])
        starts = splits(self._problem, range(int(self._forecast.counts.max())))
        near = numpy.concatenate([same, starts])
        hinted = numpy.empty((0, near.shape[1]), dtype=numpy.int64) if hint is None else rounded(hint.shares)
        self._try(hinted)
        order = self._order(near, Correction())
        # Splits that differ by one block lead to the same place.
        firsts = [near[order[0]]]
        for index in order:
            if len(firsts) > STARTS:
                break
            if all(int((near[index] != one).sum()) * 8 > near.shape[1] for one in firsts):
                firsts.append(near[index])
        self._try(numpy.array(firsts))
        leader = self._leader()
        for start in [*map(_numbers, hinted), leader, *map(_numbers, firsts)]:
            self._descend(start)
        self._promising = everything
        self._polish()
        return self._leader()

    def better(self, start: Chosen, hint: Relaxed | None) -> Chosen:
        """A better choice than one that a search has ended with, if there is one not far from it.

        See NOTE [ Where a search has ended ].

        Args:
            start: that choice.
            hint: shares that the search began with.
        """
        everything = self._promising
        if hint is not None:
            self._promising = promising(self._forecast, hint.shares)
        self._trials.timeline(start)
        random_ = random.Random(0)
        for _ in range(KICKS):
            leader = self._leader()
            self._descend(kicked(self._problem, leader, self._promising, random_))
            if self._leader() != leader:
                self._polish()
            if self._spent():
                break
        self._promising = everything
        self._polish()
        return self._leader()

    def _descend(self, start: Chosen) -> None:
        """See the note at the top of this file."""
        here, correction = start, Correction()
        been: set[Chosen] = set()
        for _ in range(ROUNDS):
            if self._spent():
                return
            correction = self._correction(here)
            here = self._downhill(here, correction)
            if here in been:
                return
            been.add(here)
            self._trials.timeline(here)

    def _downhill(self, here: Chosen, correction: Correction) -> Chosen:
        """Where guesses lead to."""
        idle = turn = 0
        while self._cells > 0:
            near = neighbours(self._forecast, here, self._promising)
            # A part of them at a time: a step that is good enough now is worth more than the best one later.
            parts = -(-len(near) // AT_ONCE)
            if idle >= parts:
                break
            now = numpy.array([here], dtype=numpy.int64)
            rows = numpy.concatenate([now, near[turn % parts :: parts]])
            turn += 1
            order = self._order(rows, correction)
            if order[0] == 0:
                idle += 1
                continue
            idle = 0
            together = _together(rows, order)
            here = _numbers(together[self._order(together, correction)[0]])
        return here

    def _polish(self) -> None:
        """The neighbours that seem best are tried, until none is better."""
        tried: set[Chosen] = set()
        while (here := self._leader()) not in tried:
            tried.add(here)
            rows = neighbours(self._forecast, here, self._promising)
            for index in self._order(rows, self._correction(here))[:TRIED]:
                if self._spent():
                    return
                self._trials.timeline(_numbers(rows[index]))
                if self._leader() != here:
                    break

    def _order(self, rows: Choices, correction: Correction) -> Order:
        """The best guess first; of equal ones, that which stands first."""
        outlook = self._forecast.guesses(rows)
        self._cells -= rows.size * self._forecast.passes
        seconds = numpy.round(outlook.seconds + correction.seconds, DIGITS)
        peak = outlook.peak_bytes + correction.peak_bytes
        over = outlook.excess(self._problem)
        if self._small:
            return numpy.lexsort((seconds, peak, over))
        return numpy.lexsort((peak, seconds, over + numpy.maximum(0.0, peak - self._problem.budget)))

    def _correction(self, chosen: Chosen) -> Correction:
        guess = self._forecast.guesses(numpy.array([chosen], dtype=numpy.int64))
        timeline = self._trials.timeline(chosen)
        return Correction(
            self._trials.seconds(chosen) - float(guess.seconds[0]), timeline.peak_bytes - float(guess.peak_bytes[0])
        )

    def _try(self, rows: Choices) -> None:
        for row in rows:
            self._trials.timeline(_numbers(row))

    def _leader(self) -> Chosen:
        return min(self._trials.known, key=self._rank)

    def _rank(self, chosen: Chosen) -> Rank:
        return self._trials.by_peak(chosen) if self._small else self._trials.by_seconds(chosen)

    def _spent(self) -> bool:
        return self._cells <= 0 or self._trials.tasks > self._most_tasks


def _numbers(row: Choices) -> Chosen:
    return tuple(int(number) for number in row)


def _together(rows: Choices, order: Order) -> Choices:
    """The first of ``rows`` with the best changes that others make to it, one, some or many of them."""
    here = rows[0]
    merged = here.copy()
    changed = numpy.zeros(len(here), dtype=bool)
    found = []
    for count, index in enumerate(order[: TOGETHER[-1]], 1):
        other = rows[index] != here
        if not (other & changed).any():
            merged = numpy.where(other, rows[index], merged)
            changed |= other
        if count in TOGETHER:
            found.append(merged)
    return numpy.array(found, dtype=numpy.int64)
