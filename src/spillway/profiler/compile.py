"""Makes a profile of the traces of two steps: one for times (``timed``), and one for bytes (``weighed``)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import astuple, replace

import torch

from spillway.errors import UnsupportedError
from spillway.planner.block_tasks import make_option
from spillway.planner.profile import BackwardPart, BlockCall, BlockProfile, HostTimes, Outside, Profile, Static
from spillway.profiler.meter import static_within
from spillway.profiler.probe import Probe
from spillway.profiler.step_trace import CallTrace, Place, StepTrace
from spillway.types import Decision

_LEAST_GAP = 1e-3
"""Seconds between two blocks that are no more than a call."""
_LEAST_LEFT = 1 << 16
"""Bytes. A recomputed block leaves less behind: on a CPU, the state of its random number generator."""
_BEGIN, _FIRST, _DONE, _LEFT = ("begin", 0), ("first", 0), ("done", 0), ("left", 0)
Interval = tuple[Place, Place]


def compile_profile(
    timed: StepTrace,
    weighed: StepTrace,
    probes: Mapping[Hashable, Probe],
    *,
    model: str,
    device: torch.device,
    min_bytes: int,
    known: Static | None = None,
) -> Profile:
    """The profile of a step, in which blocks were recomputed and inputs of at least ``min_bytes`` offloaded.

    Times are those of ``timed``. Bytes are those of ``weighed``, a step with calls of the same kinds, or the same step.
    The bytes at its start that could be told apart are ``known``.
    """
    numbers_of: dict[Hashable, list[int]] = {}
    for number, call in enumerate(timed.calls):
        numbers_of.setdefault(call.kind, []).append(number)
    turns = _turns_of(timed)
    end = _FIRST if _FIRST in timed.readings else _DONE
    if not {end, *turns} <= weighed.readings.keys():
        weighed = timed
    # A process grows a little in its first steps.
    static_bytes = max(weighed.level(_BEGIN), timed.level(_BEGIN))
    kinds = tuple(
        _kind(timed, weighed, probes[kind], numbers, end, min_bytes=min_bytes) for kind, numbers in numbers_of.items()
    )
    calls: dict[int, BlockCall] = {}
    for place, (kind, numbers) in enumerate(numbers_of.items()):
        mean = _mean_change(weighed, numbers, end)
        for number in numbers:
            named, call = timed.calls[number], weighed.calls[number]
            # A shared tensor is released in the backward of the first call that holds it. If offloaded, it had not
            # been counted.
            extra = _change(weighed, number, end) - mean - _offloaded(call, probes[kind], call.released, min_bytes)
            calls[number] = BlockCall(named.name, place, extra, named.streamed)
    before = _outside(timed, weighed, _BEGIN, ("forward", 0), stops=("started", 0))
    left = _left_behind(weighed, dict(zip(numbers_of, kinds, strict=True)), probes, min_bytes)
    middle, held_bytes = _middle(timed, weighed, len(calls) - 1)
    profile = Profile(
        model=model,
        device=str(device),
        kinds=kinds,
        calls=tuple(calls[number] for number in sorted(calls)),
        static_bytes=static_bytes,
        before=replace(before, change_bytes=before.change_bytes + left),
        middle=middle,
        # The CPU may wait in it, as for a loss that is printed.
        after=replace(_outside(timed, weighed, end, _DONE), host_seconds=0.0),
        min_bytes=min_bytes,
        static=None if known is None else static_within(known, static_bytes),
        held_bytes=held_bytes,
    )
    return _with_casts(profile, weighed)


def _turns_of(trace: StepTrace) -> set[Place]:
    """The begins of the backwards of all calls."""
    turns = {("back", number) for number in range(len(trace.calls))}
    missing = turns - trace.readings.keys()
    if not turns or missing:
        raise UnsupportedError(
            f"A step called blocks {len(turns)} times, and {len(missing)} of these calls had no backward. A profile "
            f"needs one through all blocks: freeze blocks that are not trained before attaching, or name the blocks"
        )
    return turns


def _with_casts(profile: Profile, weighed: StepTrace) -> Profile:
    """The profile with the bytes of blocks' casts counted in the parts of the step that release them."""
    last = len(profile.calls) - 1
    cached_bytes = sum(profile.kinds[call.kind].cached_bytes for call in profile.calls)
    if not cached_bytes:
        return profile
    at = weighed.order.index
    uncast = [place for place in weighed.order[at(("end", last)) : at(("back", last))] if place[0] == "uncast"]
    if _LEFT in weighed.readings or uncast:
        # Plans count these bytes for the blocks.
        middle = replace(profile.middle, change_bytes=profile.middle.change_bytes + cached_bytes)
        # If other passes came between, the context of this one has ended.
        late = None
        if _LEFT not in weighed.readings:
            middle, late = _parted(weighed, middle, last, uncast)
        return replace(profile, middle=middle, late=late)
    # The casts stay whatever is decided, and no replay casts again.
    return replace(
        profile,
        before=replace(profile.before, change_bytes=profile.before.change_bytes + cached_bytes),
        kinds=tuple(
            replace(kind, cached_bytes=0, values=tuple(replace(value, is_cast=False) for value in kind.values))
            for kind in profile.kinds
        ),
    )


def _outside(
    timed: StepTrace, weighed: StepTrace, since: Place, until: Place, *, stops: Place | None = None
) -> Outside:
    """A part of the step outside of blocks. If the device lagged behind ``stops``, times go on at the instant after."""
    if since == until:
        return Outside(0.0, 0, 0)
    spans = [(since, until)]
    if stops is not None and stops in timed.readings:
        # Frozen blocks may follow: they are outside, too.
        spans = [(since, stops), (timed.order[timed.order.index(stops) + 1], until)]
    level = weighed.level(since)
    host = sum(timed.host_seconds(*span) for span in spans)
    return Outside(
        seconds=sum(timed.work_seconds(*span) for span in spans),
        peak_bytes=max(weighed.peak(since, until) - level, 0),
        change_bytes=weighed.level(until) - level,
        host_seconds=min(host, weighed.host_seconds(since, until)),
    )


def _middle(timed: StepTrace, weighed: StepTrace, last: int) -> tuple[Outside, int]:
    """The task between the last block's forward and its backward, and bytes that are held there while others pass."""
    ends, turns = ("end", last), ("back", last)
    if _LEFT not in weighed.readings or _LEFT not in timed.readings:
        return _outside(timed, weighed, ends, turns, stops=("turned", 0)), 0
    before = _outside(timed, weighed, ends, _LEFT)
    after = _outside(timed, weighed, ("back again", 0), turns, stops=("turned", 0))
    middle = Outside(
        seconds=before.seconds + after.seconds,
        peak_bytes=max(before.peak_bytes, before.change_bytes + after.peak_bytes, 0),
        change_bytes=before.change_bytes + after.change_bytes,
        host_seconds=before.host_seconds + after.host_seconds,
    )
    return middle, max(before.change_bytes, 0)


def _parted(weighed: StepTrace, middle: Outside, last: int, uncast: list[Place]) -> tuple[Outside, Outside]:
    """The tasks between the last block's forward and its backward: before casts are released, and after."""
    ends, turns, gone = ("end", last), ("back", last), uncast[-1]
    level = weighed.level(gone) - weighed.uncast[gone[1]]
    late = Outside(0.0, max(weighed.peak(gone, turns) - level, 0), weighed.level(turns) - level)
    peak = max(weighed.peak(ends, uncast[0]) - weighed.level(ends), 0)
    return replace(middle, peak_bytes=peak, change_bytes=middle.change_bytes - late.change_bytes), late


def _times(timed: StepTrace, spans: list[list[Interval]]) -> float:
    """The median over calls, given their spans. See NOTE [ The device's clock ] in ``step_trace.py``."""
    shown = [each for each in spans if timed.is_behind(*(place for span in each for place in span))]
    return max(statistics.median(sum(timed.work_seconds(*span) for span in each) for each in shown or spans), 0.0)


def _kind(
    timed: StepTrace, weighed: StepTrace, probe: Probe, numbers: list[int], end: Place, *, min_bytes: int
) -> BlockProfile:
    probe.read(set().union(*(timed.calls[number].shared for number in numbers)))
    assert probe.operators is not None
    backward: list[list[Interval]] = []
    replays: list[list[Interval]] = []
    peaks, parts = [], []
    held: tuple[BackwardPart, ...] = ()
    for number in numbers:
        begin, until = _backward_of(number, end)
        # The replays of a second backward are outside, and do not count.
        at = timed.order.index
        ran = [span for span in timed.replays_of(number) if at(begin) <= at(span[0]) <= at(span[1]) <= at(until)]
        given = next((("asked", n) for n, (whose, _) in enumerate(weighed.asked) if whose == number), begin)
        backward.append(_between(begin, until, ran))
        if ran:
            replays.append(ran)
        if number in weighed.held:
            held = _parts(weighed, probe, number, until)
            continue
        peaks.append(max(weighed.peak(given, until) - weighed.level(given), 0))
        parts.append(_parts(weighed, probe, number, until))
    forward: list[list[Interval]] = [[(("forward", number), ("end", number))] for number in numbers]
    block = BlockProfile(
        kind=timed.calls[numbers[0]].name,
        operators=probe.operators,
        values=probe.values,
        # If the recording of a trace slowed the CPU down, the operators' own times are nearer.
        forward_seconds=min(_times(timed, forward), sum(each.seconds for each in probe.operators)),
        backward_seconds=_times(timed, backward),
        backward_peak_bytes=int(statistics.median(peaks)),
        # An input too small to be offloaded was released, as a plan counts for those that it keeps.
        backward_change_bytes=_mean_change(weighed, numbers, end)
        + sum(value.nbytes for value in probe.values if value.is_input and value.nbytes < min_bytes),
        recompute_factor=1.0,
        backward_parts=_with_held(_fullest(parts), held),
        saves_at=probe.saves_at,
        host=_host((timed, weighed), numbers, end) if timed.has_host and replays else None,
        gap=_gap(timed, weighed, numbers),
        # If calls are of one module, the first of them casts.
        cached_bytes=sum(weighed.calls[number].cached_bytes for number in numbers) // len(numbers),
        parameters=probe.parameters if any(timed.calls[number].streamed for number in numbers) else (),
    )
    if not replays:
        return block
    whole = make_option(block, [Decision.RECOMPUTE] * len(block.values), min_bytes=0).recompute_seconds
    return replace(block, recompute_factor=_times(timed, replays) / whole if whole else 1.0)


def _backward_of(number: int, end: Place) -> Interval:
    return ("back", number), ("back", number - 1) if number else end


def _change(weighed: StepTrace, number: int, end: Place) -> int:
    begin, until = _backward_of(number, end)
    return weighed.level(until) - weighed.level(begin)


def _mean_change(weighed: StepTrace, numbers: list[int], end: Place) -> int:
    return sum(_change(weighed, number, end) for number in numbers) // len(numbers)


def _left_behind(
    weighed: StepTrace, kinds: Mapping[Hashable, BlockProfile], probes: Mapping[Hashable, Probe], min_bytes: int
) -> int:
    """Bytes that the forwards of all blocks leave behind, beyond those that a plan counts for their values.

    See NOTE [ Counted bytes ] in ``profile.py``.
    """
    counted = {}
    for kind, block in kinds.items():
        # As in the measured step.
        decisions = [Decision.OFFLOAD_HOST if value.is_input else Decision.RECOMPUTE for value in block.values]
        gap = 0 if block.gap is None else block.gap.change_bytes
        counted[kind] = make_option(block, decisions, min_bytes=min_bytes).kept_bytes - gap
    left = 0
    for number, call in enumerate(weighed.calls):
        # Plans do not count tensors that calls share.
        offloaded = _offloaded(call, probes[call.kind], call.given.keys(), min_bytes)
        change = weighed.level(("end", number)) - weighed.level(("forward", number))
        more = change + offloaded - counted[call.kind]
        left += more if abs(more) >= _LEAST_LEFT else 0
    return left


def _offloaded(call: CallTrace, probe: Probe, places: Collection[int], min_bytes: int) -> int:
    """Bytes of tensors at some places that a call offloaded, and shares with later calls."""
    shared = probe.shared_inputs.intersection(places)
    return sum(call.given[place] for place in shared if call.given[place] >= min_bytes)


def _gap(timed: StepTrace, weighed: StepTrace, numbers: list[int]) -> Outside | None:
    """The work before calls of one kind: a mean, so that its sum is right."""
    pairs = ((("end", number - 1), ("forward", number)) for number in numbers if number)
    found, count = [_outside(timed, weighed, *pair) for pair in pairs], len(numbers)
    gap = Outside(
        seconds=sum(each.seconds for each in found) / count,
        peak_bytes=max((each.peak_bytes for each in found), default=0),
        change_bytes=sum(each.change_bytes for each in found) // count,
        host_seconds=sum(each.host_seconds for each in found) / count,
    )
    return gap if gap.peak_bytes or gap.change_bytes or gap.seconds > _LEAST_GAP else None


def _between(begin: Place, until: Place, spans: list[Interval]) -> list[Interval]:
    """The intervals between two instants without some spans, in order."""
    since, found = begin, []
    for start, end in spans:
        found.append((since, start))
        since = end
    return [*found, (since, until)]


def _parts(weighed: StepTrace, probe: Probe, number: int, until: Place) -> tuple[BackwardPart, ...]:
    begin = ("back", number)
    asked = [(("asked", n), place) for n, (whose, place) in enumerate(weighed.asked) if whose == number]
    if not asked:
        return ()
    count = len(probe.operators or ())
    # Now all that the block has saved is there, and the frames of the replay are gone.
    level = weighed.level(asked[0][0])
    runs = next((since for since, _ in weighed.replays_of(number)), asked[0][0])
    before = max(weighed.peak(begin, weighed.first_move(begin, runs)) - weighed.level(begin), 0)
    parts = [BackwardPart(count, before, 0)]
    for (since, place), (following, _) in zip(asked, [*asked[1:], (until, 0)], strict=True):
        # The place nearer to the block's begin counts: both places needed what was saved later.
        lowest = min(place + 1, parts[-1].place, count)
        gone = sum(
            value.nbytes
            for value in probe.values
            if value.maker is not None and value.saved_at is not None and min(value.saved_at + 1, count) > lowest
        )
        most = (weighed.peak(since, following), weighed.level(since))
        parts.append(BackwardPart(lowest, *(max(nbytes - level + gone, 0) for nbytes in most)))
    return tuple(parts)


def _with_held(parts: tuple[BackwardPart, ...], held: tuple[BackwardPart, ...]) -> tuple[BackwardPart, ...]:
    """The parts with the peaks of a call in which tensors were held: NOTE [ Held tensors ] in ``step_trace.py``."""
    if [each.place for each in parts] != [each.place for each in held]:
        return parts
    return tuple(replace(part, held_peak_bytes=other.peak_bytes) for part, other in zip(parts, held, strict=True))


def _fullest(calls: list[tuple[BackwardPart, ...]]) -> tuple[BackwardPart, ...]:
    calls = [parts for parts in calls if parts]
    if not calls or len({tuple(part.place for part in parts) for parts in calls}) > 1:
        return ()
    return tuple(
        BackwardPart(*(max(fields) for fields in zip(*map(astuple, alike), strict=True)))
        for alike in zip(*calls, strict=True)
    )


def _host(traces: tuple[StepTrace, StepTrace], numbers: list[int], end: Place) -> HostTimes:
    """The shortest times of some calls in two steps: see NOTE [ The CPU's clock ] in ``step_trace.py``."""
    ran = [(trace, number) for trace in traces for number in numbers if trace.replays_of(number)]

    def shortest(spans_of: Callable[[StepTrace, int], list[Interval]]) -> float:
        return min(sum(trace.host_seconds(*span) for span in spans_of(trace, number)) for trace, number in ran)

    checkpointed = shortest(lambda _, number: [(("forward", number), ("end", number))])
    return HostTimes(
        # The function itself, within a checkpointed call.
        plain=min(checkpointed, *(trace.calls[number].own_seconds for trace, number in ran)),
        checkpointed=checkpointed,
        replay=shortest(lambda trace, number: trace.replays_of(number)),
        backward=shortest(lambda trace, number: _between(*_backward_of(number, end), trace.replays_of(number))),
    )
