"""Seconds and bytes of many choices at once, without a simulation: bounds, and guesses that rank.

NOTE [ Bounds and guesses ]

One walk over the blocks, for all choices side by side, adds up footprints (see the note in ``footprint.py``) and keeps
a clock for each lane and for the host. It is asked in two ways.

As a bound it grants what a simulation might: a whole window that was not waited for, a whole window that is taken
again before it left, and only those bytes that no order of storages can keep away. What it says is never more than
what a simulation says, so a choice whose bound is worse than a choice in hand needs no simulation.

As a guess it takes the middle: half of the largest storage of the window is not used. It may be wrong either way.

Where something leaves in backward or comes back in forward, lanes and window are left out: then computing and the host
are the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy
from numpy.typing import NDArray

from spillway.planning.footprint import NEVER, Footprint, footprint
from spillway.planning.tasks import Option, Problem

Numbers: TypeAlias = NDArray[numpy.float64]
Choices: TypeAlias = NDArray[numpy.int64]
"""An option's number for each block, in rows."""

PART = 2048
"""Choices that are walked side by side."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Of each choice."""

    seconds: Numbers
    peak_bytes: Numbers
    host_bytes: Numbers
    disk_bytes: Numbers

    def excess(self, problem: Problem) -> Numbers:
        """Bytes beyond the host's and the disk's budgets."""
        over = numpy.zeros(len(self.seconds))
        for nbytes, budget in ((self.host_bytes, problem.host_budget), (self.disk_bytes, problem.disk_budget)):
            if budget is not None:
                over += numpy.maximum(0.0, nbytes - budget)
        return over


class Forecast:
    """What is known of a problem's options without a simulation.

    Args:
        problem: whose footprints are taken, once for each signature.
    """

    def __init__(self, problem: Problem) -> None:
        rates = problem.rates
        self.problem = problem
        signatures = {id(each): each for each in problem.options}
        known = {key: [footprint(option, rates) for option in each] for key, each in signatures.items()}
        self.blocks = [known[id(each)] for each in problem.options]
        """Footprints of each block's options."""
        self.outer = footprint(Option((), problem.before, problem.after), rates)
        """Of what is before and after all blocks, as a block around them."""
        self.middle = footprint(Option((), problem.middle, ()), rates)
        everything = [self.outer, self.middle, *(one for each in known.values() for one in each)]
        self.plain = all(one.plain for one in everything) and not self.middle.sent
        self.window = max(rates.window, *(one.biggest for one in everything)) if self.plain else 0.0
        """Bytes that may be LEAVING at most."""
        self.biggest = max(one.biggest for one in everything)
        self.counts = numpy.array([len(each) for each in problem.options], dtype=numpy.int64)
        names = [field.name for field in fields(Footprint) if field.name != "plain"]
        width = int(self.counts.max(initial=1))
        # One row for each block, the outer one first and the middle last; short ones are padded and never looked up.
        rows = [[self.outer], *self.blocks, [self.middle]]
        self._table: dict[str, Numbers] = {
            name: numpy.array([[getattr(one, name) for one in (row + row[-1:] * width)[:width]] for row in rows])
            for name in names
        }
        if not self.plain:
            for name in ("sent", "disk_sent", "taken", "disk_taken"):
                self._table[name][:] = 0.0
            for name in ("out_end", "out_need", "out_free_need", "disk_need", "back_need", "read_need"):
                self._table[name][:] = NEVER
        self.to_disk = bool(self._table["disk_sent"].any())
        self.hosted = bool(self._table["forward_host"].any() or self._table["backward_host"].any())
        """Whether the host takes time."""
        # For each row: a line for each number, an option in each column. One look-up then gathers all.
        self._rows = numpy.stack([self._table[name] for name in names], axis=1)
        self._lines = {name: line for line, name in enumerate(names)}

    def bounds(self, choices: Choices) -> Outlook:
        """What no simulation of these choices can go below."""
        return self._in_parts(choices, self.biggest, True)

    def guesses(self, choices: Choices) -> Outlook:
        """What a simulation might say, roughly."""
        return self._in_parts(choices, self.biggest / 2, False)

    def column(self, name: str) -> Numbers:
        """A number of every option: a row for each block, the outer one first and the middle last."""
        return self._table[name]

    def _in_parts(self, choices: Choices, unused: float, granted: bool) -> Outlook:
        """Parts whose numbers stay in the processor's cache."""
        parts = [self._walk(choices[at : at + PART], unused, granted) for at in range(0, len(choices), PART)]
        return Outlook(*(numpy.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Outlook)))

    def _walk(self, choices: Choices, unused: float, granted: bool) -> Outlook:
        """See the note at the top of this file: bytes of the window that may be unused, and whether to grant it."""
        rates = self.problem.rates
        count, blocks = choices.shape
        numbers = numpy.zeros((blocks + 2, count), dtype=numpy.int64)
        numbers[1:-1] = choices.T
        line = self._lines

        window = self.window - (0.0 if granted else unused)
        held = max(0.0, (rates.window if self.plain else 0) - unused)
        out_credit, back_credit = window / rates.out, window / rates.back
        write_credit, read_credit = out_credit + window / rates.disk_write, window / rates.disk_read

        clock, sent, on_disk, issued = numpy.zeros((4, count))
        out, disk, back, read = numpy.full((4, count), NEVER)
        level = numpy.full(count, float(self.problem.static_bytes))
        peak = level.copy()
        before = numpy.zeros((blocks + 2, count))
        """Bytes that the blocks before this one take."""
        output = numpy.zeros(count)
        """Bytes that the block before has kept of its output."""
        shared: list[Numbers] = []
        """Of each block, what it keeps of its input and the one before has kept, too."""
        for row in range(blocks + 2):
            at = self._rows[row][:, numbers[row]]
            peak = numpy.maximum(peak, level + numpy.minimum(sent, held) + at[line["forward_peak"]])
            begin = clock
            need = numpy.maximum(out + at[line["out_need"]], begin + at[line["out_free_need"]]) - out_credit
            clock = numpy.maximum(begin + at[line["forward_seconds"]], need)
            if self.hosted:
                clock = numpy.maximum(clock, issued + at[line["forward_host_need"]])
                issued = issued + at[line["forward_host"]]
            out = numpy.maximum(out + at[line["sent"]] / rates.out, begin + at[line["out_end"]])
            if self.to_disk:
                clock = numpy.maximum(clock, disk + at[line["disk_need"]] - write_credit)
                writes = at[line["disk_sent"]]
                on_disk = on_disk + writes
                disk = numpy.where(writes > 0, numpy.maximum(disk, begin) + writes / rates.disk_write, disk)
            twice = numpy.where(output == at[line["input"]], output, 0.0)
            output = at[line["output"]]
            shared.append(twice)
            level = level + at[line["kept"]] - twice
            sent = sent + at[line["sent"]]
            if row <= blocks:
                before[row + 1] = before[row] + at[line["taken"]]

        leaving = numpy.minimum(sent, held)
        # What is taken while it is LEAVING never comes back: at most a window's bytes.
        reused = numpy.full(count, window) if granted else leaving
        begun = numpy.zeros(count, dtype=bool)
        for row in range(blocks, -1, -1):
            at = self._rows[row][:, numbers[row]]
            taken = at[line["taken"]]
            begins = (taken > 0) & ~begun
            ahead = begun if granted else begun | begins
            begun = begun | begins
            leaving = numpy.maximum(0.0, leaving - at[line["sent"]])
            fetched = numpy.where(ahead, numpy.minimum(before[row], held), 0.0)
            peak = numpy.maximum(peak, level + numpy.maximum(leaving, fetched) + at[line["backward_peak"]])
            begin = clock
            back = numpy.where(begins, begin - reused / rates.back, back)
            # No more than a window was fetched ahead, and no more than another one was not needed.
            late = numpy.maximum(back, begin - back_credit * (1 + granted))
            clock = numpy.maximum(begin + at[line["backward_seconds"]], late + at[line["back_need"]])
            back = back + taken / rates.back
            if self.hosted:
                clock = numpy.maximum(clock, issued + at[line["backward_host_need"]])
                issued = issued + at[line["backward_host"]]
            if self.to_disk:
                read = numpy.where(begins, begin - reused / rates.disk_read, read)
                late = numpy.maximum(read, begin - read_credit * (1 + granted))
                clock = numpy.maximum(clock, late + at[line["read_need"]])
                read = read + at[line["disk_taken"]] / rates.disk_read
            level = level + at[line["back_change"]] + shared[row]
        unseen = self.window if granted else 0.0
        return Outlook(
            seconds=clock,
            peak_bytes=numpy.maximum(peak, level),
            host_bytes=numpy.maximum(0.0, sent - on_disk - unseen),
            disk_bytes=numpy.maximum(0.0, on_disk - unseen),
        )
