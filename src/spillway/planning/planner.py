"""From a profile and a budget to a plan.

NOTE [ How much of an optimizer is on the host ]

Where a profile has an optimizer, each fraction of it makes another profile: the part on the device adds its state to
what is always there, its gradients from the end of its blocks' backward to the step, and takes its step's time of the
device's memory; the part on the host is waited for as far as it takes longer than what hides it. What hides it is what
hid it when all of it was there. All, none and some parts of it are solved for, and the fastest step counts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from spillway.errors import BudgetError
from spillway.planning.hardware import Hardware
from spillway.planning.menu import ALL
from spillway.planning.plan import Plan
from spillway.planning.profile import Outside, Profile
from spillway.planning.programs import ANY_RATES, kept_program, part_of, plan_of, problem_of
from spillway.planning.relaxation import Relaxed
from spillway.planning.solver import least, solve
from spillway.planning.tasks import Option, Problem
from spillway.planning.timeline import simulate_program
from spillway.planning.treatment import treat
from spillway.planning.windows import (
    SECONDS,
    Found,
    Lanes,
    Windows,
    ahead_of,
    best_of,
    improved,
    usable_rates,
    windows_of,
)
from spillway.records import Decision
from spillway.units import parse_bytes, read_budget

_PARTS = 4
"""Of an optimizer, so many parts are on the host or not."""
_MOST_SLACK = 64 << 20


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
    lanes = Lanes(hardware, active)
    room = tried.budget - profile.static_bytes
    sizes = [(size, None) for size in windows_of([profile], most, may_grow=may_grow, room=room)]
    near: dict[float, Relaxed] = {}
    """Of the first window, for all of them: a linear programme takes as long as the search does."""

    def best_with(fraction: float, windows: Sequence[Windows], seconds: float) -> Found:
        problem = _divided_problem(tried, profile, divided(profile, fraction, hardware))
        found = best_of(problem, lanes, windows, seconds=seconds, near=near.get(fraction))
        if found.solution.shares is not None:
            near.setdefault(fraction, found.solution.shares)
        return found

    # With all of it on the host a step takes the least memory: if that does not fit, nothing does.
    fraction, best = 1.0, best_with(1.0, sizes, SECONDS)
    others = [] if profile.optimizer is None else [0.0, *(part / _PARTS for part in range(1, _PARTS))]
    for other in others:
        with contextlib.suppress(BudgetError):
            found = best_with(other, [(best.problem.rates.window, None)], SECONDS / 2)
            fraction, best = min((fraction, best), (other, found), key=lambda each: each[1].seconds)
    best = improved(ahead_of(best, lambda windows: best_with(fraction, windows, SECONDS)))
    plan = plan_of(divided(profile, fraction, hardware), best.problem, best.solution)
    return plan if profile.optimizer is None else replace(plan, optimizer_fraction=fraction)


def make_checkpointing_plan(profile: Profile, hardware: Hardware, *, budget: int, window: int, active: int = 1) -> Plan:
    """The plan of torch's checkpointing: every block is recomputed, and nothing but inputs is kept.

    Args:
        profile: of a step.
        hardware: what the machine can do.
        budget: bytes that may be allocated on the device.
        window: bytes that may be on their way at once.
        active: how many devices of the machine copy at the same time.

    Raises:
        BudgetError: where it is not within the budget.
    """
    problem = problem_of(profile, usable_rates(hardware, window, active=active), budget=budget)
    kinds = [
        treat(
            kind,
            [Decision.KEEP if value.is_input else Decision.RECOMPUTE for value in kind.values],
            min_bytes=profile.min_bytes,
        )
        for kind in profile.kinds
    ]
    options = [(kind,) for kind in kinds]
    problem = replace(problem, options=tuple(options[call.kind] for call in profile.calls), placed={})
    return plan_of(profile, problem, solve(problem))


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
    nbytes = parse_bytes(budget, what="budget")
    room = nbytes - profile.static_bytes
    size = min(windows_of([profile], parse_bytes(window, what="window"), may_grow=False, room=room))
    problem = problem_of(
        profile,
        usable_rates(hardware, size, active=active),
        budget=nbytes,
        host_budget=None if host_budget is None else parse_bytes(host_budget, what="host_budget"),
        disk_budget=None if disk_budget is None else parse_bytes(disk_budget, what="disk_budget"),
        allow=allow,
    )
    found = least(problem, seconds=SECONDS).timeline
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
        parts=(part_of(part),),
        placed={},
    )


def _with_change(option: Option, nbytes: int) -> Option:
    *before, last = option.backward
    return replace(option, backward=(*before, replace(last, change_bytes=last.change_bytes + nbytes)))


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
    share = read_budget(budget)
    if isinstance(share, int):
        return share
    most = simulate_program(kept_program(profile), ANY_RATES).peak_bytes
    return profile.static_bytes + math.ceil(share * (most - profile.static_bytes))
