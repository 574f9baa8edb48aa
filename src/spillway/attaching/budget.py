"""Budgets of attached models, and the planner that keeps to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from spillway.errors import BudgetError
from spillway.planner.hardware import Hardware
from spillway.planner.plan import check_allow
from spillway.planner.planner import make_checkpointing_plan, make_plan, with_weights
from spillway.planner.solve import aim_at
from spillway.profiler.machine import known_hardware
from spillway.runtime.system import local_ranks
from spillway.session import Session
from spillway.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from spillway.attaching.ranks import RankGroup
    from spillway.parameters.streamed import StreamedModel
    from spillway.planner.plan import Plan
    from spillway.planner.profile import Profile

_MOST_CORRECTIONS = 8
_SLACK = 1 << 20
_MOST_ABOVE = 1.01
"""By so much of the budget, torch's own checkpointing may be predicted to be above it, and is tried."""


class BudgetTarget:
    """The bytes that plans are made for: a little less than the budget, and less after each step above it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = aim_at(budget)
        self.corrections = 0
        """How many plans in a row were above the budget."""

    def margin(self, predicted: int) -> int:
        """Bytes by which a step may exceed its predicted peak within the budget."""
        return max(self.budget - aim_at(self.budget) + self.nbytes - predicted, 0)

    def reset(self) -> None:
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
                f"budget: steps take {format_bytes(peak)}, above {format_bytes(self.budget)}, after "
                f"{_MOST_CORRECTIONS} plans, since the model's steps differ too much. Give a larger budget",
                budget=self.budget,
                least=peak,
            )
        # Peaks vary with the copies under way. The more steps were above the budget, the more is left.
        self.nbytes = max(self.nbytes - (peak - self.budget + _SLACK) * 2 ** max(self.corrections - 2, 0), 0)
        note(f"planned again for {format_bytes(self.nbytes)}")
        try:
            replan()
        except BudgetError as error:
            missing = aim_at(error.least) - self.nbytes
            self.corrections, self.nbytes = before
            raise BudgetError(
                f"budget: a step took {format_bytes(peak)}, above {format_bytes(self.budget)} and its prediction, and "
                f"no plan is that much smaller. Give a budget of {format_bytes(self.budget + missing)}, or allow more: "
                f"allow=, host_budget=, disk_budget=",
                budget=self.budget,
                least=self.budget + missing,
            ) from error


def allowed(device: torch.device, allow: Collection[str] | None) -> Collection[str]:
    """The decisions that a plan may make; by default, those that suit a device best."""
    if allow is not None:
        return allow
    return {"keep", "recompute", "disk" if device.type == "cpu" else "host"}


class Planner:
    """Makes the plans of a device, within the user's limits, which are those of :func:`spillway.plan`.

    The machine is measured when it is first asked for, at most once. A given plan does not need it.
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
        places_weights: bool = False,
    ) -> None:
        self._places_weights = places_weights
        self.streams: StreamedModel | None = None
        """Streamed blocks."""
        self._host_budget = None if host_budget is None else parse_bytes(host_budget, what="host_budget")
        self._disk_budget = None if disk_budget is None else parse_bytes(disk_budget, what="disk_budget")
        self._allow = allowed(device, allow)
        check_allow(self._allow)
        self.device = device
        self._hardware = None if hardware is None else Hardware.of(hardware)
        self._session = session if session is not None else Session.default()
        self._window = self._session.runtime(device).mover.window
        """Bytes that may be in flight, before any plan claims another limit."""

    @cached_property
    def hardware(self) -> Hardware:
        found = known_hardware(self.device) if self._hardware is None else self._hardware
        return found.shared_by(local_ranks())

    def plan(self, profile: Profile, target: BudgetTarget, ranks: RankGroup) -> Plan:
        """The plan of a model that ranks train together."""
        free = min(ranks.share("free", self._free_host_bytes))
        hardware = ranks.share("hardware", lambda: self.hardware)[0]
        limits = self.limits(free) | {"budget": target.budget, "aim": target.nbytes}
        return ranks.share("plan", lambda: make_plan(profile, hardware, **limits))[0]

    def checkpointing_plan(
        self, profile: Profile, budget: int, ranks: RankGroup, resident: tuple[str, ...] = ()
    ) -> Plan | None:
        """The plan of torch's own checkpointing; ``None`` if it is not allowed, or not within the budget.

        Streamed blocks of these names have their weights on the device.
        Predictions are not exact. So it may be predicted to take up to 1 % more than the budget: a step shows.
        """
        if profile.optimizer is not None or not {"keep", "recompute"}.issubset(self._allow):
            return None
        hardware = ranks.share("hardware", lambda: self.hardware)[0]
        placed, most = with_weights(profile, resident), int(_MOST_ABOVE * budget)
        make = partial(make_checkpointing_plan, placed, hardware, budget=most, window=self._window)
        with contextlib.suppress(BudgetError):
            plan = ranks.share("plan", make)[0]
            return replace(plan, budget=budget, resident=resident)
        return None

    def limits(self, free: int | None = None) -> dict[str, Any]:
        """Limits of plans as keyword arguments, with so many free bytes of CPU memory."""
        free = self._free_host_bytes() if free is None else free
        return {
            "window": self._window,
            "may_grow": self._session.window is None,
            "host_budget": free if self._host_budget is None else min(self._host_budget, free),
            "disk_budget": self._disk_budget,
            "allow": self._allow,
            **({"places_weights": True} if self._places_weights else {}),
        }

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights of streamed blocks that stay on the device."""
        return 0 if self.streams is None else self.streams.resident_bytes

    def _free_host_bytes(self) -> int:
        """Bytes of CPU memory. Those of an optimizer are taken, and those of weights that stay on the device theirs."""
        taken = 0 if self.streams is None else self.streams.missing_host_bytes
        return max(self._session.unused_host_bytes(self.device) - taken, 0)
