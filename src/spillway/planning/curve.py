"""What a step takes for each budget: a plan for each of several, beside the two steps that need no plan.

NOTE [ Which budgets ]

The largest budget that says anything is what a step needs that keeps everything, and the smallest is the least that any
plan was found to need. Between them peaks are spaced evenly by their logarithms above what is there when a step begins:
the time changes most where memory is short.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from spillway.errors import BudgetError, UsageError
from spillway.planning.hardware import Hardware
from spillway.planning.menu import ALL
from spillway.planning.plan import Plan
from spillway.planning.planner import make_plan
from spillway.planning.profile import Profile
from spillway.planning.programs import checkpointed_program, kept_program
from spillway.planning.timeline import simulate_program
from spillway.planning.windows import usable_rates

POINTS = 8
"""How many plans a curve is drawn through, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Point:
    """A step: the most bytes that it has on the device, and what it takes."""

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
    """A step that keeps the inputs of blocks, and computes all else again."""


def make_curve(
    profile: Profile,
    hardware: Hardware,
    *,
    window: int | str,
    may_grow: bool = False,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    allow: Collection[str] = ALL,
    active: int = 1,
    points: int = POINTS,
    on_point: Callable[[int, int], None] | None = None,
) -> Curve:
    """Plan for several budgets. Each takes as long as a plan does. See NOTE [ Which budgets ].

    Args:
        profile: of a step.
        hardware: as for :func:`~spillway.planning.planner.make_plan`, and so are the next five.
        window: bytes.
        may_grow: whether larger windows are tried.
        host_budget: bytes.
        disk_budget: bytes.
        allow: what may be done.
        active: devices that copy.
        points: how many budgets, at least 2.
        on_point: is told how many plans have been made, and of how many, after each.

    Raises:
        UsageError: for fewer than 2 points, and for arguments that cannot be meant.
    """
    if type(points) is not int or points < 2:
        raise UsageError(f"points: got {points!r}, expected a whole number of at least 2")
    planned = functools.partial(
        make_plan,
        profile,
        hardware,
        window=window,
        may_grow=may_grow,
        host_budget=host_budget,
        disk_budget=disk_budget,
        allow=allow,
        active=active,
    )
    # Nothing leaves in either, so that any window will do.
    rates = usable_rates(hardware, 1, active=active)
    keep, checkpoint = (
        simulate_program(program, rates) for program in (kept_program(profile), checkpointed_program(profile))
    )
    budgets = _budgets(profile.static_bytes, _least(planned), keep.peak_bytes, points)
    found = []
    for number, budget in enumerate(budgets, 1):
        # Where the host or the disk may have little, the smallest steps are not to be had: the curve begins later.
        with contextlib.suppress(BudgetError):
            plan = planned(budget=budget)
            found.append(Point(plan.predicted_peak, plan.predicted_seconds))
        if on_point is not None:
            on_point(number, len(budgets))
    return Curve(
        points=frontier(found),
        keep=Point(keep.peak_bytes, keep.seconds),
        checkpoint=Point(checkpoint.peak_bytes, checkpoint.seconds),
    )


def frontier(points: Iterable[Point]) -> tuple[Point, ...]:
    """Those of which none other is both as small and as fast, by their peaks.

    Example:
        >>> frontier([Point(3, 1.0), Point(1, 2.0), Point(2, 2.0)])
        (Point(peak_bytes=1, seconds=2.0), Point(peak_bytes=3, seconds=1.0))
    """
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.seconds)):
        if not found or point.seconds < found[-1].seconds:
            found.append(point)
    return tuple(found)


def _least(planned: Callable[..., Plan]) -> int:
    """The smallest peak that any plan was found to have."""
    try:
        return planned(budget=0).predicted_peak
    except BudgetError as error:
        return error.least


def _budgets(static: int, least: int, most: int, count: int) -> list[int]:
    """See NOTE [ Which budgets ]."""
    low = max(least - static, 1)
    ratio = max(most - static, low) / low
    between = (static + math.ceil(low * ratio ** (number / (count - 1))) for number in range(1, count - 1))
    return sorted({least, *between, max(least, most)})
