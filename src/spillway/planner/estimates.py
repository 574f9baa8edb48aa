"""Estimates of a step, without a simulation.

NOTE [ Estimates ]

Each option's tasks are walked once, alone: an offloaded storage is freed at once, and a reloaded one arrives when it is
taken. The bytes of a step are then sums over its blocks, and the real bytes are never less. One recurrence over the
blocks adds them up, with a clock for compute, for each stream of copies and for the CPU.

A stream copies a block's storages one after the other, out from the block's begin on. Compute is never further ahead of
the copies out than a window (the in-flight limit), and the block's computation after a storage comes on top. Copies
back are a window ahead of the backward that takes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
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


def option_numbers(option: Option, rates: Rates) -> dict[str, float]:
    """The numbers of one option, in seconds and bytes. See NOTE [ Estimates ]."""
    sent = {one.key: one for task in option.forward for one in task.sends}
    forward_seconds, backward_seconds = (
        sum(task.seconds for task in each) for each in (option.forward, option.backward)
    )
    # Copied storages, with the seconds of computation after each.
    out, back, left = [], [], forward_seconds
    # The end of its copies out on a stream that is free, and the end of its computation if compute waits for each.
    out_end, out_free_need = 0.0, forward_seconds
    for task in option.forward:
        left -= task.seconds
        for one in task.sends:
            out.append((one, left))
            out_end = max(out_end, forward_seconds - left) + one.nbytes / rates.out
            out_free_need = max(out_free_need, out_end + left)
    left, taken = backward_seconds, set[int]()
    for task in option.backward:
        back += [(sent[key], left) for key in task.takes if key in sent and key not in taken]
        taken.update(task.takes)
        left -= task.seconds
    kept, forward_peak = _levels(option.forward, sent)
    change, peak = _levels(option.backward, sent)
    later_change, later_peak = _levels([task.later() for task in option.backward], sent)
    return {
        "forward_seconds": forward_seconds,
        "backward_seconds": backward_seconds,
        "forward_host": sum(task.host_seconds for task in option.forward),
        "backward_host": sum(task.host_seconds for task in option.backward),
        # Bytes to any tier and to the disk, and from there.
        "sent": sum(one.nbytes for one, _ in out),
        "to_disk": sum(one.nbytes for one, _ in out if one.on_disk),
        "taken": sum(one.nbytes for one, _ in back),
        "from_disk": sum(one.nbytes for one, _ in back if one.on_disk),
        # Copies up to a storage, and the computation after it: the most of these sums.
        "out_end": out_end,
        "out_free_need": out_free_need,
        "out_need": _need(out, rates.out),
        "back_need": _need(back, rates.back),
        # The most in its forward, beyond the bytes at its begin, and the bytes that it leaves behind.
        "forward_peak": forward_peak,
        "kept": kept,
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


def _need(copies: Sequence[tuple[Sent, float]], rate: float) -> float:
    nbytes = accumulate(one.nbytes for one, _ in copies)
    return max((size / rate + left for size, (_, left) in zip(nbytes, copies, strict=True)), default=0.0)


def _levels(tasks: Sequence[Task], sent: dict[int, Sent]) -> tuple[int, int]:
    """Bytes after these tasks, and the most in them, beyond those before; with nothing in flight."""
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


@dataclass(frozen=True, slots=True)
class Estimates:
    """Seconds and peak bytes of each choice."""

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


_LINES = {name: line for line, name in enumerate(option_numbers(Option((), (), ()), Rates(1.0, 1.0, 1.0, 1.0, 1)))}
"""Places of an option's numbers."""


class CostModel:
    """Estimates of a problem's choices. See NOTE [ Estimates ].

    The problem's options send in forward only, and take and drop in backward only.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

        def numbers(options: Collection[Option]) -> Numbers:
            return numpy.array([list(option_numbers(option, problem.rates).values()) for option in options]).T

        known = {id(each): each for each in problem.options}
        tables = {key: numbers(each) for key, each in known.items()}

        def outside(forward: tuple[Task, ...], backward: tuple[Task, ...] = ()) -> _Row:
            return _Row(numbers([Option((), forward, backward)]), None)

        self.parts = [
            _Part(
                outside(part.before, part.after),
                [
                    _Row(tables[id(problem.options[block])], block, problem.extra_bytes[block])
                    for block in problem.blocks_of(number)
                ],
                [outside(part.middle), outside(part.late)],
            )
            for number, part in enumerate(problem.parts)
        ]

    def estimates(self, choices: Choices, *, slower: float = 0.0) -> Estimates:
        """The estimates of these choices, with a CPU that takes so much more of the measured time."""
        parts = []
        for at in range(0, max(len(choices), 1), _AT_ONCE):
            walk = _Recurrence(self, choices[at : at + _AT_ONCE], slower)
            seconds, most = walk.end(), walk.most
            tiers = (numpy.maximum(0.0, most[tier] - self.problem.rates.window) for tier in ("host", "disk"))
            parts.append((seconds, most["device"], *tiers))
        return Estimates(*(numpy.concatenate(each) for each in zip(*parts, strict=True)))


class _Recurrence:
    """One walk through the turns of a step, for many choices side by side. See NOTE [ Estimates ]."""

    def __init__(self, model: CostModel, choices: Choices, slower: float) -> None:
        self._problem, self._rates, self._parts = model.problem, model.problem.rates, model.parts
        self._choices, self._slower = choices, slower
        zeros = numpy.zeros(len(choices))
        self.most = dict.fromkeys(("device", "host", "disk"), zeros)
        """Most bytes of each tier so far."""
        # The clocks of compute, of the CPU, and of each stream.
        self._clock = self._queued = self._out = self._write = self._back = self._read = zeros
        self._level = zeros + self._problem.static_bytes
        self._on_host = self._on_disk = zeros
        self._shared: dict[int, Numbers] = {}

    def end(self) -> Numbers:
        """The clock at the end of the step."""
        had_backward: set[int] = set()
        for turn in self._problem.turns:
            part = self._parts[turn.part]
            self._forward(part.between if turn.is_backward else [part.around, *part.blocks], part, turn.is_backward)
            if turn.is_backward:
                self._backward(part, later=turn.part in had_backward)
                had_backward.add(turn.part)
        self._reach("device", self._level)
        return self._clock

    def _forward(self, rows: Sequence[_Row], part: _Part, is_between: bool) -> None:
        rates = self._rates
        before: Callable[[str], Numbers] | None = None
        for row in rows:
            at = self._at(row)
            self._reach("device", self._level + at("forward_peak"))
            copied = numpy.maximum(self._out + at("out_need"), self._clock + at("out_free_need"))
            copied = copied - rates.window / rates.out
            self._out = numpy.maximum(self._out + at("sent") / rates.out, self._clock + at("out_end"))
            self._write = numpy.maximum(self._write, self._clock) + at("to_disk") / rates.disk_write
            written = self._write - rates.window / rates.out - rates.window / rates.disk_write
            self._compute(at("forward_seconds"), at("forward_host"), copied, written)
            if before is not None and row.block is not None:
                # Bytes that count once: see Problem.program().
                twice = numpy.where(before("output") == at("input"), at("input"), 0.0)
                self._shared[id(row)] = twice
                self._level = self._level - twice
            self._level = self._level + at("kept")
            self._on_host = self._on_host + at("sent") - at("to_disk")
            self._on_disk = self._on_disk + at("to_disk")
            if is_between and row is rows[0]:
                self._level = self._level - sum(self._at(each)("let_go") for each in part.blocks)
            before = None if row.block is None else at
        self._reach("host", self._on_host)
        self._reach("disk", self._on_disk)

    def _backward(self, part: _Part, *, later: bool) -> None:
        rates = self._rates
        peak, change = ("later_peak", "later_change") if later else ("backward_peak", "backward_change")
        for row in [*part.blocks[::-1], part.around]:
            at = self._at(row)
            self._reach("device", self._level + at(peak))
            self._read = numpy.maximum(self._read, self._clock - rates.window / rates.disk_read)
            self._read = self._read + at("from_disk") / rates.disk_read
            begin = numpy.maximum(self._back, self._clock - rates.window / rates.back)
            copied = numpy.where(at("taken") > 0, begin + at("back_need"), 0.0)
            self._back = begin + at("taken") / rates.back
            self._compute(at("backward_seconds"), at("backward_host"), copied, self._read)
            self._level = self._level + at(change) + self._shared.get(id(row), 0.0) + row.extra_bytes
            self._on_host = self._on_host - at("sent") + at("to_disk")
            self._on_disk = self._on_disk - at("to_disk")

    def _compute(self, seconds: Numbers, host_seconds: Numbers, *others: Numbers) -> None:
        """Compute a block's tasks, which end no earlier than the CPU has queued them, and than other times."""
        self._queued = self._queued + host_seconds * (1 + self._slower)
        self._clock = functools.reduce(numpy.maximum, (self._clock + seconds, self._queued, *others))

    def _at(self, row: _Row) -> Callable[[str], Numbers]:
        """The numbers of a row by their names, one for each choice."""
        numbers = row.numbers if row.block is None else row.numbers[:, self._choices[:, row.block]]
        return lambda name: numbers[_LINES[name]]

    def _reach(self, tier: str, nbytes: Numbers) -> None:
        self.most[tier] = numpy.maximum(self.most[tier], nbytes)
