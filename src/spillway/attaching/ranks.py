"""Finds the plans of the pipeline stages of a rank within one budget, in the steps of the user's own schedule.

NOTE [ How the stages of a rank find their plans ]

It goes as with one model (NOTE [ How a plan is found ] in ``pilot.py``), but in steps of a schedule in the place of
passes. Of each stage, the first chunk of a step is the one that is watched. Between its forward and its backward other
chunks have their turns: the watch leaves after the one, and is back before the other, so that what it sees between is
what the chunk itself holds, its loss included.

``TRACING``, ``WEIGHING``, ``MEASURING``
    Blocks take the least memory. Each stage is watched until there is a profile of it; the order of turns is written
    down. A step that failed counts for nothing.
``TRYING``
    Plans of all stages were made when the step began, after the optimizer's last, and are in force.
``CHECKING``
    The same, and the peak of the step is measured.
``HOLDING``
    A peak over the budget (of an accelerator), an order of turns in which the plans would need too much, or larger
    inputs, which take the least memory at first, and there are other plans.

A step ends when a chunk comes whose number was there already. A stage whose chunks had no backward in some steps, as
where all of it is frozen, is left alone. Ranks share nothing, and each has its own plans.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

import torch
from torch.nn import Module

from spillway.attaching.aim import Aim
from spillway.attaching.pilot import MOST_GROWTH, Stage
from spillway.attaching.stages import StagePilot
from spillway.errors import BudgetError
from spillway.planning.plan import Plan
from spillway.planning.stages import StageProfile
from spillway.planning.tasks import Turn
from spillway.profiling.meter import DeviceMemory
from spillway.units import format_bytes

_MOST_ORDERS = 8
"""So many orders of turns are planned for. Of others it is only noted that they came."""


class Planner(Protocol):
    """Makes plans for the stages of a rank."""

    def plans(self, stages: Sequence[StageProfile], turns: Sequence[Turn], static: int, aim: int) -> list[Plan]:
        """One for each stage, within so many bytes, of which some are there when a step begins."""
        ...

    def peak(self, stages: Sequence[StageProfile], turns: Sequence[Turn], static: int, plans: Sequence[Plan]) -> int:
        """What a step is predicted to need with other turns."""
        ...


class RankPilot:
    """See NOTE [ How the stages of a rank find their plans ].

    Args:
        stages: all that the rank has, each with its module.
        device: where they compute.
        budget: bytes that may be allocated on it.
        planner: makes plans.
    """

    def __init__(
        self,
        stages: Sequence[tuple[StagePilot, Module]],
        device: torch.device,
        budget: int,
        planner: Planner,
    ) -> None:
        self.stages = [pilot for pilot, _ in stages]
        self._modules = [module for _, module in stages]
        self._device = device
        self._budget = budget
        self._aim = Aim(budget)
        self._planner = planner
        self._turns: list[Turn] = []
        """Of the step so far."""
        self._order: list[Turn] = []
        """That was planned for."""
        self._accepted: list[list[Turn]] = []
        """Others in which the plans are within the budget, by their own word."""
        self._order_plans = 0
        """How often there were plans because of another order."""
        self._static = 0
        """Bytes that were there when plans were made."""
        self._memory = DeviceMemory(device)
        self._tried = 0
        self._seen: int | None = None
        """Most bytes in the step, up to when each chunk had its backward."""
        self._states: list[object] = []
        """What of each stage was trained when plans were made."""
        self._has_outgrown = False
        """Whether this step has larger inputs than the plans are for."""
        self.stage = Stage.TRACING
        self.measured: int | None = None
        """Most bytes on the device in the step that was checked."""
        self.notes: list[str] = []
        for pilot in self.stages:
            pilot.on_growth = self._on_growth

    @property
    def plans(self) -> dict[int, Plan]:
        """Of each stage, by its place in the pipeline; none before they were made."""
        return {pilot.index: pilot.plan for pilot in self.stages if pilot.plan is not None}

    @property
    def is_plain(self) -> bool:
        """Whether nothing is to be done, in no block."""
        return all(pilot.is_plain for pilot in self._stages)

    def forward_begins(self, part: int, chunk: int) -> None:
        """A chunk goes forward through a stage."""
        if Turn(part, chunk) in self._turns:
            self._step_ended()
        is_first = not any(turn.part == part for turn in self._turns)
        self._take_turn(Turn(part, chunk))
        pilot = self.stages[part]
        pilot.is_turn = is_first and self._is_sought(pilot)

    def backward_begins(self, part: int, chunk: int) -> None:
        """A chunk goes back."""
        self._take_turn(Turn(part, chunk, is_backward=True))
        if self._is_watched(part, chunk):
            self.stages[part].come_back()

    def backward_ended(self, part: int, chunk: int) -> None:
        """It has."""
        if self._is_watched(part, chunk):
            self.stages[part].end()
        if self.stage in (Stage.CHECKING, Stage.HOLDING):
            self._see_peak()

    def drop(self) -> None:
        """Nothing is measured any more."""
        self._turns.clear()
        for pilot in self.stages:
            pilot.drop()

    def explain(self) -> str:
        """The plans, and what happened on the way to them."""
        plans = [f"stage {index}: {plan}" for index, plan in self.plans.items()]
        return "\n".join([*plans, *self.notes])

    def _take_turn(self, turn: Turn) -> None:
        for pilot in self.stages:
            if pilot.is_turn:
                pilot.leave()
        self._turns.append(turn)

    def _is_watched(self, part: int, chunk: int) -> bool:
        """Whether it is the chunk that came first of this stage, and it is looked at."""
        first = next((turn.chunk for turn in self._turns if turn.part == part), None)
        return chunk == first and self._is_sought(self.stages[part])

    def _is_sought(self, pilot: StagePilot) -> bool:
        """Whether there is to be a profile of a stage."""
        return self.stage is Stage.TRACING and pilot.profile is None and not pilot.is_left_alone

    def _step_ended(self) -> None:
        turns, self._turns = self._turns, []
        if not self._is_whole(turns):
            # It failed, or was no training.
            if self.stage is Stage.CHECKING:
                self._begin_check()
            return
        if self._device.type == "cpu":
            self.stages[0].trim()
        states = list(map(_state_of, self._modules))
        if states != self._states:
            before, self._states = self._states, states
            if before:
                self._note("other parameters are trained, or stages are in another mode, than there were")
                self._seek()
                return
        is_full = {turn.part for turn in turns} >= set(range(len(self.stages)))
        if self.stage is Stage.TRACING:
            for pilot in self.stages:
                pilot.conclude()
            self._count({turn.part for turn in turns})
            if is_full and self._stages and all(pilot.profile is not None for pilot in self._stages):
                self._replan(turns)
        elif not is_full:
            # Of what a stage without a chunk needs nothing is told.
            if self.stage is Stage.CHECKING:
                self._begin_check()
        elif self._has_outgrown:
            self._has_outgrown = False
            try:
                self._replan(turns)
            except BudgetError:
                # What is enlarged may be too much. It is measured instead.
                self._seek()
        elif not self._accepts(turns):
            self._order_plans += 1
            self._aim.reset()
            self._replan(turns)
        elif self.stage is Stage.TRYING:
            self.stage = Stage.CHECKING
            self._begin_check()
        elif self.stage is Stage.CHECKING:
            self.measured = self._peak()
            self.stage = Stage.HOLDING
            self._tried = sum(pilot.tried for pilot in self.stages)
            self._compare(self.measured)
        else:
            self._hold()

    @staticmethod
    def _is_whole(turns: Sequence[Turn]) -> bool:
        """Whether each forward had its backward."""
        forward = {turn[:2] for turn in turns if not turn.is_backward}
        return bool(forward) and forward == {turn[:2] for turn in turns if turn.is_backward}

    @property
    def _stages(self) -> list[StagePilot]:
        """Those that there is anything to plan of."""
        return [pilot for pilot in self.stages if not pilot.is_left_alone]

    def _count(self, parts: Set[int]) -> None:
        for part in parts:
            pilot = self.stages[part]
            if self._is_sought(pilot) and pilot.count():
                self._note(f"no backward came through stage {pilot.index}, which is left alone")

    def _accepts(self, turns: list[Turn]) -> bool:
        """Whether the plans may do for these turns."""
        if turns == self._order or turns in self._accepted:
            return True
        self._note(f"a step had other turns, of {len(turns) // 2} chunks, than those that were planned for")
        plans = [pilot.plan for pilot in self._stages if pilot.plan is not None]
        peak = self._planner.peak(self._profiled(), self._of_stages(turns), self._static, plans)
        if peak > self._aim.nbytes and self._order_plans < _MOST_ORDERS:
            return False
        self._accepted = [*self._accepted[-_MOST_ORDERS:], turns]
        return True

    def _profiled(self) -> list[StageProfile]:
        pairs = zip(self.stages, self._modules, strict=True)
        return [pilot.profiled(list(module.parameters())) for pilot, module in pairs if not pilot.is_left_alone]

    def _of_stages(self, turns: Sequence[Turn]) -> list[Turn]:
        """Those of the stages that are planned for, by their places among them."""
        places = [part for part, pilot in enumerate(self.stages) if not pilot.is_left_alone]
        return [turn._replace(part=places.index(turn.part)) for turn in turns if turn.part in places]

    def _replan(self, turns: list[Turn]) -> None:
        static = self._memory.level()
        plans = self._planner.plans(self._profiled(), self._of_stages(turns), static, self._aim.nbytes)
        self._order, self._accepted, self._static = turns, [], static
        for pilot, plan in zip(self._stages, plans, strict=True):
            pilot.hold(plan)
        self.stage = Stage.TRYING

    def _hold(self) -> None:
        peak = self._peak()
        before, self._tried = self._tried, sum(pilot.tried for pilot in self.stages)
        if self._memory.peak() > self._budget:
            # Whatever it was, the next step is not to blame.
            self._memory.reset_peak()
        # Calls of a size that had not come before run again whole, and are tried: that says nothing of the plan.
        if self._tried == before:
            self._compare(peak)

    def _compare(self, peak: int | None) -> None:
        if peak is not None and peak > self._budget:
            self._note(f"a step had a peak of {format_bytes(peak)}, over the budget of {format_bytes(self._budget)}")
            self._aim.back_off(peak, lambda: self._replan(self._order), self._note)

    def _on_growth(self, pilot: StagePilot, before: int, now: int) -> None:
        if self.stage is Stage.TRACING:
            # The profile will be enlarged.
            return
        self._note(f"inputs of {format_bytes(now)} came where there had been {format_bytes(before)}")
        self._aim.reset()
        if now > MOST_GROWTH * pilot.measured_inputs:
            self._seek()
            return
        self._has_outgrown, self.stage = True, Stage.TRYING
        for each in self._stages:
            each.take_least()

    def _seek(self) -> None:
        self._has_outgrown, self.stage = False, Stage.TRACING
        for pilot in self.stages:
            pilot.seek()

    def _begin_check(self) -> None:
        self._seen = None
        self._memory.reset_peak()

    def _see_peak(self) -> None:
        """A backward has ended. What comes after a step's last one, as an evaluation, is not the step's."""
        if self._is_whole(self._turns):
            self._seen = self._memory.peak()

    def _peak(self) -> int | None:
        """Most bytes since the check began, if that is known."""
        found, self._seen = self._seen, None
        return found

    def _note(self, what: str) -> None:
        if what not in self.notes:
            self.notes.append(what)


def _state_of(module: Module) -> object:
    """What of a stage is trained."""
    return module.training, tuple(parameter.requires_grad for parameter in module.parameters())
