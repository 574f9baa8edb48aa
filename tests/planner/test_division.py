"""How much of an optimizer is on the host, as a plan says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spillway.errors import BudgetError
from spillway.planner.hardware import Hardware
from spillway.planner.plan import Plan, program_of
from spillway.planner.planner import divided, make_plan, planning_rates
from spillway.planner.profile import OptimizerProfile, Profile
from spillway.planner.timeline import simulate_program

GiB = 2**30
H200 = Hardware.named("h200")
PLAIN = replace(
    Profile.load(Path(__file__).parent / "llama_8b_block.json"),
    calls=Profile.load(Path(__file__).parent / "llama_8b_block.json").calls[:4],
)
# The host takes half a second for all of it, of which a tenth is hidden.
OPTIMIZER = OptimizerProfile(
    state_bytes=10 * GiB, gradient_bytes=2 * GiB, step_bytes=4 * GiB, host_seconds=0.5, stall_seconds=0.45
)
PROFILE = replace(PLAIN, optimizer=OPTIMIZER, after=replace(PLAIN.after, seconds=PLAIN.after.seconds + 0.45))


def planned(budget: int, profile: Profile = PROFILE) -> Plan:
    return make_plan(profile, H200, budget=budget, window="512MiB", allow={"keep", "host", "recompute"})


def least() -> int:
    with pytest.raises(BudgetError) as caught:
        planned(1)
    return caught.value.least


def test_with_room_for_all_of_it_nothing_is_on_the_host() -> None:
    assert planned(100 * GiB).optimizer_fraction == 0.0


def test_with_the_least_budget_all_of_it_is() -> None:
    assert planned(least()).optimizer_fraction == 1.0


@pytest.mark.long
def test_between_a_part_of_it_is_and_the_peak_is_within_the_budget() -> None:
    fractions = []
    for room in range(0, 25, 4):
        budget = least() + room * GiB
        plan = planned(budget)
        assert plan.predicted_peak <= budget
        assert plan.optimizer_fraction is not None
        fractions.append(plan.optimizer_fraction)
        part = divided(PROFILE, plan.optimizer_fraction, H200)
        simulated = simulate_program(program_of(part, plan), planning_rates(H200, plan.window))
        assert simulated.peak_bytes == plan.predicted_peak
        assert simulated.seconds == pytest.approx(plan.predicted_seconds, rel=1e-12)
    assert fractions == sorted(fractions, reverse=True)
    assert {0.25, 0.5, 0.75} & set(fractions)


@pytest.mark.long
def test_it_is_never_slower_than_with_all_of_it_on_the_host() -> None:
    for room in (0, 2, 8, 16):
        budget = least() + room * GiB
        alone = planned(budget, replace(PROFILE, optimizer=None))
        assert planned(budget).predicted_seconds <= alone.predicted_seconds


def test_an_optimizer_that_is_hidden_stays_on_the_host() -> None:
    hidden = replace(OPTIMIZER, stall_seconds=0.0)
    assert planned(100 * GiB, replace(PLAIN, optimizer=hidden)).optimizer_fraction == 1.0


def test_what_is_on_the_device_is_counted() -> None:
    part = divided(PROFILE, 0.25, H200)
    assert part.static_bytes == PROFILE.static_bytes + 0.75 * OPTIMIZER.state_bytes
    gradients = sum(part.kinds[call.kind].backward_change_bytes for call in part.calls)
    before = sum(PROFILE.kinds[call.kind].backward_change_bytes for call in PROFILE.calls)
    assert gradients - before == 0.75 * OPTIMIZER.gradient_bytes
    assert PROFILE.after.change_bytes - part.after.change_bytes == 0.75 * OPTIMIZER.gradient_bytes
    assert part.after.peak_bytes - PROFILE.after.peak_bytes == 0.75 * OPTIMIZER.step_bytes
    # 0.125 s of work, of which 0.05 are hidden.
    waited = 0.125 - 0.05
    stepped = (2 * 0.75 * OPTIMIZER.state_bytes + 3 * 0.75 * OPTIMIZER.gradient_bytes) / H200.memory_bandwidth
    assert part.after.seconds == pytest.approx(PLAIN.after.seconds + waited + stepped)


def test_without_an_optimizer_nothing_is_said_of_it() -> None:
    plan = planned(100 * GiB, PLAIN)
    assert plan.optimizer_fraction is None
    assert "optimizer" not in str(plan)


def test_a_plan_says_it_in_words_and_in_its_file() -> None:
    plan = planned(100 * GiB)
    assert "optimizer: 0% of it on the CPU" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
