"""Finds the plan of an attached model within a budget, in the steps of the user's own loop.

NOTE [ How a plan is found ]

Each call of the model in training begins a step, and each step has a stage. A step is judged when the next one begins.
An evaluation between two steps ends the first of them: no plan makes an evaluation smaller. A call without gradients in
training mode belongs to its step.

The first three stages profile the model (NOTE [ Profiling steps ] in ``collector.py``). Then:

``WARMING_UP``
    The plan is applied. New replays are compared, and the order of backward is learned.
``VALIDATING``
    The peak of the step is measured. If it is above the budget, there is a plan for less, and the next step validates
    that. On an accelerator, the next step then times torch's own checkpointing, if that is within the budget:
    predictions of CPU overhead are rough, and so is one step of a CPU that others use. The plan with the smaller
    product of predicted and measured seconds becomes active. Checkpointing offloads nothing,
    and its replays have run before: it needs no warming up. Its peak does not vary with copies: it may take the whole
    budget, and other plans leave some. It is tried even if it is predicted to take 1 % more. It is also the plan after
    two others that were above the budget. A step that was learned from is not judged.

    An allocator counts a cached block whole, though a tensor takes a little less of it. So checkpointing may take a
    little more than its peak after steps with blocks of other sizes. On one GPU it is not refused for a thousandth of
    the budget, but cached blocks are freed. Later steps must keep to the budget.
``ACTIVE``
    Only the device's peak and the inputs' sizes are measured. After a peak above the budget there is a plan for less.
    If there is none, the step is noted; a second one soon after it is an error. One of several ranks only notes it. A
    step that begins with more bytes than the profiled one has a plan for that before it runs. Larger inputs take the
    least memory once, and then have a plan for the profile, enlarged. If there is none, profiling begins again.

So a search takes five steps, and six if checkpointing is timed or the plan is corrected once. Each stage is a line
in the log ``spillway.attach``.

Ranks that share a model go through the stages in step: NOTE [ One plan for many ranks ] in ``ranks.py``. The stages of
a pipeline are planned for together: ``pipeline.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from spillway.attaching.budget import BudgetTarget, Planner, Rival, is_same
from spillway.attaching.collector import PROFILING, ProfileCollector, Stage, kinds_of, tensor_bytes
from spillway.attaching.ranks import ALONE, ranks_of
from spillway.attaching.validation import refuse_nested
from spillway.checkpointing.blocks import Named
from spillway.errors import BudgetError
from spillway.planner.planner import Point, parse_budget
from spillway.profiler.meter import DeviceMemory
from spillway.units import format_bytes

if TYPE_CHECKING:
    from spillway.attaching.block import BlockCall
    from spillway.planner.plan import Plan
    from spillway.planner.profile import Profile
    from spillway.profiler.step_trace import StepTrace

MOST_APART = 16
"""A second step above the budget within so many steps is an error, if there is no plan for less."""
_MOST_GROWTH = 2
"""Inputs that are larger than so many times the profiled ones need a profile of their own."""
_MOST_UNJUDGED = 4
"""Steps of a plan that are not judged, since they were learned from."""
_MOST_IDLE = 16
_GRAINS = 256
"""A step's first bytes are rounded up to such a part of the budget."""
_ROUNDING = 1000
"""Up to such a part of the budget, a step of torch's own checkpointing may be above it because of cached blocks."""
_CLOSE = 1.01
"""If predicted times are this close, the plan of torch's own checkpointing is taken."""
_MOST_LEAD = 0.5
"""Seconds of the CPU's lead that a step is validated with, at most."""
_EVALUATED = "an evaluation between two steps had a peak over the budget, which is of training alone"
_LEARNED = "a step with inputs of a new size, which is learned from, was over the budget"


class PlanController:
    """See NOTE [ How a plan is found ].

    The budget is in bytes, or a share as a float, as for :func:`spillway.plan`. A plan that is given instead is active
    from the start, whatever comes.
    """

    _bears_a_step = True
    """Whether one step above the budget is only noted, if there is no plan for less."""

    def __init__(
        self,
        collector: ProfileCollector,
        planner: Planner,
        *,
        budget: int | float | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.collector = collector
        self.collectors: Sequence[ProfileCollector] = (collector,)
        """Several for the stages of a pipeline."""
        self.planner = planner
        self.plan = plan
        self.profile: Profile | None = None
        """The profile that the plan was made of."""
        self.measured: Point | None = None
        """Peak and seconds of the validated step."""
        self.notes = collector.notes
        self.losses = collector.losses
        self._memory = DeviceMemory(collector.device)
        self._stage = Stage.ACTIVE
        if plan is None:
            self._stage = Stage.PROFILING_OPERATORS
            # Not in the middle of a step.
            _ = planner.hardware
        self._is_given = plan is not None
        self._share = budget if isinstance(budget, float) else None
        self._target = BudgetTarget(budget) if isinstance(budget, int) else None
        self._ranks = ALONE
        self._was_called = False
        self._inputs = 0
        """Bytes of the largest inputs that the plan is for."""
        self._has_outgrown = False
        """Whether this step has larger inputs than the plan was for."""
        self._learned = 0
        """Calls of blocks that were recorded or compared so far."""
        self._unjudged = 0
        self._rival: Rival | None = None
        self._has_tried_checkpointing = False
        self._is_checkpointing_over = False
        """Whether a step of torch's own checkpointing was above the budget."""
        self._profiled: Profile | None = None
        """The profile before it was made to begin with more bytes."""
        self._peak: int | None = None
        """The step's peak, if something came after it that is no part of it."""
        self._steps = 0
        """Steps in which a plan was active."""
        self._over_at: int | None = None
        """The last of them that was above the budget."""
        self._refused: int | None = None
        """The least bytes at the start of a step for which no plan was found."""

    @property
    def stage(self) -> Stage:
        if self._stage not in PROFILING:
            return self._stage
        stages = (each.stage for each in self.collectors if not each.is_left_alone)
        return min(stages, key=PROFILING.index, default=self._stage)

    @property
    def budget(self) -> int | None:
        """Bytes that a step may have; ``None``: a share of a step that was not profiled yet."""
        if self._is_given and self.plan is not None:
            return self.plan.budget
        return None if self._target is None else self._target.budget

    @property
    def missing(self) -> str:
        """The calls or steps that a plan still needs; empty: there is one."""
        if self.stage not in PROFILING:
            return ""
        if idle := self.collector.idle_steps:
            return f"a backward pass through the blocks: the last {idle} calls of the model had none"
        if self.collector.is_waiting:
            return "two steps of the optimizer that attach() was given"
        calls = len(PROFILING) - PROFILING.index(self.stage) + (not self._was_called)
        return f"{calls} more call{'s' if calls > 1 else ''} of the model in training, after a backward pass each"

    @property
    def applied(self) -> int:
        return self.collector.applied

    @property
    def is_plain(self) -> bool:
        return self.stage is Stage.ACTIVE and self.collector.is_plain

    @property
    def spare_bytes(self) -> int:
        return self.plan.budget - self.plan.predicted_peak if self.is_plain and self.plan is not None else 0

    def manage(self, blocks: Sequence[BlockCall]) -> None:
        if self.plan is None:
            refuse_nested([Named(call.name, module) for call in blocks if (module := call.module()) is not None])
        self.collector.manage(blocks, self.plan)

    def begin(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        collector = self.collector
        if collector.is_elsewhere:
            return
        self._meet(model)
        if not self._ranks.are_all_here(model):
            # Not all ranks make this call. Nothing is learned of it, and the step before it is kept.
            collector.cut()
            return
        was_judged, applied = self.stage in (Stage.VALIDATING, Stage.ACTIVE), self.applied
        self._step_ended(collector.end_step())
        if collector.idle_steps == _MOST_IDLE:
            self.notes.once(
                f"{_MOST_IDLE} calls of the model had no backward before the next one, so nothing was profiled: a "
                f"pipeline's stages have their budget by offload_stages(budget=...)"
            )
        nbytes = self._see_inputs(tensor_bytes(args, kwargs))
        if collector.device.type == "cpu":
            # Freed memory of reloaded tensors is kept for more of them. Until then it counts as activations.
            collector.session.trim(collector.device)
        if not was_judged or self.applied == applied:
            # Otherwise the new plan is for this step's first bytes, too.
            self._look_at_level()
        if self.stage is not Stage.ACTIVE:
            lead = self.profile.lead_seconds if self.stage is Stage.VALIDATING and self.profile is not None else 0.0
            collector.begin_step(self.stage, nbytes, min(lead, _MOST_LEAD))

    def evaluates(self) -> None:
        if self.stage is not Stage.ACTIVE:
            # One of several ranks may evaluate: the others hear of it when the next step begins.
            self.collector.evaluates()
        elif self._peak is None:
            self._peak = self._memory.peak()

    def drop(self) -> None:
        self.collector.drop()

    def _enter(self, stage: Stage) -> None:
        """The next step has this stage."""
        self._stage = stage
        stage.log(self.collector.model)
        self._unjudged = 0
        if stage is Stage.ACTIVE:
            self._memory.reset_peak()

    def _meet(self, model: Module) -> None:
        """Find the ranks that train the model together. It may be wrapped later than it is first called."""
        if self._was_called and (not self._ranks.alone or self.stage is Stage.ACTIVE):
            return
        self._ranks = ranks_of(model)
        if self._was_called and not self._ranks.alone and self.stage is not Stage.PROFILING_OPERATORS:
            self._start_again()
        self._was_called = True

    def _step_ended(self, trace: StepTrace | None) -> None:
        """Judge the step by its stage. ``trace`` has its measurements, unless it had no backward, or was not traced."""
        if self._stage in PROFILING:
            if self.collector.advance(trace, self._ranks):
                self._plan_first()
        elif self.stage is Stage.ACTIVE:
            self._check()
        elif self._has_outgrown:
            self._plan_outgrown()
        elif all(self._ranks.share(self.stage.value, lambda: trace is not None)):
            assert trace is not None
            if self.stage is Stage.WARMING_UP:
                self._has_learned()
                self._enter(Stage.VALIDATING)
            else:
                self._validate(trace.step_peak, trace)

    def _see_inputs(self, nbytes: int) -> int:
        """Bytes of this step's inputs: those of the largest rank, unless a plan is active."""
        if self.stage is not Stage.ACTIVE:
            nbytes = max(self._ranks.share("inputs", lambda: nbytes))
        elif not self._ranks.alone:
            # Other ranks may have smaller inputs, and do not begin again.
            nbytes = min(nbytes, self._inputs)
        before, self._inputs = self._inputs, max(self._inputs, nbytes)
        if 0 < before < nbytes and self.stage not in PROFILING and not self._is_given:
            self._outgrow(self.collector, before, nbytes)
        return nbytes

    def _outgrow(self, collector: ProfileCollector, before: int, now: int) -> None:
        self.notes.append(f"the inputs of {format_bytes(now)} are larger than any before ({format_bytes(before)})")
        if now > _MOST_GROWTH * collector.measured_inputs or not self._ranks.alone:
            self._start_again()
            return
        if self._target is not None:
            self._target.reset()
        self._has_outgrown = True
        self._forget_rival()
        self._enter(Stage.WARMING_UP)
        for each in self.collectors:
            each.use_least_memory()

    def _plan_first(self) -> None:
        """The first plan of a profile: for the largest inputs that came while it was made, if there is one for them."""
        collector = self.collector
        assert collector.profile is not None
        if self._share is not None:
            self._target = BudgetTarget(parse_budget(self._share, collector.profile))
        if self._ranks.alone and self._inputs > collector.measured_inputs:
            with suppress(BudgetError):
                self._plan_enlarged()
                return
            self._inputs = collector.measured_inputs
        try:
            self._plan_for(collector.profile)
        except BudgetError:
            # A user who goes on hears it again, of the next profile.
            is_rough = collector.is_rough
            self._start_again()
            if not is_rough:
                raise

    def _plan_outgrown(self) -> None:
        self._has_outgrown = False
        try:
            self._plan_enlarged()
        except BudgetError:
            # The enlarged profile may be too large. The step is measured instead.
            self._start_again()

    def _plan_enlarged(self) -> None:
        self._plan_for(self.collector.enlarged(self._inputs))

    def _plan_for(self, profile: Profile) -> None:
        self.profile = self._profiled = profile
        self._is_checkpointing_over = False
        self._replan()

    def _replan(self, stage: Stage = Stage.WARMING_UP) -> None:
        """Apply a plan for the profile and the target: that of torch's own checkpointing, unless another is faster.

        Raises:
            BudgetError: if there is none.
        """
        assert self.profile is not None
        plan, target = None, self._known_target
        checkpointing = None if target.corrections else self._checkpointing(self.profile)
        try:
            plan = self.planner.plan(self.profile, target.nbytes, self._ranks)
        except BudgetError:
            if checkpointing is None:
                raise
        if plan is None or (
            checkpointing is not None and checkpointing.predicted_seconds <= _CLOSE * plan.predicted_seconds
        ):
            plan = checkpointing
        assert plan is not None
        self._use(plan, stage)

    def _use(self, plan: Plan, stage: Stage) -> None:
        self.plan = plan
        self.collector.apply(plan)
        self._enter(stage)

    def _validate(self, peak: int, trace: StepTrace | None = None) -> None:
        """A step with the plan is over: correct the plan, compare it, or make it active."""
        ranks, target, rival = self._ranks, self._known_target, self._rival
        peak = max(ranks.share("peak", lambda: peak))
        learned = any(ranks.share("learned", self._has_learned))
        self.measured = Point(peak, 0.0 if trace is None else trace.seconds(("begin", 0), ("done", 0)))
        is_over = peak > target.budget
        is_close = ranks.alone and 0 < peak - target.budget <= target.budget // _ROUNDING
        if is_close and self._is_active(self._checkpointing(self._profiled)):
            is_over = not self._memory.free_cached()
        checkpointing = None if rival is not None or trace is None else self._checkpointing_beside()
        if rival is not None and trace is not None:
            kinds = kinds_of(trace)
            learned = any(ranks.share("other", lambda: kinds != rival.kinds)) or learned
        is_judged = is_over or checkpointing is not None or rival is not None
        if learned and is_judged and self._unjudged < _MOST_UNJUDGED:
            # The next step is judged instead.
            self._unjudged += 1
            if is_over:
                self.notes.once(_LEARNED)
        elif rival is not None and (is_over or (not learned and self._is_slower(self._seconds_of(trace), rival))):
            self._rival, self.measured, self._is_checkpointing_over = None, rival.measured, is_over
            why = "took more than the budget" if is_over else "was no faster"
            self.notes.append(f"torch's own checkpointing {why}: the plan before is active")
            self._use(rival.plan, Stage.ACTIVE)
        elif is_over:
            self._correct(peak)
        elif checkpointing is not None:
            assert self.plan is not None
            assert trace is not None
            self._has_tried_checkpointing = True
            self._rival = Rival(self.plan, self.measured, kinds_of(trace), self._seconds_of(trace))
            self._use(checkpointing, Stage.VALIDATING)
        else:
            self._rival = None
            self._enter(Stage.ACTIVE)

    def _is_slower(self, seconds: float, rival: Rival) -> bool:
        """Whether the validated plan is slower than the one before: by one step of each, and by what they predict."""
        assert self.plan is not None
        return seconds * self.plan.predicted_seconds > rival.seconds * rival.plan.predicted_seconds

    def _correct(self, peak: int) -> None:
        """Apply another plan, since a step was above the budget: after two such plans, torch's own checkpointing."""
        checkpointing = self._checkpointing(self._profiled)
        if self._is_active(checkpointing):
            self._is_checkpointing_over = True
            checkpointing = None
            if not self._known_target.corrections:
                # It may be predicted to take more than other plans may.
                with suppress(BudgetError):
                    self._replan(self._corrected_stage)
                    self.notes.append(f"torch's own checkpointing took {format_bytes(peak)}: another plan next")
                    return
        if checkpointing is None or not self._known_target.corrections:
            self._back_off(peak)
        else:
            self.notes.append(
                f"a step of {format_bytes(peak)} where less was predicted: torch's own checkpointing next"
            )
            self._use(checkpointing, self._corrected_stage)

    def _back_off(self, peak: int) -> None:
        """Apply a plan for so much less as a step was above the budget."""
        self._forget_rival()
        stage = self._corrected_stage
        self._known_target.back_off(peak, lambda: self._replan(stage), self.notes.append)

    @property
    def _corrected_stage(self) -> Stage:
        """The stage after a correction. Ranks judge no step once a plan is active. So they judge one that is warm."""
        return Stage.VALIDATING if self.stage is Stage.VALIDATING and self._ranks.alone else Stage.WARMING_UP

    def _checkpointing_beside(self) -> Plan | None:
        """The plan of torch's own checkpointing, if it is to be timed beside the plan."""
        profile, plan = self.profile, self.plan
        if self._has_tried_checkpointing or profile is None or plan is None or profile.kinds[0].host is None:
            return None
        if all(block.plain for block in plan.blocks):
            # Nothing is faster.
            return None
        found = self._checkpointing(self._profiled)
        return None if self._is_active(found) else found

    def _checkpointing(self, profile: Profile | None) -> Plan | None:
        """The plan of torch's own checkpointing, if its predicted peak is within the whole budget."""
        if profile is None or self._is_checkpointing_over:
            return None
        return self.planner.checkpointing_plan(profile, self._known_target.budget, self._ranks)

    def _is_active(self, plan: Plan | None) -> bool:
        """Whether steps already run by this plan."""
        return plan is not None and self.plan is not None and is_same(plan, self.plan)

    def _seconds_of(self, trace: StepTrace | None) -> float:
        """Seconds of the step's blocks on the slowest rank."""
        assert trace is not None
        return max(self._ranks.share("seconds", trace.blocks_seconds))

    def _check(self) -> None:
        """A step with an active plan is over: find another plan, or raise, if it was above the budget."""
        target = self._target
        if target is None:
            return
        self._steps += 1
        last = self._memory.peak()
        peak, self._peak = last if self._peak is None else self._peak, None
        if peak <= target.budget < last:
            self.notes.once(_EVALUATED)
            self._memory.reset_peak()
        if self._has_learned():
            self._memory.reset_peak()
            if peak > target.budget:
                self.notes.once(_LEARNED)
        elif peak > target.budget and not self._ranks.alone:
            self.notes.once(f"a step of this rank had a peak over the budget of {format_bytes(target.budget)}")
        elif peak > target.budget:
            self.notes.append(
                f"a step had a peak of {format_bytes(peak)}, over the budget of {format_bytes(target.budget)}"
            )
            before, self._over_at = self._over_at, self._steps
            try:
                self._correct(peak)
            except BudgetError:
                self._memory.reset_peak()
                if not self._bears_a_step or (before is not None and self._steps - before <= MOST_APART):
                    raise
                # Another such step need not come.
                self.notes.append(
                    f"no plan takes less, so this one stays: a second such step in {MOST_APART} is an error"
                )

    def _look_at_level(self) -> None:
        """Plan again before a step that begins with more bytes than planned for, if it would be above the budget."""
        if self._stage in PROFILING or self._has_outgrown or self._target is None:
            return
        if self.stage is Stage.ACTIVE and not self._ranks.alone:
            return
        # Copies under way are not counted. The plan itself decides how much of an offloaded optimizer is on the device.
        level = None if self.collector.optimizer is not None else self._memory.level() - self.collector.carried()
        found = self._ranks.share("level", lambda: level)
        levels = [level for level in found if level is not None]
        if len(levels) < len(found):
            return
        level, profile, plan = max(levels), self.profile, self.plan
        assert profile is not None
        assert plan is not None
        rise = level - profile.static_bytes
        if rise <= self._target.margin(plan.predicted_peak):
            return
        # If levels keep rising or change a little, not every step has a plan of its own.
        grain = max(self._target.budget // _GRAINS, 1)
        more = -(-rise // grain) * grain
        if self._refused is not None and level > self._refused - grain:
            return
        self.profile = self.collector.risen(profile, more)
        try:
            self._replan()
        except BudgetError:
            # These bytes may go in time. If they do not, the step's peak tells.
            self.profile = profile
            self._refused = level
            return
        assert self.collector.profile is not None
        self.collector.profile = self.collector.risen(self.collector.profile, more)
        self._forget_rival()
        self.notes.append(
            f"planned again for steps that begin with {format_bytes(level)}; the profiled one began with "
            f"{format_bytes(profile.static_bytes)}"
        )

    def _has_learned(self) -> bool:
        """Whether calls were recorded or compared since this was last asked."""
        before, self._learned = self._learned, sum(each.learned for each in self.collectors)
        return self._learned != before

    def _start_again(self) -> None:
        self._stage = Stage.PROFILING_OPERATORS
        self._has_outgrown = self._is_checkpointing_over = False
        self._refused = None
        self._forget_rival()
        if self._target is not None:
            self._target.reset()
        for each in self.collectors:
            each.restart()

    def _forget_rival(self) -> None:
        """The next plan is another one, and may be compared again."""
        self._rival = None
        self._has_tried_checkpointing = False

    @property
    def _known_target(self) -> BudgetTarget:
        assert self._target is not None
        return self._target
