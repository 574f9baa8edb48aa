"""What one set of decisions about a block comes to: its tasks in forward and backward.

NOTE [ When what happens ]

A saved storage leaves when autograd saves something for a later operator; what is only handed in leaves when the block
has ended. In backward, work is taken to be spread over operators as it is in forward. A re-run comes when the first
storage is asked for that it makes, and makes all of them. Where the block's own code runs again, that is one re-run;
where its operators do by themselves, each of their parts is one (:meth:`~spillway.planning.outcome.Outcome.parts`).

What has been sent is on the device for as long as the block's own code holds it, whether or not the window has let go
of it: it is counted for both, which is too much as long as it is on its way.

NOTE [ Outputs that are saved ]

Whoever takes a block's output lets go of it, and counts it off then. If the block has saved it, it is still there: so
it is counted once more for the block that holds it. Where the next block keeps it, too, that is once too often, and is
taken off where the two meet (:meth:`~spillway.planning.tasks.Problem.program`). Where one of them sends it away it is
counted for both: what is predicted too high fits, what is predicted too low does not.

NOTE [ Casts ]

A block may cast weights, as under autocast, and autograd then saves the casts in the place of the weights. A re-run
casts again what it needs: so where a block is computed again, its casts are let go of when its forward is over, and are
there again for its backward; where nothing of it is, autograd holds them from the one to the other. Autocast's cache
holds them whatever is decided, but no longer than to the end of its outermost context, which is that of the model's
forward, or of its loss: what of them is there when a block's call has returned tells whether it does
(``BlockProfile.cached_bytes``). Where it lasts through backward, a profile has them in what is there before the blocks.
For a re-run in parts, all casts are taken to come with the first one.

NOTE [ What the host needs ]

A block that is left alone is queued in a fraction of the time that a region takes, of which each call is compared; so
is one of which nothing is computed again, but for what it keeps and sends. What else is done is put in multiples of
what an operator of a plain block takes: twice as much to keep a tensor, ten times to send one, 6.4 times to bring it
back. On an H200's host that was 17, 103 and 69 us where a plain operator took about 9 (a layer of transformers' Llama
of width 2048 under its trainer). What is computed again is queued operator by operator, and nothing else is. A checked
step corrects all of it.

Where the host may take longer for a region than the device, and less if nobody looks at it in forward, there are both
options for the search. Where nobody looks, and some of it is handed in, its operators are looked at when it runs again
(``regions/unwatched.py``), from the first one that is left out to the last: which takes what a region's forward takes
beyond a plain one, for so many of its operators, and half as much for each later one, which comes by a mode that looks
away.

NOTE [ What is compared ]

Where nobody looks at a forward, both runs are compared by sums of what all the rest of what is computed again goes
into: what is saved of it, and no operator reads that runs again. The device reads that once in each run. A byte is
taken to need what it needs in the fastest of the block's operators for each byte that these make: on an H100 a layer of
transformers' Llama of width 2048 took 0.23 ms for some 200 MiB, twice.

NOTE [ What is free ]

A copy that is hidden costs next to nothing, but not nothing: so that of two plans of the same time the one is taken
that moves less, a byte that leaves costs the hundredth part of what the link needs for it. That is near the truth: on
an H200, products of matrices took 0.4 % longer beside copies one way, and 0.9 % beside both (300 layers of Llama-8B's
products and attention; 268 MB a layer and way; the device at its limit of power).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from spillway.planning.outcome import Outcome, as_planned, leaves_at
from spillway.planning.profile import BackwardPart, BlockProfile
from spillway.planning.tasks import Option, Phase, Sent, Task
from spillway.records import Decision

_SECONDS_A_BYTE = 2e-13
"""See NOTE [ What is free ]."""
_LARGE = 1 << 20
"""Bytes that take the device long enough to tell its rate."""
_KEEP, _SEND, _TAKE = 2.0, 10.0, 6.4
"""See NOTE [ What the host needs ]."""


def treat(block: BlockProfile, decisions: Sequence[Decision], *, min_bytes: int, watched: bool = False) -> Option:
    """The tasks of a block that is treated so.

    Args:
        block: its profile.
        decisions: for each of its values. Those about values from outside that are no inputs do not count; of what one
            operator makes, the first counts; of inputs, the first that leaves. What comes of them is the option's
            ``decisions``: see NOTE [ What a plan can say ] in ``outcome.py``.
        min_bytes: what is smaller stays where it was to leave.
        watched: whether somebody looks at its calls in forward, also where nobody need.
    """
    said = as_planned(block, decisions, min_bytes)
    outcome = Outcome.of(block, said, min_bytes)
    handed = (block.values[number] for number in (*outcome.stays, *outcome.leaves))
    shown = all(value.is_input or value.saved_at is not None for value in handed)
    watched = watched or not (block.is_late and block.is_told and outcome.again and shown)
    return Option(
        tuple(outcome.told(block, said)),
        _forward(block, outcome, watched=watched),
        _backward(block, outcome, watched=watched),
        output_bytes=sum(block.values[number].nbytes for number in outcome.stays if _outlives(block, number)),
        input_bytes=sum(block.values[number].nbytes for number in outcome.stays if block.values[number].is_input),
        let_go_bytes=_held_casts(block, outcome) - _kept_casts(block, outcome),
        watched=watched,
    )


def _casts(block: BlockProfile, outcome: Outcome) -> int:
    """Bytes that autograd saves of a block's casts."""
    return sum(block.values[number].nbytes for number in outcome.casts)


def _kept_casts(block: BlockProfile, outcome: Outcome) -> int:
    """Of these, what is there from the block's forward to its backward. See NOTE [ Casts ]."""
    if outcome.again:
        return 0
    # Where a block is called several times, the cache has one cast for all of them.
    casts = _casts(block, outcome)
    return min(casts, block.cached_bytes) if block.cached_bytes else casts


def _held_casts(block: BlockProfile, outcome: Outcome) -> int:
    """What there is of casts when the block's forward has ended."""
    return block.cached_bytes or _kept_casts(block, outcome)


def _levels(
    block: BlockProfile, held: Collection[int], given: Collection[int], runs: Collection[int], count: int
) -> tuple[list[int], list[int]]:
    """Bytes that are allocated after each number of operators, and the most within each operator.

    Args:
        block: whose operators are gone through.
        held: values that live on.
        given: values that are there already, and are not counted.
        runs: operators that compute, and so need their workspace.
        count: how many operators.
    """
    rise = [0] * (len(block.operators) + 2)
    for number, value in enumerate(block.values):
        if value.maker is None or number in given:
            continue
        rise[value.maker] += value.nbytes
        dies_at = max(value.dies_at, value.maker + 1)
        if number not in held and dies_at < len(rise):
            rise[dies_at] -= value.nbytes
    # What dies at a place is gone before the operator there makes anything.
    made = [
        sum(block.values[number].nbytes for number in each.makes if number not in given) for each in block.operators
    ]
    level, levels, peaks = 0, [0], []
    for place in range(count):
        level += rise[place]
        peaks.append(level + (block.operators[place].workspace_bytes if place in runs else 0))
        following = rise[place + 1] - (made[place + 1] if place + 1 < len(made) else 0)
        levels.append(level + following)
    return levels, peaks


def _forward(block: BlockProfile, outcome: Outcome, *, watched: bool) -> tuple[Task, ...]:
    values, count = block.values, len(block.operators)
    held = outcome.stays | outcome.leaves.keys()
    levels, peaks = _levels(block, held, (), range(count), count)
    for number in outcome.leaves:
        for place in range(leaves_at(block, number), min(values[number].dies_at, count)):
            peaks[place] += values[number].nbytes
    casts = _held_casts(block, outcome)
    levels = [levels[0], *(level + casts for level in levels[1:])]
    peaks = [peak + casts for peak in peaks]
    cuts = sorted({0, count, *(leaves_at(block, number) for number in outcome.leaves)})
    seconds = _seconds(block)
    host_seconds = _forward_host(block, outcome, watched=watched)
    compared = 0.0 if watched else _compared_seconds(block, outcome)
    tasks = []
    for start, end in list(pairwise(cuts)) or [(0, 0)]:
        change = levels[end] - levels[start]
        if end == count:
            # Who called the block lets go of its inputs, and of its outputs later on.
            change -= sum(value.nbytes for number, value in enumerate(values) if value.is_input and number not in held)
            change += sum(values[number].nbytes for number in held if _outlives(block, number))
            change += sum(values[number].nbytes for number in outcome.copied)
        sends = tuple(
            Sent(number, values[number].nbytes, on_disk)
            for number, on_disk in outcome.leaves.items()
            if leaves_at(block, number) == end
        )
        leaving = sum(sent.nbytes for sent in sends)
        tasks.append(
            Task(
                "forward",
                Phase.FORWARD,
                seconds=(sum(seconds[start:end]) if count else block.forward_seconds)
                + _SECONDS_A_BYTE * leaving
                + (compared if end == count else 0.0),
                peak_bytes=max(max(peaks[start:end], default=0) - levels[start], change),
                change_bytes=change,
                sends=sends,
                host_seconds=host_seconds * ((end - start) / count if count else 1.0),
            )
        )
    return tuple(tasks)


def _forward_host(block: BlockProfile, outcome: Outcome, *, watched: bool) -> float:
    """See NOTE [ What the host needs ]."""
    if block.host is None:
        return 0.0
    if not (outcome.again or outcome.leaves):
        return block.host.plain
    queued, stays, leaves = block.host.plain, set(outcome.stays), set(outcome.leaves)
    if not watched and block.host.unwatched is not None:
        # That was with inputs that leave.
        inputs = _inputs(block)
        unsent = _SEND * _host_by_operator(block) * len(inputs & stays)
        queued, stays, leaves = max(block.host.unwatched - unsent, queued), stays - inputs, leaves - inputs
    elif outcome.again:
        queued = block.host.region
    return queued + _host_by_operator(block) * (_KEEP * len(stays) + _SEND * len(leaves))


def _rerun_host(block: BlockProfile, outcome: Outcome, *, watched: bool) -> float:
    if block.host is None:
        return 0.0
    if not watched and block.host.unwatched_rerun is not None:
        if not outcome.given - _inputs(block):
            return block.host.unwatched_rerun
        looks = max(block.host.region - block.host.plain, 0.0)
        return block.host.unwatched_rerun + looks * _share_looked_at(block, outcome.runs)
    return block.host.rerun * _share_run(block, outcome.runs)


def _inputs(block: BlockProfile) -> set[int]:
    return {number for number, value in enumerate(block.values) if value.is_input}


def _host_by_operator(block: BlockProfile) -> float:
    if block.host is None:
        return 0.0
    return block.host.plain / max(len(block.operators), 1)


def _share_run(block: BlockProfile, runs: Collection[int]) -> float:
    """How many of the operators that make something are run again, of all."""
    makers = {place for place, each in enumerate(block.operators) if each.makes}
    return len(makers.intersection(runs)) / max(len(makers), 1)


def _share_looked_at(block: BlockProfile, runs: Collection[int]) -> float:
    """How many operators come between the first that is left out and the last, and half of the later ones, of all.

    From when autograd has last saved something before the first, to when it saves what an operator has just made: then
    it saves that for the next one, too, when no more of them have run.
    """
    count, saves = len(block.operators), block.saves_at
    left = [place for place in range(max(runs, default=0)) if block.operators[place].makes and place not in runs]
    first, last = (left[0], left[-1] + 1) if left else (0, 0)
    first = max((place for place in saves if place < first), default=0)
    until = next((place for place, after in pairwise(saves) if place == after > last), count)
    return (last - first + (until - last) / 2) / max(count, 1)


def _compared_seconds(block: BlockProfile, outcome: Outcome) -> float:
    """Of one run. See NOTE [ What is compared ]."""
    operators = block.operators
    made = [(each.seconds, sum(block.values[number].nbytes for number in each.makes)) for each in operators]
    fastest = min((seconds / nbytes for seconds, nbytes in made if nbytes >= _LARGE and seconds), default=0.0)
    read = {number for place in outcome.runs for number in operators[place].reads}
    return fastest * sum(block.values[number].nbytes for number in outcome.again if number not in read)


def _outlives(block: BlockProfile, number: int) -> bool:
    """Whether the block made it, and gave it away. See NOTE [ Outputs that are saved ]."""
    return block.values[number].maker is not None and block.values[number].dies_at > len(block.operators)


def _seconds(block: BlockProfile) -> list[float]:
    """What each operator takes, so that together they take what was measured of the whole."""
    total = sum(each.seconds for each in block.operators)
    if not total:
        # Nothing is known of any.
        return [block.forward_seconds / len(block.operators) for _ in block.operators]
    return [block.forward_seconds * (each.seconds / total) for each in block.operators]


def _backward(block: BlockProfile, outcome: Outcome, *, watched: bool) -> tuple[Task, ...]:
    values, count = block.values, len(block.operators)
    weights = [each.seconds for each in block.operators]
    if not any(weights):
        weights = [1.0] * count
    done = list(accumulate(weights, initial=0.0))
    wanted_at = {number: min((value.saved_at or 0) + 1, count) for number, value in enumerate(values)}
    """To where it is wanted."""
    asked_at = {number: min((value.asked_at or 0) + 1, count) for number, value in enumerate(values)}
    """From where on."""
    over_at = _over_at(block, outcome, wanted_at)
    by_parts = block.is_told and watched
    rerun_at: dict[int, list[Outcome]] = {}
    for part in outcome.parts(block) if by_parts else [outcome] if outcome.again else []:
        # All of the block's own code runs again for the first cast that is asked for.
        asked = part.again if by_parts else part.again | outcome.casts
        rerun_at.setdefault(max(asked_at[number] for number in asked), []).append(part)
    taken = [number for number in outcome.leaves if values[number].saved_at is not None]
    cuts = {count, 0, *(places[number] for number in taken for places in (wanted_at, asked_at))}
    cuts.update(rerun_at)
    places = sorted(cuts, reverse=True)
    host_seconds = 0.0 if block.host is None else block.host.backward
    tasks: list[Task] = []
    freed: set[int] = set()
    cast_again = 0
    for start, end in list(pairwise(places)) or [(0, 0)]:
        again = [
            _rerun(block, part, _part_at(block, start).begin_bytes, watched=watched, by_parts=by_parts)
            for part in rerun_at.get(start, ())
        ]
        # One operator asks for them in an order that is not known: they are put in the one that needs the most.
        again.sort(key=lambda task: task.peak_bytes - task.change_bytes)
        if again and not cast_again:
            cast_again = _casts(block, outcome)
            again[0] = _with_casts(again[0], cast_again)
        tasks += again
        takes = tuple(number for number in taken if asked_at[number] == start)
        over = {
            number
            for number in (*outcome.stays, *outcome.leaves, *outcome.again)
            if number not in freed and (end == 0 or over_at[number] > end)
        }
        freed |= over
        change = -sum(values[number].nbytes for number in over if number not in outcome.leaves)
        if end == 0:
            change -= sum(values[number].nbytes for number in outcome.copied)
            change -= _kept_casts(block, outcome) + cast_again
        gradients = block.backward_change_bytes if end == 0 else 0
        share = (done[start] - done[end]) / done[-1] if count else 1.0
        tasks.append(
            Task(
                "backward",
                Phase.BACKWARD,
                seconds=block.backward_seconds * share,
                peak_bytes=_backward_peak(block, outcome, wanted_at, over_at, start, end),
                change_bytes=change + gradients,
                takes=takes,
                drops=tuple(number for number in outcome.leaves if number in over),
                gradient_bytes=gradients,
                recomputed_bytes=-sum(values[number].nbytes for number in over & outcome.again)
                - (cast_again if end == 0 else 0),
                host_seconds=host_seconds * share + _TAKE * _host_by_operator(block) * len(takes),
            )
        )
    return tuple(tasks)


def _with_casts(task: Task, nbytes: int) -> Task:
    """A re-run that makes so many bytes of casts, too."""
    return replace(
        task,
        peak_bytes=task.peak_bytes + nbytes,
        change_bytes=task.change_bytes + nbytes,
        recomputed_bytes=task.recomputed_bytes + nbytes,
    )


def _part_at(block: BlockProfile, place: int) -> BackwardPart:
    """The part of the backward that goes through a place."""
    parts = [part for part in block.backward_parts if part.place >= place]
    return parts[-1] if parts else BackwardPart(place, block.backward_peak_bytes, 0)


def _over_at(block: BlockProfile, outcome: Outcome, wanted_at: dict[int, int]) -> dict[int, int]:
    """To where each value is there."""
    over_at = {
        number: wanted_at[number] if value.saved_at is not None else 0 for number, value in enumerate(block.values)
    }
    if block.is_told and outcome.again:
        # What is handed in stays as long as anything that hangs on it; the function's tensors, as long as anything.
        end = min(wanted_at[number] for number in outcome.again)
        for number, users in outcome.users(block).items():
            value = block.values[number]
            last = end if value.is_input else min(wanted_at[user] for user in users)
            over_at[number] = last if value.saved_at is None else min(last, wanted_at[number])
    return over_at


def _backward_peak(
    block: BlockProfile,
    outcome: Outcome,
    wanted_at: dict[int, int],
    over_at: dict[int, int],
    start: int,
    end: int,
) -> int:
    """The most that backward takes between two places, beyond what there is at the first."""
    values = block.values
    peaks = [_part_at(block, start).peak_bytes]
    for part in block.backward_parts:
        if end < part.place <= start:
            # What is not needed any more by then was there at the first place.
            there = (*outcome.stays, *outcome.leaves, *outcome.again)
            gone = sum(values[number].nbytes for number in there if part.place < over_at[number] <= start)
            here = (number for number in outcome.stays if values[number].saved_at is not None)
            kept = sum(values[number].nbytes for number in here if wanted_at[number] == part.place)
            peaks.append(max(part.peak_bytes, part.late_bytes + kept if part.late_bytes else 0) - gone)
    return max(peaks)


def _rerun(block: BlockProfile, outcome: Outcome, begin_bytes: int, *, watched: bool, by_parts: bool) -> Task:
    values, seconds = block.values, _seconds(block)
    given: Collection[int] = outcome.given
    if by_parts:
        # Nothing else is there but what the part makes.
        makers = {number: value.maker for number, value in enumerate(values)}
        given = {number for number, maker in makers.items() if number in outcome.given or maker not in outcome.runs}
    _, peaks = _levels(block, outcome.again, given, outcome.runs, outcome.reach)
    made = sum(values[number].nbytes for number in outcome.again)
    return Task(
        "again",
        Phase.RERUN,
        seconds=block.rerun_factor * sum(seconds[place] for place in sorted(outcome.runs))
        + (0.0 if watched else _compared_seconds(block, outcome)),
        peak_bytes=max(peaks, default=0) + begin_bytes,
        change_bytes=made,
        takes=tuple(number for number in outcome.leaves if number in outcome.given),
        recomputed_bytes=made,
        host_seconds=_rerun_host(block, outcome, watched=watched),
    )
