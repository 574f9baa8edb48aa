"""What the user chose for an optimizer, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from spillway.errors import UnsupportedError, UsageError
from spillway.optim.threads import thread_count
from spillway.units import parse_bytes

_NARROW = (torch.bfloat16, torch.float16)

Fraction = float | str | None
MasterDtype = torch.dtype | str | None


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The arguments of an :class:`~spillway.OffloadedOptimizer`, but for those of its classes.

    Raises:
        UsageError: one that cannot be meant.
        UnsupportedError: some that do not go together.
    """

    fraction: Fraction
    slowdown: float
    device_budget: int | str | None
    master_dtype: MasterDtype
    offload_gradients: bool
    tier: str
    step_on: str
    threads: int | None
    hold: str
    step_in_backward: bool

    def __post_init__(self) -> None:
        for name in ("offload_gradients", "step_in_backward"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}: got {getattr(self, name)!r}, expected True or False")
        if self.hold not in ("last", "first"):
            raise UsageError(f"hold: got {self.hold!r}, expected 'last' or 'first'")
        self._check_fraction()
        self._check_master_dtype()
        # What is wrong with these is said at once, and they stay what they are now.
        _ = self.threads_of_step, self.budget
        if self.step_in_backward and not (self.offload_gradients and self.tier == self.step_on == "host"):
            raise UnsupportedError(
                f"got step_in_backward=True with tier={self.tier!r}, step_on={self.step_on!r}, offload_gradients="
                f"{self.offload_gradients}, expected 'host', 'host' and True; leave one of them out"
            )

    @property
    def finds_fraction(self) -> bool:
        """Whether the fraction is to be found."""
        return self.fraction == "auto"

    @property
    def first_fraction(self) -> float:
        """Of all elements, how many are on the host at the beginning."""
        return float(self.fraction) if isinstance(self.fraction, (int, float)) else 1.0

    @cached_property
    def budget(self) -> int | None:
        """The device's, in bytes."""
        return None if self.device_budget is None else parse_bytes(self.device_budget, what="device_budget")

    @cached_property
    def threads_of_step(self) -> int:
        """How many the host's step computes with."""
        return thread_count(self.threads)

    def work_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """The type that a parameter is stepped in: its master's, if it has one."""
        wanted, own = self.master_dtype, parameter.dtype
        if wanted is None or not parameter.is_floating_point():
            return own
        if wanted == "auto":
            return torch.float32 if own in _NARROW else own
        assert isinstance(wanted, torch.dtype)
        return wanted if wanted.itemsize > own.itemsize else own

    def _check_fraction(self) -> None:
        fraction, slowdown = self.fraction, self.slowdown
        if fraction is not None and self.device_budget is not None:
            raise UsageError("got both a fraction and a device_budget, expected one of them; leave one out")
        if fraction is None:
            return
        if fraction == "auto":
            if self.step_on == "device":
                raise UsageError(
                    "fraction: got 'auto' with step_on='device', expected a number: the host steps nothing"
                )
            if self.step_in_backward:
                raise UsageError(
                    "fraction: got 'auto' with step_in_backward=True, expected a number: the host's work is behind "
                    "backward, where what it costs cannot be seen"
                )
            if isinstance(slowdown, bool) or not isinstance(slowdown, (int, float)) or not 0 <= slowdown < math.inf:
                raise UsageError(f"slowdown: got {slowdown!r}, expected a number of at least 0: 0.05 for 5 %")
        elif isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise UsageError(
                f"fraction: got {fraction!r}, expected 'auto', or a number from 0 (none on the host) to 1 (all)"
            )

    def _check_master_dtype(self) -> None:
        dtype = self.master_dtype
        known = dtype is None or dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        if not known:
            raise UsageError(f"master_dtype: got {dtype!r}, expected 'auto', None or a floating point type of torch's")
