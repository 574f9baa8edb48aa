"""The sizes of a sequence or a batch with which a step fits a budget, and the largest of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module

from spillway.attaching import attach
from spillway.attaching.budget import allowed
from spillway.attaching.meta_profile import is_on_meta
from spillway.errors import BudgetError, UsageError
from spillway.planner.hardware import Hardware
from spillway.planner.plan import Plan
from spillway.planner.planner import aim_at, fits
from spillway.planner.profile import Profile
from spillway.planner.scaling import scaled
from spillway.planning import WINDOW, Loss, as_it_was, call, hardware_of, plan, profile, scalar_of
from spillway.profiler.meta_device import OptimizerOf
from spillway.profiler.meter import allocated
from spillway.runtime.system import local_ranks
from spillway.session import Session
from spillway.units import parse_bytes

_TRIES = 3
"""Plans for one size."""
_SLACK = 1 << 20
_FARTHEST = 64
"""How many times the largest size that was run is foreseen at most."""


def longest(
    step: Callable[[int], tuple[Module, Any]],
    *,
    budget: int | str,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    allow: Collection[str] | None = None,
    loss: Loss | None = None,
    at_least: int = 1,
    multiple_of: int = 1,
    most: int | None = None,
    hardware: Hardware | str | None = None,
    session: Session | None = None,
    attention: str | None = None,
    optimizer: OptimizerOf | float | None = None,
) -> int:
    """The largest size, of a sequence or a batch, with which a step fits a budget.

    Two sizes are profiled, in the least memory there is, and tell what larger ones need (``planner/scaling.py``). The
    largest that fits by that is profiled itself; where it was too much or too little, the search goes on between, or
    beyond, and knows by how much steps took more than was foreseen. What is found was profiled at that very size, and
    trained for two steps with its plan; where these were over the budget, with one for so much less.

    Args:
        step: from a size to a model and a batch of that size, as for :func:`spillway.profile`.
        budget: bytes, or a size, as for :func:`spillway.plan`. No share: all sizes are within a share of themselves.
        host_budget: as for :func:`spillway.plan`, and no more than the session has room for.
        disk_budget: as for :func:`spillway.plan`.
        allow: as for :func:`spillway.plan`.
        loss: as for :func:`spillway.profile`.
        at_least: a size that is known to fit.
        multiple_of: sizes are multiples of this.
        most: the largest size to try. ``None``: any.
        hardware: as for :func:`spillway.plan`. With a model on ``meta``, also as for :func:`spillway.profile`: then
            nothing is run, and nothing trained.
        session: ``None``: the default one.
        attention: of a model on ``meta``, as for :func:`spillway.profile`.
        optimizer: of a model on ``meta``, as for :func:`spillway.profile`.

    Raises:
        BudgetError: if not even ``at_least`` fits.
        UsageError: for arguments that cannot be meant.

    Example:
        >>> spillway.longest(lambda n: (model, tokens(n)), budget="40GiB", multiple_of=1024)  # doctest: +SKIP
    """
    if at_least < 1 or multiple_of < 1 or (most is not None and most < at_least):
        raise UsageError(
            f"got at_least={at_least!r}, multiple_of={multiple_of!r} and most={most!r}, expected whole numbers of at "
            f"least 1, and most not below at_least"
        )
    sizes = _Sizes(
        step=lambda units: step(units * multiple_of),
        budget=parse_bytes(budget, what="budget"),
        limits={"host_budget": host_budget, "disk_budget": disk_budget, "allow": allow},
        loss=loss,
        session=session,
        target={"hardware": hardware, "attention": attention, "optimizer": optimizer},
    )
    first = -(-at_least // multiple_of)
    if not sizes.fits(first):
        # Said with the least that there is.
        sizes.plan(sizes.profile(first), sizes.budget)
        raise UsageError(
            f"at_least: got {at_least}, with which a step has a plan within the budget, and does not keep to it, "
            f"expected a size that fits; give a smaller one, or a larger budget"
        )
    return multiple_of * sizes.largest(first, None if most is None else max(most // multiple_of, first))


@dataclass
class _Sizes:
    """What was found out of some sizes."""

    step: Callable[[int], tuple[Module, Any]]
    budget: int
    limits: dict[str, Any]
    """Of plans."""
    loss: Loss | None
    session: Session | None
    target: dict[str, Any]
    """What a model on ``meta`` would run on."""
    is_elsewhere: bool = False
    """Whether steps are worked out, and not run."""
    profiles: dict[int, Profile] = field(default_factory=dict)
    off: int = 0
    """By how much a step took more than its plan had foreseen, at most."""

    def largest(self, low: int, limit: int | None) -> int:
        """From a size that fits on, up to a limit."""
        high = None if limit is None else limit + 1
        while high is None or high - low > 1:
            size = self._next(low, high)
            if self.fits(size):
                low = size
                if self._foresees(low + 1) is False:
                    break
            else:
                high = size
        return low

    def fits(self, size: int) -> bool:
        """Whether one does, by a profile, and by two steps with its plan, or with one for so much less."""
        aim = aim_at(self.budget)
        try:
            profile = self.profile(size)
            for number in range(_TRIES):
                plan = self.plan(profile, aim)
                peak = self._peak(size, plan)
                over = peak - self.budget
                self.off = max(self.off, peak - plan.predicted_peak)
                if over <= 0:
                    return True
                # A step's peak moves a little: the more often it was over, the more is left.
                aim -= (over + _SLACK) * 2**number
                if aim <= 0:
                    break
        except (BudgetError, torch.OutOfMemoryError):
            pass
        return False

    def profile(self, size: int) -> Profile:
        """Of a step of this size, which is run."""
        model, batch = self.step(size)
        self.is_elsewhere = is_on_meta(model, batch)
        target = self.target if self.is_elsewhere else {}
        if not self.is_elsewhere:
            # Room for tensors of another size does not fit these, and counts.
            self._used_session.trim()
        self.profiles[size] = found = profile(model, batch, loss=self.loss, session=self.session, **target)
        return found

    def plan(self, profile: Profile, budget: int) -> Plan:
        """For a profile, within so many bytes."""
        return plan(profile, budget=budget, hardware=self.target["hardware"], **self._limits(profile))

    def _next(self, low: int, high: int | None) -> int:
        """Which size to run next, above one that fits and below one that does not."""
        if len(self.profiles) < 2 and (high is None or 2 * low < high):
            return 2 * low
        farthest = _FARTHEST * max(self.profiles)
        foreseen, beyond = low, farthest if high is None else min(high, farthest)
        while beyond - foreseen > 1:
            middle = min(2 * foreseen, beyond - 1) if beyond == farthest else (foreseen + beyond) // 2
            fits = self._foresees(middle)
            if fits is None:
                break
            if fits:
                foreseen = middle
            else:
                beyond = middle
        if low < foreseen and (high is None or foreseen < high - 1):
            return foreseen
        # Nothing was foreseen, or it was another thing than what came.
        return 2 * low if high is None else (low + high) // 2

    def _foresees(self, size: int) -> bool | None:
        """Whether a size fits, by what is known of two others; ``None``: too little is."""
        if len(self.profiles) < 2:
            return None
        one, other = sorted(self.profiles)[-2:]
        found = scaled(self.profiles[one], self.profiles[other], (one, other), size)
        if found is None:
            return None
        if self.budget <= self.off:
            return False
        return fits(
            found,
            hardware_of(self.target["hardware"], torch.device(found.device)),
            budget=min(aim_at(self.budget), self.budget - self.off),
            window=WINDOW,
            active=local_ranks(),
            **self._limits(found),
        )

    def _limits(self, profile: Profile) -> dict[str, Any]:
        """Of plans for a profile: no more CPU memory than the session has room for."""
        device, given = torch.device(profile.device), self.limits["host_budget"]
        limits = {**self.limits, "allow": allowed(device, self.limits["allow"])}
        if not self.is_elsewhere:
            room = self._used_session.host_room(device)
            limits["host_budget"] = room if given is None else min(parse_bytes(given, what="host_budget"), room)
        return limits

    @property
    def _used_session(self) -> Session:
        return self.session if self.session is not None else Session.default()

    def _peak(self, size: int, plan: Plan) -> int:
        """Of the second of two steps with the plan, on an accelerator. The first tries its regions."""
        model, batch = self.step(size)
        if self.is_elsewhere:
            return 0
        device = torch.device(plan.device)
        with as_it_was(model, batch), attach(model, plan=plan, session=self.session):
            for _ in range(2):
                if device.type != "cpu":
                    torch.accelerator.reset_peak_memory_stats(device)
                scalar_of(call(model, batch), self.loss).backward()  # type: ignore[no-untyped-call]
                model.zero_grad(set_to_none=True)
        return 0 if device.type == "cpu" else allocated(device)[1]
