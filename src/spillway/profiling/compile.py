"""From what was watched to a profile."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch

from spillway.errors import UnsupportedError
from spillway.planning.profile import BlockCall, BlockProfile, Outside, Profile
from spillway.planning.treatment import treat
from spillway.profiling.probe import Probe
from spillway.profiling.statics import Known
from spillway.profiling.watch import Place, Watched
from spillway.records import Decision


def compile_profile(
    watched: Watched,
    probes: Mapping[Hashable, Probe],
    *,
    model: str,
    device: torch.device,
    min_bytes: int,
    known: Known | None = None,
) -> Profile:
    """The profile of a step.

    Args:
        watched: a pass whose blocks were recomputed and sent their inputs away.
        probes: of one call of each kind of block.
        model: its class.
        device: where it computed.
        min_bytes: what was smaller did not leave.
        known: what of the bytes that were there when the step began can be told.

    Raises:
        UnsupportedError: where no backward came through the blocks one after the other.
    """
    kinds: dict[Hashable, list[int]] = {}
    for number, call in enumerate(watched.calls):
        kinds.setdefault(call.kind, []).append(number)
    missing = [number for number in range(len(watched.calls)) if ("back", number) not in watched.readings]
    if not watched.calls or missing:
        raise UnsupportedError(
            f"got a step of {len(watched.calls)} calls of blocks, of which {len(missing)} had no backward, expected "
            f"one through all of them; freeze blocks that are not trained before attaching, or say which are blocks"
        )
    last = len(watched.calls) - 1
    end = ("first", 0) if ("first", 0) in watched.readings else ("done", 0)
    static_bytes = watched.level(("begin", 0))
    return Profile(
        model=model,
        device=str(device),
        kinds=tuple(_kind(watched, probes[kind], numbers, end) for kind, numbers in kinds.items()),
        calls=tuple(BlockCall(call.name, list(kinds).index(call.kind)) for call in watched.calls),
        static_bytes=static_bytes,
        before=_outside(watched, ("begin", 0), ("forward", 0)),
        middle=_outside(watched, ("end", last), ("back", last)),
        after=_outside(watched, end, ("done", 0)),
        min_bytes=min_bytes,
        static=None if known is None else known.within(static_bytes),
    )


def _outside(watched: Watched, since: Place, until: Place) -> Outside:
    if since == until:
        return Outside(0.0, 0, 0)
    level = watched.level(since)
    return Outside(
        seconds=watched.seconds(since, until),
        peak_bytes=max(watched.peak(since, until) - level, 0),
        change_bytes=watched.level(until) - level,
    )


def _kind(watched: Watched, probe: Probe, numbers: list[int], end: Place) -> BlockProfile:
    probe.read(frozenset().union(*(watched.calls[number].shared for number in numbers)))
    assert probe.operators is not None
    forward, backward, again, peaks, changes = [], [], [], [], []
    for number in numbers:
        begin, until = ("back", number), ("back", number - 1) if number else end
        ran = ("ran", number)
        since = ran if ran in watched.readings else begin
        forward.append(watched.seconds(("forward", number), ("end", number)))
        backward.append(watched.seconds(since, until))
        if ran in watched.readings:
            backward[-1] += watched.seconds(begin, ("again", number))
            again.append(watched.seconds(("again", number), ran))
        peaks.append(max(watched.peak(since, until) - watched.level(since), 0))
        changes.append(watched.level(until) - watched.level(begin))
    block = BlockProfile(
        kind=watched.calls[numbers[0]].name,
        operators=probe.operators,
        values=probe.values,
        # Where the host was late because it wrote down a trace, the operators' own times are nearer.
        forward_seconds=min(statistics.median(forward), sum(each.seconds for each in probe.operators)),
        backward_seconds=statistics.median(backward),
        backward_peak_bytes=int(statistics.median(peaks)),
        backward_change_bytes=int(statistics.median(changes)),
        rerun_factor=1.0,
    )
    if not again:
        return block
    all_again = treat(block, [Decision.RECOMPUTE] * len(block.values), min_bytes=0).rerun_seconds
    return replace(block, rerun_factor=statistics.median(again) / all_again if all_again else 1.0)
