"""The plans of a model within a budget: the first of a profile, and others when a step was too large or too slow.

NOTE [ Two plans in turn ]

Two plans within the budget, one of them torch's own checkpointing, are compared while the plan is active: some steps by
one plan, some by the other, twice. If kernels are short, the CPU sets the time of a step, and other programs use the
CPU, too: one step of each would say little. A run takes as long as on the slowest rank, and each plan counts with the
faster of its two runs.

The first step of a run learns the order of tensors, and is not timed. A run begins and ends with a synchronisation, so
that the CPU's lead does not count. A run in which inputs have another size, or replays are compared, begins again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from spillway.attaching.budget import BudgetTarget, Planner
from spillway.attaching.collector import Notes, Stage
from spillway.attaching.ranks import ALONE, RankGroup
from spillway.errors import BudgetError
from spillway.planner.planner import Point, parse_budget
from spillway.profiler.meter import DeviceMemory
from spillway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from spillway.attaching.collector import ProfileCollector
    from spillway.planner.plan import Plan
    from spillway.planner.profile import Profile
    from spillway.profiler.step_trace import StepTrace

MOST_APART = 16
"""A second step above the budget within so many steps is an error, if there is no plan for less."""
_EVALUATED = "an evaluation between two steps had a peak over the budget, which is of training alone"
_LEARNED = "a step with inputs of a new size, which is learned from, was over the budget"
_ROUNDED = (
    "a step of torch's own checkpointing was above the budget by less than a thousandth: cached blocks were freed"
)
_MOST_UNJUDGED = 4
"""Steps of a plan that are not judged, since they were learned from."""
_GRAINS = 256
"""A step's first bytes are rounded up to such a part of the budget."""
_ROUNDING = 1000
"""Up to such a part of the budget, a step of torch's own checkpointing may be above it because of cached blocks."""
_MOST_FILLED = 0.9
"""A part of the GPU's memory. A plan may fill more of it, and that is noted."""
_CLOSE = 1.01
"""If predicted times are this close, the plan of torch's own checkpointing is taken."""
_WORTH = 1.05
"""After two plans above the budget, a smaller one is worth a try if torch's own checkpointing takes so much longer."""
_MOST_SMALLER = 3
"""Smaller plans that are tried before torch's own checkpointing is next in any case."""
_FIRST = 1
"""Steps of a run that are not timed."""
_TIMED = 3
"""Steps that are."""
_RUNS = 4
_MOST_TIMED = 64
"""Steps after which the comparison ends without a result."""


def is_same(plan: Plan, other: Plan) -> bool:
    """Whether two plans of one model do the same, whatever they predict."""
    names = ("blocks", "window", "optimizer_fraction", "resident")
    return all(getattr(plan, name) == getattr(other, name) for name in names)


class PlanSearch:
    """Chooses the plan of the next step. See NOTE [ How a plan is found ] in ``controller.py``.

    The budget is in bytes, or a share as a float, as for :func:`spillway.plan`. A plan that is given instead stays.
    """

    bears_a_step = True
    """Whether one step above the budget is only noted, if there is no plan for less."""

    def __init__(
        self, planner: Planner, notes: Notes, *, budget: int | float | None = None, plan: Plan | None = None
    ) -> None:
        self.planner = planner
        self.memory = DeviceMemory(planner.device)
        self.notes = notes
        self.plan = plan
        """The latest plan."""
        self.is_given = plan is not None
        self.profile: Profile | None = None
        """The profile that the plan was made of."""
        self.measured: Point | None = None
        """Peak and seconds of the validated step."""
        self.target = BudgetTarget(budget) if isinstance(budget, int) else None
        self.ranks = ALONE
        self._share = budget if isinstance(budget, float) else None
        self._profiled: Profile | None = None
        """The profile before it was made to begin with more bytes."""
        self._unjudged = 0
        self._rival: tuple[Plan, Point] | None = None
        """A validated plan and its step, while torch's own checkpointing is validated beside it."""
        self.timer: PlanTimer | None = None
        """Compares the active plan with torch's own checkpointing."""
        self._has_tried_checkpointing = False
        self._is_checkpointing_over = False
        """Whether a step of torch's own checkpointing was above the budget."""
        self._refused: int | None = None
        """The least bytes at the start of a step for which no plan was found."""

    @property
    def plans(self) -> Sequence[Plan]:
        """The latest plan of each collector."""
        return [] if self.plan is None else [self.plan]

    @property
    def budget(self) -> int | None:
        """Bytes that a step may have; ``None``: a share of a step that was not profiled yet."""
        if self.is_given and self.plan is not None:
            return self.plan.budget
        return None if self.target is None else self.target.budget

    @property
    def known_target(self) -> BudgetTarget:
        assert self.target is not None
        return self.target

    def restart(self) -> None:
        """Another profile is made."""
        self._is_checkpointing_over = False
        self._refused = None
        self.reset()

    def reset(self) -> None:
        """Steps change: the next plan is for the whole budget, and may be compared again."""
        self._forget_rival()
        if self.target is not None:
            self.target.reset()

    def read_share(self, profile: Profile) -> None:
        """A budget that is a share is known in bytes once there is a profile."""
        if self._share is not None:
            self.target = BudgetTarget(parse_budget(self._share, profile))

    def plan_for(self, profile: Profile) -> None:
        """Choose the first plan of a profile."""
        self.profile = self._profiled = profile
        self._is_checkpointing_over = False
        self.replan()

    def replan(self) -> None:
        """Choose a plan for the profile and the target: that of torch's own checkpointing, unless another is faster."""
        assert self.profile is not None
        plan, target = None, self.known_target
        checkpointing = None if target.corrections else self._checkpointing(self.profile)
        try:
            plan = self.planner.plan(self.profile, target, self.ranks)
        except BudgetError:
            if checkpointing is None:
                raise
        if plan is None or (
            checkpointing is not None and checkpointing.predicted_seconds <= _CLOSE * plan.predicted_seconds
        ):
            plan = checkpointing
        assert plan is not None
        self.plan = plan
        total = self.memory.total()
        if total is not None and plan.predicted_peak > _MOST_FILLED * total:
            self.notes.once(
                f"the plan fills more than nine tenths of the GPU's {format_bytes(total)}, of which the allocator's "
                f"reserve and other libraries take a part: if memory runs out, give a budget of "
                f"{format_bytes(int(_MOST_FILLED * total))}, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            )

    def step_begins(self, collector: ProfileCollector) -> bool:
        """Whether a step begins with so many more bytes than planned for that there is another plan."""
        # Copies under way are not counted. The plan itself decides how much of an offloaded optimizer is on the device.
        is_divided = collector.applied.optimizer is not None
        other = collector.tracing.carried() + self.planner.resident_bytes
        known = None if is_divided else self.memory.level() - other
        levels = self.ranks.share("level", lambda: known)
        level = max((each for each in levels if each is not None), default=0)
        profile, plan, target = self.profile, self.plan, self.known_target
        assert profile is not None
        assert plan is not None
        rise = level - profile.static_bytes
        if None in levels or rise <= target.margin(plan.predicted_peak):
            return False
        # If levels keep rising or change a little, not every step has a plan of its own.
        grain = max(target.budget // _GRAINS, 1)
        more = -(-rise // grain) * grain
        if self._refused is not None and level > self._refused - grain:
            return False
        self.profile = collector.risen(profile, more)
        try:
            self.replan()
        except BudgetError:
            # These bytes may go in time. If they do not, the step's peak tells.
            self.profile, self._refused = profile, level
            return False
        assert collector.profile is not None
        collector.profile = collector.risen(collector.profile, more)
        self._forget_rival()
        self.notes.append(
            f"planned again for steps that begin with {format_bytes(level)}; the profiled one began with "
            f"{format_bytes(profile.static_bytes)}"
        )
        return True

    def validate(self, peak: int, trace: StepTrace | None, *, learned: bool) -> Stage | None:
        """A step with the plan is over: correct the plan, compare it, or accept it.

        Returns the stage of the next step; ``None``: that is judged instead. Raises as :meth:`correct`.
        """
        ranks, target = self.ranks, self.known_target
        self.measured = (
            Point(peak, 0.0) if trace is None else Point(peak, trace.seconds(("begin", 0), ("done", 0)), trace.tasks())
        )
        is_over = peak > target.budget and not self.frees_rounding(peak)
        if learned and is_over and self._unjudged < _MOST_UNJUDGED:
            self._unjudged += 1
            self.notes.once(_LEARNED)
            return None
        self._unjudged = 0
        if self._rival is not None and self.plan is not None:
            rival, checkpointing, self._rival = self._rival, (self.plan, self.measured), None
            self.plan, self.measured = rival
            self._is_checkpointing_over = is_over
            if is_over:
                self.notes.append("torch's own checkpointing took more than the budget: the plan before is active")
            else:
                self.timer = PlanTimer((rival, checkpointing), self.planner.device, ranks)
        elif is_over:
            self.correct(peak)
            # Ranks judge no step once a plan is active. So they judge one that is warm.
            return Stage.VALIDATING if ranks.alone else Stage.WARMING_UP
        elif self.plan is not None and (beside := self._checkpointing_beside()) is not None:
            self._has_tried_checkpointing = True
            self._rival, self.plan = (self.plan, self.measured), beside
            return Stage.VALIDATING
        return Stage.ACTIVE

    def frees_rounding(self, peak: int) -> bool:
        """Free cached blocks, if a step of torch's own checkpointing is above the budget by those only: whether so."""
        is_close = self.ranks.alone and peak - self.known_target.budget <= self.known_target.budget // _ROUNDING
        return is_close and self._is_latest(self._checkpointing(self._profiled)) and self.memory.free_cached()

    def correct(self, peak: int) -> None:
        """Choose another plan, since a step was above the budget: a smaller one, or torch's own checkpointing.

        Raises:
            BudgetError: if no plan takes less. The latest one stays.
        """
        self.timer = None
        checkpointing = self._checkpointing(self._profiled)
        if self._is_latest(checkpointing):
            self._is_checkpointing_over = True
            checkpointing = None
            if not self.known_target.corrections:
                # It may be predicted to take more than other plans may.
                with suppress(BudgetError):
                    self.replan()
                    self.notes.append(f"torch's own checkpointing took {format_bytes(peak)}: another plan next")
                    return
        if checkpointing is None or not self.known_target.corrections:
            self._back_off(peak)
        elif self.known_target.corrections >= _MOST_SMALLER or not self._finds_smaller(peak, checkpointing):
            self.notes.append(
                f"a step of {format_bytes(peak)} where less was predicted: torch's own checkpointing next"
            )
            self.plan = checkpointing

    def _finds_smaller(self, peak: int, checkpointing: Plan) -> bool:
        """Back off, unless that plan is not predicted to be worth a step; whether it is."""
        target, count = self.known_target, len(self.notes)
        before = target.corrections, target.nbytes
        with suppress(BudgetError):
            self._back_off(peak)
            assert self.plan is not None
            if self.plan.predicted_seconds * _WORTH < checkpointing.predicted_seconds:
                return True
        # That plan never ran.
        target.corrections, target.nbytes = before
        del self.notes[count:]
        return False

    def _back_off(self, peak: int) -> None:
        self._forget_rival()
        self.known_target.back_off(peak, self.replan, self.notes.append)

    def step_ended(self, inputs: int, *, learned: bool) -> bool:
        """A step by the active plan is over, and was within the budget; whether the next one has another plan."""
        timer = self.timer
        if timer is None:
            return False
        timer.step_ended(inputs, learned=learned)
        if timer.is_done:
            self.timer = None
        if timer.seconds is not None:
            first, second = (format_seconds(each) for each in timer.seconds)
            self.notes.append(f"steps by two plans in turn took {first} and {second}: the faster one is active")
        before = self.plan
        self.plan, self.measured = timer.chosen
        return self.plan is not before

    def _checkpointing_beside(self) -> Plan | None:
        """The plan of torch's own checkpointing, if it is to be timed beside the plan."""
        profile, plan = self.profile, self.plan
        if self._has_tried_checkpointing or profile is None or plan is None or profile.kinds[0].host is None:
            return None
        if all(block.plain for block in plan.blocks):
            # Nothing is faster.
            return None
        found = self._checkpointing(self._profiled)
        return None if self._is_latest(found) else found

    def _checkpointing(self, profile: Profile | None) -> Plan | None:
        """The plan of torch's own checkpointing, if its predicted peak is within the whole budget."""
        if profile is None or self._is_checkpointing_over:
            return None
        resident, budget = () if self.plan is None else self.plan.resident, self.known_target.budget
        found = self.planner.checkpointing_plan(profile, budget, self.ranks, resident)
        return self.planner.checkpointing_plan(profile, budget, self.ranks) if found is None and resident else found

    def _is_latest(self, plan: Plan | None) -> bool:
        """Whether steps already run by this plan."""
        return plan is not None and self.plan is not None and is_same(plan, self.plan)

    def _forget_rival(self) -> None:
        """The next plan is another one, and may be compared again."""
        self._rival = self.timer = None
        self._has_tried_checkpointing = False
        self._unjudged = 0


class PeakMonitor:
    """Compares steps by an active plan with the budget of a search."""

    def __init__(self, search: PlanSearch) -> None:
        self.peak: int | None = None
        """The step's peak, if something came after it that is no part of it."""
        self._search = search
        self._steps = 0
        """Steps in which a plan was active."""
        self._over_at: int | None = None
        """The last of them that was above the budget."""
        self._rounded_at = -MOST_APART
        """The last of them after which cached blocks were freed."""

    def step_ended(self, *, learned: bool) -> bool:
        """A step with an active plan is over; whether the search has another plan, since it was above the budget.

        Raises:
            BudgetError: if it has none, and another step was above the budget a short time ago.
        """
        search, memory = self._search, self._search.memory
        budget, notes = search.known_target.budget, search.notes
        self._steps += 1
        last = memory.peak()
        peak, self.peak = last if self.peak is None else self.peak, None
        if peak <= budget < last:
            notes.once(_EVALUATED)
            memory.reset_peak()
        if learned:
            memory.reset_peak()
            if peak > budget:
                notes.once(_LEARNED)
        elif peak > budget and not search.ranks.alone:
            notes.once(f"a step of this rank had a peak over the budget of {format_bytes(budget)}")
        elif peak > budget and self._steps - self._rounded_at >= MOST_APART and search.frees_rounding(peak):
            self._rounded_at = self._steps
            notes.once(_ROUNDED)
            memory.reset_peak()
        elif peak > budget:
            notes.append(f"a step had a peak of {format_bytes(peak)}, {format_bytes(peak - budget)} over the budget")
            before, self._over_at = self._over_at, self._steps
            try:
                search.correct(peak)
            except BudgetError:
                memory.reset_peak()
                if not search.bears_a_step or (before is not None and self._steps - before <= MOST_APART):
                    raise
                # Another such step need not come.
                notes.append(f"no plan takes less, so this one stays: a second such step in {MOST_APART} is an error")
            else:
                return True
        return False


class PlanTimer:
    """Gives the plan of the next step. See NOTE [ Two plans in turn ].

    Each plan has what was measured of its step. The first is the active one, which also stays without a result.
    """

    def __init__(
        self, plans: tuple[tuple[Plan, Point], tuple[Plan, Point]], device: torch.device, ranks: RankGroup
    ) -> None:
        self.chosen = plans[0]
        """The plan of the next step."""
        self.is_done = False
        self.seconds: tuple[float, float] | None = None
        """Seconds of a step by each plan, if it is done."""
        self._plans = plans
        self._device = device
        self._ranks = ranks
        self._runs: list[float] = []
        self._steps = self._of_run = 0
        self._begin = 0.0
        self._inputs: list[int] | None = None

    def step_ended(self, inputs: int, *, learned: bool) -> None:
        """A step by the plan is over. ``inputs``: bytes of its inputs."""
        self._steps += 1
        if self._steps == _MOST_TIMED:
            self.is_done, self.chosen = True, self._plans[0]
            return
        steps = self._ranks.share("timed step", lambda: (inputs, learned))
        of_all = [nbytes for nbytes, _ in steps]
        if any(each for _, each in steps) or self._inputs not in (None, of_all):
            self._of_run = 0
            return
        self._inputs = of_all
        self._of_run += 1
        if self._of_run == _FIRST:
            self._begin = self._now()
        elif self._of_run == _FIRST + _TIMED:
            seconds = (self._now() - self._begin) / _TIMED
            self._runs.append(max(self._ranks.share("seconds", lambda: seconds)))
            self._of_run = 0
            self.chosen = self._plans[len(self._runs) % 2]
            if len(self._runs) == _RUNS:
                self.seconds = min(self._runs[::2]), min(self._runs[1::2])
                self.chosen = self._plans[self.seconds[1] < self.seconds[0]]
                self.is_done = True

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
