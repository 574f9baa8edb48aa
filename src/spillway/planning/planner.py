"""From a profile and a budget to a plan.

NOTE [ How much of an optimizer is on the host ]

Where a profile has an optimizer, each fraction of it makes another profile: the part on the device adds its state to
what is always there, its gradients from the end of its blocks' backward to the step, and takes its step's time of the
device's memory; the part on the host is waited for as far as it takes longer than what hides it. What hides it is what
hid it when all of it was there. All, none and some parts of it are solved for, and the fastest step counts.

NOTE [ How large a window ]

A smaller window leaves more memory to other things; with a larger one more can be on its way, and what is waited for
comes earlier. Which is better hangs on the budget, and is found by trying. What fills a window leaves alone, and what
comes after it waits. So where a window may grow, it is made to hold one, two and three of the largest tensors: of a
Llama-8B's MLP three are saved one after the other, and with room for all of them a step within checkpointing's peak is
1 % (32768 tokens) and 1.5 % (8192) shorter by simulation than with twice and four times 512 MiB. Four gave no more.

What is fetched ahead takes memory where there is the least of it, in backward. So with the best window it is tried
whether three quarters or half of it are enough there: of 32768 tokens that is another 1 %.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeAlias

from spillway.errors import BudgetError, SizeError, UsageError
from spillway.planning.hardware import Hardware
from spillway.planning.menu import ALL, menu
from spillway.planning.plan import BlockPlan, Plan, planned_block
from spillway.planning.profile import BlockProfile, Outside, Profile
from spillway.planning.relaxation import Relaxed
from spillway.planning.solver import Solution, bound_of, least, solve
from spillway.planning.tasks import Option, Part, Phase, Problem, Program, Rates, Task
from spillway.planning.timeline import simulate_program
from spillway.planning.treatment import treat
from spillway.records import Decision
from spillway.units import parse_bytes, parse_share

_USABLE = 0.95
"""A plan that needs all of a link waits for each irregularity: this share of it is planned with."""
_SECONDS = 0.8
"""What solving may take, of work, for each window."""
_AHEAD = (0.75, 0.5)
"""Of a window, so much is fetched ahead, where that is better."""
_PARTS = 4
"""Of an optimizer, so many parts are on the host or not."""
MIN_WINDOW = 32 << 20
_MOST_SLACK = 64 << 20
_MOST_SHARE = 10.0
"""Of what a step needs that keeps everything. A larger one was meant as something else."""
_Windows: TypeAlias = tuple[int, int | None]
"""Bytes that may be leaving, and bytes that may be fetched ahead; ``None``: as many."""
_FRACTION = re.compile(r"\s*(\d+\.\d*|\.\d+)\s*")
"""A number that is no whole one, with no unit."""


def aim_at(budget: int) -> int:
    """What is planned for at first within so many bytes.

    What the host frees a moment later than another time is to fit, too.
    """
    return budget - min(budget // 200, _MOST_SLACK)


def make_plan(
    profile: Profile,
    hardware: Hardware,
    *,
    budget: int | float | str,
    window: int | str,
    may_grow: bool = False,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    allow: Collection[str] = ALL,
    active: int = 1,
) -> Plan:
    """The plan with the shortest step within a budget.

    Args:
        profile: of a step.
        hardware: what the machine can do.
        window: bytes that may be on their way at once, at most. A smaller window leaves more to other things, and may
            be better: a half and a quarter of it are tried, too.
        may_grow: whether larger ones are tried, too: see NOTE [ How large a window ].
        budget: bytes that may be allocated on the device, or a size like ``"40GiB"``, or a share: see
            :func:`parse_budget`.
        host_budget: bytes of host memory that may be used. ``None``: any.
        disk_budget: bytes of disk. ``None``: any.
        allow: what may be done with what is saved.
        active: how many devices of the machine copy at the same time.

    Raises:
        BudgetError: where no plan is within the budget: it names the least one.
        UsageError: for arguments that cannot be meant.
    """
    most = parse_bytes(window, what="window")
    tried = problem_of(
        profile,
        usable_rates(hardware, most, active=active),
        budget=parse_budget(budget, profile),
        host_budget=None if host_budget is None else parse_bytes(host_budget, what="host_budget"),
        disk_budget=None if disk_budget is None else parse_bytes(disk_budget, what="disk_budget"),
        allow=allow,
    )
    windows: list[_Windows] = [(size, None) for size in _windows(profile, most, may_grow=may_grow)]
    near: dict[float, Relaxed] = {}
    """Of the first window, for all of them: a linear programme takes as long as the search does."""

    def best_with(fraction: float, windows: Sequence[_Windows], seconds: float) -> tuple[Plan, Problem]:
        part = divided(profile, fraction, hardware)
        problem = _divided_problem(tried, profile, part)
        best: tuple[Plan, Problem] | None = None
        refused: BudgetError | None = None
        for size, ahead in windows:
            problem = replace(problem, rates=usable_rates(hardware, size, ahead=ahead, active=active))
            try:
                solution = solve(problem, seconds=seconds, near=near.get(fraction))
            except BudgetError as error:
                refused = error if refused is None or error.least < refused.least else refused
                continue
            if solution.shares is not None:
                near.setdefault(fraction, solution.shares)
            found = plan_of(part, problem, solution)
            if profile.optimizer is not None:
                found = replace(found, optimizer_fraction=fraction)
            best = (found, problem) if best is None else _faster(best, (found, problem))
            if not (best[0].sent_bytes or best[0].rerun_seconds):
                # All may stay, and no window is needed.
                break
        if best is None:
            assert refused is not None
            raise refused
        return best

    # With all of it on the host a step takes the least memory: if that does not fit, nothing does.
    best = best_with(1.0, windows, _SECONDS)
    fractions = [] if profile.optimizer is None else [0.0, *(part / _PARTS for part in range(1, _PARTS))]
    for fraction in fractions:
        with contextlib.suppress(BudgetError):
            best = _faster(best, best_with(fraction, [(best[0].window, None)], _SECONDS / 2))
    plan = best[0]
    if plan.sent_bytes and (plan.rerun_seconds or plan.stall_seconds):
        fraction = 1.0 if plan.optimizer_fraction is None else plan.optimizer_fraction
        for share in _AHEAD:
            with contextlib.suppress(BudgetError):
                best = _faster(best, best_with(fraction, [(plan.window, int(share * plan.window))], _SECONDS))
    plan, problem = best
    return plan if plan.bound_seconds is not None else replace(plan, bound_seconds=bound_of(problem))


def _faster(one: tuple[Plan, Problem], other: tuple[Plan, Problem]) -> tuple[Plan, Problem]:
    return min(one, other, key=lambda each: each[0].predicted_seconds)


def fits(
    profile: Profile,
    hardware: Hardware,
    *,
    budget: int | str,
    window: int | str,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    allow: Collection[str] = ALL,
    active: int = 1,
) -> bool:
    """Whether any plan is within the budgets: that which takes the least memory. Arguments as of :func:`make_plan`."""
    size = min(_windows(profile, parse_bytes(window, what="window"), may_grow=False))
    problem = problem_of(
        profile,
        usable_rates(hardware, size, active=active),
        budget=parse_bytes(budget, what="budget"),
        host_budget=None if host_budget is None else parse_bytes(host_budget, what="host_budget"),
        disk_budget=None if disk_budget is None else parse_bytes(disk_budget, what="disk_budget"),
        allow=allow,
    )
    found = least(problem, seconds=_SECONDS).timeline
    limits = (
        (found.peak_bytes, problem.budget),
        (found.host_bytes, problem.host_budget),
        (found.disk_bytes, problem.disk_budget),
    )
    return all(limit is None or nbytes <= limit for nbytes, limit in limits)


def divided(profile: Profile, fraction: float, hardware: Hardware) -> Profile:
    """The profile of a step in which so much of the optimizer is stepped on the host.

    See NOTE [ How much of an optimizer is on the host ].
    """
    optimizer = profile.optimizer
    if optimizer is None:
        return profile
    here = 1 - fraction
    state, gradients = int(here * optimizer.state_bytes), int(here * optimizer.gradient_bytes)
    hidden = optimizer.host_seconds - optimizer.stall_seconds
    waited = max(0.0, fraction * optimizer.host_seconds - max(0.0, hidden))
    # State is read and written, gradients are read, and parameters are as large as these.
    stepped = (2 * state + 3 * gradients) / hardware.memory_rate
    each = gradients // max(1, len(profile.calls))
    return replace(
        profile,
        static_bytes=profile.static_bytes + state,
        static=None if profile.static is None else replace(profile.static, optimizer=profile.static.optimizer + state),
        kinds=tuple(replace(kind, backward_change_bytes=kind.backward_change_bytes + each) for kind in profile.kinds),
        after=Outside(
            seconds=max(0.0, profile.after.seconds - optimizer.stall_seconds) + waited + stepped,
            peak_bytes=profile.after.peak_bytes + int(here * optimizer.step_bytes),
            change_bytes=profile.after.change_bytes - each * len(profile.calls),
        ),
    )


def _divided_problem(problem: Problem, profile: Profile, part: Profile) -> Problem:
    """The problem of a profile, for the same with another part of the optimizer: the ways to treat blocks are those."""
    if part is profile:
        return problem
    more = part.kinds[0].backward_change_bytes - profile.kinds[0].backward_change_bytes
    changed = {id(options): tuple(_with_change(option, more) for option in options) for options in problem.options}
    return replace(
        problem,
        static_bytes=part.static_bytes,
        options=tuple(changed[id(options)] for options in problem.options),
        parts=(_part(part),),
        placed={},
    )


def _with_change(option: Option, nbytes: int) -> Option:
    *before, last = option.backward
    return replace(option, backward=(*before, replace(last, change_bytes=last.change_bytes + nbytes)))


def _windows(profile: Profile, window: int, *, may_grow: bool) -> list[int]:
    """What is tried: the window itself first. See NOTE [ How large a window ]."""
    smaller = (max(window // share, min(window, MIN_WINDOW)) for share in (1, 2, 4))
    values = (value for kind in profile.kinds for value in kind.values)
    saved = (value.nbytes for value in values if value.maker is not None and value.saved_at is not None)
    largest = max(saved, default=0)
    larger = (largest * times for times in (1, 2, 3) if may_grow and largest * times > window)
    return list(dict.fromkeys((*smaller, *larger)))


def rates_of(plan: Plan, hardware: Hardware, *, active: int = 1) -> Rates:
    """What a plan was made with."""
    return usable_rates(hardware, plan.window, ahead=plan.ahead, active=active)


def usable_rates(hardware: Hardware, window: int, *, ahead: int | None = None, active: int = 1) -> Rates:
    """What may be planned with."""
    rates = hardware.rates(window, active=active)
    return replace(
        rates,
        ahead=ahead,
        out=rates.out * _USABLE,
        back=rates.back * _USABLE,
        disk_write=rates.disk_write * _USABLE,
        disk_read=rates.disk_read * _USABLE,
    )


def parse_budget(budget: int | float | str, profile: Profile) -> int:
    """A budget as a number of bytes.

    Args:
        budget: bytes, or a size like ``"40GiB"``. Or a share of what a step that keeps everything has at its peak
            beyond what is there when it begins: a float, a percentage like ``"50%"``, or a string like ``"0.5"``. What
            is there when the step begins comes on top.
        profile: of the step.

    Raises:
        SizeError: for anything else, and for a float above 10: bytes are whole numbers.

    Example:
        >>> parse_budget("50%", profile) == parse_budget(0.5, profile)  # doctest: +SKIP
        True
    """
    share = budget
    if isinstance(share, str):
        share = float(share) if _FRACTION.fullmatch(share) else parse_share(share, what="budget")
    if not isinstance(share, float):
        return parse_bytes(share, what="budget")
    if not 0 <= share <= _MOST_SHARE:
        raise SizeError(
            f"budget: got {budget!r}, expected a share between 0 and {_MOST_SHARE:.0f} of what a step needs that keeps "
            f"everything, or bytes as an int"
        )
    most = simulate_program(kept_program(profile), _ANY_RATES).peak_bytes
    return profile.static_bytes + math.ceil(share * (most - profile.static_bytes))


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
        parts=(_part(profile),),
        names=tuple(call.name for call in profile.calls),
        options=tuple(menus[call.kind] for call in profile.calls),
        rates=rates,
        budget=budget,
        host_budget=host_budget,
        disk_budget=disk_budget,
    )


def plan_of(profile: Profile, problem: Problem, solution: Solution) -> Plan:
    """A solution in words."""
    timeline = solution.timeline
    options = [each[number] for each, number in zip(problem.options, solution.chosen, strict=True)]
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
        treat(profile.kinds[call.kind], _decisions(profile.kinds[call.kind], block), min_bytes=profile.min_bytes)
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
        parts=(_part(profile),),
        names=tuple(call.name for call in profile.calls),
        options=tuple((option,) for option in options),
        rates=_ANY_RATES,
        budget=0,
    ).program([0] * len(options))


_ANY_RATES = Rates(1.0, 1.0, 1.0, 1.0, 1)
"""Of steps in which nothing leaves."""


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


def _part(profile: Profile) -> Part:
    """What is around its blocks."""
    return Part(
        len(profile.calls),
        before=(_outside("before the blocks", profile.before),),
        middle=(_outside("head and loss", profile.middle),),
        after=(_outside("after the blocks", profile.after),),
    )


def _outside(name: str, outside: Outside) -> Task:
    return Task(
        name,
        Phase.OUTSIDE,
        outside.seconds,
        peak_bytes=outside.peak_bytes,
        change_bytes=outside.change_bytes,
        host_seconds=outside.host_seconds,
    )
