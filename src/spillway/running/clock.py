"""Counts and times the optimizer steps of a script."""

from __future__ import annotations

import itertools
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_MOST_TIMES = 32


class Clock:
    """Sees the steps of the optimizer that stepped first: of two that take turns, one says what a step is.

    Args:
        told: called after each, with how many there were.
    """

    def __init__(self, told: Callable[[int], None] | None = None) -> None:
        self._told = told
        self._first: weakref.ref[Optimizer] | None = None
        self._times: deque[float] = deque(maxlen=_MOST_TIMES)
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self.count = 0
        """Steps so far."""

    @property
    def seconds(self) -> float | None:
        """Median of the time between the last steps; ``None`` as long as there were not two."""
        times = list(self._times)
        return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else None

    def close(self) -> None:
        """See no steps any more."""
        self._hook.remove()

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = None if self._first is None else self._first()
        if first is None:
            self._first = weakref.ref(optimizer)
        if first is None or first is optimizer:
            self.count += 1
            self._times.append(time.perf_counter())
            if self._told is not None:
                self._told(self.count)
