"""A host that is slower than its profile says: how much is found, and a plan is made once more."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import spillway
from allocations import count_exactly
from budgets import NAMED, attached_to, budget_of, one_step, search
from spillway import Session
from spillway.attaching import contest
from spillway.attaching import pilot as pilots
from spillway.attaching.pilot import Pilot
from spillway.planning.profile import HostTimes, Profile
from spillway.planning.programs import options_of
from spillway.profiling import compile as compiling
from spillway.profiling import meter
from spillway.profiling.compile import HostSlowdown
from spillway.profiling.watch import Place, Watch, Watched, WatchedCall

LLAMA = Profile.load(Path(__file__).parents[1] / "planning" / "llama_8b_block.json")
HOST = HostTimes(plain=0.001, region=0.005, rerun=0.004, backward=0.003)
PROFILE = replace(LLAMA, kinds=(replace(LLAMA.kinds[0], host=HOST),))
MiB = 1 << 20


@pytest.fixture(autouse=True)
def plans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step here is so slow that torch's own checkpointing is tried."""
    monkeypatch.setattr(pilots, "_SLOW", float("inf"))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(spill_directory=tmp_path) as session:
        yield session


def watched(profile: Profile, plan: spillway.Plan, forward: float, backward: float) -> Watched:
    """A step in which the host took so many times what is predicted; plain blocks take it an hour."""
    host: dict[Place, float] = {}
    now = 0.0
    options = options_of(profile, plan)
    for number, (block, option) in enumerate(zip(plan.blocks, options, strict=True)):
        host["forward", number] = now
        now += 3600.0 if block.plain else forward * sum(task.host_seconds for task in option.forward)
        host["end", number] = now
    for number in reversed(range(len(options))):
        host["back", number] = now
        plain = plan.blocks[number].plain
        now += 3600.0 if plain else backward * sum(task.host_seconds for task in options[number].backward)
    host["first", 0] = now
    calls = [WatchedCall(call.name, "kind", frozenset()) for call in profile.calls]
    readings = dict.fromkeys(host, meter.Reading(0.0, 0, 0, 0))
    return Watched(calls, readings, dict.fromkeys(host, 0), host)


def test_how_slow_it_was_is_told_of_regions_alone() -> None:
    # On so slow a host some blocks are left alone.
    profile = HostSlowdown(12.0, 12.0).told(PROFILE)
    budget = profile.static_bytes + int(0.8 * profile.saved_bytes)
    plan = spillway.plan(profile, budget=budget, hardware="h200")
    assert 0 < sum(block.plain for block in plan.blocks) < len(plan.blocks), "this proves nothing"
    found = HostSlowdown.of(profile, plan, watched(profile, plan, 1.5, 0.5))
    assert found.forward == pytest.approx(1.5) and found.backward == pytest.approx(0.5)
    assert found.matters_to(profile)
    assert not HostSlowdown.of(profile, plan, watched(profile, plan, 1.05, 0.5)).matters_to(profile)
    assert HostSlowdown.most([HostSlowdown(1.0, 3.0), HostSlowdown(2.0, 1.0)]) == HostSlowdown(2.0, 3.0)
    told = found.told(PROFILE).kinds[0].host
    # A backward that went faster than predicted is left as it was.
    assert told == replace(HOST, plain=pytest.approx(0.0015), region=pytest.approx(0.0075))


def test_of_a_faster_host_it_is_told_where_the_device_waits_for_it() -> None:
    kind = PROFILE.kinds[0]
    late, early = (
        replace(PROFILE, kinds=(replace(kind, forward_seconds=HOST.region * factor),)) for factor in (0.9, 1.1)
    )
    assert HostSlowdown(0.8, 1.0).matters_to(late)
    assert not HostSlowdown(0.8, 1.0).matters_to(early)
    assert not HostSlowdown(0.95, 0.5).matters_to(late)
    assert HostSlowdown(1.2, 1.0).matters_to(early)
    faster = replace(HOST, plain=pytest.approx(0.8 * HOST.plain), region=pytest.approx(0.8 * HOST.region))
    assert HostSlowdown(0.8, 0.5).told(late).kinds[0].host == faster


def test_in_backward_the_block_counts_that_waited_least_and_in_forward_the_one_in_the_middle() -> None:
    profile = HostSlowdown(4.0, 4.0).told(PROFILE)
    plan = spillway.plan(profile, budget=profile.static_bytes + int(0.5 * profile.saved_bytes), hardware="h200")
    treated = [number for number, block in enumerate(plan.blocks) if not block.plain]
    assert len(treated) > 2
    seen = watched(profile, plan, 1.5, 1.2)
    # All but one waited for room in the queue, or were late.
    for direction, ends in (("end", treated[:1]), ("back", treated[:-1])):
        for number in ends:
            later = [place for place, at in seen.host.items() if at >= seen.host[direction, number]]
            if direction == "back":
                later.remove(("back", number))
            for place in later:
                seen.host[place] += 1000.0
    found = HostSlowdown.of(profile, plan, seen)
    assert found.forward == pytest.approx(1.5)
    assert found.backward == pytest.approx(1.2)


def test_where_the_host_is_timed_a_pass_begins_on_an_idle_device(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(meter.Meter, "wait", lambda self: waits.append(1))
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    with attached_to(model, "8GiB", session) as attached:
        told = []
        while attached.stage != "holding":
            before = len(waits)
            one_step(model, batch)
            told.append((str(attached.stage), len(waits) - before))
    # The stage is that of the pass that has just been made.
    assert {stage for stage, count in told if count} == {"measuring", "checking"}, told


def test_a_step_of_other_blocks_says_nothing() -> None:
    plan = spillway.plan(PROFILE, budget="1TiB", hardware="h200")
    other = watched(PROFILE, plan, 9.0, 9.0)
    other.calls.pop()
    assert HostSlowdown.of(PROFILE, plan, other) == HostSlowdown()


@pytest.mark.parametrize(("own", "plain"), [(2.0, 2.0), (9.0, 5.0)], ids=["as measured", "no longer than with ours"])
def test_what_the_host_takes_is_what_the_fastest_call_took(
    own: float, plain: float, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "queues", lambda device: True)
    kind = NAMED["mlp"]
    spans = {"forward": 5.0, "again": 6.0, "back": 0.5, "ran": 1.5}

    def host_seconds(self: Watched, since: Place, until: Place) -> float:
        what, number = since
        number = self.reruns[number] if what in ("again", "ran") else number
        return spans.get(what, 0.0) + 0.001 * number

    monkeypatch.setattr(Watched, "host_seconds", host_seconds)
    ran = Watch.block_ran
    monkeypatch.setattr(Watch, "block_ran", lambda self, number, _: ran(self, number, own + 0.001 * number))
    host = spillway.profile(kind.model(), kind.batch(), session=session).kinds[0].host
    # The first call is the fastest. Its backward comes before and after its replay.
    assert host == HostTimes(plain=plain, region=5.0, rerun=6.0, backward=0.5 + 1.5)


def test_of_a_slower_host_fewer_blocks_are_computed_again() -> None:
    budget = PROFILE.static_bytes + int(0.7 * PROFILE.saved_bytes)

    def blocks_again(slowness: HostSlowdown) -> int:
        plan = spillway.plan(slowness.told(PROFILE), budget=budget, hardware="h200")
        assert plan.predicted_peak <= budget
        return sum(block.recomputes for block in plan.blocks)

    assert blocks_again(HostSlowdown(4.0, 4.0)) < blocks_again(HostSlowdown())


def _paced(watched: Watched, numbers: list[int], end: Place) -> HostTimes:
    """A host of the device's own pace, however busy the machine is."""
    forward = statistics.median(watched.seconds(("forward", number), ("end", number)) for number in numbers)
    return HostTimes(plain=0.2 * forward, region=forward, rerun=0.45 * forward, backward=forward)


@pytest.mark.parametrize(
    ("slow", "growing", "plans", "checks"),
    [
        ([], 0, 1, 1),
        ([5.0], 0, 1, 2),
        ([5.0, 5.0], 0, 2, 4),
        ([5.0, 5.0, 5.0], 0, 2, 4),
        # The third does what the second does, and is compared with nothing.
        ([5.0] * 4, 0, 3, 5),
        ([5.0] * 8, 0, 3, 5),
        ([], 3, 1, 4),
    ],
    ids=["as foreseen", "in a step", "slow", "then in a step", "slow again", "slow ever again", "memory was pinned"],
)
def test_for_a_slow_host_a_plan_is_made_once_more_and_another_if_it_is_slow_again(
    slow: list[float], growing: int, plans: int, checks: int, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()
    monkeypatch.setattr(Session, "is_growing", property(lambda self: next(looks) < growing))
    count_exactly(monkeypatch, lambda: 16 * MiB)
    monkeypatch.setattr(compiling, "queues", lambda device: True)
    monkeypatch.setattr(compiling, "_host", _paced)
    monkeypatch.setattr(contest, "_seconds_of", lambda watched: 1.0)
    monkeypatch.setattr(Pilot, "_has_learned", lambda self: False)
    seen = itertools.chain(slow, itertools.repeat(1.0))
    monkeypatch.setattr(HostSlowdown, "of", classmethod(lambda cls, profile, plan, watched: cls(*[next(seen)] * 2)))
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    expected = one_step(kind.model(), batch)
    measured = spillway.profile(model, batch, session=session)
    assert measured.kinds[0].host is not None
    with attached_to(model, budget_of(measured, 0.5) + 3 * MiB, session) as attached:
        stages = search(model, batch, attached, 16)
        assert (stages.count("trying"), stages.count("checking")) == (plans, checks)
        assert all(map(torch.equal, one_step(model, batch), expected))
        assert attached.measured is not None and attached.plan is not None
        assert attached.measured.peak_bytes <= attached.plan.budget + 3 * MiB


@pytest.mark.parametrize(
    ("seconds", "slow", "over", "says"),
    [
        ([3.0, 2.0, 4.0, 1.0], 2, False, ""),
        ([3.0, 2.0, 2.0, 5.0], 2, False, ""),
        ([3.0, 2.0, 4.0, 2.5], 2, False, "was no faster"),
        ([3.0, 2.0], 2, True, "took more than the budget"),
        ([3.0, 2.0, 1.0, 1.5, 0.5, 0.5], 4, False, ""),
        ([3.0, 2.0, 1.0, 1.5, 4.0, 1.2], 4, False, "was no faster"),
    ],
    ids=["faster", "as fast", "slower", "over the budget", "faster and faster", "faster, then slower"],
)
def test_of_two_plans_the_faster_one_is_held(
    seconds: list[float], slow: int, over: bool, says: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_exactly(monkeypatch, lambda: 16 * MiB)
    monkeypatch.setattr(compiling, "queues", lambda device: True)
    seen = itertools.chain([5.0] * slow, itertools.repeat(1.0))
    monkeypatch.setattr(HostSlowdown, "of", classmethod(lambda cls, profile, plan, watched: cls(*[next(seen)] * 2)))
    # All of them count.
    monkeypatch.setattr(Session, "is_growing", property(lambda self: False))
    monkeypatch.setattr(Pilot, "_has_learned", lambda self: False)
    # On a loaded machine both may do the same. They are compared, too.
    numbers = itertools.count()
    monkeypatch.setattr(pilots, "decisions", lambda plan: next(numbers))
    taken = iter(seconds)
    monkeypatch.setattr(contest, "_seconds_of", lambda watched: next(taken, 9.0))
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    expected = one_step(kind.model(), batch)
    measured = spillway.profile(model, batch, session=session)
    budget = budget_of(measured, 0.5) + 3 * MiB
    with attached_to(model, budget, session) as attached:
        pilot = attached._root.pilot
        assert pilot is not None
        own = pilot._budget
        plans: list[str] = []
        stages = []
        while attached.stage != "holding":
            if over and len(set(plans)) == 2 and stages[-1] == "checking":
                # Of the step that has just been made, which is looked at when the next one begins.
                monkeypatch.setattr(pilot, "_budget", 1)
                over = False
            one_step(model, batch)
            monkeypatch.setattr(pilot, "_budget", own)
            stages.append(attached.stage)
            plans += [] if attached.plan is None else [str(attached.plan)]
        made = list(dict.fromkeys(plans))
        assert len(made) == 1 + slow // 2
        assert attached.plan is not None
        assert str(attached.plan) == made[-2 if says else -1]
        notes = [note for note in attached.notes if "another plan" in note]
        assert [says in note for note in notes] == ([True] if says else [])
        # A plan that is gone back to is tried once more: orders have been learned for another one.
        assert stages.count("trying") == len(made) + bool(says)
        assert all(map(torch.equal, one_step(model, batch), expected))
