"""What becomes of the values and operators of a block, by the rules of the engine.

NOTE [ What a region does ]

The engine's own rules, over records: what autograd saves and is to be recomputed is wanted; going through the operators
from their end, one that makes what is wanted is handed its output if that was kept or sent, and runs otherwise, and
then what it reads is wanted too. What nobody wants is not run, but while the code holds it, its memory is there.

NOTE [ What a plan can say ]

A plan says one thing of all that an operator makes, and one of all inputs: so does what is treated here. A block that
is recomputed in part keeps nothing that its replay computes anyway, nor what is written after it was made. A block of
which nothing is recomputed keeps these, too. Only what autograd saves can be preserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spillway.planning.profile import Again, BlockProfile, Value
from spillway.records import Decision

_LEAVES = {Decision.OFFLOAD, Decision.OFFLOAD_HOST, Decision.OFFLOAD_DISK}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of values and operators."""

    runs: frozenset[int]
    """Operators that run again."""
    stays: frozenset[int]
    """Values that are on the device from forward to backward."""
    leaves: dict[int, bool]
    """Values that leave, and whether for the disk."""
    again: frozenset[int]
    """Saved values that are computed again."""
    given: frozenset[int]
    """Values that a re-run is handed."""
    casts: frozenset[int]
    """Casts that autograd saved."""
    reach: int
    """How many operators a re-run goes through: it ends with the last value that is wanted."""

    @classmethod
    def of(cls, block: BlockProfile, decisions: Sequence[Decision], min_bytes: int) -> Outcome:
        """That of decisions as :func:`as_planned` gives them."""
        values = block.values
        again = frozenset(
            number
            for number, value in enumerate(values)
            if value.saved_at is not None and value.maker is not None and decisions[number] is Decision.RECOMPUTE
        )
        casts = frozenset(number for number, value in enumerate(values) if value.is_cast and value.saved_at is not None)
        reach = _reach(block, again | casts)
        runs, given = _reruns(block, decisions, again, reach) if again else (frozenset(), frozenset())
        # A replay goes on until each value that it was handed was saved once.
        reach = max([reach, *(values[number].saved_at or 0 for number in given)])
        made = (number for number, value in enumerate(values) if value.saved_at is not None and value.maker is not None)
        if again and again.issuperset(made):
            # Nothing is preserved, and nothing is left out.
            runs = frozenset(place for place in range(reach) if block.operators[place].again is not Again.VIEW)
        held = {
            number
            for number, value in enumerate(values)
            if value.saved_at is not None and number not in again and (value.maker is not None or value.is_input)
        }
        held |= given
        if again:
            # Whether or not an operator saved them.
            held.update(number for number, value in enumerate(values) if value.is_input)
        leaves = {
            number: decisions[number] is Decision.OFFLOAD_DISK
            for number in sorted(held, key=lambda number: leaves_at(block, number))
            if decisions[number] in _LEAVES and values[number].nbytes >= min_bytes
        }
        return cls(runs, frozenset(held - leaves.keys()), leaves, again, given, casts, reach)

    def told(self, block: BlockProfile, decisions: Sequence[Decision]) -> list[Decision]:
        """These decisions without those about what nobody needs. See NOTE [ What a plan can say ]."""
        said = list(decisions)
        if self.again:
            for each in block.operators:
                if each.again is Again.FREE and not any(
                    made in self.stays or made in self.leaves for made in each.makes
                ):
                    for number in each.makes:
                        said[number] = Decision.RECOMPUTE
        return said


def _wanted_at(block: BlockProfile, number: int) -> int:
    """How many operators must have run for a saved value to be what was saved."""
    saved_at = block.values[number].saved_at
    assert saved_at is not None
    # Saved before its own operator wrote it: it is good when that has run.
    is_early = saved_at < len(block.operators) and number in block.operators[saved_at].writes
    return saved_at + is_early


def _reach(block: BlockProfile, again: frozenset[int]) -> int:
    if any(_wanted_at(block, number) != block.values[number].saved_at for number in again):
        return len(block.operators)
    # What is saved twice is told of twice.
    return max((max(_wanted_at(block, number), block.values[number].asked_at or 0) for number in again), default=0)


def _reruns(
    block: BlockProfile, decisions: Sequence[Decision], again: frozenset[int], reach: int
) -> tuple[frozenset[int], frozenset[int]]:
    """Which operators run again, and which values are handed in. See NOTE [ What a region does ]."""
    at: dict[int, set[int]] = {}
    for number in again:
        at.setdefault(_wanted_at(block, number), set()).add(number)
    runs: set[int] = set()
    given: set[int] = set()
    want = set(at.get(len(block.operators), ()))
    for place in range(len(block.operators) - 1, -1, -1):
        each = block.operators[place]
        if place < reach and _is_wanted(each.again, want, each.makes, each.writes):
            if each.again is Again.FREE and want.isdisjoint(each.writes) and _is_preserved(each.makes, decisions):
                given.update(each.makes)
            else:
                runs.add(place)
                want.update(each.reads, each.writes)
        want.difference_update(each.makes)
        want |= at.get(place, set())
    inputs = {number for number, value in enumerate(block.values) if value.is_input}
    return frozenset(runs), frozenset(given | inputs)


def _is_wanted(again: Again, want: set[int], makes: Sequence[int], writes: Sequence[int]) -> bool:
    return again is Again.ALWAYS or (again is Again.FREE and not (want.isdisjoint(makes) and want.isdisjoint(writes)))


def _is_preserved(makes: Sequence[int], decisions: Sequence[Decision]) -> bool:
    return bool(makes) and decisions[makes[0]] is not Decision.RECOMPUTE


def as_planned(block: BlockProfile, decisions: Sequence[Decision], min_bytes: int) -> list[Decision]:
    """The decisions as a plan says them. See NOTE [ What a plan can say ]."""
    said = list(decisions)
    values = block.values
    inputs = [number for number, value in enumerate(values) if value.is_input]
    leaving = next((said[number] for number in inputs if said[number] in _LEAVES), Decision.KEEP)
    for number in inputs:
        said[number] = leaving
    # Nobody can keep these in a region.
    again: list[int] = []
    written = {number for each in block.operators for number in each.writes}
    for each in block.operators:
        decision = said[each.makes[0]] if each.makes else Decision.KEEP
        if each.again is not Again.FREE or not written.isdisjoint(each.makes):
            again += each.makes
            decision = Decision.RECOMPUTE if decision is Decision.RECOMPUTE else Decision.KEEP
        for number in each.makes:
            said[number] = decision
    if any(_needs_a_region(value, decision) for value, decision in zip(values, said, strict=True)):
        for number in again:
            said[number] = Decision.RECOMPUTE
    return said


def _needs_a_region(value: Value, decision: Decision) -> bool:
    return value.saved_at is not None and value.maker is not None and decision is Decision.RECOMPUTE


def leaves_at(block: BlockProfile, number: int) -> int:
    """After how many operators it leaves."""
    value, count = block.values[number], len(block.operators)
    if value.saved_at is None:
        return min(1, count) if value.is_input else count
    if not block.saves_at:
        return min(value.saved_at + 1, count)
    # When autograd saves for another operator, those before have returned.
    return min(next((place for place in block.saves_at if place > value.saved_at), count), count)
