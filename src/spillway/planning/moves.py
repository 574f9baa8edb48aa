"""Choices to begin a search with, and choices near one in hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy

from spillway.planning.forecast import Choices, Forecast, Numbers
from spillway.planning.tasks import Problem

MOST_STARTS = 6000
"""Splits that are looked at."""
MOST_MOVES = 1200
"""Neighbours of each kind that are looked at."""
_LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)


def uniform(problem: Problem) -> Choices:
    """Every block the same option's number, or its last one."""
    counts = [len(each) for each in problem.options]
    return numpy.array([[min(number, count - 1) for count in counts] for number in range(max(counts))])


def splits(problem: Problem, numbers: Sequence[int]) -> Choices:
    """The first blocks one of ``numbers``, the others another one: for all pairs, at some places."""
    counts = numpy.array([len(each) for each in problem.options])
    blocks = len(counts)
    pairs = list(itertools.permutations(numbers, 2))
    step = max(1, -(-blocks * len(pairs) // MOST_STARTS))
    places = numpy.arange(blocks)
    rows = [numpy.where(places < cut, first, second) for first, second in pairs for cut in range(1, blocks, step)]
    if not rows:
        return numpy.empty((0, blocks), dtype=numpy.int64)
    split: Choices = numpy.minimum(numpy.array(rows, dtype=numpy.int64), counts - 1)
    return split


def rounded(shares: Sequence[Numbers]) -> Choices:
    """Two choices near shares: each block's largest one, and one in which errors are made good by the next blocks."""
    largest = [int(numpy.argmax(numpy.round(each, 6))) for each in shares]
    owed = numpy.zeros(max(len(each) for each in shares))
    spread = []
    for each in shares:
        owed[: len(each)] += each
        number = int(numpy.argmax(numpy.round(numpy.where(each > 1e-6, owed[: len(each)], -numpy.inf), 6)))
        owed[number] -= 1
        spread.append(number)
    return numpy.array([largest, spread], dtype=numpy.int64)


def promising(forecast: Forecast, shares: Sequence[Numbers] | None) -> tuple[frozenset[int], ...]:
    """For each block the options that a descent looks at: those that blocks of its signature have a share of.

    All of them, where there are few or where nothing is known. A relaxed solution has shares of few.
    """
    options = forecast.problem.options
    if shares is None or sum(len(each) for each in options) <= MOST_MOVES:
        return tuple(frozenset(range(len(each))) for each in options)
    used: dict[int, set[int]] = {}
    for each, part in zip(options, shares, strict=True):
        used.setdefault(id(each), set()).update(numpy.flatnonzero(part > 1e-6).tolist())
    return tuple(frozenset(used[id(each)]) for each in options)


def neighbours(forecast: Forecast, chosen: Sequence[int], promising: Sequence[frozenset[int]]) -> Choices:
    """One block, or a run of equal options or a part of one, changed; two blocks of one signature swapped.

    Args:
        forecast: of the problem.
        chosen: the choice in hand.
        promising: for each block, the options that it may change to.
    """
    here = numpy.array(chosen, dtype=numpy.int64)
    blocks = len(here)
    options = forecast.problem.options
    rows: list[Choices] = []
    for block in range(blocks):
        for number in sorted(promising[block]):
            if number != here[block]:
                row = here.copy()
                row[block] = number
                rows.append(row)
    rows += _swapped(options, here)
    rows += _runs(here, promising)
    return numpy.array(rows, dtype=numpy.int64).reshape(len(rows), blocks)


def kicked(
    problem: Problem, chosen: Sequence[int], promising: Sequence[frozenset[int]], random_: random.Random
) -> tuple[int, ...]:
    """Some blocks, up to a quarter, take any option that is promising, or change places with another of their kind."""
    here = list(chosen)
    for _ in range(random_.randint(2, max(2, len(here) // 4))):
        block, other = random_.randrange(len(here)), random_.randrange(len(here))
        if random_.random() < 0.5:
            here[block] = random_.choice(sorted(promising[block]))
        elif problem.options[block] is problem.options[other]:
            here[block], here[other] = here[other], here[block]
    return tuple(here)


def _swapped(options: Sequence[object], here: Choices) -> list[Choices]:
    rows: list[Choices] = []
    # Near ones first: they leave most as it is.
    for length in range(1, len(here)):
        for block in range(len(here) - length):
            other = block + length
            if here[block] != here[other] and options[block] is options[other]:
                row = here.copy()
                row[block], row[other] = here[other], here[block]
                rows.append(row)
        if len(rows) > MOST_MOVES:
            break
    return rows


def _runs(here: Choices, promising: Sequence[frozenset[int]]) -> list[Choices]:
    """Runs, and their begins and ends, take other options."""
    blocks = len(here)
    edges = [0, *(at for at in range(1, blocks) if here[at] != here[at - 1]), blocks]
    rows: list[Choices] = []
    for begin, end in itertools.pairwise(edges):
        spans = {(begin, end)}
        spans |= {(begin, begin + length) for length in _LENGTHS if length < end - begin}
        spans |= {(end - length, end) for length in _LENGTHS if length < end - begin}
        for first, last in sorted(spans):
            if last - first < 2:
                continue
            for number in sorted(frozenset.intersection(*promising[first:last])):
                if number != here[begin]:
                    row = here.copy()
                    row[first:last] = number
                    rows.append(row)
            if len(rows) > MOST_MOVES:
                return rows
    return rows
