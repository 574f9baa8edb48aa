"""From a profile and a budget to a plan, and to a curve of plans; from several stages of a pipeline to one for each.

NOTE [ In-flight limits ]

A window is the in-flight limit of a plan: the bytes that may be under way at once. A smaller window leaves more memory
for other things, and a larger one shortens stalls. The better one depends on the budget, so several are tried. A tensor
as large as the window is copied alone; later ones wait. So where a window may grow, windows of one, two and three of
the largest tensors are tried: a Llama's MLP saves three, one after the other. A window that would take more than a
sixteenth of the available memory is halved.

Simulated steps of Llama-8B on an H200 (2026-11-22) within checkpointing's peak: with three of the largest tensors they
are 1 % (32768 tokens) and 1.5 % (8192) shorter than with 1 GiB and 2 GiB.

NOTE [ Bandwidth to plan with ]

Copies reach 98 % of the bandwidth in a trace of an H200, with gaps: one waits for the tensor that it copies, another
for the CPU. A plan that needs all of the bandwidth stalls for each gap. So plans use 0.9 of it. This was simulated for
layers of Llama-8B on an H200. Such plans take 0.2 % longer at most than those for 0.95 if 0.95 of it is reached, and
0.8 to 1.7 % less if 0.9 is.

NOTE [ How much of an optimizer is on the CPU ]

If a profile has an optimizer, each fraction of it makes another profile. The part on the GPU adds its state to the
static bytes, its gradients from its blocks' backward to the step, and its step's time. The part on the CPU stalls the
GPU as far as it takes longer than the time that hid it when all of it was there. Plans are made for all, none and some
parts of it, and the fastest step counts.

NOTE [ Weights on the GPU ]

Streaming a block's weights saves their bytes, and costs two copies in a step, which compute may hide. The same bytes
could keep activations instead. So, where a plan may choose, steps are solved with none, all and some parts of the
streamed blocks on the GPU, then with counts closer to the fastest one. Blocks that stay are spread evenly: the copies
of each streamed one have the computation of those before it to hide behind. Bits do not depend on this choice.

NOTE [ Budgets of a curve ]

A curve's largest budget is the peak of a step that keeps everything. Its smallest one is the least that any plan was
found to need. Between them, peaks are spaced evenly by their logarithms above the static bytes: the time changes most
where memory is short.

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

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spillway.errors import BudgetError
from spillway.planner.hardware import Hardware
from spillway.planner.options import block_options
from spillway.planner.plan import (
    ALL,
    ANY_RATES,
    Plan,
    check_allow,
    part_of,
    plan_of,
    problem_with,
    uniform_options,
    uniform_program,
)
from spillway.planner.profile import Outside, Profile
from spillway.planner.solve import LATE, Solution, solve
from spillway.planner.tasks import Part, Problem, Rates, TaskBytes, Turn
from spillway.planner.timeline import simulate_program
from spillway.types import Decision
from spillway.units import parse_bytes, read_budget

USABLE = 0.9
"""The share of a bandwidth to plan with. See NOTE [ Bandwidth to plan with ]."""
MIN_WINDOW = 32 << 20
POINTS = 8
"""Number of plans on a curve, unless given."""
_SECONDS, _NEAR_SECONDS = 0.35, 0.1
"""Work of solving: for the first window, and for each later one, which begins at the best choice."""
_SHARE = 16
"""A window that takes more than this part of the memory is halved."""
_FRACTIONS = (0.0, 0.25, 0.5, 0.75)
"""The fractions of an optimizer on the CPU that are tried, beside all of it."""
_block_options = functools.lru_cache(32)(block_options)
"""One plan solves many steps of the same blocks."""
_SAME = 1.001
"""If steps are this close, the one with fewer weights on the GPU is taken."""


def make_plan(
    profile: Profile,
    hardware: Hardware,
    *,
    budget: int | float | str,
    window: int | str,
    aim: int | None = None,
    may_grow: bool = False,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    allow: Collection[str] = ALL,
    places_weights: bool = False,
) -> Plan:
    """The plan with the shortest step within a budget: see :func:`spillway.plan`.

    Given ``aim``, a step takes no more bytes than that, and the rest of the budget stays free.
    Windows smaller than ``window`` are tried, too, and larger ones if it ``may_grow``: see NOTE [ In-flight limits ].
    If it ``places_weights``, streamed blocks may have theirs on the GPU: see NOTE [ Weights on the GPU ].
    """
    most, nbytes = parse_bytes(window, what="window"), parse_budget(budget, profile)
    rates = planning_rates(hardware, most)

    limits: dict[str, Any] = {"host_budget": host_budget, "disk_budget": disk_budget, "allow": allow}
    limits |= {"budget": nbytes, "aim": aim}

    def solved(part: Profile, windows: Iterable[int]) -> Solution:
        return best_of(problem_of(part, rates, **limits), windows)

    # With all of an optimizer on the CPU, a step takes the least memory: if that does not fit, no other fraction does.
    fraction = 1.0
    available = (nbytes if aim is None else aim) - profile.static_bytes
    sizes = windows_of([profile], most, may_grow=may_grow, available=available)
    best = solved(divided(profile, fraction, hardware), sizes)
    for other in _FRACTIONS if profile.optimizer is not None else ():
        with contextlib.suppress(BudgetError):
            found = solved(divided(profile, other, hardware), [best.problem.rates.window])
            fraction, best = min((fraction, best), (other, found), key=lambda each: each[1].seconds)
    names: tuple[str, ...] = ()
    if places_weights and profile.optimizer is None:
        chosen = [best.problem.rates.window]
        names, best = _placed(profile, best, lambda part: solved(part, chosen))
    plan = plan_of(with_weights(divided(profile, fraction, hardware), names), best)
    return replace(plan, resident=names, optimizer_fraction=None if profile.optimizer is None else fraction)


def _placed(
    profile: Profile, best: Solution, solved: Callable[[Profile], Solution]
) -> tuple[tuple[str, ...], Solution]:
    """The streamed blocks whose weights are on the GPU in the fastest step, and that step.

    ``best`` is the one in which all are streamed. See NOTE [ Weights on the GPU ].
    """
    streamed = list(dict.fromkeys(call.name for call in profile.calls if call.streamed))
    found: dict[int, Solution] = {0: best}
    count, stride = 0, max(len(streamed) // 4, 1)
    counts = [*range(stride, len(streamed), stride), len(streamed)] if streamed else []
    while counts:
        for count in sorted(set(counts) - found.keys()):
            try:
                found[count] = solved(with_weights(profile, spread(streamed, count)))
            except BudgetError:
                # More of them take more memory.
                break
        fastest = min(each.seconds for each in found.values())
        count = min(each for each in found if found[each].seconds <= _SAME * fastest)
        stride //= 2
        counts = [count - stride, count + stride] if stride else []
        counts = [each for each in counts if 0 < each <= len(streamed)]
    return spread(streamed, count), found[count]


def spread(names: Sequence[str], count: int) -> tuple[str, ...]:
    """So many of these names, at equal distances.

    Example:
        >>> spread(["a", "b", "c", "d"], 2)
        ('b', 'd')
    """
    total = len(names)
    return tuple(name for place, name in enumerate(names) if (place + 1) * count // total > place * count // total)


def with_weights(profile: Profile, names: Collection[str]) -> Profile:
    """The profile of a step in which these streamed blocks have their weights on the GPU."""
    here = {call.name: call.streamed for call in profile.calls if call.name in names}
    nbytes = sum(map(sum, here.values()))
    static = profile.static
    return replace(
        profile,
        static_bytes=profile.static_bytes + nbytes,
        static=None if static is None else replace(static, weights=static.weights + nbytes),
        calls=tuple(
            replace(call, streamed=(), read_seconds=0.0) if call.name in here else call for call in profile.calls
        ),
    )


def profile_for(profile: Profile, plan: Plan, hardware: Hardware) -> Profile:
    """The profile with the optimizer divided, and weights placed, as in a plan."""
    fraction = 1.0 if plan.optimizer_fraction is None else plan.optimizer_fraction
    return with_weights(divided(profile, fraction, hardware), plan.resident)


def make_checkpointing_plan(profile: Profile, hardware: Hardware, *, budget: int, window: int) -> Plan:
    """The plan of torch's checkpointing: each block is recomputed, and only its inputs are kept."""
    options = [(option,) for option in uniform_options(profile, Decision.RECOMPUTE)]
    rates = planning_rates(hardware, window)
    return plan_of(profile, solve(problem_with(profile, options, rates, budget=budget)))


def problem_of(
    profile: Profile,
    rates: Rates,
    *,
    budget: int,
    aim: int | None = None,
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
    kinds = [_block_options(kind, min_bytes=profile.min_bytes, allow=frozenset(allow)) for kind in profile.kinds]
    options = (kinds[call.kind] for call in profile.calls)
    problem = problem_with(profile, options, rates, budget=budget if aim is None else aim)
    late = LATE if any(kind.host is not None for kind in profile.kinds) else 1.0
    spare = None if aim is None else budget - aim
    return replace(problem, spare=spare, host_budget=host, disk_budget=disk, late=late)


def best_of(problem: Problem, windows: Iterable[int]) -> Solution:
    """The fastest step of several windows, tried in this order; the problem's own window does not count."""
    best: Solution | None = None
    refused: BudgetError | None = None
    for window in windows:
        problem = replace(problem, rates=replace(problem.rates, window=window))
        try:
            seconds = _SECONDS if best is None else _NEAR_SECONDS
            found = solve(problem, seconds=seconds, near=best)
        except BudgetError as error:
            refused = error if refused is None or error.least < refused.least else refused
            continue
        best = found if best is None else min(best, found, key=lambda each: each.seconds)
        if not any(option.sent_bytes or option.recompute_seconds for option in best.options):
            # Everything is kept, and no window is needed.
            break
    if best is None:
        assert refused is not None
        raise refused
    return best


def windows_of(profiles: Iterable[Profile], window: int, *, may_grow: bool, available: int) -> list[int]:
    """The windows to try, in bytes, the given one first. See NOTE [ In-flight limits ].

    The bytes of the budget beyond the static ones are ``available``.
    """
    smaller = [max(window // share, min(window, MIN_WINDOW)) for share in (1, 2, 4)]
    while smaller[-1] > max(available // _SHARE, MIN_WINDOW):
        smaller.append(max(smaller[-1] // 2, MIN_WINDOW))
    values = (value for profile in profiles for kind in profile.kinds for value in kind.values)
    largest = max((value.nbytes for value in values if value.is_recomputable), default=0)
    larger = (largest * times for times in (1, 2, 3) if may_grow and largest * times > window)
    return list(dict.fromkeys((*smaller, *larger)))


def planning_rates(hardware: Hardware, window: int) -> Rates:
    """The bandwidths to plan with, and an in-flight limit. See NOTE [ Bandwidth to plan with ]."""
    rates = hardware.rates(window)
    names = ("out", "back", "disk_write", "disk_read")
    return replace(rates, **{name: getattr(rates, name) * USABLE for name in names})


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
    stepped = (2 * state + 3 * gradients) / hardware.memory_bandwidth
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


def parse_budget(budget: int | float | str, profile: Profile) -> int:
    """A budget as a number of bytes: see :func:`~spillway.units.read_budget`.

    A share is of the memory that a step without Spillway adds at its peak to the static bytes, which come on top.
    """
    share = read_budget(budget)
    if isinstance(share, int):
        return share
    most = simulate_program(uniform_program(profile, Decision.KEEP), ANY_RATES).peak_bytes
    return profile.static_bytes + math.ceil(share * (most - profile.static_bytes))


@dataclass(frozen=True, slots=True)
class Point:
    """The peak and the time of a step."""

    peak_bytes: int
    seconds: float
    tasks: tuple[TaskBytes, ...] = field(default=(), repr=False)
    """The bytes of its tasks, in order, if they were measured."""


def make_curve(
    profile: Profile,
    hardware: Hardware,
    *,
    points: int = POINTS,
    on_point: Callable[[int, int], None] | None = None,
    **limits: Any,
) -> tuple[Point, ...]:
    """Plan for several budgets, at least 2: see NOTE [ Budgets of a curve ]. The limits are those of :func:`make_plan`.

    Gives plans by their peaks, without those that are both larger and slower than another. After each plan,
    ``on_point`` is called with the number of plans so far, and of all.
    """
    planned = functools.partial(make_plan, profile, hardware, **limits)
    try:
        least = planned(budget=0).predicted_peak
    except BudgetError as error:
        least = error.least
    here = {call.name for call in profile.calls} if limits.get("places_weights") else set()
    keeping = uniform_program(with_weights(profile, here), Decision.KEEP)
    most = simulate_program(keeping, planning_rates(hardware, parse_bytes(limits["window"], what="window"))).peak_bytes
    budgets = _budgets(profile.static_bytes, least, most, points)
    found = []
    for number, budget in enumerate(budgets, 1):
        # The curve begins later if the budget of CPU memory or of the disk rules out the smallest steps.
        with contextlib.suppress(BudgetError):
            plan = planned(budget=budget)
            found.append(Point(plan.predicted_peak, plan.predicted_seconds))
        if on_point is not None:
            on_point(number, len(budgets))
    return frontier(found)


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
    aim: int,
    window: int,
    may_grow: bool = False,
    host_budget: int | None = None,
    disk_budget: int | None = None,
    allow: Collection[str] = ALL,
) -> list[Plan]:
    """A plan for each stage, so that their rank's step is within a budget and as short as it can be.

    The predictions of all of them are those of the rank. The part of a turn is a stage's place in ``stages``. When the
    rank's step begins, ``static_bytes`` are in use. The limits are those of :func:`make_plan`, in bytes.
    """
    few, profiles = shortened(turns), [stage.profile for stage in stages]
    rates = planning_rates(hardware, window)
    limits: dict[str, Any] = {"host_budget": host_budget, "disk_budget": disk_budget, "allow": allow}
    limits |= {"budget": budget, "aim": aim}
    alone = [problem_of(profile, rates, **limits) for profile in profiles]
    problem = replace(
        alone[0],
        static_bytes=static_bytes,
        parts=tuple(map(chunk_of, stages)),
        names=tuple(f"stage {stage.index}, {call.name}" for stage in stages for call in stage.profile.calls),
        options=tuple(options for each in alone for options in each.options),
        extra_bytes=tuple(nbytes for each in alone for nbytes in each.extra_bytes),
        streamed=tuple(each for one in alone for each in one.streamed),
        late=max(each.late for each in alone),
        turns=tuple(few),
    )
    sizes = windows_of(profiles, window, may_grow=may_grow, available=aim - static_bytes)
    best = best_of(problem, sizes)
    # The turns that were left out take as long as the others.
    times = len(turns) / len(few)
    plans = (plan_of(profile, best, part=part) for part, profile in enumerate(profiles))
    return [
        replace(plan, predicted_seconds=plan.predicted_seconds * times, stall_seconds=plan.stall_seconds * times)
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
