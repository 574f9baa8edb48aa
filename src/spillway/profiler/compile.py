"""Makes a profile of the traces of two steps: one from which times are taken, and one from which bytes are.

NOTE [ The CPU's lead ]

A loop that waits for the device nowhere has a CPU that gets further ahead with each step, until the device's queue is
full. One that waits between steps, for a loss that is printed or inputs that are copied, has what it has gained since.
Both are seen where the device is made to lag: what the CPU is ahead at the end of such a step is what it can be ahead.

A lead that is lost on the way is none. So the device lags from the begin of the step in which bytes are measured, and
from the first block in the one that is timed. The CPU must keep most of that up to the first block, and at each instant
from there to the turn. Otherwise the model or the loop waits there, or the CPU is slower than the device, and the lead
is 0.

The CPU's time after the blocks is known only where the CPU waits for nothing there: where the device had not got there
at the end of the step. The shorter one of both steps counts: a CPU that has filled the device's queue waits for room.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import astuple, replace

import torch

from spillway.errors import UnsupportedError
from spillway.planner.block_tasks import make_option
from spillway.planner.profile import BackwardPart, BlockCall, BlockProfile, HostTimes, Outside, Profile
from spillway.profiler.meter import Known
from spillway.profiler.probe import Probe
from spillway.profiler.watch import Place, Watched
from spillway.types import Decision

_LEAST_GAP = 1e-3
"""Seconds between two blocks that are no more than a call."""
_LEAST_LAG = 0.01
"""Seconds. Some devices cannot be made to lag."""
Interval = tuple[Place, Place]


def compile_profile(
    watched: Watched,
    weighed: Watched,
    probes: Mapping[Hashable, Probe],
    *,
    model: str,
    device: torch.device,
    min_bytes: int,
    known: Known | None = None,
    has_host: bool | None = None,
) -> Profile:
    """The profile of a step.

    Args:
        watched: a pass whose blocks were recomputed and sent their inputs away: times are taken from it.
        weighed: another one of the same kinds of calls, or the same: bytes are taken from it, if all of it was seen.
        probes: of one call of each kind of block.
        model: its class.
        device: where it computed.
        min_bytes: what was smaller did not leave.
        known: what of the bytes that were there when the step began can be told.
        has_host: whether the CPU's time is told apart from the device's. ``None``: where it queues work there.

    Raises:
        UnsupportedError: where no backward came through the blocks one after the other.
    """
    watched = replace(watched, has_host=queues(device) if has_host is None else has_host)
    kinds: dict[Hashable, list[int]] = {}
    for number, call in enumerate(watched.calls):
        kinds.setdefault(call.kind, []).append(number)
    turns = {("back", number) for number in range(len(watched.calls))}
    missing = turns - watched.readings.keys()
    if not watched.calls or missing:
        raise UnsupportedError(
            f"got a step of {len(watched.calls)} calls of blocks, of which {len(missing)} had no backward, expected "
            f"one through all of them; freeze blocks that are not trained before attaching, or say which are blocks"
        )
    last = len(watched.calls) - 1
    end = ("first", 0) if ("first", 0) in watched.readings else ("done", 0)
    if not {end, *turns} <= weighed.readings.keys():
        weighed = watched
    # A process grows a little in its first steps.
    static_bytes = max(weighed.level(("begin", 0)), watched.level(("begin", 0)))
    found = tuple(
        _kind(watched, weighed, probes[kind], numbers, end, min_bytes=min_bytes) for kind, numbers in kinds.items()
    )
    place_of = {kind: place for place, kind in enumerate(kinds)}
    calls = tuple(BlockCall(call.name, place_of[call.kind]) for call in watched.calls)
    cached_bytes = sum(found[call.kind].cached_bytes for call in calls)
    lead = host_lead(watched, weighed) if watched.has_host else 0.0
    before = _outside(watched, weighed, ("begin", 0), ("forward", 0), stops=("started", 0))
    middle, held_bytes = _middle(watched, weighed, last)
    late = None
    between = weighed.order[weighed.order.index(("end", last)) : weighed.order.index(("back", last))]
    uncast = [place for place in between if place[0] == "uncast"]
    # The context of a pass that others come between has ended.
    has_left = ("left", 0) in weighed.readings
    if cached_bytes and (uncast or has_left):
        # Plans count for the blocks what is let go of in it.
        middle = replace(middle, change_bytes=middle.change_bytes + cached_bytes)
        if not has_left:
            middle, late = _parted(weighed, middle, last, uncast)
    elif cached_bytes:
        # They stay whatever is decided, and no re-run casts again.
        before = replace(before, change_bytes=before.change_bytes + cached_bytes)
        found = tuple(
            replace(kind, cached_bytes=0, values=tuple(replace(value, is_cast=False) for value in kind.values))
            for kind in found
        )
    return Profile(
        model=model,
        device=str(device),
        kinds=found,
        calls=calls,
        static_bytes=static_bytes,
        before=before,
        middle=middle,
        late=late,
        after=replace(
            _outside(watched, weighed, end, ("done", 0)),
            # The CPU may wait in it, as for a loss that is printed.
            host_seconds=host_seconds_after(watched, weighed, end, lead),
        ),
        min_bytes=min_bytes,
        static=None if known is None else known.within(static_bytes),
        held_bytes=held_bytes,
        lead_seconds=lead,
    )


def queues(device: torch.device) -> bool:
    """Whether the host queues work there, and goes on."""
    return device.type != "cpu"


def _outside(watched: Watched, weighed: Watched, since: Place, until: Place, *, stops: Place | None = None) -> Outside:
    """What is outside of blocks. If the device lagged behind ``stops``, times go on at the instant after it."""
    if since == until:
        return Outside(0.0, 0, 0)
    spans = [(since, until)]
    if stops is not None and stops in watched.readings:
        # Frozen blocks may follow: they are outside, too.
        spans = [(since, stops), (watched.order[watched.order.index(stops) + 1], until)]
    level = weighed.level(since)
    return Outside(
        seconds=sum(watched.seconds(*span) for span in spans),
        peak_bytes=max(weighed.peak(since, until) - level, 0),
        change_bytes=weighed.level(until) - level,
        host_seconds=sum(watched.host_seconds(*span) for span in spans),
    )


def _middle(watched: Watched, weighed: Watched, last: int) -> tuple[Outside, int]:
    """The task between the last block's forward and its backward, and bytes that are held there while others pass."""
    ends, turns, left = ("end", last), ("back", last), ("left", 0)
    if left not in weighed.readings or left not in watched.readings:
        return _outside(watched, weighed, ends, turns, stops=("turned", 0)), 0
    before = _outside(watched, weighed, ends, left)
    after = _outside(watched, weighed, ("back again", 0), turns, stops=("turned", 0))
    middle = Outside(
        seconds=before.seconds + after.seconds,
        peak_bytes=max(before.peak_bytes, before.change_bytes + after.peak_bytes, 0),
        change_bytes=before.change_bytes + after.change_bytes,
        host_seconds=before.host_seconds + after.host_seconds,
    )
    return middle, max(before.change_bytes, 0)


def _parted(weighed: Watched, middle: Outside, last: int, uncast: list[Place]) -> tuple[Outside, Outside]:
    """The tasks between the last block's forward and its backward: before casts are released, and after."""
    ends, turns, gone = ("end", last), ("back", last), uncast[-1]
    level = weighed.level(gone) - weighed.uncast[gone[1]]
    late = Outside(0.0, max(weighed.peak(gone, turns) - level, 0), weighed.level(turns) - level)
    peak = max(weighed.peak(ends, uncast[0]) - weighed.level(ends), 0)
    return replace(middle, peak_bytes=peak, change_bytes=middle.change_bytes - late.change_bytes), late


def _times(watched: Watched, spans: list[list[Interval]]) -> float:
    """The median over calls, given their spans. See NOTE [ The device's clock ] in ``watch.py``."""
    shown = [each for each in spans if watched.is_behind(*(place for span in each for place in span))]
    return max(statistics.median(sum(watched.seconds(*span) for span in each) for each in shown or spans), 0.0)


def _kind(
    watched: Watched,
    weighed: Watched,
    probe: Probe,
    numbers: list[int],
    end: Place,
    *,
    min_bytes: int,
) -> BlockProfile:
    probe.read(frozenset().union(*(watched.calls[number].shared for number in numbers)))
    assert probe.operators is not None
    forward: list[list[Interval]] = []
    backward: list[list[Interval]] = []
    again: list[list[Interval]] = []
    peaks, changes, parts = [], [], []
    for number in numbers:
        begin, until = ("back", number), ("back", number - 1) if number else end
        # Of a backward that comes a second time, nothing is told.
        ran = [span for span in watched.reruns_of(number) if _is_between(watched, begin, span, until)]
        given = next((("asked", n) for n, (whose, _) in enumerate(weighed.asked) if whose == number), begin)
        forward.append([(("forward", number), ("end", number))])
        backward.append(_between(begin, until, ran))
        if ran:
            again.append(ran)
        peaks.append(max(weighed.peak(given, until) - weighed.level(given), 0))
        changes.append(weighed.level(until) - weighed.level(begin))
        parts.append(_parts(weighed, probe, number, until))
    block = BlockProfile(
        kind=watched.calls[numbers[0]].name,
        operators=probe.operators,
        values=probe.values,
        # Where the host was late because it wrote down a trace, the operators' own times are nearer.
        forward_seconds=min(_times(watched, forward), sum(each.seconds for each in probe.operators)),
        backward_seconds=_times(watched, backward),
        backward_peak_bytes=int(statistics.median(peaks)),
        # An input that was too small to leave was let go of, as a plan counts of those that it keeps.
        backward_change_bytes=int(statistics.median(changes))
        + sum(value.nbytes for value in probe.values if value.is_input and value.nbytes < min_bytes),
        recompute_factor=1.0,
        backward_parts=_fullest(parts),
        saves_at=probe.saves_at,
        host=_host(watched, numbers, end) if watched.has_host and again else None,
        gap=_gap(watched, weighed, numbers),
        # Where calls are of one module, the first of them casts.
        cached_bytes=sum(weighed.calls[number].cached_bytes for number in numbers) // len(numbers),
    )
    if not again:
        return block
    all_again = make_option(block, [Decision.RECOMPUTE] * len(block.values), min_bytes=0).recompute_seconds
    return replace(block, recompute_factor=_times(watched, again) / all_again if all_again else 1.0)


def _gap(watched: Watched, weighed: Watched, numbers: list[int]) -> Outside | None:
    """What comes before calls of one kind: a mean, so that its sum is right."""
    pairs = ((("end", number - 1), ("forward", number)) for number in numbers if number)
    found, count = [_outside(watched, weighed, *pair) for pair in pairs], len(numbers)
    gap = Outside(
        seconds=sum(each.seconds for each in found) / count,
        peak_bytes=max((each.peak_bytes for each in found), default=0),
        change_bytes=sum(each.change_bytes for each in found) // count,
        host_seconds=sum(each.host_seconds for each in found) / count,
    )
    return gap if gap.peak_bytes or gap.change_bytes or gap.seconds > _LEAST_GAP else None


def _is_between(watched: Watched, begin: Place, span: Interval, until: Place) -> bool:
    places = [watched.order.index(place) for place in (begin, *span, until)]
    return places == sorted(places)


def _between(begin: Place, until: Place, spans: list[Interval]) -> list[Interval]:
    """The intervals between two instants without some spans, in order."""
    since, found = begin, []
    for start, end in spans:
        found.append((since, start))
        since = end
    return [*found, (since, until)]


def _parts(weighed: Watched, probe: Probe, number: int, until: Place) -> tuple[BackwardPart, ...]:
    begin = ("back", number)
    asked = [(("asked", n), place) for n, (whose, place) in enumerate(weighed.asked) if whose == number]
    if not asked:
        return ()
    count = len(probe.operators or ())
    # Now all that the block has saved is there, and the frames that ran again are not any more.
    level = weighed.level(asked[0][0])
    runs = next((since for since, _ in weighed.reruns_of(number)), asked[0][0])
    before = max(weighed.peak(begin, weighed.first_move(begin, runs)) - weighed.level(begin), 0)
    parts = [BackwardPart(count, before, 0, 0)]
    for (since, place), (following, _) in zip(asked, [*asked[1:], (until, 0)], strict=True):
        # Of two places the one that is nearer to the block's begin counts: what was saved later was needed by both.
        lowest = min(place + 1, parts[-1].place, count)
        gone = sum(
            value.nbytes
            for value in probe.values
            if value.maker is not None and value.saved_at is not None and min(value.saved_at + 1, count) > lowest
        )
        late = weighed.late_peak(since, following)
        most = (weighed.peak(since, following), weighed.level(since), level - gone if late is None else late)
        parts.append(BackwardPart(lowest, *(max(nbytes - level + gone, 0) for nbytes in most)))
    return tuple(parts)


def _fullest(calls: list[tuple[BackwardPart, ...]]) -> tuple[BackwardPart, ...]:
    calls = [parts for parts in calls if parts]
    if not calls or len({tuple(part.place for part in parts) for parts in calls}) > 1:
        return ()
    return tuple(
        BackwardPart(*(max(fields) for fields in zip(*map(astuple, alike), strict=True)))
        for alike in zip(*calls, strict=True)
    )


def _host(watched: Watched, numbers: list[int], end: Place) -> HostTimes:
    """Of some calls, the shortest: see NOTE [ The CPU's clock ] in ``watch.py``."""
    ran = [number for number in numbers if watched.reruns_of(number)]

    def backward(number: int) -> float:
        until = ("back", number - 1) if number else end
        spans = _between(("back", number), until, watched.reruns_of(number))
        return sum(watched.host_seconds(*span) for span in spans)

    region = min(watched.host_seconds(("forward", number), ("end", number)) for number in ran)
    return HostTimes(
        # The function itself, within a checkpointed call.
        plain=min(region, *(watched.calls[number].own_seconds for number in ran)),
        checkpointed=region,
        replay=min(sum(watched.host_seconds(*span) for span in watched.reruns_of(number)) for number in ran),
        backward=min(map(backward, ran)),
    )


def host_lead(watched: Watched, weighed: Watched) -> float:
    """Seconds by which the CPU is ahead of the device where a step begins. See NOTE [ The CPU's lead ].

    In the watched step the device lagged where the blocks begin, in both directions; in the weighed one, at its begin.
    """
    is_kept = _keeps_lead(weighed, ("ahead", 0), ("forward", 0)) and _keeps_lead(watched, ("started", 0), ("turned", 0))
    return max(watched.lead(("done", 0)), 0.0) if is_kept else 0.0


def host_seconds_after(watched: Watched, weighed: Watched, end: Place, lead: float) -> float:
    """The CPU's seconds after the end of the blocks' backward; 0: not known. See NOTE [ The CPU's lead ].

    The steps are as for :func:`host_lead`, and the lead is theirs.
    """
    if lead <= watched.seconds(end, ("done", 0)):
        return 0.0
    return min(each.host_seconds(end, ("done", 0)) for each in (watched, weighed))


def without_lead(profile: Profile) -> Profile:
    """The profile for a loop of which it is not known where it waits."""
    return replace(profile, lead_seconds=0.0, after=replace(profile.after, host_seconds=0.0))


def _keeps_lead(watched: Watched, since: Place, until: Place) -> bool:
    """Whether the device was made to lag at an instant, and the CPU was ahead by most of that until another one."""
    if since not in watched.readings or until not in watched.readings:
        return False
    order = watched.order
    first = order.index(since) + 1
    lag = watched.seconds(since, order[first])
    return lag > _LEAST_LAG and all(watched.lead(place) > lag / 2 for place in order[first : order.index(until) + 1])
