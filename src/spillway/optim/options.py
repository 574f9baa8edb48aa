"""The user's options, the CPU's threads, and the choice of parameters that the CPU steps."""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from spillway.errors import UnsupportedError, UsageError
from spillway.runtime.system import local_ranks
from spillway.units import is_number, parse_bytes

Fraction = float | str | None
MasterDtype = torch.dtype | str | None

_NARROW = (torch.bfloat16, torch.float16)
_MOST_THREADS = 16
_FEW_THREADS = 4
_THREADS_OF_A_WORKER = 2

WARM_UP = 3
"""Steps that are not measured: one is not over, a fraction is chosen in the next, and the third allocates."""
MEASURED = 5
"""Steps that a fraction is chosen from."""
MOST_CHOICES = 6
ENOUGH = 3
"""How often in a row a fraction has to be cheap enough to be final."""
_MARGIN = 0.97
SHARES = (0.0, 0.25, 0.5)
"""Shares of the CPU that ``step_on="auto"`` tries."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of an :class:`~spillway.OffloadedOptimizer`, without those of its classes."""

    fraction: Fraction
    slowdown: float
    device_budget: int | str | None
    master_dtype: MasterDtype
    offload_gradients: bool
    tier: str
    step_on: str
    cpu_share: float | None
    threads: int | None
    hold: str
    step_in_backward: bool

    def __post_init__(self) -> None:
        for name in ("offload_gradients", "step_in_backward"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}: got {getattr(self, name)!r}, expected True or False")
        all_known = {"hold": ("last", "first"), "tier": ("host", "disk"), "step_on": ("cpu", "gpu", "auto")}
        for name, (*first, last) in all_known.items():
            if getattr(self, name) not in (*first, last):
                expected = f"{', '.join(map(repr, first))} or {last!r}"
                raise UsageError(f"{name}: got {getattr(self, name)!r}, expected {expected}")
        self._check_fraction()
        self._check_cpu_share()
        dtype = self.master_dtype
        if dtype not in (None, "auto") and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UsageError(f"master_dtype: got {dtype!r}, expected 'auto', None or a floating point type of torch's")
        # Errors are raised now, and the values stay what they are now.
        _ = self.threads_of_step, self.budget
        if self.step_in_backward and not (self.offload_gradients and self.tier == "host"):
            raise UnsupportedError(
                f"step_in_backward=True needs tier='host' and offload_gradients=True, got tier={self.tier!r}, "
                f"offload_gradients={self.offload_gradients}"
            )
        if self.tier == "disk" and self.step_on != "cpu":
            raise UnsupportedError(
                f'got tier="disk" with step_on="{self.step_on}", but a state on disk is loaded to CPU memory and '
                f"stepped there. Leave one of the two out."
            )

    @cached_property
    def budget(self) -> int | None:
        """The bytes of state that may stay on the GPU."""
        return None if self.device_budget is None else parse_bytes(self.device_budget, what="device_budget")

    @property
    def first_cpu_share(self) -> float:
        """The share of elements that the CPU steps, of those whose state is not kept on the GPU; at first."""
        return {"cpu": 1.0, "gpu": 0.0}.get(self.step_on, SHARES[0] if self.cpu_share is None else self.cpu_share)

    @property
    def measures_share(self) -> bool:
        """Whether that share is chosen from the times of the first steps."""
        return self.step_on == "auto" and self.cpu_share is None

    @cached_property
    def threads_of_step(self) -> int:
        """The user's number; else one for each CPU of this process, shared by the ranks of the machine, at most 16.

        If there are more than four, two are left to the threads that launch the GPU's kernels.
        """
        threads = self.threads
        if threads is not None:
            if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
                raise UsageError(f"threads: got {threads!r}, expected an integer of at least 1, or None")
            return threads
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        mine = max(1, min(_MOST_THREADS, cpus // local_ranks()))
        return mine - 2 if mine > _FEW_THREADS else mine

    def work_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """The type that a parameter is stepped in: that of its master weight, if it has one."""
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
            raise UsageError("got both a fraction and a device_budget, but each decides alone. Leave one out.")
        if fraction is None:
            return
        if fraction != "auto":
            check_fraction(fraction, "'auto', or a number")
            return
        if self.step_on == "gpu":
            raise UsageError("fraction='auto' with step_on='gpu': the CPU steps nothing. Give a number.")
        if self.step_on == "auto":
            raise UsageError(
                "fraction='auto' with step_on='auto': both are chosen from the times of the same steps. Give the "
                "fraction as a number."
            )
        if self.step_in_backward:
            raise UsageError(
                "fraction='auto' with step_in_backward=True: the CPU's work is hidden behind backward, so its cost "
                "cannot be measured. Give a number."
            )
        if not (is_number(slowdown) and 0 <= slowdown < math.inf):
            raise UsageError(f"slowdown: got {slowdown!r}, expected a number of at least 0: 0.05 for 5 %")

    def _check_cpu_share(self) -> None:
        share = self.cpu_share
        if share is None:
            return
        if self.step_on != "auto":
            raise UsageError(
                f"cpu_share: got {share!r} with step_on={self.step_on!r}, where all parameters step in one place. Pass "
                f"step_on='auto', or leave cpu_share out."
            )
        check_fraction(share, "None, or a number", name="cpu_share")


def check_fraction(fraction: object, expected: str = "a number", *, name: str = "fraction") -> None:
    """Raise a ``UsageError`` if a fraction is no number from 0 to 1."""
    if not (is_number(fraction) and 0 <= fraction <= 1):
        raise UsageError(f"{name}: got {fraction!r}, expected {expected} from 0 (none on the CPU) to 1 (all)")


def workers_of(threads: int) -> tuple[int, int]:
    """How many workers share some threads, and how many each has.

    Several, so that one computes while another is in Python. Few, because all of them need Python's lock there.
    """
    workers = max(1, threads // _THREADS_OF_A_WORKER)
    return workers, threads // workers


def compute_with(threads: int) -> None:
    """Set the calling thread's own number of OpenMP threads."""
    # Torch gives a thread its number when it asks for the first time.
    before = torch.get_num_threads()
    openmp = ctypes.CDLL(None)
    if hasattr(openmp, "omp_set_num_threads"):
        openmp.omp_set_num_threads(threads)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
        # That sets the number of later threads, too, whose sums would have other bits.
        restore = threading.Thread(target=torch.set_num_threads, args=(before,))
        restore.start()
        restore.join()


def counted(devices: Sequence[torch.device]) -> list[bool]:
    """Whether a fraction counts each parameter: those on a GPU count, or all if all are on the CPU."""
    on_device = [device.type != "cpu" for device in devices]
    return on_device if any(on_device) else [True] * len(devices)


def held_of(sizes: Sequence[int], fraction: float, *, last_first: bool = True) -> list[bool]:
    """Whether the CPU steps each parameter, so that it has at least a fraction of all elements.

    ``last_first`` begins with the last ones. Their gradients come first in backward. The first ones, which the next
    forward needs first, are then stepped on the GPU.
    """
    wanted = fraction * sum(sizes)
    held = [False] * len(sizes)
    taken = 0
    order = range(len(sizes))
    for index in reversed(order) if last_first else order:
        if taken >= wanted:
            break
        held[index] = True
        taken += sizes[index]
    return held


def held_beyond(nbytes: Sequence[int], budget: int) -> list[bool]:
    """Whether the CPU steps each parameter, so that the state of the others fits a budget.

    A parameter stays on the GPU if it fits the rest of the budget, beginning with the first. ``nbytes`` are bytes of
    state, master weights included.
    """
    held = []
    for size in nbytes:
        held.append(size > budget)
        budget -= 0 if size > budget else size
    return held


def alternating(sizes: Sequence[int], share: float) -> list[bool]:
    """Whether the CPU steps each parameter, so that it has a share of all elements, and of those up to any parameter.

    Example:
        >>> alternating([4, 4, 2, 2], 0.5)
        [True, False, True, False]
    """
    on_cpu = []
    seen = taken = 0
    for size in sizes:
        seen += size
        on_cpu.append(share * seen - taken >= size / 2)
        taken += size if on_cpu[-1] else 0
    return on_cpu


class StepTimes(NamedTuple):
    """How long one step took."""

    step_seconds: float
    """From the end of the step before."""
    stall_seconds: float
    """How long of this the GPU stalled for the optimizer."""
    host_seconds: float
    """How long the CPU computed."""


class Tuner(ABC):
    """Chooses a number from the median times of a few training steps, after some that are not measured."""

    def __init__(self) -> None:
        self.is_done = False
        """Whether the number is final."""
        self._skip = WARM_UP
        self._seen: list[StepTimes] = []

    def note(self, seen: StepTimes, now: float) -> float | None:
        """Note a training step with a number. Gives the number of the next steps, if it changes."""
        if self.is_done:
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._seen.append(seen)
        if len(self._seen) < MEASURED:
            return None
        seen_all, self._seen = self._seen, []
        chosen = self._choose(StepTimes(*(statistics.median(values) for values in zip(*seen_all, strict=True))), now)
        if chosen is not None:
            self._skip = WARM_UP
        return chosen

    @abstractmethod
    def _choose(self, middle: StepTimes, now: float) -> float | None:
        """The number of the next steps, if it changes."""


class FractionTuner(Tuner):
    """Chooses the fraction of elements that the CPU steps, for ``fraction="auto"``.

    The CPU's work grows with the fraction. A part of it is hidden behind the GPU's work, and the rest is a stall. So
    the times at one fraction give the largest fraction that costs no more than allowed. The choice is measured again,
    and lowered if it costs more after all.
    """

    def __init__(self, slowdown: float) -> None:
        super().__init__()
        self._slowdown = slowdown
        self._choices = 0
        self._cheap = 0
        """How often in a row a choice was cheap enough."""

    def _choose(self, middle: StepTimes, now: float) -> float | None:
        chosen = affordable(middle, now, self._slowdown)
        if chosen >= now:
            self._cheap += 1
            self.is_done = self._cheap == ENOUGH
            return None
        self._cheap = 0
        self._choices += 1
        self.is_done = self._choices == MOST_CHOICES or chosen == 0
        return chosen


def affordable(seen: StepTimes, fraction: float, slowdown: float) -> float:
    """The largest fraction that slows a step down by no more than allowed."""
    own = seen.step_seconds - seen.stall_seconds
    allowed = slowdown * own
    if seen.stall_seconds <= allowed:
        return fraction
    hidden = max(0.0, seen.host_seconds - seen.stall_seconds)
    return min(fraction, _MARGIN * fraction * (hidden + allowed) / max(seen.host_seconds, 1e-9))


class ShareTuner(Tuner):
    """Chooses the share of elements that the CPU steps, for ``step_on="auto"``: that of the fastest training step.

    At first the GPU steps all. Then shares of the CPU are tried, from small to large, as long as steps get faster.
    """

    _place = 0
    _fastest = math.inf

    def _choose(self, middle: StepTimes, now: float) -> float | None:
        if middle.step_seconds > _MARGIN * self._fastest:
            self.is_done = True
            return SHARES[self._place - 1]
        self._fastest = middle.step_seconds
        self._place += 1
        self.is_done = self._place == len(SHARES)
        return None if self.is_done else SHARES[self._place]
