"""Takes the search for the plan of an attached model from stage to stage, in the steps of the user's own loop.

NOTE [ How a plan is found ]

A search has stages: NOTE [ Stages of a search ] in ``collector.py``. An evaluation between two steps ends the first of
them: no plan makes an evaluation smaller. A call without gradients in training mode belongs to its step.

The first three stages profile the model (NOTE [ Profiling steps ] in ``collector.py``). Then the plan is applied.
``docs/planning.md`` describes the stages, the trial of torch's own checkpointing beside the plan, and changes of plans.

Torch's own checkpointing offloads nothing, and its replays have run before: it needs no warming up. An allocator counts
a cached block whole, though a tensor takes a little less of it. So checkpointing may take a little more than its peak
after steps with blocks of other sizes. On one GPU it is not refused for a thousandth of the budget, but cached blocks
are freed: in ``VALIDATING``, and in ``ACTIVE`` after one step of sixteen.

Ranks that share a model go through the stages in step: NOTE [ One plan for many ranks ] in ``ranks.py``. The stages of
a pipeline are planned for together: ``pipeline.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from spillway.attaching.blocks import tensor_bytes
from spillway.attaching.collector import PROFILING, ProfileCollector, Stage
from spillway.attaching.ranks import ranks_of
from spillway.attaching.search import PeakMonitor, PlanSearch
from spillway.attaching.validation import refuse_nested
from spillway.checkpointing.blocks import Named
from spillway.errors import BudgetError
from spillway.units import format_bytes

if TYPE_CHECKING:
    from spillway.attaching.block import BlockCall
    from spillway.profiler.step_trace import StepTrace

_MOST_GROWTH = 2
"""Inputs that are larger than so many times the profiled ones need a profile of their own."""
_MOST_IDLE = 16


class PlanController:
    """Takes a search from stage to stage. See NOTE [ How a plan is found ].

    Each collector profiles a part of the model, and applies a plan to it: several for the stages of a pipeline. A plan
    that was given is active from the start, whatever comes.
    """

    def __init__(self, collectors: Sequence[ProfileCollector], search: PlanSearch) -> None:
        self.collectors = collectors
        self.collector = collectors[0]
        self.applied = self.collector.applied
        self.search = search
        self.monitor = PeakMonitor(search)
        self.notes = search.notes
        self.losses = self.collector.losses
        self._stage = Stage.ACTIVE
        if not search.is_given:
            self._stage = Stage.PROFILING_OPERATORS
            # Not in the middle of a step.
            _ = search.planner.hardware
        self._was_called = False
        self._last_inputs = 0
        """Bytes of the last step's inputs."""
        self._inputs = 0
        """Bytes of the largest inputs that the plan is for."""
        self._has_outgrown = False
        """Whether this step has larger inputs than the plan was for."""
        self._learned = 0
        """Calls of blocks that were recorded or compared so far."""

    @property
    def stage(self) -> Stage:
        if self._stage not in PROFILING:
            return self._stage
        return min((each.stage for each in self._planned), key=PROFILING.index, default=self._stage)

    @property
    def missing(self) -> str:
        """The calls or steps that a plan still needs; empty: there is one."""
        if self.stage not in PROFILING:
            return ""
        if idle := self.collector.tracing.idle_steps:
            return f"a backward pass through the blocks: the last {idle} calls of the model had none"
        if self.collector.is_waiting:
            return "two steps of the optimizer that attach() was given"
        calls = len(PROFILING) - PROFILING.index(self.stage) + (not self._was_called)
        return f"{calls} more call{'s' if calls > 1 else ''} of the model in training, after a backward pass each"

    @property
    def is_plain(self) -> bool:
        return self.stage is Stage.ACTIVE and self.applied.is_plain

    @property
    def spare_bytes(self) -> int:
        plan = self.search.plan
        return plan.budget - plan.predicted_peak if self.is_plain and plan is not None else 0

    def manage(self, blocks: Sequence[BlockCall]) -> None:
        plan = self.search.plan
        if plan is None:
            refuse_nested([Named(call.name, module) for call in blocks if (module := call.module()) is not None])
        self.collector.manage(blocks, plan)

    def begin(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        collector, search = self.collector, self.search
        if collector.tracing.is_elsewhere:
            return
        self._meet(model)
        if not search.ranks.are_all_here(model):
            # Not all ranks make this call. Nothing is learned of it, and the step before it is kept.
            collector.tracing.cut()
            return
        was_judged, count = self.stage in (Stage.VALIDATING, Stage.ACTIVE), self.applied.count
        self._step_ended(collector.tracing.end())
        if collector.tracing.idle_steps == _MOST_IDLE:
            self.notes.once(
                f"{_MOST_IDLE} calls of the model had no backward before the next one, so nothing was profiled: a "
                f"pipeline's stages have their budget by offload_stages(budget=...)"
            )
        self._last_inputs = tensor_bytes(args, kwargs)
        nbytes = self._see_inputs(self._last_inputs)
        if collector.device.type == "cpu":
            # Freed memory of reloaded tensors is kept for more of them. Until then it counts as activations.
            collector.tracing.session.trim(collector.device)
        # Otherwise the new plan is for this step's first bytes, too.
        if not was_judged or self.applied.count == count:
            self._check_level()
        if self.stage is not Stage.ACTIVE:
            collector.begin_step(self.stage, nbytes)

    def evaluates(self) -> None:
        if self.stage is not Stage.ACTIVE:
            # One of several ranks may evaluate: the others hear of it when the next step begins.
            self.collector.evaluates()
        elif self.monitor.peak is None:
            self.monitor.peak = self.search.memory.peak()

    def drop(self) -> None:
        for each in self.collectors:
            each.drop()

    @property
    def _planned(self) -> list[ProfileCollector]:
        """The collectors of parts that are not left alone."""
        return [each for each in self.collectors if not each.applied.is_left_alone]

    def _enter(self, stage: Stage) -> None:
        """The next step has this stage, and the latest plan."""
        with ExitStack() as undo:
            # Weights may find no memory where the plan has them.
            undo.callback(self._start_again)
            self._apply()
            undo.pop_all()
        self._stage = stage
        stage.log(self.collector.model)
        if stage is Stage.ACTIVE:
            self.search.memory.reset_peak()

    def _apply(self) -> None:
        for each, plan in zip(self._planned, self.search.plans, strict=True):
            if plan is not each.applied.plan:
                each.applied.apply(plan)

    def _meet(self, model: Module) -> None:
        """Find the ranks that train the model together. It may be wrapped later than it is first called."""
        search = self.search
        if self._was_called and (not search.ranks.alone or self.stage is Stage.ACTIVE):
            return
        search.ranks = ranks_of(model)
        if self._was_called and not search.ranks.alone and self.stage is not Stage.PROFILING_OPERATORS:
            self._start_again()
        self._was_called = True

    def _step_ended(self, trace: StepTrace | None) -> None:
        """Judge the step by its stage. ``trace`` has its measurements, unless it had no backward, or was not traced."""
        search = self.search
        if self._stage in PROFILING:
            search.ranks = search.ranks.joined(self.collector.tracing.groups)
            if self.collector.advance(trace, search.ranks):
                self._plan_first()
        elif self.stage is Stage.ACTIVE:
            self._check()
        elif self._has_outgrown:
            self._plan_outgrown()
        elif all(search.ranks.share(self.stage.value, lambda: trace is not None)):
            assert trace is not None
            if self.stage is Stage.WARMING_UP:
                self._has_learned()
                self._enter(Stage.VALIDATING)
            else:
                self._validate(trace.step_peak, trace)

    def _check(self) -> None:
        """A step with an active plan is over. A plan that was given stays, whatever comes."""
        if self.search.target is None:
            return
        learned = self._has_learned()
        if self.monitor.step_ended(learned=learned):
            self._enter(Stage.WARMING_UP)
        elif self.search.step_ended(self._last_inputs, learned=learned):
            self._apply()

    def _check_level(self) -> None:
        """Plan again before a step that begins with more bytes than planned for, if it would be above the budget."""
        is_planned = self._stage not in PROFILING and not self._has_outgrown and self.search.target is not None
        is_shared = self.stage is Stage.ACTIVE and not self.search.ranks.alone
        if is_planned and not is_shared and self.search.step_begins(self.collector):
            self._enter(Stage.WARMING_UP)

    def _validate(self, peak: int, trace: StepTrace | None = None) -> None:
        ranks = self.search.ranks
        peak = max(ranks.share("peak", lambda: peak))
        stage = self.search.validate(peak, trace, learned=any(ranks.share("learned", self._has_learned)))
        if stage is not None:
            self._enter(stage)

    def _see_inputs(self, nbytes: int) -> int:
        """Bytes of this step's inputs: those of the largest rank, unless a plan is active."""
        ranks = self.search.ranks
        if self.stage is not Stage.ACTIVE:
            nbytes = max(ranks.share("inputs", lambda: nbytes))
        elif not ranks.alone:
            # Other ranks may have smaller inputs, and do not begin again.
            nbytes = min(nbytes, self._inputs)
        before, self._inputs = self._inputs, max(self._inputs, nbytes)
        if 0 < before < nbytes and self.stage not in PROFILING and not self.search.is_given:
            self._outgrow(self.collector, before, nbytes)
        return nbytes

    def _outgrow(self, collector: ProfileCollector, before: int, now: int) -> None:
        self.notes.append(f"the inputs of {format_bytes(now)} are larger than any before ({format_bytes(before)})")
        if now > _MOST_GROWTH * collector.measured_inputs or not self.search.ranks.alone:
            self._start_again()
            return
        self.search.reset()
        self._has_outgrown = True
        self._enter(Stage.WARMING_UP)
        for each in self.collectors:
            each.applied.take_least()

    def _plan_first(self) -> None:
        """The first plan of a profile: for the largest inputs that came while it was made, if there is one for them."""
        collector, search = self.collector, self.search
        assert collector.profile is not None
        search.read_share(collector.profile)
        if search.ranks.alone and self._inputs > collector.measured_inputs:
            with suppress(BudgetError):
                self._plan_enlarged()
                return
            self._inputs = collector.measured_inputs
        try:
            search.plan_for(collector.profile)
        except BudgetError:
            # A user who goes on hears it again, of the next profile.
            is_rough = collector.is_rough
            self._start_again()
            if not is_rough:
                raise
        else:
            self._enter(Stage.WARMING_UP)

    def _plan_outgrown(self) -> None:
        self._has_outgrown = False
        try:
            self._plan_enlarged()
        except BudgetError:
            # The enlarged profile may be too large. The step is measured instead.
            self._start_again()

    def _plan_enlarged(self) -> None:
        self.search.plan_for(self.collector.enlarged(self._inputs))
        self._enter(Stage.WARMING_UP)

    def _has_learned(self) -> bool:
        """Whether calls were recorded or compared since this was last asked."""
        before, self._learned = self._learned, sum(each.applied.learned for each in self.collectors)
        return self._learned != before

    def _start_again(self) -> None:
        self._stage = Stage.PROFILING_OPERATORS
        self._has_outgrown = False
        self.search.restart()
        for each in self.collectors:
            each.restart()
