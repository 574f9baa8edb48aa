"""How much may be on its way at once: several windows are tried, and the fastest step counts.

NOTE [ How large a window ]

A smaller window leaves more memory to other things; with a larger one more can be on its way, and what is waited for
comes earlier. Which is better hangs on the budget, and is found by trying. What fills a window leaves alone, and what
comes after it waits. So where a window may grow, it is made to hold one, two and three of the largest tensors: of a
Llama-8B's MLP three are saved one after the other, and with room for all of them a step within checkpointing's peak is
1 % (32768 tokens) and 1.5 % (8192) shorter by simulation than with twice and four times 512 MiB. Four gave no more. Of
little room, a window may be all: then it is halved as long as it is more than a sixteenth of that.

What is fetched ahead takes memory where there is the least of it, in backward. So with the best window it is tried
whether three quarters or half of it are enough there: of 32768 tokens that is another 1 %.

NOTE [ Room on the link ]

Copies run at a link's rate, 98 % of it in a trace of an H200, but with gaps: one waits for what it copies, another for
the host. A plan that needs the whole link waits for each of them. So less than all is planned with, and how much less
is lopsided: by simulation of the layers of Llama-8B on an H200 (8192 and 32768 tokens; within checkpointing's peak, 0.3
and half of keep's), plans made for 0.9 of the rate take 0.2 % longer at most than those for 0.95 where there is 0.95 of
it, and 0.8 to 1.7 % less where there is 0.9.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from spillway.errors import BudgetError
from spillway.planning.hardware import Hardware
from spillway.planning.plan import Plan
from spillway.planning.profile import Profile
from spillway.planning.relaxation import Relaxed
from spillway.planning.solver import Solution, better, bound_of, solve
from spillway.planning.tasks import Option, Problem, Rates

USABLE = 0.9
"""Of a link's rate, what is planned with. See NOTE [ Room on the link ]."""
SECONDS = 0.4
"""What solving may take, of work, for each window."""
_MORE_SECONDS = 1.0
"""What it may take for the best one, once more."""
_AHEAD = (0.75, 0.5)
"""Of a window, so much is fetched ahead, where that is better."""
MIN_WINDOW = 32 << 20
_SHARE = 16
"""Of the room that there is, a window that takes more leaves little to anything else: smaller ones are tried."""
Windows: TypeAlias = tuple[int, int | None]
"""Bytes that may be leaving, and bytes that may be fetched ahead; ``None``: as many."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """What may be planned with, but for windows."""

    hardware: Hardware
    active: int
    """How many devices of the machine copy at the same time."""

    def with_window(self, window: Windows) -> Rates:
        """Of one window."""
        return usable_rates(self.hardware, window[0], ahead=window[1], active=self.active)


@dataclass(frozen=True, slots=True)
class Found:
    """The best of what was tried."""

    problem: Problem
    """With its window."""
    solution: Solution

    @property
    def seconds(self) -> float:
        """What it is ranked by."""
        return self.solution.seconds

    @property
    def options(self) -> list[Option]:
        """What each block does."""
        return [each[number] for each, number in zip(self.problem.options, self.solution.chosen, strict=True)]


def best_of(
    problem: Problem, lanes: Lanes, windows: Iterable[Windows], *, seconds: float = SECONDS, near: Relaxed | None = None
) -> Found:
    """The fastest step of several windows.

    Args:
        problem: its rates are not looked at.
        lanes: what a window has beside it.
        windows: are tried in this order.
        seconds: what solving may take for each, as :func:`~spillway.planning.solver.solve` has it.
        near: shares for the same options at another window.

    Raises:
        BudgetError: where no choice fits with any window: it names the least budget that was found.
    """
    best: Found | None = None
    refused: BudgetError | None = None
    for window in windows:
        problem = replace(problem, rates=lanes.with_window(window))
        try:
            solution = solve(problem, seconds=seconds, near=near)
        except BudgetError as error:
            refused = error if refused is None or error.least < refused.least else refused
            continue
        near = solution.shares if near is None else near
        found = Found(problem, solution)
        best = found if best is None else min(best, found, key=lambda each: each.seconds)
        if not any(option.sent_bytes or option.rerun_seconds for option in best.options):
            # All may stay, and no window is needed.
            break
    if best is None:
        assert refused is not None
        raise refused
    return best


def ahead_of(best: Found, solved: Callable[[Sequence[Windows]], Found]) -> Found:
    """The best with less fetched ahead, if that is better, with a bound. See NOTE [ How large a window ].

    Args:
        best: with as much fetched ahead as may leave.
        solved: the best of some windows.
    """
    again = any(option.rerun_seconds for option in best.options)
    if any(option.sent_bytes for option in best.options) and (again or best.solution.timeline.stall_seconds):
        window = best.problem.rates.window
        for share in _AHEAD:
            with contextlib.suppress(BudgetError):
                best = min(best, solved([(window, int(share * window))]), key=lambda each: each.seconds)
    if best.solution.bound_seconds is not None:
        return best
    return replace(best, solution=replace(best.solution, bound_seconds=bound_of(best.problem)))


def improved(best: Found) -> Found:
    """The same window, and a faster choice near the one that was found, if there is one."""
    return replace(best, solution=better(best.problem, best.solution, seconds=_MORE_SECONDS))


def windows_of(profiles: Iterable[Profile], window: int, *, may_grow: bool, room: int) -> list[int]:
    """What is tried: the window itself first. See NOTE [ How large a window ].

    Args:
        profiles: what saves something.
        window: bytes.
        may_grow: whether larger ones are tried, too.
        room: bytes of the budget beyond what is there when a step begins.
    """
    smaller = [max(window // share, min(window, MIN_WINDOW)) for share in (1, 2, 4)]
    while smaller[-1] > max(room // _SHARE, MIN_WINDOW):
        smaller.append(max(smaller[-1] // 2, MIN_WINDOW))
    values = (value for profile in profiles for kind in profile.kinds for value in kind.values)
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
        out=rates.out * USABLE,
        back=rates.back * USABLE,
        disk_write=rates.disk_write * USABLE,
        disk_read=rates.disk_read * USABLE,
    )
