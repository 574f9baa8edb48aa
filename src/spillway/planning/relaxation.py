"""The linear programme: a share of each option for each block, and clocks that no simulation runs ahead of.

NOTE [ Why it is a bound ]

It says of the sums what ``forecast.py`` says of each choice as a bound, with a share of each option in the place of a
choice. Every choice is a solution of it, with seconds that are no more than the simulated ones; so its own least
seconds are a bound of all choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from spillway.planning.footprint import NEVER
from spillway.planning.forecast import Forecast, Numbers

MIB = 2.0**20
MS = 1e3
Terms: TypeAlias = tuple[list[tuple[int, float]], float]
"""Columns with their factors, and a constant."""


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A solution."""

    seconds: float
    """No choice that fits takes less."""
    shares: tuple[Numbers, ...]
    """For each block, of each option; they add up to 1."""


def relaxed(forecast: Forecast, budget: float) -> Relaxed | None:
    """The least seconds of the linear model, or ``None`` where it has no solution: then no choice fits.

    Args:
        forecast: what the options come to.
        budget: bytes on the device, at most.
    """
    model = _Model(forecast, budget)
    # No time limit: it would give each rank another answer. It is one linear programme, without branches.
    result = milp(
        model.objective,
        constraints=LinearConstraint(model.matrix, -numpy.inf, numpy.array(model.limits)),
        bounds=Bounds(numpy.array(model.low), numpy.array(model.high)),
    )
    if result.x is None:
        return None
    shares = tuple(result.x[first : first + count] for first, count in model.places)
    # HiGHS is content within 1e-7 of each constraint.
    return Relaxed(float(result.fun) / MS * (1 - 1e-6), shares)


class _Model:
    """Columns are shares, clocks and levels, in ms and MiB, so that HiGHS's tolerances are small beside them.

    Each row says that a sum is at most its limit.
    """

    def __init__(self, forecast: Forecast, budget: float) -> None:
        self.limits: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.places: list[tuple[int, int]] = []
        """Of each block's shares: the first column, and how many."""
        self._forecast = forecast
        self._entries: list[tuple[int, int, float]] = []
        for count in forecast.counts.tolist():
            self.places.append((len(self.low), count))
            columns = [self._column(0.0, 1.0) for _ in range(count)]
            self._at_most([(column, 1.0) for column in columns], 1.0)
            self._at_most([(column, -1.0) for column in columns], -1.0)
        self._places = dict(zip(forecast.rows_of_blocks, self.places, strict=True))
        """By rows of the forecast's table."""
        self._last = self._clocks()
        self._levels(budget / MIB)
        self._tiers()

    @property
    def matrix(self) -> csr_array:
        """Of the constraints."""
        rows, columns, values = zip(*self._entries, strict=True)
        return csr_array((values, (rows, columns)), shape=(len(self.limits), len(self.low)))

    @property
    def objective(self) -> Numbers:
        """The clock when all is done."""
        objective = numpy.zeros(len(self.low))
        objective[self._last] = 1.0
        return objective

    def _clocks(self) -> int:
        """Rows for compute and the lanes; the column of the last clock."""
        forecast, rates = self._forecast, self._forecast.problem.rates
        window, to_disk = forecast.window, forecast.to_disk
        clock, out, disk = self._column(0.0, 0.0), self._column(), self._column()
        begun = -MS * forecast.problem.lead
        issued = self._column(begun, begun)
        out_credit = MS * window / rates.out
        write_credit = out_credit + MS * window / rates.disk_write
        back_credit, read_credit = MS * window / rates.back, MS * window / rates.disk_read
        back, read = self._column(-numpy.inf), self._column(-numpy.inf)
        runs = 0
        for leg in forecast.legs:
            for row in leg.forward:
                begin, clock = clock, self._column()
                own = self._terms("forward_seconds", row, MS)
                self._after(clock, begin, own)
                self._after(clock, out, self._terms("out_need", row, MS, own), out_credit)
                self._after(clock, begin, self._terms("out_free_need", row, MS, own), out_credit)
                if forecast.hosted:
                    issued = self._queued(clock, issued, "forward_host", row)
                ahead, out = out, self._column(-numpy.inf)
                self._after(out, ahead, self._terms("sent", row, MS / rates.out))
                self._after(out, begin, self._terms("out_end", row, MS, ([], 0.0)))
                if to_disk:
                    self._after(clock, disk, self._terms("disk_need", row, MS, own), write_credit)
                    ahead, disk = disk, self._column(-numpy.inf)
                    self._after(disk, ahead, self._terms("disk_sent", row, MS / rates.disk_write))
                    self._after(disk, begin, ([], 0.0))
            if leg.turns_round:
                # See NOTE [ Bounds of several chunks ] in ``forecast.py``.
                out = self._less(out, MS * window / rates.out)
                disk = self._less(disk, MS * window / rates.disk_write)
                back = self._less(back, back_credit)
                read = self._less(read, read_credit)
                self._after(back, clock, ([], 0.0), back_credit * (2 if runs else 1))
                self._after(read, clock, ([], 0.0), read_credit * (2 if runs else 1))
                runs += 1
            for row in leg.backward:
                begin, clock = clock, self._column()
                own = self._terms("backward_seconds", row, MS)
                need = self._terms("back_need", row, MS, own)
                self._after(clock, begin, own)
                self._after(clock, back, need)
                self._after(clock, begin, need, 2 * back_credit)
                if forecast.hosted:
                    issued = self._queued(clock, issued, "backward_host", row)
                ahead, back = back, self._column(-numpy.inf)
                self._after(back, ahead, self._terms("taken", row, MS / rates.back))
                if to_disk:
                    self._after(clock, read, self._terms("read_need", row, MS, own))
                    ahead, read = read, self._column(-numpy.inf)
                    self._after(read, ahead, self._terms("disk_taken", row, MS / rates.disk_read))
        if forecast.hosted:
            self._after(clock, issued, ([], MS * forecast.problem.lead))
        return clock

    def _less(self, clock: int, credit: float) -> int:
        """A column of a clock that may be so much earlier."""
        after = self._column(-numpy.inf)
        self._after(after, clock, ([], 0.0), credit)
        return after

    def _queued(self, clock: int, issued: int, name: str, row: int) -> int:
        """A block ends no earlier than the host lets it; the column of when the host has queued it."""
        self._after(clock, issued, self._terms(f"{name}_need", row, MS))
        after = self._column(-numpy.inf)
        self._after(after, issued, self._terms(name, row, MS))
        return after

    def _levels(self, budget: float) -> None:
        """Rows for bytes on the device."""
        forecast = self._forecast
        static = forecast.problem.static_bytes / MIB
        level = self._column(static, static)
        shared = {row: self._shared(row) for row in forecast.rows_of_blocks if row - 1 in self._places}
        for leg in forecast.legs:
            for row in leg.forward:
                level = self._level(level, "forward_peak", "kept", row, budget, shared.get(row), -1.0)
                if forecast.lets_go and row == leg.lets_go_after:
                    level = self._let_go(level, leg.backward)
            peak, change = ("later_peak", "later_change") if leg.is_later else ("backward_peak", "back_change")
            for row in leg.backward:
                level = self._level(level, peak, change, row, budget, shared.get(row), 1.0)

    def _let_go(self, level: int, rows: Sequence[int]) -> int:
        """The column of the level after blocks have let go of what they held for as long as the forward took."""
        after = self._column(-numpy.inf)
        terms = [term for row in rows for term in self._terms("let_go", row, 1 / MIB)[0]]
        for sign in (1.0, -1.0):
            changes = [(column, -sign * value) for column, value in terms]
            self._at_most([(level, sign), (after, -sign), *changes], 0.0)
        return after

    def _shared(self, row: int) -> int | None:
        """A column for what a block keeps of its input and the one before has kept, too: no more than either."""
        if not (self._forecast.column("output")[row - 1].any() and self._forecast.column("input")[row].any()):
            return None
        shared = self._column()
        for name, place in (("output", row - 1), ("input", row)):
            terms, _ = self._terms(name, place, 1 / MIB)
            self._at_most([(shared, 1.0), *((column, -value) for column, value in terms)], 0.0)
        return shared

    def _level(
        self, level: int, peak: str, change: str, row: int, budget: float, shared: int | None, sign_of_shared: float
    ) -> int:
        above, by_peak = self._terms(peak, row, 1 / MIB)
        self._at_most([(level, 1.0), *above], budget - by_peak)
        after = self._column(-numpy.inf)
        changes, by_change = self._terms(change, row, 1 / MIB)
        if shared is not None:
            changes = [*changes, (shared, sign_of_shared)]
        for sign in (1.0, -1.0):
            self._at_most(
                [(level, sign), (after, -sign), *((column, sign * value) for column, value in changes)],
                -sign * by_change,
            )
        return after

    def _tiers(self) -> None:
        """Rows for host memory and the disk, whenever they may have the most."""
        forecast = self._forecast
        problem = forecast.problem
        for rows in forecast.fullest():
            on_disk = [self._terms("disk_sent", row, 1 / MIB) for row in rows]
            sent = [self._terms("sent", row, 1 / MIB) for row in rows]
            less = [([(column, -value) for column, value in terms], -constant) for terms, constant in on_disk]
            for budget, parts in ((problem.host_budget, sent + less), (problem.disk_budget, on_disk)):
                if budget is not None:
                    terms = [term for part, _ in parts for term in part]
                    self._at_most(terms, (budget + forecast.window) / MIB - sum(constant for _, constant in parts))

    def _terms(self, name: str, row: int, scale: float, otherwise: Terms | None = None) -> Terms:
        """A number of a block's options, by their shares; ``otherwise`` has it for options that know it not."""
        values = self._forecast.column(name)[row] * scale
        instead: dict[int, float] = dict(otherwise[0]) if otherwise else {}
        if row not in self._places:
            known = values[0] > NEVER * scale / 2
            return [], float(values[0]) if known else (otherwise[1] if otherwise else 0.0)
        first, count = self._places[row]
        return [
            (
                first + place,
                float(values[place]) if values[place] > NEVER * scale / 2 else instead.get(first + place, 0.0),
            )
            for place in range(count)
        ], 0.0

    def _after(self, clock: int, other: int, terms: Terms, credit: float = 0.0) -> None:
        """``clock >= other + terms - credit``."""
        self._at_most([(other, 1.0), (clock, -1.0), *terms[0]], credit - terms[1])

    def _at_most(self, terms: list[tuple[int, float]], limit: float) -> None:
        self._entries += [(len(self.limits), column, value) for column, value in terms if value]
        self.limits.append(limit)

    def _column(self, low: float = 0.0, high: float = numpy.inf) -> int:
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1
