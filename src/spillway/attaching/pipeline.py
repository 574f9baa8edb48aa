"""Finds the plans of a rank's pipeline stages within one budget, in the steps of the user's own schedule.

NOTE [ How the stages of a rank find their plans ]

The search is that of one model (NOTE [ How a plan is found ] in ``controller.py``), in steps of a schedule. The first
chunk of a step is profiled for each stage. Other chunks have their turns between its forward and its backward. The
collector leaves after the one and returns before the other. So its measurements between are those of the chunk itself,
its loss included.

A step ends when a chunk comes whose number came already. A step that failed counts for nothing. The order of turns
is recorded, and plans are made for that order when a step begins, after the optimizer's last. If more chunks wait for
their backward in another order, there are other plans. A stage without a backward in some steps, as a frozen one, is
left alone. Ranks share nothing, and each has its own plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from spillway.attaching.blocks import tensor_bytes
from spillway.attaching.budget import Planner
from spillway.attaching.collector import PROFILING, Notes, ProfileCollector, Stage
from spillway.attaching.controller import PlanController
from spillway.attaching.ranks import ranks_of
from spillway.attaching.search import PlanSearch
from spillway.errors import UnsupportedError, UsageError
from spillway.planner.planner import StageProfile, covers, make_stage_plans
from spillway.planner.tasks import Turn
from spillway.session import Session
from spillway.units import read_budget

if TYPE_CHECKING:
    from spillway.planner.hardware import Hardware
    from spillway.planner.plan import Plan

_MOST_ORDERS = 8
"""Orders of turns that are planned for. Others are only noted."""
_MOST_MISSED = 3
_EXPECTED = (
    "expected stages of one rank each, since such ranks would need one plan; give offload_stages its bytes or recompute"
)


class StageCollector(ProfileCollector):
    """Collects the profile of the stage that has this place in the pipeline. One chunk of a step is traced."""

    def __init__(self, index: int, module: Module, session: Session | None, min_bytes: int | str | None) -> None:
        super().__init__(module, session, min_bytes)
        if not ranks_of(module).alone:
            raise UnsupportedError(
                f"budget: got stage {index}, whose parameters several ranks share (DDP, FSDP or a mesh), {_EXPECTED}"
            )
        self.index = index
        self.module = module
        self.controller: PipelinePlanController | None = None
        self.tracing.is_paused = True
        self.largest = 0
        """Bytes of the largest chunk's inputs."""
        self._missed = 0
        """Consecutive steps in which nothing was seen of its chunk."""

    @property
    def is_sought(self) -> bool:
        return self.profile is None and not self.applied.is_left_alone

    def begin(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nbytes = tensor_bytes(args, kwargs)
        before, self.largest = self.largest, max(self.largest, nbytes)
        if 0 < before < nbytes and self.controller is not None:
            self.controller.grows(self, before, nbytes)
        if not (self.tracing.is_paused or self.tracing.is_elsewhere):
            if self.device.type == "cpu":
                self.tracing.session.trim(self.device)
            self.begin_step(self.stage, nbytes)

    def evaluates(self) -> None:
        """The controller says when a step ends."""

    def leave(self) -> None:
        """Other chunks have their turns now."""
        self.tracing.is_paused = True
        if self.tracing.tracer is not None:
            self.tracing.tracer.leave()

    def come_back(self) -> None:
        if self.tracing.tracer is not None:
            self.tracing.tracer.come_back()

    def step_ended(self, *, had_chunk: bool) -> bool:
        """A step has ended; whether the stage is left alone from now on, since it has no backward."""
        trace = self.tracing.end()
        if any(group.size() > 1 for group in self.tracing.groups):
            raise UnsupportedError(
                f"budget: got stage {self.index}, whose blocks communicate with other ranks, {_EXPECTED}"
            )
        if self.is_sought and trace is not None:
            self.advance(trace)
        if not had_chunk or not self.is_sought:
            return False
        self._missed = 0 if trace is not None else self._missed + 1
        self.applied.is_left_alone = self._missed >= _MOST_MISSED
        self.applied.take_least()
        return self.applied.is_left_alone

    def restart(self) -> None:
        self.drop()
        self.applied.is_left_alone, self._missed = False, 0
        super().restart()

    def chunk_profile(self) -> StageProfile:
        profile = self.enlarged(self.largest)
        new = sum(each.nbytes for each in self.module.parameters() if each.requires_grad and each.grad is None)
        return StageProfile(self.index, profile, new)


class PipelineSearch(PlanSearch):
    """Chooses the plans of a rank's stages, those that are not left alone."""

    bears_a_step = False

    def __init__(self, stages: Sequence[StageCollector], planner: Planner, budget: int) -> None:
        super().__init__(planner, Notes(), budget=budget)
        self.order: list[Turn] = []
        """The turns that are planned for."""
        self._stages = stages
        self._plans: Sequence[Plan] = ()

    @property
    def plans(self) -> Sequence[Plan]:
        return self._plans

    def replan(self) -> None:
        places = [part for part, stage in enumerate(self._stages) if not stage.applied.is_left_alone]
        self._plans = make_stage_plans(
            [self._stages[part].chunk_profile() for part in places],
            [turn._replace(part=places.index(turn.part)) for turn in self.order if turn.part in places],
            self.planner.hardware,
            static_bytes=self.memory.level(),
            budget=self.known_target.budget,
            aim=self.known_target.nbytes,
            **self.planner.limits(),
        )


class PipelinePlanController(PlanController):
    """Plans for all stages of a rank. See NOTE [ How the stages of a rank find their plans ]."""

    search: PipelineSearch

    def __init__(
        self,
        stages: Sequence[StageCollector],
        session: Session | None,
        hardware: Hardware | str | None,
        budget: int | str,
        **limits: Any,
    ) -> None:
        nbytes = read_budget(budget)
        if isinstance(nbytes, float):
            raise UsageError(
                f"budget: got {budget!r} for the stages of a pipeline, expected bytes, since several stages share "
                f'them and no profile has all stages; write it like "40GiB"'
            )
        devices = {stage.device for stage in stages}
        if len(devices) > 1:
            names = sorted(map(str, devices))
            raise UsageError(f"stages: they are on {names}, and a budget is for one device. Give those of one device")
        self.stages = list(stages)
        planner = Planner(devices.pop(), session, hardware, **limits)
        super().__init__(self.stages, PipelineSearch(self.stages, planner, nbytes))
        self._turns: list[Turn] = []
        self._order_plans = 0
        """How many plans were made because of another order."""
        self._states: list[tuple[bool, list[bool]]] = []
        """Whether each stage, and each of its parameters, is trained."""
        for stage in self.stages:
            stage.controller = self

    @property
    def is_plain(self) -> bool:
        return not self._has_outgrown and all(stage.is_plain for stage in self._planned)

    def forward_begins(self, part: int, chunk: int) -> None:
        if Turn(part, chunk) in self._turns:
            self._schedule_step_ended()
        is_first = not any(turn.part == part for turn in self._turns)
        self._begin_turn(Turn(part, chunk))
        self.stages[part].tracing.is_paused = not (is_first and self.stages[part].is_sought)

    def backward_begins(self, part: int, chunk: int) -> None:
        self._begin_turn(Turn(part, chunk, is_backward=True))
        if self._is_profiled(part, chunk):
            self.stages[part].come_back()

    def backward_ended(self, part: int, chunk: int) -> None:
        if self._is_profiled(part, chunk):
            self.stages[part].tracing.cut()
        if _is_whole(self._turns):
            # The peak of an evaluation after the last backward does not count.
            self.monitor.peak = self.search.memory.peak()

    def drop(self) -> None:
        self._turns.clear()
        super().drop()

    def grows(self, stage: StageCollector, before: int, now: int) -> None:
        """A chunk of a stage has larger inputs than any before."""
        if self._stage not in PROFILING:
            self._outgrow(stage, before, now)

    def _begin_turn(self, turn: Turn) -> None:
        for stage in self.stages:
            if not stage.tracing.is_paused:
                stage.leave()
        self._turns.append(turn)

    def _is_profiled(self, part: int, chunk: int) -> bool:
        """Whether it is the stage's first chunk, and the stage lacks a profile."""
        first = next((turn.chunk for turn in self._turns if turn.part == part), None)
        return chunk == first and self.stages[part].is_sought

    def _schedule_step_ended(self) -> None:
        turns, self._turns = self._turns, []
        # Otherwise it failed, or did not train.
        if _is_whole(turns):
            self._turns_ended(turns)
        if self.stage is Stage.VALIDATING:
            # The peak of the next step is its own.
            self.monitor.peak = None
            self.search.memory.reset_peak()

    def _turns_ended(self, turns: list[Turn]) -> None:
        if self.collector.device.type == "cpu":
            self.collector.tracing.session.trim(self.collector.device)
        trained = [[each.requires_grad for each in stage.module.parameters()] for stage in self.stages]
        states = [(stage.module.training, each) for stage, each in zip(self.stages, trained, strict=True)]
        before, self._states = self._states, states
        if before and states != before:
            self.notes.once("other parameters are trained than before, or stages are in another mode")
            self._start_again()
        elif self._stage in PROFILING:
            self._profile(turns)
        elif len({turn.part for turn in turns}) < len(self.stages):
            # A stage without a chunk has no peak to judge.
            return
        elif self._has_outgrown:
            self.search.order = turns
            self._plan_outgrown()
        elif not self._accepts(turns):
            self._order_plans += 1
            self.search.reset()
            self._plan_for_turns(turns)
        elif self.stage is Stage.WARMING_UP:
            self._has_learned()
            self._enter(Stage.VALIDATING)
        elif self.monitor.peak is not None and self.stage is Stage.VALIDATING:
            self._validate(self.monitor.peak)
        elif self.monitor.peak is not None:
            self._check()

    def _profile(self, turns: list[Turn]) -> None:
        parts = {turn.part for turn in turns}
        for part, stage in enumerate(self.stages):
            if stage.step_ended(had_chunk=part in parts):
                self.notes.once(f"no backward came through stage {stage.index}, which is left alone")
        have_profiles = [stage.profile is not None for stage in self._planned]
        if len(parts) == len(self.stages) and have_profiles and all(have_profiles):
            self._plan_for_turns(turns)

    def _accepts(self, turns: list[Turn]) -> bool:
        """Whether the plans are for these turns, or for more chunks that wait."""
        if turns == self.search.order:
            return True
        self.notes.once(f"a step had other turns, of {len(turns) // 2} chunks, than those that were planned for")
        return covers(self.search.order, turns) or self._order_plans >= _MOST_ORDERS

    def _plan_for_turns(self, turns: list[Turn]) -> None:
        self.search.order = turns
        self._plan_enlarged()

    def _plan_enlarged(self) -> None:
        # The profile of each stage is that of its largest chunk.
        self.search.replan()
        self._enter(Stage.WARMING_UP)


def _is_whole(turns: Sequence[Turn]) -> bool:
    """Whether each forward had its backward."""
    forward = {turn[:2] for turn in turns if not turn.is_backward}
    return bool(forward) and forward == {turn[:2] for turn in turns if turn.is_backward}
