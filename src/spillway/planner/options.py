"""The options of a block that are worth considering.

NOTE [ Preserved values ]

Given a price in seconds of a preserved byte, the cheapest set of preserved values is a minimum cut. A saved value is
preserved or recomputed, and a recomputed one needs the values that its operator reads, which are preserved or
recomputed in turn. The linear program of the cut has an integer solution. All prices together give the lower convex
hull of seconds over bytes (Lagrange's relaxation; it is found by halving between two neighbours, as in Aneja and Nair
1979). Mixed blocks give the points above the hull. Any number of the first values of a set may be offloaded. A plan has
one decision for all inputs, so they go together.

A value that is written after it was made cannot be preserved: its maker and its writers run in each replay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from spillway.planner.block_tasks import make_option
from spillway.planner.plan import ALL
from spillway.planner.profile import BlockProfile, ReplayRule
from spillway.planner.tasks import Option, Phase
from spillway.types import Decision

_DIGITS = 9
"""Seconds are compared to a nanosecond."""
_MOST_SETS = 24
_PARTS = 5
"""Parts of a set that are offloaded or stay."""
_TIERS = {"host": Decision.OFFLOAD_HOST, "disk": Decision.OFFLOAD_DISK}
_SMALL = 4096
_LARGE = 1e6


def block_options(block: BlockProfile, *, min_bytes: int, allow: Collection[str] = ALL) -> tuple[Option, ...]:
    """The options of a block, none of which is worse than another in all that counts.

    Values below ``min_bytes`` are not offloaded. If nothing else is allowed, values are kept.
    """
    sets = preserved_sets(block) if "recompute" in allow else [_all_saved(block)]
    tiers = [decision for name, decision in _TIERS.items() if name in allow]
    if not tiers and "keep" not in allow and "recompute" in allow:
        sets = [frozenset()]
    found: dict[tuple[Decision, ...], Option] = {}
    for preserved in sets:
        for decisions in _spread(block, preserved, tiers, min_bytes, keeps="keep" in allow or not tiers):
            if decisions not in found:
                found[decisions] = make_option(block, decisions, min_bytes=min_bytes)
    return _worthwhile(found.values())


def _spread(
    block: BlockProfile, preserved: frozenset[int], tiers: Sequence[Decision], min_bytes: int, *, keeps: bool
) -> Iterable[tuple[Decision, ...]]:
    """The set, with no value, the inputs, or ever more of the first values offloaded."""
    inputs = [number for number, value in enumerate(block.values) if value.is_input]
    stays = [
        Decision.KEEP if number in preserved or number in inputs else Decision.RECOMPUTE
        for number in range(len(block.values))
    ]
    candidates = sorted(preserved, key=lambda number: (block.values[number].saved_at or 0, number))
    offloadable = [_made_with(block, number) for number in candidates if block.values[number].nbytes >= min_bytes]
    if any(block.values[number].nbytes >= min_bytes for number in inputs):
        offloadable.insert(0, tuple(inputs))
    if keeps or not offloadable:
        yield tuple(stays)
    sizes = np.cumsum([block.nbytes(numbers) for numbers in offloadable])
    for tier in tiers:
        decisions = list(stays)
        offloaded = 0
        for place, numbers in enumerate(offloadable):
            for number in numbers:
                decisions[number] = tier
            is_last = place == len(offloadable) - 1
            if is_last or (keeps and (place == 0 or sizes[place] - offloaded >= sizes[-1] / _PARTS)):
                offloaded = sizes[place]
                yield tuple(decisions)


def _made_with(block: BlockProfile, number: int) -> tuple[int, ...]:
    maker = block.values[number].maker
    return () if maker is None else block.operators[maker].makes


def _all_saved(block: BlockProfile) -> frozenset[int]:
    saved = (number for number, value in enumerate(block.values) if value.saved_at is not None)
    return frozenset(other for number in saved for other in _made_with(block, number))


def preserved_sets(block: BlockProfile) -> list[frozenset[int]]:
    """Sets of preserved values on the lower hull of seconds over bytes, from all to none."""
    if not block.operators:
        return [frozenset()]
    cut = _Cut(block)
    dear, cheap = cut.at(cut.dear), cut.at(cut.cheap)
    found = {cheap.preserved: cheap, dear.preserved: dear}
    _between(cut, cheap, dear, found)
    ordered = sorted(found.values(), key=lambda point: -point.nbytes)
    # Recomputing everything takes the fewest bytes, even if times are too short for a price.
    sets = [_all_saved(block), *(point.preserved for point in ordered), frozenset()]
    # Some of many, evenly.
    keep = sorted({round(place) for place in np.linspace(0, len(sets) - 1, min(len(sets), _MOST_SETS))})
    return list(dict.fromkeys(sets[place] for place in keep))


@dataclass(frozen=True, slots=True)
class _Point:
    seconds: float
    nbytes: int
    preserved: frozenset[int]


def _between(cut: _Cut, more: _Point, less: _Point, found: dict[frozenset[int], _Point]) -> None:
    if more.nbytes <= less.nbytes or less.seconds <= more.seconds:
        return
    price = (less.seconds - more.seconds) / (more.nbytes - less.nbytes)
    point = cut.at(price)
    cost = point.seconds + price * point.nbytes
    if point.preserved in found or cost >= (more.seconds + price * more.nbytes) * (1 - 1e-9):
        return
    found[point.preserved] = point
    _between(cut, more, point, found)
    _between(cut, point, less, found)


class _Cut:
    """The linear program of NOTE [ Preserved values ].

    For each operator, whether its output is needed, and whether it runs for that.
    """

    def __init__(self, block: BlockProfile) -> None:
        self._block = block
        operators = block.operators
        count = len(operators)
        self._bytes = np.array([block.nbytes(each.makes) for each in operators])
        self._seconds = np.array([each.seconds for each in operators])
        rows: list[tuple[int, int]] = []
        writers: dict[int, list[int]] = {}
        for place, each in enumerate(operators):
            for number in each.writes:
                writers.setdefault(number, []).append(place)
        # A value that is written later, or that autograd does not save though an operator reads it, is not preserved.
        read = {number for each in operators for number in each.reads}
        lost = {*writers, *(number for number in read if block.values[number].saved_at is None)}
        for place, each in enumerate(operators):
            # It runs only if it is needed, and then the values that it reads are needed.
            rows.append((count + place, place))
            rows += [
                (count + place, source)
                for number in (*each.reads, *each.writes)
                for source in _sources(block, writers, number, place)
            ]
            if each.replay is ReplayRule.FREE and (each.writes or not lost.isdisjoint(each.makes)):
                rows.append((place, count + place))
        saved = {
            source
            for number, value in enumerate(block.values)
            if value.saved_at is not None and value.maker is not None
            for source in _sources(block, writers, number, value.saved_at)
        }
        places = np.repeat(np.arange(len(rows)), 2), np.array(rows).ravel()
        self._rows = coo_array((np.tile([1.0, -1.0], len(rows)), places), shape=(len(rows), 2 * count)).tocsr()
        self._free = [each.replay is ReplayRule.FREE for each in operators]
        always = [each.replay is ReplayRule.ALWAYS for each in operators]
        self._bounds = [
            *((float(place in saved or always[place]), 1.0) for place in range(count)),
            *((float(always[place]), 1.0) for place in range(count)),
        ]
        self.dear = float(self._seconds.sum()) / _SMALL
        """A price at which all but small values are recomputed."""
        self.cheap = float(self._seconds.sum()) / (_LARGE * (float(self._bytes.sum()) or 1.0))
        """A price at which nothing is recomputed, and only needed values are preserved."""

    def at(self, price: float) -> _Point:
        """The cheapest set at a price of a byte in seconds."""
        count = len(self._seconds)
        unit = float(self._seconds.sum()) or 1.0
        preserving = price * self._bytes / unit
        costs = np.concatenate([preserving, self._seconds / unit - preserving])
        # The one of equal sets that runs less.
        costs[count:] += 1e-9
        solved = linprog(costs, A_ub=self._rows, b_ub=np.zeros(self._rows.shape[0]), bounds=self._bounds)
        needed, runs = solved.x[:count] > 0.5, solved.x[count:] > 0.5
        kept = [place for place in range(count) if needed[place] and not runs[place] and self._free[place]]
        return _Point(
            float(self._seconds[runs].sum()),
            int(sum(self._bytes[place] for place in kept)),
            frozenset(number for place in kept for number in self._block.operators[place].makes),
        )


def _sources(block: BlockProfile, writers: Mapping[int, Sequence[int]], number: int, before: int) -> list[int]:
    """The operators that made or wrote a value before a place."""
    maker = block.values[number].maker
    written = [place for place in writers.get(number, ()) if place < before]
    return written if maker is None or maker >= before else [maker, *written]


def _worthwhile(options: Iterable[Option]) -> tuple[Option, ...]:
    """The options that no other one equals or beats in all figures, from the fastest on."""
    found = sorted(options, key=lambda option: (_figures(option), len(option.backward)))
    figures = np.array([_figures(option) for option in found])
    kept: list[int] = []
    for place in range(len(found)):
        if not any((figures[other] <= figures[place]).all() for other in kept):
            kept.append(place)
    return tuple(found[place] for place in kept)


def _figures(option: Option) -> tuple[float, ...]:
    """The figures that count: less is better."""
    # If CPU memory is full, the disk is better than nothing.
    on_disk = sum(sent.nbytes for task in option.forward for sent in task.sends if sent.on_disk)
    return (
        option.recompute_seconds,
        option.kept_bytes,
        # These may count once for it and the next block.
        -option.output_bytes,
        # These are freed before backward.
        -option.let_go_bytes,
        option.sent_bytes - on_disk,
        on_disk,
        max((task.peak_bytes for task in option.forward), default=0),
        max((task.peak_bytes for task in option.backward if task.phase is Phase.RECOMPUTE), default=0),
        # Sums in another order are equal.
        round(sum(task.host_seconds for task in option.forward), _DIGITS),
        round(sum(task.host_seconds for task in option.backward), _DIGITS),
    )
