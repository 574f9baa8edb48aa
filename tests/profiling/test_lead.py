"""By how much the host may be ahead where a step begins, from passes in which the device was made to lag."""

from __future__ import annotations

import pytest

from spillway.profiling.lead import lead_of
from spillway.profiling.meter import Reading
from spillway.profiling.watch import Place, Watched

LAG = 100.0


def passed(*instants: tuple[str, float, float]) -> Watched:
    """A pass: what happens, when the host was there, and when the device."""
    order: list[Place] = [(what, 0) for what, _, _ in instants]
    readings = {place: Reading(there, 0, 0, 0) for place, (_, _, there) in zip(order, instants, strict=True)}
    queued = {place: here for place, (_, here, _) in zip(order, instants, strict=True)}
    return Watched([], readings, {}, {}, order, queued=queued)


# The device lags from the begin on.
WEIGHED = passed(("ahead", 0, 0), ("begin", 0, LAG), ("forward", 1, LAG + 1))
WAITED_BEFORE = passed(("ahead", 0, 0), ("begin", 0, LAG), ("forward", LAG + 1, LAG + 2))


def timed(*, middle: float = 0.0, after: float = 0.0) -> Watched:
    """The host needs 4 s before the turn and 6 s after it, the device 5 and 10; the host may wait until so late."""
    turned = max(5.0, middle)
    return passed(
        ("begin", 0, 0),
        ("started", 1, 1),
        ("forward", 1, 1 + LAG),
        ("turned", turned, LAG + 6),
        ("back", turned, 2 * LAG + 6),
        ("done", max(turned + 6, after), 2 * LAG + 16),
    )


def test_where_nobody_waits_it_is_all_that_the_device_is_behind() -> None:
    assert lead_of(timed(), WEIGHED) == 2 * LAG + 5


def test_where_the_loop_waits_it_is_what_came_since() -> None:
    assert lead_of(timed(after=2 * LAG + 13), WEIGHED) == 3
    assert lead_of(timed(after=2 * LAG + 16), WEIGHED) == 0


def test_where_the_host_waits_before_backward_the_second_lag_is_not_the_loops() -> None:
    assert lead_of(timed(middle=LAG + 6), WEIGHED) == 4


def test_where_the_host_waits_before_the_first_block_there_is_none() -> None:
    assert lead_of(timed(), WAITED_BEFORE) == 0


@pytest.mark.parametrize("other", [passed(("begin", 0, 0), ("forward", 1, 3)), timed()], ids=["weighed", "timed"])
def test_where_the_device_did_not_lag_nothing_is_known(other: Watched) -> None:
    assert lead_of(timed(), other) == 0


def test_it_is_never_less_than_nothing() -> None:
    # The host was behind.
    late = passed(("begin", 0, 0), ("started", 1, 1), ("forward", 1, 1 + LAG), ("turned", 500, 499), ("done", 700, 699))
    assert lead_of(late, WEIGHED) == 0
