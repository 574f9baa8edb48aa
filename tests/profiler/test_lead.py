"""By how much the host may be ahead where a step begins, from passes in which the device was made to lag."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
import torch
from torch import nn

import spillway
from allocations import ExactMeter
from spillway.planner.profile import Profile
from spillway.profiler.compile import host_lead, host_seconds_after
from spillway.profiler.meter import Reading
from spillway.profiler.step_trace import Place, StepTrace

LAG = 100.0


def passed(*instants: tuple[str, float, float]) -> StepTrace:
    """A pass: what happens, when the host was there, and when the device."""
    order: list[Place] = [(what, 0) for what, _, _ in instants]
    readings = {place: Reading(there, 0, 0, 0) for place, (_, _, there) in zip(order, instants, strict=True)}
    queued = {place: here for place, (_, here, _) in zip(order, instants, strict=True)}
    return StepTrace([], readings, {}, {}, order, queued=queued)


# The device lags from the begin on.
WEIGHED = passed(("ahead", 0, 0), ("begin", 0, LAG), ("forward", 1, LAG + 1))
WAITED_BEFORE = passed(("ahead", 0, 0), ("begin", 0, LAG), ("forward", LAG + 1, LAG + 2))


def timed(*, within: float = 0.0, middle: float = 0.0, after: float = 0.0) -> StepTrace:
    """The host needs 2 s for the block, 2 to the turn, 4 for backward and 2 from there on; the device 4, 1, 6 and 4.

    The host may wait in the block, before the turn, or at the end, until so late.
    """
    ended = max(3.0, within)
    turned = max(ended + 2, middle)
    return passed(
        ("begin", 0, 0),
        ("started", 1, 1),
        ("forward", 1, 1 + LAG),
        ("end", ended, LAG + 5),
        ("turned", turned, max(LAG, turned - 6) + 6),
        ("back", turned, 2 * LAG + 6),
        ("first", turned + 4, 2 * LAG + 12),
        ("done", max(turned + 6, after), 2 * LAG + 16),
    )


def test_where_nobody_waits_it_is_all_that_the_device_is_behind() -> None:
    assert host_lead(timed(), WEIGHED) == 2 * LAG + 5


def test_where_the_loop_waits_it_is_what_came_since() -> None:
    assert host_lead(timed(after=2 * LAG + 13), WEIGHED) == 3
    assert host_lead(timed(after=2 * LAG + 16), WEIGHED) == 0


def test_where_the_host_waits_in_a_block_or_before_backward_the_lead_is_lost_there_and_none() -> None:
    assert host_lead(timed(within=LAG + 5), WEIGHED) == 0
    assert host_lead(timed(middle=LAG + 6), WEIGHED) == 0


def test_a_wait_in_a_block_is_seen_though_the_host_is_ahead_again_at_the_turn() -> None:
    # Of a head and loss that take long.
    watched = timed(within=LAG + 5)
    watched.readings["turned", 0] = Reading(2 * LAG, 0, 0, 0)
    assert watched.lead(("turned", 0)) > LAG / 2
    assert host_lead(watched, WEIGHED) == 0


def test_the_hosts_time_after_the_blocks_is_the_shorter_ones_where_nothing_waits_there() -> None:
    weighed = passed(("ahead", 0, 0), ("begin", 0, LAG), ("forward", 1, LAG + 1), ("first", 50, 120), ("done", 51, 130))
    for each in (weighed, watched := timed()):
        each.host.update(each.queued)
    assert host_seconds_after(watched, weighed, ("first", 0), 2 * LAG) == 1
    watched.host["done", 0] = watched.host["first", 0] + 0.5
    assert host_seconds_after(watched, weighed, ("first", 0), 2 * LAG) == 0.5
    # The device had got to what comes after them.
    assert host_seconds_after(watched, weighed, ("first", 0), 3) == 0


def test_where_the_host_waits_before_the_first_block_there_is_none() -> None:
    assert host_lead(timed(), WAITED_BEFORE) == 0


SHORT = passed(("ahead", 0, 0), ("begin", 0, 1e-5), ("forward", 1e-5, 3))


@pytest.mark.parametrize("other", [passed(("begin", 0, 0), ("forward", 1, 3)), timed(), SHORT])
def test_where_the_device_did_not_lag_nothing_is_known(other: StepTrace) -> None:
    assert host_lead(timed(), other) == 0


def test_of_a_pass_that_was_not_timed_nothing_is_known() -> None:
    # Where no pass that is timed is like the one that was weighed, its times are taken.
    weighed = passed(
        ("ahead", 0, 0), ("begin", 0, LAG), ("forward", 1, LAG + 1), ("back", 2, LAG + 3), ("done", 3, 130)
    )
    assert host_lead(weighed, weighed) == 0


class Lagging(ExactMeter):
    """A device that is slower than its host by what it is made to lag."""

    asked: ClassVar[list[float]] = []
    behind = 0.0

    def mark(self) -> None:
        super().mark()
        number, seconds = self._instants.pop()
        self._instants.append((number, seconds + self.behind))

    def lag(self, seconds: float) -> None:
        self.asked.append(seconds)
        self.behind += seconds


@pytest.fixture
def _lags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is such a device."""
    monkeypatch.setattr(Lagging, "asked", [])
    monkeypatch.setattr("spillway.profiler.step_trace.meter_of", lambda _: Lagging(0))
    for place in ("spillway.profiler.compile.queues", "spillway.attaching.blocks.queues"):
        monkeypatch.setattr(place, lambda _: True)


def searched(lengths: list[int], *, evaluates: bool = False) -> Profile:
    """What a search has measured in steps of these lengths, in any order."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(16, 16), *layers)
    random_ = random.Random(1)
    with spillway.attach(model, budget="60GiB", blocks=["1", "2", "3"], min_bytes=1) as attached:
        for _ in range(80):
            model(torch.randn(random_.choice(lengths), 16)).square().mean().backward()
            if evaluates:
                model.eval()(torch.randn(8, 16))
                model.train()
            if attached.stage == "active":
                break
        assert attached.stage == "active" and attached.profile is not None
        return attached.profile


@pytest.mark.usefixtures("_lags")
def test_a_search_measures_it_in_the_users_steps_and_has_plans_checked_with_it() -> None:
    profile = searched([8])
    lead = profile.lead_seconds
    assert profile.after.host_seconds > 0
    # That of the pass which was timed, whose device lagged twice.
    assert 0.15 < lead < 0.25
    # A host that seems slow has plans checked more than once.
    assert Lagging.asked[:3] == [0.03, 0.1, 0.1] and set(Lagging.asked[3:]) == {lead}


@pytest.mark.usefixtures("_lags")
def test_of_many_lengths_none_may_be_timed_that_was_weighed() -> None:
    assert searched([8, 16, 24, 32, 40, 48, 56, 64]).lead_seconds < 0.25


@pytest.mark.usefixtures("_lags")
def test_what_a_loop_waits_for_after_an_evaluation_is_not_seen() -> None:
    profile = searched([8], evaluates=True)
    assert profile.lead_seconds == profile.after.host_seconds == 0


def test_it_is_never_less_than_nothing() -> None:
    # The host was behind.
    late = passed(("begin", 0, 0), ("started", 1, 1), ("forward", 1, 1 + LAG), ("turned", 500, 499), ("done", 700, 699))
    assert host_lead(late, WEIGHED) == 0
