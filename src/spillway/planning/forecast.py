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

NOTE [ Bounds of several chunks ]

Where a step is of several chunks, forwards follow on backwards. What is taken while it is LEAVING was sent before, and
nothing is sent in a backward: so of all that is sent, and of all that is taken, each run of backwards may spare the
lanes a window's bytes, and no more. Before a run that is not the first a window's bytes may have been fetched ahead.
What is LEAVING in a backward beside other chunks is not known, and a bound says that it is nothing; a guess, that it is
what others have sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray

from spillway.planning.footprint import NEVER, Footprint, footprint
from spillway.planning.tasks import Option, Problem
from spillway.planning.trials import TIE

Numbers: TypeAlias = NDArray[numpy.float64]
Choices: TypeAlias = NDArray[numpy.int64]
"""An option's number for each block, in rows."""

_OTHERS = 3
"""Rows of a part that are no block's: what is around the blocks, and twice what comes between forward and backward."""
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


class Leg(NamedTuple):
    """A turn, in rows of the table."""

    forward: tuple[int, ...]
    """What goes forward in it: of a backward, what comes before that of the blocks."""
    backward: tuple[int, ...]
    turns_round: bool
    """Whether it is the first backward after a forward."""
    is_alone: bool
    """Whether there is no other chunk between its forward and its backward."""
    is_later: bool
    """Whether it is a backward, and its part had one before."""
    lets_go_after: int | None = None
    """The row after which blocks let go of what they held for as long as the forward took."""


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
        outer = [footprint(Option((), part.before, part.after), rates) for part in problem.parts]
        """Of what is before and after all blocks, as a block around them."""
        middle = [footprint(Option((), part.middle, ()), rates) for part in problem.parts]
        late = [footprint(Option((), part.late, ()), rates) for part in problem.parts]
        inner = [*middle, *late]
        everything = [*outer, *inner, *(one for each in known.values() for one in each)]
        self.plain = all(one.plain for one in everything) and not any(one.sent for one in inner)
        self.window = max(rates.window, *(one.biggest for one in everything)) if self.plain else 0.0
        """Bytes that may be LEAVING at most."""
        self.biggest = max(one.biggest for one in everything)
        self.counts = numpy.array([len(each) for each in problem.options], dtype=numpy.int64)
        names = [field.name for field in fields(Footprint) if field.name != "plain"]
        width = int(self.counts.max(initial=1))
        # Of each part a row for each block, the outer one first, and last what comes between forward and backward;
        # short ones are padded and never looked up.
        rows: list[list[Footprint]] = []
        for number, around in enumerate(outer):
            blocks = (self.blocks[block] for block in problem.blocks_of(number))
            rows += [[around], *blocks, [middle[number]], [late[number]]]
        self.legs = _legs(problem)
        """The step's turns."""
        parts = range(len(problem.parts))
        self.rows_of_blocks = [block + _OTHERS * part + 1 for part in parts for block in problem.blocks_of(part)]
        """Of each block."""
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
        self.lets_go = bool(self._table["let_go"].any())
        """Whether anything is held to the end of all forwards only."""
        self.passes = max(1, sum(not leg.backward for leg in self.legs) // max(1, len(problem.parts)))
        """How often each block is called, about."""
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
        """A number of every option: of each part a row for each block, among :data:`_OTHERS` others."""
        return self._table[name]

    def fullest(self) -> list[tuple[int, ...]]:
        """Rows of what has been sent, and was not taken yet, whenever more chunks wait than at other times."""
        waiting: Counter[int] = Counter()
        found: list[Counter[int]] = []
        for leg in self.legs:
            waiting.update(leg.forward)
            if not any(waiting <= other for other in found):
                found = [other for other in found if not other <= waiting] + [Counter(waiting)]
            waiting.subtract(leg.backward)
            waiting.subtract(leg.forward if leg.backward else ())
        return [tuple(sorted(rows.elements())) for rows in found]

    def _in_parts(self, choices: Choices, unused: float, granted: bool) -> Outlook:
        """Parts whose numbers stay in the processor's cache."""
        parts = [self._walk(choices[at : at + PART], unused, granted) for at in range(0, len(choices), PART)]
        return Outlook(*(numpy.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Outlook)))

    def _walk(self, choices: Choices, unused: float, granted: bool) -> Outlook:
        """See the notes at the top of this file: bytes of the window that may be unused, and whether to grant it."""
        rates = self.problem.rates
        count = len(choices)
        numbers = numpy.zeros((len(self._rows), count), dtype=numpy.int64)
        numbers[self.rows_of_blocks] = choices.T
        line = self._lines

        window = self.window - (0.0 if granted else unused)
        held = max(0.0, (rates.window if self.plain else 0) - unused)
        held_ahead = held if rates.ahead is None else max(0.0, (rates.ahead if self.plain else 0) - unused)
        out_credit, back_credit = window / rates.out, window / rates.back
        write_credit, read_credit = out_credit + window / rates.disk_write, window / rates.disk_read

        # Of two steps, one of them with a late host, the mean.
        slower = 0.0 if granted else (self.problem.late - 1) / 2
        clock, leaving, hosted, most_hosted, stored, most_stored, issued, owed = numpy.zeros((8, count))
        """Of the last: bytes that chunks have sent and not yet taken."""
        issued -= self.problem.lead
        out, disk, back, read = numpy.full((4, count), NEVER)
        level = numpy.full(count, float(self.problem.static_bytes))
        peak = level.copy()
        reused = numpy.zeros(count)
        """Bytes that are taken while they are LEAVING, and so are never copied."""
        begun = numpy.zeros(count, dtype=bool)
        """Whether anything was fetched in this run of backwards."""
        before = begun
        """Whether anything was before that."""
        shared: dict[int, Numbers] = {}
        """Of each block, what it keeps of its input and the one before has kept, too."""
        for leg in self.legs:
            output = numpy.zeros(count)
            """Bytes that the block before has kept of its output."""
            fetched = numpy.where(before | begun, numpy.minimum(owed, 0.0 if granted else held_ahead), 0.0)
            for row in leg.forward:
                at = self._rows[row][:, numbers[row]]
                above = numpy.minimum(leaving, held) + fetched
                peak = numpy.maximum(peak, level + above + at[line["forward_peak"]])
                begin = clock
                need = numpy.maximum(out + at[line["out_need"]], begin + at[line["out_free_need"]]) - out_credit
                clock = numpy.maximum(begin + at[line["forward_seconds"]], need)
                if self.hosted:
                    queued = at[line["forward_host"]]
                    clock = numpy.maximum(clock, issued + at[line["forward_host_need"]] + slower * queued)
                    issued = issued + (1 + slower) * queued
                out = numpy.maximum(out + at[line["sent"]] / rates.out, begin + at[line["out_end"]])
                if self.to_disk:
                    clock = numpy.maximum(clock, disk + at[line["disk_need"]] - write_credit)
                    writes = at[line["disk_sent"]]
                    stored = stored + writes
                    disk = numpy.where(writes > 0, numpy.maximum(disk, begin) + writes / rates.disk_write, disk)
                twice = numpy.where(output == at[line["input"]], output, 0.0)
                output = at[line["output"]]
                shared[row] = twice
                level = level + at[line["kept"]] - twice
                leaving = leaving + at[line["sent"]]
                hosted = hosted + at[line["sent"]] - at[line["disk_sent"]]
                owed = owed + at[line["taken"]]
                if self.lets_go and row == leg.lets_go_after:
                    for each in leg.backward:
                        level = level - self._rows[each][line["let_go"], numbers[each]]
            most_hosted, most_stored = numpy.maximum(most_hosted, hosted), numpy.maximum(most_stored, stored)

            if leg.turns_round:
                leaving = numpy.minimum(leaving, held)
                # What is taken while it is LEAVING never comes back: at most a window's bytes.
                reused = numpy.full(count, window) if granted else leaving if leg.is_alone else numpy.zeros(count)
                if granted and not leg.is_alone:
                    leaving = numpy.zeros(count)
                out, disk = out - reused / rates.out, disk - reused / rates.disk_write
                before, begun = before | begun, numpy.zeros(count, dtype=bool)
            # Ahead of this run.
            fetched_before = numpy.where(before, self.window if granted else held_ahead, 0.0)
            for row in leg.backward:
                at = self._rows[row][:, numbers[row]]
                taken = at[line["taken"]]
                begins = (taken > 0) & ~begun
                ahead = begun if granted else begun | begins
                begun = begun | begins
                owed = owed - taken
                if leg.is_alone:
                    leaving = numpy.maximum(0.0, leaving - at[line["sent"]])
                fetched = numpy.where(ahead, numpy.minimum(owed, held_ahead), 0.0)
                above = numpy.maximum(leaving, fetched) if leg.is_alone else leaving + fetched
                highest = at[line["later_peak" if leg.is_later else "backward_peak"]]
                peak = numpy.maximum(peak, level + above + highest)
                begin = clock
                first = begin - (reused + fetched_before) / rates.back
                back = numpy.where(begins, numpy.maximum(back - reused / rates.back, first), back)
                # No more than a window was fetched ahead, and no more than another one was not needed.
                late = numpy.maximum(back, begin - back_credit * (1 + granted))
                clock = numpy.maximum(begin + at[line["backward_seconds"]], late + at[line["back_need"]])
                back = back + taken / rates.back
                if self.hosted:
                    queued = at[line["backward_host"]]
                    clock = numpy.maximum(clock, issued + at[line["backward_host_need"]] + slower * queued)
                    issued = issued + (1 + slower) * queued
                if self.to_disk:
                    first = begin - (reused + fetched_before) / rates.disk_read
                    read = numpy.where(begins, numpy.maximum(read - reused / rates.disk_read, first), read)
                    late = numpy.maximum(read, begin - read_credit * (1 + granted))
                    clock = numpy.maximum(clock, late + at[line["read_need"]])
                    read = read + at[line["disk_taken"]] / rates.disk_read
                    stored = stored - at[line["disk_sent"]]
                level = level + at[line["later_change" if leg.is_later else "back_change"]] + shared.get(row, 0.0)
                hosted = hosted - at[line["sent"]] + at[line["disk_sent"]]
        unseen = self.window if granted else 0.0
        if self.hosted and self.problem.lead:
            tie = 0.0 if granted else TIE * clock
            clock = numpy.maximum(clock, issued + self.problem.lead) + tie
        return Outlook(
            seconds=clock,
            peak_bytes=numpy.maximum(peak, level),
            host_bytes=numpy.maximum(0.0, most_hosted - unseen),
            disk_bytes=numpy.maximum(0.0, most_stored - unseen),
        )


def _legs(problem: Problem) -> tuple[Leg, ...]:
    """The turns of a problem, in rows of the table."""
    legs: list[Leg] = []
    live = 0
    gone: set[int] = set()
    for turn in problem.turns:
        blocks = problem.blocks_of(turn.part)
        outer, *inner, middle, late = range(blocks.start + _OTHERS * turn.part, blocks.stop + _OTHERS * (turn.part + 1))
        if turn.is_backward:
            turns_round = bool(legs) and not legs[-1].backward
            back = (*inner[::-1], outer)
            legs.append(Leg((middle, late), back, turns_round, live == 1, turn.part in gone, lets_go_after=middle))
            gone.add(turn.part)
            live -= 1
        else:
            legs.append(Leg((outer, *inner), (), False, False, False))
            live += 1
    return tuple(legs)
