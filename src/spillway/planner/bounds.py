"""Lower bounds of a step, without a simulation.

NOTE [ Bounds ]

Each option's tasks are walked once, alone: an offloaded storage is freed at once, and a reloaded one arrives when it is
taken. The bytes of a step are then sums over its blocks, and the real bytes are never less. One recurrence over the
blocks adds them up, with a clock for compute, for each stream of copies and for the CPU. It grants the streams a whole
window (the in-flight limit) at each place where a simulation might, so no simulation is below a bound.

A copy out begins after the task that sends, and all but a window's bytes are copied when the sends are done. So compute
is never ahead of "stream's end - window / bandwidth", and the block's computation after that send comes on top:
``out_need`` is the largest of those sums. In the same way ``back_need`` is the largest of "bytes up to a take /
bandwidth + the block's computation from there on". A task ends no earlier than the CPU has queued it: ``host_need``.

NOTE [ Bounds of several chunks ]

In a step of several chunks, forwards follow backwards. A storage that is taken while its copy is in flight was sent
before, and a backward sends nothing. So each run of backwards spares the streams a window's bytes of all copies. Before
a run that is not the first, another window's bytes may have been prefetched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray

from spillway.planner.tasks import Option, Problem, Rates, Sent, Task

Numbers: TypeAlias = NDArray[numpy.float64]
Choices: TypeAlias = NDArray[numpy.int64]
"""An option's number for each block, in rows."""
_AT_ONCE = 2048
"""Choices whose numbers stay in the processor's cache."""


def excess(problem: Problem, host_bytes: Any, disk_bytes: Any) -> Any:
    """Bytes beyond the budgets of CPU memory and the disk: a number, or one for each choice."""
    pairs = ((host_bytes, problem.host_budget), (disk_bytes, problem.disk_budget))
    return sum(numpy.maximum(0, nbytes - budget) for nbytes, budget in pairs if budget is not None)


def option_bounds(option: Option, rates: Rates) -> dict[str, float]:
    """The numbers of one option, in seconds and bytes. See NOTE [ Bounds ]."""
    sent = {one.key: one for task in option.forward for one in task.sends}
    kept, forward_peak = _levels(option.forward, sent)
    change, peak = _levels(option.backward, sent)
    later_change, later_peak = _levels([task.later() for task in option.backward], sent)
    host, host_need = _queued(option.forward, rates.host)
    backward_host, backward_host_need = _queued(option.backward, rates.host)
    return {
        **_copied_out(option.forward, rates),
        **_copied_back(option.backward, sent, rates),
        # The CPU needs this long to queue its forward, and this long until that has ended if nothing else stalls.
        "forward_host": host,
        "forward_host_need": host_need,
        "backward_host": backward_host,
        "backward_host_need": backward_host_need,
        # The most in its forward, beyond the bytes at its begin, and the bytes that it leaves behind.
        "forward_peak": forward_peak,
        "kept": kept,
        # The largest offloaded storage.
        "largest": max((one.nbytes for one in sent.values()), default=0),
        # Kept bytes of its output, which count once more for the next block, and of its inputs.
        "output": option.output_bytes,
        "input": option.input_bytes,
        # Kept no longer than to the end of all forwards.
        "let_go": option.let_go_bytes,
        "backward_peak": peak,
        "backward_change": change,
        # The same for a backward whose gradients exist already.
        "later_peak": later_peak,
        "later_change": later_change,
    }


def _copied_out(tasks: Sequence[Task], rates: Rates) -> dict[str, float]:
    """The numbers of a forward and its copies out."""
    left = seconds = sum(task.seconds for task in tasks)
    nbytes = written = 0
    stream = 0.0
    # A block that copies nothing is no earlier than its streams either: its needs are its own seconds.
    out_need = out_free_need = disk_need = seconds
    for task in tasks:
        left -= task.seconds
        for one in task.sends:
            nbytes += one.nbytes
            stream = max(stream, seconds - left) + one.nbytes / rates.out
            out_need = max(out_need, nbytes / rates.out + left)
            out_free_need = max(out_free_need, stream + left)
            if one.on_disk:
                written += one.nbytes
                disk_need = max(disk_need, written / rates.disk_write + left)
    return {
        "forward_seconds": seconds,
        # Bytes to any tier, and to the disk.
        "sent": nbytes,
        "to_disk": written,
        # From its begin to the end of its copies out, on a stream that is free.
        "out_end": stream,
        # Its copies out and what it computes after their sends, on a busy stream, and on one that is free.
        "out_need": out_need,
        "out_free_need": out_free_need,
        # The same for its writes.
        "disk_need": disk_need,
    }


def _copied_back(tasks: Sequence[Task], sent: dict[int, Sent], rates: Rates) -> dict[str, float]:
    """The numbers of a backward and its copies back."""
    left = back_need = read_need = seconds = sum(task.seconds for task in tasks)
    taken = read = 0
    seen: set[int] = set()
    for task in tasks:
        for key in task.takes:
            if key in sent and key not in seen:
                seen.add(key)
                taken += sent[key].nbytes
                back_need = max(back_need, taken / rates.back + left)
                if sent[key].on_disk:
                    read += sent[key].nbytes
                    read_need = max(read_need, read / rates.disk_read + left)
        left -= task.seconds
    return {
        "backward_seconds": seconds,
        # Bytes from any tier, and from the disk.
        "taken": taken,
        "from_disk": read,
        # Its copies back, or its reads, and what it computes from their takes on.
        "back_need": back_need,
        "read_need": read_need,
    }


def _levels(tasks: Sequence[Task], sent: dict[int, Sent]) -> tuple[int, int]:
    """Bytes after these tasks, and the most in them, beyond those before; with an empty window."""
    level = peak = 0
    here: set[int] = set()
    for task in tasks:
        for key in task.takes:
            if key in sent and key not in here:
                here.add(key)
                level += sent[key].nbytes
        peak = max(peak, level + task.peak_bytes)
        level += task.change_bytes - sum(one.nbytes for one in task.sends)
        peak = max(peak, level)
        for key in here.intersection(task.drops):
            here.remove(key)
            level -= sent[key].nbytes
    return level, peak


def _queued(tasks: Sequence[Task], times: float) -> tuple[float, float]:
    """Seconds until the CPU has queued all tasks, and until they have ended on a device that was free."""
    queued = ended = 0.0
    for task in tasks:
        queued += task.host_seconds * times
        ended = max(ended + task.seconds, queued)
    return queued, ended


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least seconds and peak bytes of each choice."""

    seconds: Numbers
    peak_bytes: Numbers
    host_bytes: Numbers
    disk_bytes: Numbers


class _Row(NamedTuple):
    """A block of the recurrence, or the tasks around the blocks, as a block with one option."""

    numbers: Numbers
    """For each of ``_LINES``, each option's number."""
    block: int | None
    extra_bytes: int = 0
    """Rise of the level in the block's backward, beyond that of its options."""


class _Part(NamedTuple):
    """A part's rows."""

    around: _Row
    blocks: list[_Row]
    between: list[_Row]
    """Tasks between the forwards and the backwards of the blocks."""


_LINES = {name: line for line, name in enumerate(option_bounds(Option((), (), ()), Rates(1.0, 1.0, 1.0, 1.0, 1)))}
"""Places of an option's numbers."""


class CostModel:
    """Bounds of a problem's choices. See NOTE [ Bounds ].

    The problem's options send in forward only, and take and drop in backward only.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

        def numbers(options: Collection[Option]) -> Numbers:
            return numpy.array([list(option_bounds(option, problem.rates).values()) for option in options]).T

        known = {id(each): each for each in problem.options}
        tables = {key: numbers(each) for key, each in known.items()}

        def outside(forward: tuple[Task, ...], backward: tuple[Task, ...] = ()) -> _Row:
            return _Row(numbers([Option((), forward, backward)]), None)

        self.parts = [
            _Part(
                outside(part.before, part.after),
                [
                    _Row(tables[id(problem.options[block])], block, problem.extra_of(block))
                    for block in problem.blocks_of(number)
                ],
                [outside(part.middle), outside(part.late)],
            )
            for number, part in enumerate(problem.parts)
        ]
        every = numpy.concatenate(
            [row.numbers for part in self.parts for row in (part.around, *part.blocks, *part.between)], axis=1
        )
        has = {name for name, line in _LINES.items() if numpy.any(every[line])}
        self.has_host = not has.isdisjoint(("forward_host", "backward_host"))
        self.has_disk, self.lets_go = "to_disk" in has, "let_go" in has
        self.window = max(float(problem.rates.window), float(every[_LINES["largest"]].max()))
        """Most bytes in flight: a storage that exceeds the limit is copied alone."""

    def bounds(self, choices: Choices, *, slower: float = 0.0) -> Bounds:
        """No simulation of these choices is below, with a CPU that takes so much more of the measured time."""
        parts = []
        for at in range(0, max(len(choices), 1), _AT_ONCE):
            walk = _Recurrence(self, choices[at : at + _AT_ONCE], slower)
            seconds, most = walk.end(), walk.most
            tiers = (numpy.maximum(0.0, most[tier] - self.window) for tier in ("host", "disk"))
            parts.append((seconds, most["device"], *tiers))
        return Bounds(*(numpy.concatenate(each) for each in zip(*parts, strict=True)))


class _Recurrence:
    """One walk through the turns of a step, for many choices side by side. See NOTE [ Bounds ]."""

    def __init__(self, model: CostModel, choices: Choices, slower: float) -> None:
        problem, rates = model.problem, model.problem.rates
        self._model, self._problem, self._window, self._choices = model, problem, model.window, choices
        self._out, self._back, self._write, self._read = rates.out, rates.back, rates.disk_write, rates.disk_read
        self._slower = slower
        zeros = numpy.zeros(len(choices))
        self.most = dict.fromkeys(("device", "host", "disk"), zeros)
        """Most bytes of each tier so far."""
        # The clocks of compute, of the CPU, and of each stream.
        self._clock = self._queued = self._out_free = self._disk_free = self._back_free = self._read_free = zeros
        self._level = zeros + problem.static_bytes
        self._on_host = self._on_disk = zeros
        self._shared: dict[int, Numbers] = {}
        self._has_fetched = False

    def end(self) -> Numbers:
        """The clock at the end of the step."""
        had_backward: set[int] = set()
        was_backward = False
        for turn in self._problem.turns:
            part = self._model.parts[turn.part]
            self._forward(part.between if turn.is_backward else [part.around, *part.blocks], part, turn.is_backward)
            if turn.is_backward:
                if not was_backward:
                    self._begin_backwards()
                self._backward(part, later=turn.part in had_backward)
                had_backward.add(turn.part)
            was_backward = turn.is_backward
        self._reach("device", self._level)
        return self._clock

    def _forward(self, rows: Sequence[_Row], part: _Part, is_between: bool) -> None:
        window, out, write = self._window, self._out, self._write
        before: Callable[[str], Numbers] | None = None
        for row in rows:
            at = self._at(row)
            self._reach("device", self._level + at("forward_peak"))
            begin = self._clock
            ends = [
                begin + at("forward_seconds"),
                self._out_free + at("out_need") - window / out,
                begin + at("out_free_need") - window / out,
            ]
            if self._model.has_host:
                ends.append(self._queued + at("forward_host_need") + at("forward_host") * self._slower)
                self._queued = self._queued + at("forward_host") * (1 + self._slower)
            if self._model.has_disk:
                ends.append(self._disk_free + at("disk_need") - (window / out + window / write))
                self._disk_free = numpy.maximum(self._disk_free + at("to_disk") / write, begin)
                self._on_disk = self._on_disk + at("to_disk")
            self._clock = functools.reduce(numpy.maximum, ends)
            self._out_free = numpy.maximum(self._out_free + at("sent") / out, begin + at("out_end"))
            if before is not None and row.block is not None:
                # Bytes that count once: see counted_twice().
                twice = numpy.where(before("output") == at("input"), at("input"), 0.0)
                self._shared[id(row)] = twice
                self._level = self._level - twice
            self._level = self._level + at("kept")
            self._on_host = self._on_host + at("sent") - at("to_disk")
            if is_between and row is rows[0] and self._model.lets_go:
                self._level = self._level - sum(self._at(each)("let_go") for each in part.blocks)
            before = None if row.block is None else at
        self._reach("host", self._on_host)
        self._reach("disk", self._on_disk)

    def _begin_backwards(self) -> None:
        """Spare the streams what is in flight or prefetched. See NOTE [ Bounds of several chunks ]."""
        window, back, read = self._window, self._back, self._read
        granted = window * (2 if self._has_fetched else 1)
        self._out_free = self._out_free - window / self._out
        self._disk_free = self._disk_free - window / self._write
        self._back_free = numpy.maximum(self._back_free - window / back, self._clock - granted / back)
        self._read_free = numpy.maximum(self._read_free - window / read, self._clock - granted / read)
        self._has_fetched = True

    def _backward(self, part: _Part, *, later: bool) -> None:
        back, read = self._back, self._read
        # At most a window was fetched ahead, and at most another one was not needed.
        credit = self._window * 2
        peak, change = ("later_peak", "later_change") if later else ("backward_peak", "backward_change")
        for row in [*part.blocks[::-1], part.around]:
            at = self._at(row)
            self._reach("device", self._level + at(peak))
            begin = self._clock
            ends = [
                begin + at("backward_seconds"),
                self._back_free + at("back_need"),
                begin + at("back_need") - credit / back,
            ]
            self._back_free = self._back_free + at("taken") / back
            if self._model.has_host:
                ends.append(self._queued + at("backward_host_need") + at("backward_host") * self._slower)
                self._queued = self._queued + at("backward_host") * (1 + self._slower)
            if self._model.has_disk:
                ends += [self._read_free + at("read_need"), begin + at("read_need") - credit / read]
                self._read_free = self._read_free + at("from_disk") / read
                self._on_disk = self._on_disk - at("to_disk")
            self._clock = functools.reduce(numpy.maximum, ends)
            self._level = self._level + at(change) + self._shared.get(id(row), 0.0) + row.extra_bytes
            self._on_host = self._on_host - at("sent") + at("to_disk")

    def _at(self, row: _Row) -> Callable[[str], Numbers]:
        """The numbers of a row by their names, one for each choice."""
        numbers = row.numbers if row.block is None else row.numbers[:, self._choices[:, row.block]]
        return lambda name: numbers[_LINES[name]]

    def _reach(self, tier: str, nbytes: Numbers) -> None:
        self.most[tier] = numpy.maximum(self.most[tier], nbytes)
