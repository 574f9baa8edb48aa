"""Budgets of attached models, and the planner that keeps to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from spillway.errors import BudgetError
from spillway.planner.hardware import Hardware
from spillway.planner.plan import check_allow
from spillway.planner.planner import Curve, aim_at, make_checkpointing_plan, make_curve, make_plan
from spillway.planner.stages import StageProfile, make_stage_plans, simulate_stages
from spillway.profiler.machine import known_hardware
from spillway.runtime.system import local_ranks
from spillway.session import Session
from spillway.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from spillway.attaching.ranks import RankGroup
    from spillway.planner.plan import Plan
    from spillway.planner.profile import Profile
    from spillway.planner.tasks import Turn

_MOST_CORRECTIONS = 8
_SLACK = 1 << 20


class BudgetTarget:
    """The bytes that plans are made for: a little less than the budget, and less after each step above it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = aim_at(budget)
        self.corrections = 0
        """How many plans in a row were above the budget."""

    def margin(self, predicted: int) -> int:
        """Bytes by which a step may exceed its predicted peak within the budget."""
        return self.budget - aim_at(self.budget) + self.nbytes - predicted

    def reset(self) -> None:
        """Forget the steps above the budget."""
        self.corrections, self.nbytes = 0, aim_at(self.budget)

    def back_off(self, peak: int, replan: Callable[[], object], note: Callable[[str], object]) -> None:
        """Plan for so much less as a step's peak was above the budget, and note that for the user.

        Raises:
            BudgetError: if there is no such plan, or if eight plans were above the budget. The last plan stays active.
        """
        before = self.corrections, self.nbytes
        self.corrections += 1
        if self.corrections > _MOST_CORRECTIONS:
            raise BudgetError(
                f"budget: got {format_bytes(self.budget)}, and steps of {format_bytes(peak)} after {_MOST_CORRECTIONS} "
                f"plans, expected a budget that is met; the model's steps differ too much: give a larger budget",
                budget=self.budget,
                least=peak,
            )
        # Peaks vary with the copies under way. The more steps were above the budget, the more is left.
        self.nbytes = max(self.nbytes - (peak - self.budget + _SLACK) * 2 ** max(self.corrections - 2, 0), 0)
        note(f"planned anew for {format_bytes(self.nbytes)}")
        try:
            replan()
        except BudgetError as error:
            missing = error.least - self.nbytes
            self.corrections, self.nbytes = before
            raise BudgetError(
                f"budget: got {format_bytes(self.budget)}, and a step of {format_bytes(peak)} where less was "
                f"predicted, expected {format_bytes(missing)} more, since no plan is that much smaller; give a budget "
                f"of {format_bytes(self.budget + missing)}, or allow more to leave or to be computed again",
                budget=self.budget,
                least=self.budget + missing,
            ) from error


def allowed(device: torch.device, allow: Collection[str] | None) -> Collection[str]:
    """What a plan may do; by default, all that serves a device at its best."""
    if allow is not None:
        return allow
    return {"keep", "recompute", "disk" if device.type == "cpu" else "host"}


class Planner:
    """Makes the plans of a device, within the user's limits.

    Args:
        device: which.
        session: ``None``: the default one.
        hardware: as for :func:`spillway.plan`, and so are the next three.
        host_budget: bytes of CPU memory.
        disk_budget: bytes of disk.
        allow: what a plan may do.
        needs_hardware: whether there are plans to be made: none where the plan is given.

    Raises:
        UsageError: for limits that cannot be meant.
    """

    def __init__(
        self,
        device: torch.device,
        session: Session | None,
        hardware: Hardware | str | None,
        *,
        host_budget: int | str | None = None,
        disk_budget: int | str | None = None,
        allow: Collection[str] | None = None,
        needs_hardware: bool = True,
    ) -> None:
        self._host_budget = None if host_budget is None else parse_bytes(host_budget, what="host_budget")
        self._disk_budget = None if disk_budget is None else parse_bytes(disk_budget, what="disk_budget")
        self._allow = allowed(device, allow)
        check_allow(self._allow)
        self._device = device
        self.hardware: Hardware | None = None
        """``None``: not known, since the plan was given."""
        # A machine is measured at most once, and not in the middle of a step.
        if hardware is not None or needs_hardware:
            self.hardware = known_hardware(device) if hardware is None else Hardware.of(hardware)
        self._session = session if session is not None else Session.default()
        self._window = self._session.runtime(device).mover.window
        """Bytes that may be in flight, before any plan claims another limit."""

    def plan(self, profile: Profile, budget: int, ranks: RankGroup) -> Plan:
        """The plan of a model that ranks train together.

        Raises:
            BudgetError: if no plan is within the budget.
        """
        room = min(ranks.share("room", self._room))
        hardware = ranks.share("hardware", lambda: self.hardware)[0]
        assert hardware is not None
        return ranks.share("plan", lambda: make_plan(profile, hardware, budget=budget, **self._limits(room)))[0]

    def checkpointing_plan(self, profile: Profile, budget: int, ranks: RankGroup) -> Plan | None:
        """The plan of torch's own checkpointing; ``None`` if it is not allowed, or not within the budget."""
        if profile.optimizer is not None or not {"keep", "recompute"}.issubset(self._allow):
            return None
        hardware = ranks.share("hardware", lambda: self.hardware)[0]
        assert hardware is not None
        options: dict[str, Any] = {"budget": budget, "window": self._window, "active": local_ranks()}
        with contextlib.suppress(BudgetError):
            return ranks.share("plan", lambda: make_checkpointing_plan(profile, hardware, **options))[0]
        return None

    def curve(self, profile: Profile) -> Curve:
        """Plans for several budgets."""
        assert self.hardware is not None
        return make_curve(profile, self.hardware, **self._limits(self._room()))

    def stage_plans(
        self, stages: Sequence[StageProfile], turns: Sequence[Turn], static_bytes: int, budget: int
    ) -> list[Plan]:
        """A plan for each stage of a rank, within one budget."""
        assert self.hardware is not None
        limits = self._limits(self._room())
        return make_stage_plans(stages, turns, self.hardware, static_bytes=static_bytes, budget=budget, **limits)

    def stage_peak(
        self, stages: Sequence[StageProfile], turns: Sequence[Turn], static_bytes: int, plans: Sequence[Plan]
    ) -> int:
        """The predicted peak of a step with other turns than those that were planned for."""
        assert self.hardware is not None
        options: dict[str, Any] = {"static_bytes": static_bytes, "active": local_ranks()}
        return simulate_stages(stages, plans, turns, self.hardware, **options).peak_bytes

    def _room(self) -> int:
        """Bytes of CPU memory. What others have there, as an optimizer has, is taken already."""
        return self._session.host_room(self._device)

    def _limits(self, room: int) -> dict[str, Any]:
        return {
            "window": self._window,
            "may_grow": self._session.window is None,
            "active": local_ranks(),
            "host_budget": room if self._host_budget is None else min(self._host_budget, room),
            "disk_budget": self._disk_budget,
            "allow": self._allow,
        }
