"""Which of two plans is faster is told by steps of the same work."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import pytest

from spillway.attaching.contest import Contest, Timed, decisions
from spillway.attaching.peers import Peers
from spillway.planning.plan import BlockPlan, OperatorPlan, Plan
from spillway.profiling.meter import Reading
from spillway.profiling.watch import Place, Watched, WatchedCall
from spillway.records import Decision

ALONE = Peers()
SMALL, LARGE = ("small",) * 3, ("large",) * 3


def step(seconds: float, kinds: tuple[Hashable, ...] = SMALL, *, pause: float = 0.0, first: bool = False) -> Watched:
    """A step that takes so long, and what the user's loop does before the next one."""
    ends: dict[Place, float] = {("begin", 0): 1.0, ("back", 0): 1.0 + seconds, ("done", 0): 1.0 + seconds + pause}
    if first:
        # It needs a gradient of its input.
        ends |= {("first", 0): 1.0 + seconds, ("back", 0): 1.0 + seconds / 2}
    readings = {place: Reading(at, 0, 0, 0) for place, at in ends.items()}
    calls = [WatchedCall(f"layers.{number}", kind, frozenset()) for number, kind in enumerate(kinds)]
    return Watched(calls, readings, {}, {})


def held(rival: list[Watched], other: list[Watched], *, odd: int = 0) -> str:
    """Which plan is held after these steps, the first ``odd`` of the other's being odd."""
    before = Contest()
    for each in rival:
        before.saw(each, ALONE, is_odd=False)
    contest = Contest(before.timed)
    for number, each in enumerate(other):
        assert not contest.is_over
        contest.saw(each, ALONE, is_odd=number < odd)
    assert contest.is_over
    return "rival" if contest.is_lost else "other"


@pytest.mark.parametrize("first", [False, True])
def test_the_faster_of_both_is_held_each_by_its_faster_step(first: bool) -> None:
    steps = [[step(each, first=first) for each in some] for some in ((3.0, 2.0), (4.0, 1.0), (4.0, 2.5), (2.0, 5.0))]
    assert [held(steps[0], each) for each in steps[1:]] == ["other", "rival", "other"]


def test_steps_of_other_sizes_say_nothing() -> None:
    rival = [step(2.0, LARGE), step(1.0), step(2.1, LARGE)]
    # By its work it is slower.
    assert held(rival, [step(1.4), step(2.8, LARGE), step(1.4), step(2.7, LARGE)]) == "rival"
    assert held(rival, [step(1.4), step(1.9, LARGE), step(1.8, LARGE)]) == "other"


def test_odd_steps_say_nothing() -> None:
    assert held([step(2.0)] * 2, [step(3.0), step(3.0), step(1.9), step(1.9)], odd=2) == "other"


def test_what_is_done_between_steps_says_nothing() -> None:
    assert held([step(2.0)] * 2, [step(1.9, pause=5.0)] * 2) == "other"
    assert held([step(2.0, pause=5.0)] * 2, [step(2.1)] * 2) == "rival"


def test_where_too_few_can_be_compared_the_one_that_knows_more_is_held() -> None:
    assert held([step(2.0)], [step(9.0, LARGE)] * 5) == "other"
    assert held([], [step(9.0)] * 2) == "other"
    assert Contest(Timed(None, 0.0)).is_lost is False


def test_ranks_count_the_same_steps_and_the_slowest_one() -> None:
    class Two(Peers):
        """The other rank is a second slower, and odd in its first step."""

        turn = 0

        def share(self, what, make):  # type: ignore[no-untyped-def]
            mine = make()
            if what == "other":
                self.turn += 1
                return [mine, self.turn == 1]
            return [mine, mine + 1]

    contest, two = Contest(Timed(SMALL, 2.5)), Two()
    for _ in range(3):
        contest.saw(step(2.0), two, is_odd=False)
    assert contest.timed == Timed(SMALL, 3.0)
    assert contest.is_over and contest.is_lost


def plan_of(**changes: object) -> Plan:
    operator = OperatorPlan(3, "aten::mm.default", Decision.KEEP, 64, "because")
    block = BlockPlan("layers.0", False, Decision.RECOMPUTE, (operator,), 64, 0, 0.1)
    plan = Plan("Model", "cuda", 100, 10, 90, 1.0, 0.0, "backward", 0, 0, (block,), "search")
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def test_plans_of_the_same_decisions_are_the_same_whatever_is_foreseen_of_them() -> None:
    plan = plan_of()
    (block,) = plan.blocks
    (operator,) = block.operators
    same = [
        plan_of(bound_seconds=0.5, predicted_seconds=2.0),
        plan_of(blocks=(dataclasses.replace(block, rerun_seconds=0.2),)),
        plan_of(blocks=(dataclasses.replace(block, operators=(dataclasses.replace(operator, reason="why"),)),)),
    ]
    others = [
        plan_of(window=11),
        plan_of(ahead=5),
        plan_of(optimizer_fraction=0.5),
        plan_of(blocks=(dataclasses.replace(block, recomputes=False),)),
        plan_of(blocks=(dataclasses.replace(block, plain=True),)),
        plan_of(blocks=(dataclasses.replace(block, inputs=Decision.KEEP),)),
        plan_of(blocks=(dataclasses.replace(block, operators=()),)),
    ]
    assert {decisions(each) for each in same} == {decisions(plan)}
    assert all(decisions(each) != decisions(plan) for each in others)
