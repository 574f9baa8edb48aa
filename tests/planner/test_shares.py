"""A budget that is a share of what a step needs that keeps everything, and the curve through several budgets."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import spillway
from spillway import SizeError, UsageError
from spillway.planner.hardware import Hardware
from spillway.planner.plan import uniform_program
from spillway.planner.planner import Point, frontier, make_curve, parse_budget, planning_rates
from spillway.planner.profile import Profile, Static
from spillway.planner.timeline import simulate_program
from spillway.types import Decision

H200 = Hardware.named("h200")
LLAMA = Profile.load(Path(__file__).with_name("llama_8b_block.json"))
SMALL = replace(LLAMA, calls=LLAMA.calls[:3])
WINDOW = 512 << 20


def peak_of_keeping(profile: Profile) -> int:
    return simulate_program(uniform_program(profile, Decision.KEEP), planning_rates(H200, WINDOW)).peak_bytes


def test_a_share_is_of_what_keeping_everything_needs_above_what_is_there_anyway() -> None:
    most = peak_of_keeping(LLAMA)
    # As the solver has it, which chooses from its own menu.
    assert spillway.plan(LLAMA, budget="1TiB", hardware=H200).predicted_peak == most
    assert parse_budget(1.0, LLAMA) == most
    assert parse_budget(0.0, LLAMA) == LLAMA.static_bytes
    half = LLAMA.static_bytes + -(-(most - LLAMA.static_bytes) // 2)
    assert {parse_budget(share, LLAMA) for share in (0.5, "50%", "50.0 %", "0.5", ".5", " 0.50 ")} == {half}
    assert parse_budget("150%", LLAMA) > most
    # What is always there comes on top, and is no part of it.
    larger = replace(LLAMA, static_bytes=LLAMA.static_bytes + (1 << 30))
    assert parse_budget(0.5, larger) == half + (1 << 30)


def test_bytes_are_bytes_as_ever() -> None:
    assert [parse_budget(size, LLAMA) for size in (1, "1", "2KiB", "1.5 KiB")] == [1, 1, 2048, 1536]


@pytest.mark.parametrize("budget", [-0.5, 40e9, float("nan"), float("inf"), "-5%", "half", True, None, "10.5.1"])
def test_what_is_neither_is_refused(budget: object) -> None:
    with pytest.raises(SizeError, match=r"budget: got .*expected"):
        parse_budget(budget, LLAMA)


def test_a_plan_within_a_share_has_that_budget() -> None:
    plan = spillway.plan(SMALL, budget="60%", hardware=H200)
    assert plan.budget == parse_budget(0.6, SMALL)
    assert SMALL.static_bytes < plan.predicted_peak <= plan.budget
    assert (
        plan
        == spillway.plan(SMALL, budget=0.6, hardware=H200)
        == spillway.plan(SMALL, budget=plan.budget, hardware=H200)
    )


def test_the_longest_size_is_sought_for_bytes_and_not_for_a_share() -> None:
    with pytest.raises(SizeError, match="budget: got '50%'"):
        spillway.longest(lambda size: pytest.fail("nothing is run"), budget="50%")


def step_of(decision: Decision) -> Point:
    timeline = simulate_program(uniform_program(SMALL, decision), planning_rates(H200, WINDOW))
    return Point(timeline.peak_bytes, timeline.seconds)


@cache
def curve() -> tuple[tuple[Point, ...], tuple[tuple[int, int], ...]]:
    told: list[tuple[int, int]] = []
    found = make_curve(
        SMALL,
        H200,
        window=WINDOW,
        allow={"keep", "host", "recompute"},
        points=4,
        on_point=lambda done, all_of_them: told.append((done, all_of_them)),
    )
    return found, tuple(told)


def test_a_curve_goes_from_the_least_step_to_the_one_that_keeps_everything() -> None:
    found, told = curve()
    assert told == tuple((number, told[-1][1]) for number in range(1, told[-1][1] + 1))
    assert 2 <= len(found) <= len(told) <= 4
    with pytest.raises(spillway.BudgetError) as error:
        spillway.plan(SMALL, budget=1, hardware=H200, allow={"keep", "host", "recompute"})
    assert found[0].peak_bytes == error.value.least
    assert found[-1] == step_of(Decision.KEEP) == Point(peak_of_keeping(SMALL), found[-1].seconds)
    seconds = [point.seconds for point in found]
    assert seconds == sorted(seconds, reverse=True)


def test_checkpointing_keeps_inputs_and_computes_all_else_again() -> None:
    keep, checkpoint = step_of(Decision.KEEP), step_of(Decision.RECOMPUTE)
    program = uniform_program(SMALL, Decision.RECOMPUTE)
    # Each block's forward runs once more, and nothing leaves.
    assert not [task for task in program.tasks if task.sends]
    inputs = sum(value.nbytes for value in SMALL.kinds[0].values if value.is_input)
    assert checkpoint.seconds > keep.seconds
    assert SMALL.static_bytes + 3 * inputs < checkpoint.peak_bytes < keep.peak_bytes
    plan = spillway.plan(SMALL, budget=checkpoint.peak_bytes, hardware=H200)
    assert plan.predicted_seconds <= checkpoint.seconds


def test_a_curve_leaves_out_what_the_host_has_no_room_for() -> None:
    found = make_curve(SMALL, H200, window=WINDOW, host_budget=0, allow={"keep", "host"}, points=2)
    assert found == (step_of(Decision.KEEP),)


def test_of_points_only_those_that_are_the_best_for_some_size_are_drawn() -> None:
    best = (Point(1, 3.0), Point(2, 2.0), Point(4, 1.0))
    assert frontier([Point(3, 2.0), *reversed(best), Point(2, 2.5), Point(5, 1.0)]) == best


STATIC = Static(weights=LLAMA.static_bytes - 10, gradients=4, optimizer=3, other=3)


def test_a_profile_says_what_its_static_bytes_are_made_of_or_nothing() -> None:
    told = replace(LLAMA, static=STATIC)
    assert Profile.from_json(told.to_json()) == told
    assert Profile.from_json(LLAMA.to_json()).static is None


@pytest.mark.parametrize(
    ("static", "match"),
    [
        ({"weights": 1, "gradients": 1, "optimizer": 1, "other": 1}, "static: 4 bytes, but static_bytes are"),
        ({"weights": 1, "gradients": 1, "other": 1}, "static.optimizer"),
        ({"weights": -1, "gradients": 1, "optimizer": 1, "other": 1}, "static.weights"),
    ],
)
def test_shares_that_do_not_add_up_are_refused(static: dict[str, int], match: str) -> None:
    file = {**json.loads(LLAMA.to_json()), "static": static}
    with pytest.raises(UsageError, match=match):
        Profile.from_json(json.dumps(file))
