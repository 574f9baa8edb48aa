"""Plans of the stages of a rank: what its chunks come to in bytes, and that no simple way is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

from spillway import BudgetError
from spillway.planner.block_tasks import make_option
from spillway.planner.hardware import Hardware
from spillway.planner.plan import Plan, uniform_program
from spillway.planner.planner import StageProfile, chunk_of, make_stage_plans, planning_rates, shortened
from spillway.planner.profile import Profile
from spillway.planner.tasks import Option, Problem, Program, Streamed, Turn
from spillway.planner.timeline import Timeline, simulate_program
from spillway.types import Decision

FOUND = Profile.load(Path(__file__).with_name("llama_8b_block.json"))
"""16 blocks of an 8B Llama of 8192 tokens, in bfloat16. Their gradients were there."""
GRADIENTS = 416 << 20
LLAMA = replace(FOUND, kinds=(replace(FOUND.kinds[0], backward_change_bytes=GRADIENTS),))
H200 = Hardware.named("h200")
STATIC, WINDOW = 20 << 30, 512 << 20
HELD = 100 << 20


def stage(blocks: int, index: int = 0) -> StageProfile:
    """So many of its blocks, and an embedding whose gradient is as large as two of theirs."""
    profile = replace(LLAMA, calls=LLAMA.calls[:blocks], held_bytes=HELD)
    return StageProfile(index, profile, (blocks + 2) * GRADIENTS)


def one_forward_one_backward(chunks: int, most: int, part: int = 0) -> list[Turn]:
    turns = []
    for number in range(chunks + most - 1):
        turns += [Turn(part, number)] * (number < chunks)
        turns += [Turn(part, number - most + 1, is_backward=True)] * (number >= most - 1)
    return turns


def uniform(stages: Sequence[StageProfile], turns: Sequence[Turn], decision: Decision) -> Program:
    """The step that does the same with all that there is, but for the inputs of what is computed again."""
    options: list[tuple[Option, ...]] = []
    for each in stages:
        block = each.profile.kinds[0]
        inputs = Decision.KEEP if decision is Decision.RECOMPUTE else decision
        decisions = [inputs if value.is_input else decision for value in block.values]
        options += [(make_option(block, decisions, min_bytes=1 << 20),)] * len(each.profile.calls)
    parts = tuple(map(chunk_of, stages))
    names = tuple(map(str, range(len(options))))
    rates = planning_rates(H200.shared_by(4), WINDOW)
    extra, streamed = (0,) * len(options), (Streamed(),) * len(options)
    problem = Problem(STATIC, parts, names, tuple(options), rates, 0, extra, streamed, turns=tuple(turns))
    return problem.program([0] * len(options))


def simulated(program: Program) -> Timeline:
    return simulate_program(program, planning_rates(H200.shared_by(4), WINDOW))


@cache
def planned(stages: tuple[StageProfile, ...], turns: tuple[Turn, ...], budget: int) -> list[Plan]:
    allow = {"keep", "host", "recompute"}
    return make_stage_plans(
        stages, turns, H200.shared_by(4), static_bytes=STATIC, budget=budget, aim=budget, window=WINDOW, allow=allow
    )


def test_chunks_leave_gradients_behind_once_and_what_waits_is_held_by_each() -> None:
    turns = one_forward_one_backward(4, 3)
    tasks = uniform([stage(2)], turns, Decision.KEEP).tasks
    # Of a forward: before the blocks, and two blocks; of a backward: between, two blocks, and after them.
    levels = list(accumulate((task.change_bytes for task in tasks), initial=0))
    sizes = {False: 3, True: 4}
    ends = list(accumulate((sizes[turn.is_backward] for turn in turns), initial=0))
    assert ends[-1] == len(tasks)
    alone = uniform_program(stage(2).profile, Decision.KEEP).tasks
    each = sum(task.change_bytes for task in alone[:3]) + HELD
    found = [levels[end] for end in ends]
    gradients = 4 * GRADIENTS
    waiting = [0, 1, 2, 3, 2, 3, 2, 1, 0]
    assert found == [count * each + gradients * (place >= 4) for place, count in enumerate(waiting)]
    # The same bytes of a chunk on its way through, wherever they are counted.
    between = [task for task in tasks if task.name == "stage 0, head and loss"]
    assert {task.change_bytes for task in between} == {LLAMA.middle.change_bytes - HELD}
    assert {task.peak_bytes for task in between} == {LLAMA.middle.peak_bytes - HELD}


def test_one_chunk_is_one_pass() -> None:
    only = replace(stage(16), profile=replace(stage(16).profile, held_bytes=0))
    chunk = uniform([only], one_forward_one_backward(1, 1), Decision.KEEP)
    alone = simulated(replace(uniform_program(LLAMA, Decision.KEEP), static_bytes=STATIC))
    assert simulated(chunk).seconds == pytest.approx(alone.seconds)
    # All but the gradients of what is outside, which are there in the end.
    assert simulated(chunk).peak_bytes == alone.peak_bytes


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
@pytest.mark.covered
def test_plans_are_within_their_budget_and_no_simple_way_within_it_is_better(most: int, share: float) -> None:
    stages, turns = (stage(4),), tuple(one_forward_one_backward(2 * most, most))
    ways = [Decision.KEEP, Decision.RECOMPUTE, Decision.OFFLOAD_HOST]
    simple = [simulated(uniform(stages, turns, way)) for way in ways]
    least = min(timeline.peak_bytes for timeline in simple)
    budget = int(least + share * (simple[0].peak_bytes - least))
    (plan,) = planned(stages, turns, budget)
    assert plan.predicted_peak <= budget
    for timeline in simple:
        assert timeline.peak_bytes > budget or plan.predicted_seconds <= timeline.seconds * 1.0001
    # Half as good as keeping all, at least, as checkpointing is at the least budget.
    assert simple[0].seconds <= plan.predicted_seconds < simple[1].seconds


def test_two_stages_share_a_budget_and_have_their_own_plans() -> None:
    stages = (stage(4, 0), stage(4, 2))
    # Of the first, four chunks wait; of the second, one at a time.
    turns = (
        *one_forward_one_backward(4, 4)[:-1],
        *one_forward_one_backward(4, 1, part=1),
        Turn(0, 3, is_backward=True),
    )
    keep = simulated(uniform(stages, turns, Decision.KEEP)).peak_bytes
    budget = STATIC + (keep - STATIC) * 6 // 10
    first, second = planned(stages, turns, budget)
    assert [block.name for block in first.blocks] == [f"layers.{number}" for number in range(4)]
    assert first.predicted_peak == second.predicted_peak <= budget
    assert first.peak_task.startswith("stage ")
    # A byte of the first is there four times.
    assert sum(block.kept_bytes for block in first.blocks) < sum(block.kept_bytes for block in second.blocks)
    with pytest.raises(BudgetError):
        planned(stages, turns, STATIC)


def test_a_long_step_is_planned_for_its_first_chunks() -> None:
    long, short = one_forward_one_backward(64, 4), one_forward_one_backward(8, 4)
    assert shortened(long) == short and shortened(short) == short
    every = [*(Turn(0, number) for number in range(6)), *(Turn(0, number, is_backward=True) for number in range(6))]
    assert shortened(every) == every
    # More wait in the middle than in the beginning.
    late = [*one_forward_one_backward(3, 1), *(turn._replace(chunk=turn.chunk + 3) for turn in short)]
    assert shortened(late) == late
    both = [each for turn in short for each in (turn, turn._replace(part=1))]
    twice = [each for turn in long for each in (turn, turn._replace(part=1))]
    assert shortened(twice) == both
    budget = 32 << 30
    (few,), (many,) = planned((stage(4),), tuple(short), budget), planned((stage(4),), tuple(long), budget)
    assert many.blocks == few.blocks and many.predicted_peak == few.predicted_peak
    assert many.predicted_seconds == pytest.approx(8 * few.predicted_seconds)
