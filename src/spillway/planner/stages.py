"""Plans for the stages of a pipeline that lie on one rank.

NOTE [ One budget for the chunks of a rank ]

A chunk is a micro-batch in one stage. The schedule defines how many chunks of a rank wait for their backward, and their
order. A stage is profiled by one of its chunks, as a model is, and each block does the same for all chunks. A rank is
one problem (NOTE [ Turns ] in ``tasks.py``), with one budget, one in-flight limit and one PCIe bandwidth. Predictions
ignore bubbles, which only leave more time for copies.

A chunk also holds tensors that were saved outside of blocks, from its forward to its backward, and those that a loss
has saved. The profile has these between the two; here they belong to the forward. A chunk leaves nothing behind but
gradients, once.

NOTE [ Long steps ]

A step of many micro-batches repeats itself. Plans are made for the first of them: as many as it takes to reach the most
waiting chunks, and as many again, so that the pace of the middle counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spillway.planner.hardware import Hardware
from spillway.planner.plan import ALL, Plan, part_of, plan_of, uniform_program
from spillway.planner.planner import best_of, planning_rates, problem_of, refined, windows_of
from spillway.planner.profile import Profile
from spillway.planner.tasks import Part, Turn
from spillway.types import Decision


@dataclass(frozen=True, slots=True)
class StageProfile:
    """The profile of one chunk of a stage."""

    index: int
    """The stage's place in the pipeline."""
    profile: Profile
    gradient_bytes: int
    """Gradients of all of the stage's parameters."""


def make_stage_plans(
    stages: Sequence[StageProfile],
    turns: Sequence[Turn],
    hardware: Hardware,
    *,
    static_bytes: int,
    budget: int,
    window: int,
    may_grow: bool = False,
    host_budget: int | None = None,
    disk_budget: int | None = None,
    allow: Collection[str] = ALL,
) -> list[Plan]:
    """A plan for each stage, so that their rank's step is within a budget and as short as it can be.

    The predictions of all of them are those of the rank. The part of a turn is a stage's place in ``stages``. When the
    rank's step begins, ``static_bytes`` are in use. The limits are those of
    :func:`~spillway.planner.planner.make_plan`, in bytes.

    Raises:
        BudgetError: if no plan is within the budget.
    """
    few, profiles = shortened(turns), [stage.profile for stage in stages]
    rates = planning_rates(hardware, window)
    limits: dict[str, Any] = {"budget": budget, "host_budget": host_budget, "disk_budget": disk_budget, "allow": allow}
    alone = [problem_of(profile, rates, **limits) for profile in profiles]
    problem = replace(
        alone[0],
        static_bytes=static_bytes,
        parts=tuple(map(chunk_of, stages)),
        names=tuple(f"stage {stage.index}, {call.name}" for stage in stages for call in stage.profile.calls),
        options=tuple(options for each in alone for options in each.options),
        late=max(each.late for each in alone),
        turns=tuple(few),
    )
    sizes = windows_of(profiles, window, may_grow=may_grow, available=budget - static_bytes)
    best = refined(best_of(problem, sizes))
    # The turns that were left out take as long as the others.
    times = len(turns) / len(few)
    plans = [plan_of(profile, best, part=part) for part, profile in enumerate(profiles)]
    return [
        replace(
            plan,
            predicted_seconds=plan.predicted_seconds * times,
            stall_seconds=plan.stall_seconds * times,
            bound_seconds=plan.bound_seconds if len(few) == len(turns) else None,
        )
        for plan in plans
    ]


def chunk_of(stage: StageProfile) -> Part:
    """The tasks around the blocks of a stage. See NOTE [ One budget for the chunks of a rank ]."""
    # In the profile, a chunk's forward comes before the bytes that it holds outside of blocks.
    part, held = part_of(stage.profile), stage.profile.held_bytes
    (before,), (middle,), (after,) = part.before, part.middle, part.after
    tasks = uniform_program(stage.profile, Decision.KEEP).tasks
    left = sum(task.change_bytes for task in tasks)
    of_blocks = sum(task.gradient_bytes for task in tasks)
    before = replace(before, change_bytes=before.change_bytes + held)
    between = max(middle.peak_bytes - held, 0)
    middle = replace(middle, peak_bytes=between, change_bytes=middle.change_bytes - held)
    after = replace(
        after,
        change_bytes=after.change_bytes + stage.gradient_bytes - left,
        gradient_bytes=max(stage.gradient_bytes - of_blocks, 0),
    )
    before, middle, after = (
        replace(task, name=f"stage {stage.index}, {task.name}") for task in (before, middle, after)
    )
    return Part(part.blocks, (before,), (middle,), (after,), part.late)


def shortened(turns: Sequence[Turn]) -> list[Turn]:
    """The turns of the micro-batches that are planned for. See NOTE [ Long steps ]."""
    chunks = 1 + max(turn.chunk for turn in turns)
    most = _most_waiting(turns)
    for count in range(1, chunks):
        few = [turn for turn in turns if turn.chunk < count]
        if _most_waiting(few) == most:
            return [turn for turn in turns if turn.chunk < 2 * count]
    return list(turns)


def covers(turns: Sequence[Turn], others: Sequence[Turn]) -> bool:
    """Whether at most as many chunks wait for their backward in other turns: a plan for these does for those."""
    most = _most_waiting(turns)
    return all(any(each <= known for known in most) for each in _most_waiting(others))


def _most_waiting(turns: Sequence[Turn]) -> list[Counter[int]]:
    """The numbers of waiting chunks of each part, at times when no other time has as many of each."""
    waiting: Counter[int] = Counter()
    found: list[Counter[int]] = []
    for turn in turns:
        waiting[turn.part] += -1 if turn.is_backward else 1
        if not any(waiting <= other for other in found):
            found = [other for other in found if not other <= waiting] + [+waiting]
    return sorted(found, key=lambda counts: sorted(counts.items()))
