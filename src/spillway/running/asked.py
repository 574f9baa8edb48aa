"""What a user asks ``spillway run`` for, and what it is for one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spillway.errors import UnsupportedError, UsageError
from spillway.units import parse_bytes, read_budget

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from spillway.attaching import Attached
    from spillway.planning.plan import Plan

POLICIES = ("offload", "recompute", "keep")
DEFAULT_SHARE = 0.9
"""Of an accelerator's memory, the budget where nothing is asked for: the allocator's rounding and the driver need some
room, too."""
_WAYS = ("budget", "policy", "ratio", "plan")
_LIMITS = ("host_budget", "disk_budget", "allow", "hardware")


UNMET_CODE = 3
"""Exit code of ``spillway run`` for a script that ended well, and of which no model was treated as was asked."""


class UnmetError(UnsupportedError):
    """A script has ended, and no model of it was treated as the command line asked."""


@dataclass(frozen=True, slots=True)
class Treated:
    """What was attached to a model, and what that was."""

    attached: Attached
    way: str
    """As ``"budget"``, ``"plan"``, or a policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One way to treat each model. With none of the first four, the device decides: see :meth:`attach`.

    Raises:
        UsageError: for two ways, or for limits of a budget beside another way.
    """

    budget: str | None = None
    """A size, or a share like ``"60%"``."""
    policy: str | None = None
    """One of :data:`POLICIES`."""
    ratio: float | None = None
    """Share of the saved bytes that leaves."""
    plan: Plan | None = None
    host_budget: str | None = None
    disk_budget: str | None = None
    allow: Sequence[str] | None = None
    hardware: str | None = None
    """Name of a kind of device, or a file."""

    def __post_init__(self) -> None:
        given = [f"--{name}" for name in _WAYS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"got {' and '.join(given)}, expected one of them, since each says what is done")
        if self.budget is not None:
            read_budget(self.budget, what="--budget")
        for name in ("host_budget", "disk_budget"):
            size = getattr(self, name)
            if size is not None:
                parse_bytes(size, what=_option(name))
        if self.policy is not None and self.policy not in POLICIES:
            raise UsageError(f"--policy: got {self.policy!r}, expected one of {', '.join(POLICIES)}")
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise UsageError(f"--ratio: got {self.ratio}, expected a number from 0 (keep all) to 1 (offload all)")
        limits = [_option(name) for name in _LIMITS if getattr(self, name) is not None]
        if limits and given and self.budget is None:
            raise UsageError(f"got {' and '.join(limits)} beside {given[0]}, expected --budget, whose plan they limit")
        if self.allow is not None:
            # What checks it knows of plans, which takes a while to import, and is for those who say so.
            from spillway.planning.programs import check_allow

            check_allow(self.allow)
        if self.hardware is not None:
            from spillway.planning.hardware import Hardware

            Hardware.of(self.hardware)

    @property
    def is_default(self) -> bool:
        """Whether the device decides."""
        return all(getattr(self, name) is None for name in _WAYS)

    @property
    def option(self) -> str:
        """What was asked for, as on the command line; empty: nothing."""
        return next((f"--{name}" for name in _WAYS if getattr(self, name) is not None), "")

    @property
    def is_measured(self) -> bool:
        """Whether there is a budget, and so a profile."""
        import torch

        return self.budget is not None or (self.is_default and torch.accelerator.is_available())

    def check_machine(self) -> None:
        """Raise :class:`~spillway.errors.UsageError` for limits of a budget where there will be none."""
        limits = any(getattr(self, name) is not None for name in _LIMITS)
        if limits and self.is_default and not self.is_measured:
            raise UsageError(
                "got --host-budget, --disk-budget, --allow or --hardware without --budget, expected one beside them, "
                "since without an accelerator there is no default"
            )

    def budget_on(self, device: torch.device) -> str | int | None:
        """The budget of a model there; ``None``: it has none."""
        if self.budget is not None or not self.is_default or device.type == "cpu":
            return self.budget
        return int(_memory_of(device) * DEFAULT_SHARE)

    def attach(self, model: Module) -> Treated:
        """Attach to a model as asked. Where nothing was: 90 % of an accelerator's memory, or ``offload`` on the CPU.

        Raises:
            SpillwayError: as :func:`spillway.attach` does.
        """
        from spillway import policies
        from spillway.attaching import attach
        from spillway.attaching.budgeted import device_of

        if self.plan is not None:
            return Treated(attach(model, plan=self.plan), "plan")
        if self.ratio is not None:
            return Treated(attach(model, policy=policies.Ratio(self.ratio)), f"ratio {self.ratio:g}")
        budget = self.budget_on(device_of(model))
        if budget is not None:
            attached = attach(
                model,
                budget=budget,
                host_budget=self.host_budget,
                disk_budget=self.disk_budget,
                allow=self.allow,
                hardware=self.hardware,
            )
            return Treated(attached, "budget")
        way = self.policy or "offload"
        return Treated(attach(model, policy=way), way)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _memory_of(device: torch.device) -> int:
    """Bytes of an accelerator's memory."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return int(torch.accelerator.get_memory_info(device)[1])
