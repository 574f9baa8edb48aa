"""The tasks of a block under some decisions, in forward and backward.

NOTE [ Order of a block's tasks ]

A saved storage is offloaded when autograd saves one for a later operator. A value that is only handed in is offloaded
when the block has ended. Backward is assumed to spread its work over operators as forward does. The replay runs when
backward needs the first storage that it makes, and makes all of them.

An offloaded storage stays on the GPU for as long as the block's own code holds it, even if the in-flight limit has
released it. While it is in flight it is counted for both, which is too much.

NOTE [ Outputs that are saved ]

The user of a block's output frees it, and is credited for that. An output that the block has saved stays, and so it is
counted once more for the block. If the next block keeps it, too, the two counts are one too many, and one is subtracted
(:meth:`~spillway.planner.tasks.Problem.program`). If either offloads it, both counts stand: a prediction that is too
high fits, one that is too low does not.

NOTE [ Casts ]

A block may cast weights, as under autocast, and autograd then saves the casts. A replay casts again. So the casts of a
recomputed block are freed when its forward is over, and are there again for its backward; those of another block stay
in between. Autocast's cache holds casts, too, up to the end of its outermost context: that of the model's forward, or
of its loss. The bytes of casts when a call has returned show whether it does (``BlockProfile.cached_bytes``). If the
cache lasts through backward, the profile has its bytes before the blocks.

NOTE [ Decisions that a plan can name ]

A plan has one decision for all outputs of an operator, and one for all inputs. A block that is recomputed in part keeps
nothing that its replay computes anyway, nor a value that is written after it was made. A block without recomputation
keeps these, too. Only a value that autograd saves can be preserved.

NOTE [ CPU time of a block ]

A checkpointed block takes the CPU longer to queue than a plain one, as measured. The rest is in multiples of an
operator of a plain block: 2 to keep a tensor, 10 to offload it, 6.4 to reload it. On an H100's host these took 17, 103
and 69 us, and an operator about 9 (a layer of transformers' Llama of width 2048 under its trainer). If the replay is
handed something, a dispatch mode sees its operators, each of which then takes about twice as long, run or left out.

NOTE [ Hidden copies ]

A hidden copy costs next to nothing. So that of two plans with equal time the one with fewer copies is taken, an
offloaded byte costs a hundredth of its time on PCIe. That is near the truth: on an H200, matrix products took 0.4 %
longer beside copies one way, and 0.9 % beside both (300 layers of Llama-8B's products and attention; 268 MB a layer and
way; the GPU at its power limit).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spillway.planner.needed import Act, needed
from spillway.planner.profile import BackwardPart, BlockProfile, HostTimes, Outside, ReplayRule
from spillway.planner.tasks import GAP, Option, Phase, Sent, Task
from spillway.types import Decision

_SECONDS_A_BYTE = 2e-13
"""See NOTE [ Hidden copies ]."""
_KEEP, _OFFLOAD, _RELOAD, _MODE = 2.0, 10.0, 6.4, 1.0
"""See NOTE [ CPU time of a block ]."""
_NO_HOST = HostTimes(0.0, 0.0, 0.0, 0.0)


def make_option(block: BlockProfile, decisions: Sequence[Decision], *, min_bytes: int) -> Option:
    """The tasks of a block with a decision for each of its values; those below ``min_bytes`` are not offloaded.

    Decisions about values from outside that are no inputs do not count. Among the outputs of one operator, the first
    counts; among inputs, the first that is offloaded. See NOTE [ Decisions that a plan can name ].
    """
    said = as_planned(block, decisions, min_bytes)
    resolved = ResolvedDecisions.of(block, said, min_bytes)
    return Option(
        tuple(resolved.named(block, said)),
        _forward(block, resolved),
        _backward(block, resolved),
        output_bytes=block.nbytes(number for number in resolved.kept if _outlives(block, number)),
        input_bytes=block.nbytes(number for number in resolved.kept if block.values[number].is_input),
        let_go_bytes=_held_casts(block, resolved) - _kept_casts(block, resolved),
        parameters=() if resolved.recomputed else tuple(each.nbytes for each in block.parameters),
    )


def _kept_casts(block: BlockProfile, resolved: ResolvedDecisions) -> int:
    """Bytes of casts on the device from the block's forward to its backward. See NOTE [ Casts ]."""
    if resolved.recomputed:
        return 0
    # Several calls of a block share the casts of the cache.
    casts = block.nbytes(resolved.casts)
    return min(casts, block.cached_bytes) if block.cached_bytes else casts


def _held_casts(block: BlockProfile, resolved: ResolvedDecisions) -> int:
    return block.cached_bytes or _kept_casts(block, resolved)


def _levels(
    block: BlockProfile, held: Collection[int], given: Collection[int], runs: Collection[int], count: int
) -> tuple[list[int], list[int]]:
    """Bytes that are allocated after each of the first operators, and the most within each.

    Held values live on, and given ones do not count. Operators that do not run need no workspace.
    """
    rise = [0] * (len(block.operators) + 2)
    for number, value in enumerate(block.values):
        if value.maker is None or number in given:
            continue
        rise[value.maker] += value.nbytes
        dies_at = max(value.dies_at, value.maker + 1)
        if number not in held and dies_at < len(rise):
            rise[dies_at] -= value.nbytes
    # Values that die at a place are freed before the operator there makes others.
    made = [block.nbytes(number for number in each.makes if number not in given) for each in block.operators]
    level, levels, peaks = 0, [0], []
    for place in range(count):
        level += rise[place]
        peaks.append(level + (block.operators[place].workspace_bytes if place in runs else 0))
        following = rise[place + 1] - (made[place + 1] if place + 1 < len(made) else 0)
        levels.append(level + following)
    return levels, peaks


def _forward(block: BlockProfile, resolved: ResolvedDecisions) -> tuple[Task, ...]:
    values, count = block.values, len(block.operators)
    held = resolved.kept | resolved.offloaded.keys()
    levels, peaks = _levels(block, held, (), range(count), count)
    for number in resolved.offloaded:
        for place in range(offloaded_at(block, number), min(values[number].dies_at, count)):
            peaks[place] += values[number].nbytes
    casts = _held_casts(block, resolved)
    levels = [levels[0], *(level + casts for level in levels[1:])]
    peaks = [peak + casts for peak in peaks]
    cuts = sorted({0, count, *(offloaded_at(block, number) for number in resolved.offloaded)})
    shares, host_seconds = _shares(block), _forward_host(block, resolved)
    tasks = [] if block.gap is None else [outside_task(GAP, block.gap)]
    for start, end in list(pairwise(cuts)) or [(0, 0)]:
        change = levels[end] - levels[start]
        if end == count:
            # The caller frees the inputs here, and the outputs later.
            change -= sum(value.nbytes for number, value in enumerate(values) if value.is_input and number not in held)
            change += block.nbytes(number for number in held if _outlives(block, number))
        sends = tuple(
            Sent(number, values[number].nbytes, on_disk)
            for number, on_disk in resolved.offloaded.items()
            if offloaded_at(block, number) == end
        )
        nbytes = sum(sent.nbytes for sent in sends)
        tasks.append(
            Task(
                "forward",
                Phase.FORWARD,
                seconds=block.forward_seconds * (sum(shares[start:end]) if count else 1.0) + _SECONDS_A_BYTE * nbytes,
                peak_bytes=max(max(peaks[start:end], default=0) - levels[start], change),
                change_bytes=change,
                sends=sends,
                host_seconds=host_seconds * ((end - start) / count if count else 1.0),
            )
        )
    return tuple(tasks)


def outside_task(name: str, outside: Outside) -> Task:
    """The task of a part of a step outside of blocks."""
    return Task(
        name,
        Phase.OUTSIDE,
        seconds=outside.seconds,
        peak_bytes=max(outside.peak_bytes, outside.change_bytes),
        change_bytes=outside.change_bytes,
        host_seconds=outside.host_seconds,
    )


def _forward_host(block: BlockProfile, resolved: ResolvedDecisions) -> float:
    host = block.host or _NO_HOST
    if not (resolved.recomputed or resolved.offloaded):
        return host.plain
    queued = host.checkpointed if resolved.recomputed else host.plain
    return queued + _host_by_operator(block) * (_KEEP * len(resolved.kept) + _OFFLOAD * len(resolved.offloaded))


def _replay_host(block: BlockProfile, resolved: ResolvedDecisions) -> float:
    share = resolved.reach / max(len(block.operators), 1)
    is_partial = any(not block.values[number].is_input for number in resolved.given)
    return (block.host or _NO_HOST).replay * share + (
        _MODE * _host_by_operator(block) * resolved.reach if is_partial else 0.0
    )


def _host_by_operator(block: BlockProfile) -> float:
    return (block.host or _NO_HOST).plain / max(len(block.operators), 1)


def _outlives(block: BlockProfile, number: int) -> bool:
    """Whether a value is an output that the block made. See NOTE [ Outputs that are saved ]."""
    return block.values[number].maker is not None and block.values[number].dies_at > len(block.operators)


def _shares(block: BlockProfile) -> list[float]:
    """The part of the block's time that each operator takes."""
    seconds = [each.seconds for each in block.operators]
    total = sum(seconds)
    return [each / total if total else 1 / len(seconds) for each in seconds]


def _backward(block: BlockProfile, resolved: ResolvedDecisions) -> tuple[Task, ...]:
    values, count = block.values, len(block.operators)
    shares = _shares(block)
    # Backward needs a value from one place to another. An unsaved value is there to the end.
    asked_at = [min((value.asked_at or 0) + 1, count) for value in values]
    wanted_at = [min((value.saved_at or 0) + 1, count) for value in values]
    over_at = [wanted_at[number] if value.saved_at is not None else 0 for number, value in enumerate(values)]
    # The replay runs when backward needs the first of its results, which may be a cast.
    results = resolved.recomputed | resolved.casts
    replay_at = max((asked_at[number] for number in results), default=0) if resolved.recomputed else None
    taken = [number for number in resolved.offloaded if values[number].saved_at is not None]
    cuts = {count, 0, *(places[number] for number in taken for places in (wanted_at, asked_at))}
    # Numbers of saved parameters follow those of values. A replay has all of them.
    saved = [] if resolved.recomputed else [min(each.place + 1, count) for each in block.parameters]
    cuts.update(saved if replay_at is None else [replay_at])
    host_seconds = (block.host or _NO_HOST).backward
    there = (*resolved.kept, *resolved.offloaded, *resolved.recomputed)
    tasks: list[Task] = []
    freed: set[int] = set()
    cast_again = 0
    for start, end in list(pairwise(sorted(cuts, reverse=True))) or [(0, 0)]:
        if start == replay_at:
            cast_again = block.nbytes(resolved.casts)
            tasks.append(_replay(block, resolved, _part_at(block, start).begin_bytes, cast_again))
        takes = tuple(number for number in taken if asked_at[number] == start)
        used = tuple(number for number, place in enumerate(saved, len(values)) if place == start)
        over = {number for number in there if number not in freed and (end == 0 or over_at[number] > end)}
        freed |= over
        change = -block.nbytes(over - resolved.offloaded.keys())
        recomputed = -block.nbytes(over & resolved.recomputed)
        gradients = 0
        if end == 0:
            change -= _kept_casts(block, resolved) + cast_again
            recomputed -= cast_again
            gradients = block.backward_change_bytes
        share = sum(shares[end:start]) if count else 1.0
        tasks.append(
            Task(
                "backward",
                Phase.BACKWARD,
                seconds=block.backward_seconds * share,
                peak_bytes=_backward_peak(block, resolved, over_at, start, end),
                change_bytes=change + gradients,
                takes=(*takes, *used),
                drops=(*(number for number in resolved.offloaded if number in over), *used),
                gradient_bytes=gradients,
                recomputed_bytes=recomputed,
                host_seconds=host_seconds * share + _RELOAD * _host_by_operator(block) * len(takes),
            )
        )
    return tuple(tasks)


def _part_at(block: BlockProfile, place: int) -> BackwardPart:
    parts = [part for part in block.backward_parts if part.place >= place]
    return parts[-1] if parts else BackwardPart(place, block.backward_peak_bytes, 0)


def _backward_peak(block: BlockProfile, resolved: ResolvedDecisions, over_at: list[int], start: int, end: int) -> int:
    """Most bytes in backward between two places, beyond those at the first."""
    peaks = [_part_at(block, start).peak_bytes]
    others = (*resolved.offloaded, *resolved.recomputed)
    there = (*resolved.kept, *others)
    for part in block.backward_parts:
        if end < part.place <= start:
            # Storages that are not needed here any more were there at the first place.
            gone = block.nbytes(number for number in there if part.place < over_at[number] <= start)
            released = block.nbytes(number for number in others if over_at[number] == part.place)
            peaks.append(max(part.peak_bytes, part.held_peak_bytes - released) - gone)
    return max(peaks)


def _replay(block: BlockProfile, resolved: ResolvedDecisions, begin_bytes: int, casts: int) -> Task:
    shares = _shares(block)
    _, peaks = _levels(block, resolved.recomputed, resolved.given, resolved.runs, resolved.reach)
    made = block.nbytes(resolved.recomputed) + casts
    return Task(
        "recomputation",
        Phase.RECOMPUTE,
        seconds=block.recompute_factor * sum(block.forward_seconds * shares[place] for place in sorted(resolved.runs)),
        peak_bytes=max(peaks, default=0) + begin_bytes + casts,
        change_bytes=made,
        takes=tuple(number for number in resolved.offloaded if number in resolved.given),
        recomputed_bytes=made,
        host_seconds=_replay_host(block, resolved),
    )


_OFFLOADS = {Decision.OFFLOAD, Decision.OFFLOAD_HOST, Decision.OFFLOAD_DISK}


@dataclass(frozen=True, slots=True)
class ResolvedDecisions:
    """The values that a block keeps, offloads and recomputes, and the operators that its replay runs."""

    runs: frozenset[int]
    """Operators that the replay runs, without views."""
    kept: frozenset[int]
    """Values that stay on the GPU from forward to backward."""
    offloaded: dict[int, bool]
    """Offloaded values, and whether to the disk."""
    recomputed: frozenset[int]
    given: frozenset[int]
    """Values that the replay is handed."""
    casts: frozenset[int]
    reach: int
    """Number of operators up to the end of the replay, which is the last wanted value."""

    @classmethod
    def of(cls, block: BlockProfile, decisions: Sequence[Decision], min_bytes: int) -> ResolvedDecisions:
        """Resolve the decisions of :func:`as_planned`."""
        values = block.values
        made = frozenset(number for number, value in enumerate(values) if value.is_recomputable)
        again = frozenset(number for number in made if decisions[number] is Decision.RECOMPUTE)
        casts = frozenset(number for number, value in enumerate(values) if value.is_cast and value.saved_at is not None)
        reach = _reach(block, again | casts)
        runs, given = _replayed(block, decisions, again, reach) if again else (frozenset(), frozenset())
        # A replay ends when each value that it was handed was saved once.
        reach = max([reach, *(values[number].saved_at or 0 for number in given)])
        if again == made and again:
            # Nothing is preserved, so no operator is left out.
            runs = frozenset(place for place in range(reach) if not block.operators[place].is_view)
        held = given.union(
            number
            for number, value in enumerate(values)
            if value.saved_at is not None and number not in again and (value.maker is not None or value.is_input)
        )
        offloaded = {
            number: decisions[number] is Decision.OFFLOAD_DISK
            for number in sorted(held, key=lambda number: offloaded_at(block, number))
            if decisions[number] in _OFFLOADS and values[number].nbytes >= min_bytes
        }
        return cls(runs, frozenset(held - offloaded.keys()), offloaded, again, given, casts, reach)

    def named(self, block: BlockProfile, decisions: Sequence[Decision]) -> list[Decision]:
        """These decisions, with RECOMPUTE for values that the block does not need.

        See NOTE [ Decisions that a plan can name ].
        """
        said = list(decisions)
        for each in block.operators if self.recomputed else ():
            is_there = any(made in self.kept or made in self.offloaded for made in each.makes)
            if each.replay is ReplayRule.FREE and not is_there:
                for number in each.makes:
                    said[number] = Decision.RECOMPUTE
        return said


def _wanted_at(block: BlockProfile, number: int) -> int:
    """Number of operators that must have run for a saved value to have its saved content."""
    saved_at = block.values[number].saved_at
    assert saved_at is not None
    # It was saved before the operator that saved it wrote it.
    is_early = saved_at < len(block.operators) and number in block.operators[saved_at].writes
    return saved_at + is_early


def _reach(block: BlockProfile, again: frozenset[int]) -> int:
    if any(_wanted_at(block, number) != block.values[number].saved_at for number in again):
        return len(block.operators)
    # A value that is saved twice is recomputed up to the last time.
    last = {number: max(_wanted_at(block, number), block.values[number].asked_at or 0) for number in again}
    reach = max(last.values(), default=0)
    if any(block.values[number].is_constant for number, place in last.items() if place == reach):
        return next((place for place in block.saves_at if place > reach), len(block.operators))
    return reach


def _replayed(
    block: BlockProfile, decisions: Sequence[Decision], again: frozenset[int], reach: int
) -> tuple[frozenset[int], frozenset[int]]:
    """The operators that a replay runs, without views, and the values that it is handed."""
    preserved = {number for number, decision in enumerate(decisions) if decision is not Decision.RECOMPUTE}
    acts = needed(block.operators, [(number, _wanted_at(block, number)) for number in again], preserved)
    found = list(zip(block.operators, acts, strict=True))[:reach]
    runs = {place for place, (each, act) in enumerate(found) if act is Act.RUN and not each.is_view}
    given = {number for each, act in found if act is Act.GIVE for number in each.makes}
    # A replay needs the inputs, saved or not.
    given.update(number for number, value in enumerate(block.values) if value.is_input)
    return frozenset(runs), frozenset(given)


def as_planned(block: BlockProfile, decisions: Sequence[Decision], min_bytes: int) -> list[Decision]:
    """The decisions as a plan can name them. See NOTE [ Decisions that a plan can name ]."""
    said = list(decisions)
    values = block.values
    inputs = [number for number, value in enumerate(values) if value.is_input]
    decision = next((said[number] for number in inputs if said[number] in _OFFLOADS), Decision.KEEP)
    for number in inputs:
        said[number] = decision
    # Values that a checkpointed block cannot keep.
    again: list[int] = []
    written = {number for each in block.operators for number in each.writes}
    for each in block.operators:
        decision = said[each.makes[0]] if each.makes else Decision.KEEP
        if each.replay is not ReplayRule.FREE or not written.isdisjoint(each.makes):
            again += each.makes
            decision = Decision.RECOMPUTE if decision is Decision.RECOMPUTE else Decision.KEEP
        for number in each.makes:
            said[number] = decision
    if any(value.is_recomputable and said[number] is Decision.RECOMPUTE for number, value in enumerate(values)):
        for number in again:
            said[number] = Decision.RECOMPUTE
    return said


def offloaded_at(block: BlockProfile, number: int) -> int:
    """Number of operators after which a value is offloaded."""
    value, count = block.values[number], len(block.operators)
    if value.saved_at is None:
        return min(1, count) if value.is_input else count
    if not block.saves_at:
        return min(value.saved_at + 1, count)
    # An operator has returned when autograd saves for another one.
    return min(next((place for place in block.saves_at if place > value.saved_at), count), count)
