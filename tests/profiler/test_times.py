"""What a block takes the device, of calls of which some waited for the host."""

from __future__ import annotations

from itertools import pairwise

from spillway.profiler.compile import _times
from spillway.profiler.meter import Reading
from spillway.profiler.step_trace import Place, StepTrace


def watched(device: list[float], host: list[float]) -> tuple[StepTrace, list[list[tuple[Place, Place]]]]:
    places: list[Place] = [("forward", number) for number in range(len(device))]
    readings = {place: Reading(seconds, 0, 0) for place, seconds in zip(places, device, strict=True)}
    queued = dict(zip(places, host, strict=True))
    spans = [[(before, after)] for before, after in pairwise(places)]
    return StepTrace([], readings, {}, {}, places, queued=queued), spans


def test_those_count_that_did_not_wait() -> None:
    # The device lags by 5 s and takes 1 s for each, until it has caught up with a host that takes 3 s.
    device, host = [4.5, 5.5, 6.5, 9.0, 12.0, 15.0], [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]
    assert _times(*watched(device, host)) == 1.0


def test_where_all_waited_the_median_counts() -> None:
    times = [0.0, 3.0, 6.0, 10.0]
    assert _times(*watched(times, times)) == 3.0
