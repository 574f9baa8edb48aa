"""A linear programme that is written down as one computes with numbers: see NOTE [ Bounds ] in ``bounds.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

Array: TypeAlias = NDArray[numpy.float64]


class Linear:
    """A sum of columns with their factors, and a constant."""

    __slots__ = ("constant", "terms")

    def __init__(self, terms: dict[int, float], constant: float = 0.0) -> None:
        self.terms, self.constant = terms, constant

    def __add__(self, other: Linear | float) -> Linear:
        if not isinstance(other, Linear):
            return Linear(self.terms, self.constant + other)
        terms = dict(self.terms)
        for column, factor in other.terms.items():
            terms[column] = terms.get(column, 0.0) + factor
        return Linear(terms, self.constant + other.constant)

    def __mul__(self, factor: float) -> Linear:
        return Linear({column: each * factor for column, each in self.terms.items()}, self.constant * factor)

    def __sub__(self, other: Linear | float) -> Linear:
        return self + other * -1.0

    __radd__, __rmul__ = __add__, __mul__


class LinearProgramme:
    """A linear programme that is written down row by row; each row says that a sum is at most 0."""

    def __init__(self, counts: Sequence[int], limits: dict[str, float], lines: dict[str, int]) -> None:
        ends = numpy.cumsum([0, *counts]).tolist()
        self.places = list(itertools.pairwise(ends))
        """The first column of each block's shares, and the one after the last."""
        self._bounds: list[tuple[float | None, float | None]] = [(0.0, 1.0)] * ends[-1]
        self._limits, self._lines = limits, lines
        self._rows: list[Linear] = []
        self._equal: list[Linear] = [
            Linear(dict.fromkeys(range(first, last), 1.0), -1.0) for first, last in self.places
        ]

    def constant(self, value: float) -> Linear:
        return Linear({}, value)

    def row(self, row: Any) -> Callable[[str], Linear]:
        if row.block is None:
            return lambda name: Linear({}, float(row.numbers[self._lines[name], 0]))
        first, last = self.places[row.block]
        columns = range(first, last)
        return lambda name: Linear(dict(zip(columns, row.numbers[self._lines[name]].tolist(), strict=True)))

    def shared(self, output: Linear, input_: Linear) -> Linear | None:
        """A column that is no more than either; ``None``: it would be 0."""
        if not (any(output.terms.values()) and any(input_.terms.values())):
            return None
        shared = self._column(0.0)
        self._rows += [shared - output, shared - input_]
        return shared

    def limit(self, tier: str, nbytes: Linear) -> None:
        if tier in self._limits:
            self._rows.append(nbytes - self._limits[tier])

    def hold(self, number: Linear) -> Linear:
        """A column that is equal, so that sums stay short."""
        if len(number.terms) <= 1:
            return number
        column = self._column(None)
        self._equal.append(number - column)
        return column

    def latest(self, *numbers: Linear) -> Linear:
        """A column that is at least each."""
        column = self._column(None)
        self._rows += [number - column for number in numbers]
        return column

    def least(self, objective: Linear) -> tuple[float, Array] | None:
        """The least that a sum can be, and the columns; ``None``: there is no solution."""
        costs = numpy.zeros(len(self._bounds))
        for column, factor in objective.terms.items():
            costs[column] = factor
        (rows, limits), (equal, values) = self._matrix(self._rows), self._matrix(self._equal)
        solved = linprog(costs, A_ub=rows, b_ub=limits, A_eq=equal, b_eq=values, bounds=self._bounds, method="highs-ds")
        return None if solved.x is None else (float(solved.fun) + objective.constant, solved.x)

    def _column(self, low: float | None) -> Linear:
        self._bounds.append((low, None))
        return Linear({len(self._bounds) - 1: 1.0})

    def _matrix(self, rows: Sequence[Linear]) -> tuple[csr_array | None, Array | None]:
        if not rows:
            return None, None
        sizes = [len(row.terms) for row in rows]
        places = numpy.repeat(numpy.arange(len(rows)), sizes)
        columns = numpy.fromiter(itertools.chain.from_iterable(row.terms for row in rows), numpy.int64, sum(sizes))
        factors = numpy.fromiter(
            itertools.chain.from_iterable(row.terms.values() for row in rows), numpy.float64, sum(sizes)
        )
        matrix = csr_array((factors, (places, columns)), shape=(len(rows), len(self._bounds)))
        return matrix, numpy.array([-row.constant for row in rows])
