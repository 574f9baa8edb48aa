"""From a profile and a budget to a plan, and to a curve of plans.

NOTE [ How large a window ]

The window is how many bytes may be on their way at once. A smaller window leaves more memory for other things. With a
larger one, stalls become shorter. The better one hangs on the budget, so several are tried. A tensor as large as the
window is copied alone; later ones wait. So where a window may grow, it is made to hold one, two and three of the
largest tensors: a Llama's MLP saves three, one after the other. If a window would take more than a sixteenth of the
memory that there is, it is halved. Prefetched bytes take memory in backward, where there is the least. So with the best
window, three quarters and half of it are tried for them.

Simulated steps of layers of Llama-8B on an H200 (2026-11-22): with three of the largest tensors, a step within
checkpointing's peak is 1 % (32768 tokens) and 1.5 % (8192) shorter than with twice and four times 512 MiB. Four brought
nothing more. Fewer prefetched bytes bring another 1 % (32768 tokens).

NOTE [ Bandwidth to plan with ]

Copies reach 98 % of the bandwidth in a trace of an H200, with gaps: one waits for what it copies, another for the CPU.
A plan that needs all of the bandwidth stalls for each gap. So plans use 0.9 of it. By simulation of layers of Llama-8B
on an H200, such plans take 0.2 % longer at most than those for 0.95 where there is 0.95 of it, and 0.8 to 1.7 % less
where there is 0.9.

NOTE [ How much of an optimizer is on the CPU ]

Where a profile has an optimizer, each fraction of it makes another profile. The part on the GPU adds its state to the
static bytes, its gradients from its blocks' backward to the step, and its step's time. The part on the CPU stalls the
GPU as far as it takes longer than what hides it: what hid it when all of it was there. Plans are made for all, none and
some parts of it, and the fastest step counts.

NOTE [ Budgets of a curve ]

A curve's largest budget is the peak of a step that keeps everything. Its smallest one is the least that any plan was
found to need. Between them, peaks are spaced evenly by their logarithms above the static bytes: the time changes most
where memory is short.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from spillway.errors import BudgetError, UsageError
from spillway.planner.hardware import Hardware
from spillway.planner.options import block_options
from spillway.planner.plan import (
    ALL,
    ANY_RATES,
    Plan,
    check_allow,
    checkpointed_program,
    kept_program,
    part_of,
    plan_of,
    problem_with,
    uniform_options,
)
from spillway.planner.profile import Outside, Profile
from spillway.planner.solve import LATE, Solution, smallest, solve, within
from spillway.planner.tasks import Option, Problem, Rates
from spillway.planner.timeline import simulate_program
from spillway.types import Decision
from spillway.units import parse_bytes, read_budget

USABLE = 0.9
"""The share of a bandwidth to plan with. See NOTE [ Bandwidth to plan with ]."""
MIN_WINDOW = 32 << 20
POINTS = 8
"""How many plans a curve is drawn through, unless told otherwise."""
_SECONDS, _NEAR_SECONDS, _LAST_SECONDS = 0.35, 0.1, 0.6
"""Work of solving: for the first window, for each later one that begins at the best choice, and for the best one."""
_AHEAD = (0.75, 0.5)
"""The shares of a window that prefetched bytes may have."""
_SHARE = 16
"""A window that takes more than this part of the memory is halved."""
_FRACTIONS = (0.0, 0.25, 0.5, 0.75)
"""The fractions of an optimizer on the CPU that are tried, beside all of it."""
_MOST_SLACK = 64 << 20


class Limits(TypedDict, total=False):
    """The options of :func:`make_plan` that hold for several budgets."""

    window: int | str
    may_grow: bool
    host_budget: int | str | None
    disk_budget: int | str | None
    allow: Collection[str]
    active: int


@dataclass(frozen=True, slots=True)
class Lanes:
    """What may be planned with, but for windows."""

    hardware: Hardware
    active: int = 1
    """How many devices of the machine copy at the same time."""

    def rates(self, window: int, ahead: int | None = None) -> Rates:
        """The bandwidths to plan with, and bytes that may be LEAVING, and prefetched (``None``: as many).

        See NOTE [ Bandwidth to plan with ].
        """
        rates = self.hardware.rates(window, active=self.active)
        return replace(
            rates,
            ahead=ahead,
            out=rates.out * USABLE,
            back=rates.back * USABLE,
            disk_write=rates.disk_write * USABLE,
            disk_read=rates.disk_read * USABLE,
        )


@dataclass(frozen=True, slots=True)
class Found:
    """The best solution that was found."""

    problem: Problem
    solution: Solution

    @property
    def options(self) -> list[Option]:
        """What each block does."""
        return [each[number] for each, number in zip(self.problem.options, self.solution.chosen, strict=True)]


def aim_at(budget: int) -> int:
    """The bytes to plan for at first within a budget. The CPU may free something a moment later another time."""
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
        budget: bytes that may be allocated on the device, or a size like ``"40GiB"``, or a share: see
            :func:`parse_budget`.
        window: bytes that may be on their way at once, at most. Smaller ones are tried, too.
        may_grow: whether larger ones are tried, too. See NOTE [ How large a window ].
        host_budget: bytes of CPU memory that may be used. ``None``: any.
        disk_budget: bytes of disk. ``None``: any.
        allow: what may be done with saved tensors.
        active: how many devices of the machine copy at the same time.

    Raises:
        BudgetError: where no plan is within the budget: it names the least one.
        UsageError: for arguments that cannot be meant.
    """
    most, lanes = parse_bytes(window, what="window"), Lanes(hardware, active)
    whole = problem_of(
        profile,
        lanes.rates(most),
        budget=parse_budget(budget, profile),
        host_budget=host_budget,
        disk_budget=disk_budget,
        allow=allow,
    )
    room = whole.budget - profile.static_bytes
    # With all of an optimizer on the CPU, a step takes the least memory: if that does not fit, nothing does.
    fraction = 1.0
    problem = _divided_problem(whole, profile, divided(profile, fraction, hardware))
    best = best_of(problem, lanes, windows_of([profile], most, may_grow=may_grow, room=room))
    for other in _FRACTIONS if profile.optimizer is not None else ():
        problem = _divided_problem(whole, profile, divided(profile, other, hardware))
        with contextlib.suppress(BudgetError):
            found = best_of(problem, lanes, [best.problem.rates.window])
            fraction, best = min((fraction, best), (other, found), key=lambda each: each[1].solution.seconds)
    best = refined(best, lanes)
    plan = plan_of(divided(profile, fraction, hardware), best.problem, best.solution)
    return plan if profile.optimizer is None else replace(plan, optimizer_fraction=fraction)


def make_checkpointing_plan(profile: Profile, hardware: Hardware, *, budget: int, window: int, active: int = 1) -> Plan:
    """The plan of torch's checkpointing: each block is recomputed, and only its inputs are kept.

    The arguments are those of :func:`make_plan`, in bytes.

    Raises:
        BudgetError: where it is not within the budget.
    """
    options = [(option,) for option in uniform_options(profile, Decision.RECOMPUTE)]
    problem = problem_with(profile, options, Lanes(hardware, active).rates(window), budget=budget)
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
    """Whether any plan is within the budgets. The arguments are those of :func:`make_plan`."""
    nbytes = parse_bytes(budget, what="budget")
    room = nbytes - profile.static_bytes
    size = min(windows_of([profile], parse_bytes(window, what="window"), may_grow=False, room=room))
    rates = Lanes(hardware, active).rates(size)
    problem = problem_of(profile, rates, budget=nbytes, host_budget=host_budget, disk_budget=disk_budget, allow=allow)
    return within(problem, smallest(problem, seconds=_SECONDS).timeline)


def problem_of(
    profile: Profile,
    rates: Rates,
    *,
    budget: int,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    allow: Collection[str] = ALL,
) -> Problem:
    """The problem of a step: each block with its options."""
    host, disk = (
        None if nbytes is None else parse_bytes(nbytes, what=what)
        for nbytes, what in ((host_budget, "host_budget"), (disk_budget, "disk_budget"))
    )
    check_allow(allow)
    kinds = [block_options(kind, min_bytes=profile.min_bytes, allow=allow) for kind in profile.kinds]
    problem = problem_with(profile, (kinds[call.kind] for call in profile.calls), rates, budget=budget)
    return replace(problem, host_budget=host, disk_budget=disk, late=late_of([profile]))


def late_of(profiles: Iterable[Profile]) -> float:
    """See NOTE [ A slower CPU ] in ``solve.py``."""
    return LATE if any(kind.host is not None for profile in profiles for kind in profile.kinds) else 1.0


def best_of(problem: Problem, lanes: Lanes, sizes: Iterable[int]) -> Found:
    """The fastest step of several windows, tried in this order; the problem's own window does not count.

    Raises:
        BudgetError: where no choice fits with any window: it names the least budget that was found.
    """
    best: Found | None = None
    refused: BudgetError | None = None
    for size in sizes:
        problem = replace(problem, rates=lanes.rates(size))
        near = None if best is None else best.solution
        try:
            solution = solve(problem, seconds=_SECONDS if near is None else _NEAR_SECONDS, near=near)
        except BudgetError as error:
            refused = error if refused is None or error.least < refused.least else refused
            continue
        found = Found(problem, solution)
        best = found if best is None else min(best, found, key=lambda each: each.solution.seconds)
        if not any(option.sent_bytes or option.rerun_seconds for option in best.options):
            # Everything is kept, and no window is needed.
            break
    if best is None:
        assert refused is not None
        raise refused
    return best


def refined(best: Found, lanes: Lanes) -> Found:
    """The best with fewer bytes prefetched, if that is better, searched once more and with a bound."""
    again = any(option.rerun_seconds for option in best.options)
    if any(option.sent_bytes for option in best.options) and (again or best.solution.timeline.stall_seconds):
        window = best.problem.rates.window
        for share in _AHEAD:
            problem = replace(best.problem, rates=lanes.rates(window, int(share * window)))
            with contextlib.suppress(BudgetError):
                found = Found(problem, solve(problem, seconds=_NEAR_SECONDS, near=best.solution))
                best = min(best, found, key=lambda each: each.solution.seconds)
    if best.solution.method == "exact":
        return best
    near = replace(best.solution, shares=())
    return replace(best, solution=solve(best.problem, seconds=_LAST_SECONDS, near=near))


def windows_of(profiles: Iterable[Profile], window: int, *, may_grow: bool, room: int) -> list[int]:
    """The windows to try, in bytes, the given one first. See NOTE [ How large a window ].

    The room is the bytes of the budget beyond the static ones.
    """
    smaller = [max(window // share, min(window, MIN_WINDOW)) for share in (1, 2, 4)]
    while smaller[-1] > max(room // _SHARE, MIN_WINDOW):
        smaller.append(max(smaller[-1] // 2, MIN_WINDOW))
    values = (value for profile in profiles for kind in profile.kinds for value in kind.values)
    largest = max((value.nbytes for value in values if value.is_recomputable), default=0)
    larger = (largest * times for times in (1, 2, 3) if may_grow and largest * times > window)
    return list(dict.fromkeys((*smaller, *larger)))


def rates_of(plan: Plan, hardware: Hardware, *, active: int = 1) -> Rates:
    """What a plan was made with."""
    return Lanes(hardware, active).rates(plan.window, plan.ahead)


def divided(profile: Profile, fraction: float, hardware: Hardware) -> Profile:
    """The profile of a step in which this fraction of the optimizer is stepped on the CPU.

    See NOTE [ How much of an optimizer is on the CPU ].
    """
    optimizer = profile.optimizer
    if optimizer is None:
        return profile
    here = 1 - fraction
    state, gradients = int(here * optimizer.state_bytes), int(here * optimizer.gradient_bytes)
    hidden = optimizer.host_seconds - optimizer.stall_seconds
    stalled = max(0.0, fraction * optimizer.host_seconds - max(0.0, hidden))
    # State is read and written, gradients are read, and parameters are as large as these.
    stepped = (2 * state + 3 * gradients) / hardware.memory_rate
    of_call = gradients // max(1, len(profile.calls))
    return replace(
        profile,
        static_bytes=profile.static_bytes + state,
        static=None if profile.static is None else replace(profile.static, optimizer=profile.static.optimizer + state),
        kinds=tuple(
            replace(kind, backward_change_bytes=kind.backward_change_bytes + of_call) for kind in profile.kinds
        ),
        after=Outside(
            seconds=max(0.0, profile.after.seconds - optimizer.stall_seconds) + stalled + stepped,
            peak_bytes=profile.after.peak_bytes + int(here * optimizer.step_bytes),
            change_bytes=profile.after.change_bytes - of_call * len(profile.calls),
        ),
    )


def _divided_problem(problem: Problem, profile: Profile, part: Profile) -> Problem:
    """The problem with another fraction of the optimizer on the CPU: blocks have the same options."""
    if part is profile:
        return problem
    more = part.kinds[0].backward_change_bytes - profile.kinds[0].backward_change_bytes

    def changed(option: Option) -> Option:
        *before, last = option.backward
        return replace(option, backward=(*before, replace(last, change_bytes=last.change_bytes + more)))

    known = {id(options): tuple(map(changed, options)) for options in problem.options}
    return replace(
        problem,
        static_bytes=part.static_bytes,
        options=tuple(known[id(options)] for options in problem.options),
        parts=(part_of(part),),
        placed={},
    )


def parse_budget(budget: int | float | str, profile: Profile) -> int:
    """A budget as a number of bytes.

    Args:
        budget: bytes, or a size like ``"40GiB"``. Or a share of what a step that keeps everything has at its peak
            beyond the static bytes: a float, a percentage like ``"50%"``, or a string like ``"0.5"``. The static bytes
            come on top.
        profile: of the step.

    Raises:
        SizeError: for anything else, and for a float above 10: bytes are integers.

    Example:
        >>> parse_budget("50%", profile) == parse_budget(0.5, profile)  # doctest: +SKIP
        True
    """
    share = read_budget(budget)
    if isinstance(share, int):
        return share
    most = simulate_program(kept_program(profile), ANY_RATES).peak_bytes
    return profile.static_bytes + math.ceil(share * (most - profile.static_bytes))


@dataclass(frozen=True, slots=True)
class Point:
    """A step: its peak, and its time."""

    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Predicted seconds of a step over its predicted peak."""

    points: tuple[Point, ...]
    """Of plans, by their peaks. None is both larger and slower than another one."""
    keep: Point
    """A step that keeps everything."""
    checkpoint: Point
    """A step that keeps the inputs of blocks, and recomputes the rest."""


def make_curve(
    profile: Profile,
    hardware: Hardware,
    *,
    points: int = POINTS,
    on_point: Callable[[int, int], None] | None = None,
    **limits: Unpack[Limits],
) -> Curve:
    """Plan for several budgets. Each takes as long as a plan does. See NOTE [ Budgets of a curve ].

    Args:
        profile: of a step.
        hardware: what the machine can do.
        points: how many budgets, at least 2.
        on_point: is told how many plans have been made, and of how many, after each.
        limits: as for :func:`make_plan`, which wants a window.

    Raises:
        UsageError: for fewer than 2 points, and for arguments that cannot be meant.
    """
    if type(points) is not int or points < 2:
        raise UsageError(f"points: got {points!r}, expected a whole number of at least 2")
    planned = functools.partial(make_plan, profile, hardware, **limits)
    try:
        least = planned(budget=0).predicted_peak
    except BudgetError as error:
        least = error.least
    keep, checkpoint = (
        Point(timeline.peak_bytes, timeline.seconds)
        for program in (kept_program(profile), checkpointed_program(profile))
        for timeline in [simulate_program(program, ANY_RATES)]
    )
    budgets = _budgets(profile.static_bytes, least, keep.peak_bytes, points)
    found = []
    for number, budget in enumerate(budgets, 1):
        # The curve begins later where the budget of CPU memory or of the disk rules out the smallest steps.
        with contextlib.suppress(BudgetError):
            plan = planned(budget=budget)
            found.append(Point(plan.predicted_peak, plan.predicted_seconds))
        if on_point is not None:
            on_point(number, len(budgets))
    return Curve(frontier(found), keep, checkpoint)


def frontier(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points that no other one beats in both size and time, by their peaks.

    Example:
        >>> frontier([Point(3, 1.0), Point(1, 2.0), Point(2, 2.0)])
        (Point(peak_bytes=1, seconds=2.0), Point(peak_bytes=3, seconds=1.0))
    """
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.seconds)):
        if not found or point.seconds < found[-1].seconds:
            found.append(point)
    return tuple(found)


def _budgets(static: int, least: int, most: int, count: int) -> list[int]:
    low = max(least - static, 1)
    ratio = max(most - static, low) / low
    between = (static + math.ceil(low * ratio ** (number / (count - 1))) for number in range(1, count - 1))
    return sorted({least, *between, max(least, most)})
