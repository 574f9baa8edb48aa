"""From profiles and plans to programs and problems, and from solutions to plans."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from spillway.errors import UsageError
from spillway.planning.menu import ALL, menu
from spillway.planning.plan import BlockPlan, Plan, planned_block
from spillway.planning.profile import BlockProfile, Outside, Profile
from spillway.planning.solver import Solution
from spillway.planning.tasks import Option, Part, Phase, Problem, Program, Rates, Task
from spillway.planning.treatment import treat
from spillway.planning.trials import LATE
from spillway.records import Decision

ANY_RATES = Rates(1.0, 1.0, 1.0, 1.0, 1)
"""Of steps in which nothing leaves."""


def kept_program(profile: Profile) -> Program:
    """The step that keeps everything."""
    return _uniform(profile, inputs=Decision.KEEP, others=Decision.KEEP)


def checkpointed_program(profile: Profile) -> Program:
    """The step that keeps the inputs of blocks, and computes all else again."""
    return _uniform(profile, inputs=Decision.KEEP, others=Decision.RECOMPUTE)


def check_allow(allow: object) -> None:
    """Raise :class:`~spillway.errors.UsageError` for what does not say what may be done."""
    if isinstance(allow, str) or not isinstance(allow, Collection) or not allow or not set(allow) <= ALL:
        raise UsageError(f"allow: got {allow!r}, expected a collection of at least one of {sorted(ALL)!r}")


def problem_of(
    profile: Profile,
    rates: Rates,
    *,
    budget: int,
    host_budget: int | None = None,
    disk_budget: int | None = None,
    allow: Collection[str] = ALL,
) -> Problem:
    """What there is to solve: each block with its options."""
    check_allow(allow)
    menus: list[tuple[Option, ...]] = [menu(kind, min_bytes=profile.min_bytes, allow=allow) for kind in profile.kinds]
    return Problem(
        static_bytes=profile.static_bytes,
        parts=(part_of(profile),),
        names=tuple(call.name for call in profile.calls),
        options=tuple(menus[call.kind] for call in profile.calls),
        rates=rates,
        budget=budget,
        host_budget=host_budget,
        disk_budget=disk_budget,
        late=late_of([profile]),
        lead=profile.lead_seconds,
    )


def late_of(profiles: Iterable[Profile]) -> float:
    """See NOTE [ A host that is late ] in ``trials.py``."""
    return LATE if any(kind.host is not None for profile in profiles for kind in profile.kinds) else 1.0


def plan_of(profile: Profile, problem: Problem, solution: Solution, *, part: int = 0) -> Plan:
    """A solution in words: what it says of one part, whose profile is given."""
    timeline = solution.timeline
    options = [problem.options[block][solution.chosen[block]] for block in problem.blocks_of(part)]
    return Plan(
        model=profile.model,
        device=profile.device,
        budget=problem.budget,
        window=problem.rates.window,
        ahead=problem.rates.ahead,
        predicted_peak=timeline.peak_bytes,
        predicted_seconds=timeline.seconds,
        stall_seconds=timeline.stall_seconds,
        peak_task=timeline.peak_task,
        host_bytes=timeline.host_bytes,
        disk_bytes=timeline.disk_bytes,
        blocks=tuple(
            planned_block(call.name, profile.kinds[call.kind], option)
            for call, option in zip(profile.calls, options, strict=True)
        ),
        method=solution.method,
        bound_seconds=solution.bound_seconds,
    )


def program_of(profile: Profile, plan: Plan) -> Program:
    """The step that a plan makes of a profile, :func:`divided` where it has an optimizer.

    Raises:
        UsageError: if the plan is of another model.
    """
    return _program_of(profile, options_of(profile, plan))


def options_of(profile: Profile, plan: Plan) -> tuple[Option, ...]:
    """What a plan does with each call of a block.

    Raises:
        UsageError: if the plan is of another model.
    """
    if [block.name for block in plan.blocks] != [call.name for call in profile.calls]:
        raise UsageError(
            f"plan: got one for {plan.model} with {len(plan.blocks)} blocks, expected the {len(profile.calls)} of the "
            f"profile of {profile.model}; make a plan of this profile"
        )
    return tuple(
        treat(
            profile.kinds[call.kind],
            _decisions(profile.kinds[call.kind], block),
            min_bytes=profile.min_bytes,
        )
        for call, block in zip(profile.calls, plan.blocks, strict=True)
    )


def _uniform(profile: Profile, *, inputs: Decision, others: Decision) -> Program:
    """The step that does one thing with all inputs of blocks, and one with all that they make."""
    kinds = [
        treat(kind, [inputs if value.is_input else others for value in kind.values], min_bytes=profile.min_bytes)
        for kind in profile.kinds
    ]
    return _program_of(profile, [kinds[call.kind] for call in profile.calls])


def _program_of(profile: Profile, options: Sequence[Option]) -> Program:
    return Problem(
        static_bytes=profile.static_bytes,
        parts=(part_of(profile),),
        names=tuple(call.name for call in profile.calls),
        options=tuple((option,) for option in options),
        rates=ANY_RATES,
        budget=0,
        lead=profile.lead_seconds,
    ).program([0] * len(options))


def _decisions(block: BlockProfile, planned: BlockPlan) -> list[Decision]:
    """For each value of a block, what its plan says."""
    rest = Decision.KEEP if planned.plain or not planned.recomputes else Decision.RECOMPUTE
    decisions = [planned.inputs if value.is_input else rest for value in block.values]
    for each in planned.operators:
        if each.place >= len(block.operators) or block.operators[each.place].name != each.operator:
            raise UsageError(
                f"plan: got {each.operator} as operator {each.place} of {planned.name!r}, which is another one in the "
                f"profile, expected a plan of this profile"
            )
        for number in block.operators[each.place].makes:
            decisions[number] = each.decision
    return decisions


def part_of(profile: Profile) -> Part:
    """What is around its blocks."""
    return Part(
        len(profile.calls),
        before=(outside_task("before the blocks", profile.before),),
        middle=(outside_task("head and loss", profile.middle),),
        after=(outside_task("after the blocks", profile.after),),
        late=() if profile.late is None else (outside_task("head and loss", profile.late),),
    )


def outside_task(name: str, outside: Outside) -> Task:
    """What is done outside of blocks."""
    return Task(
        name,
        Phase.OUTSIDE,
        outside.seconds,
        peak_bytes=outside.peak_bytes,
        change_bytes=outside.change_bytes,
        host_seconds=outside.host_seconds,
    )
