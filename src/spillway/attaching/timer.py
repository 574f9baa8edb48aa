"""Times steps of two plans in turn, and says which is faster.

NOTE [ Two plans in turn ]

Two plans within the budget, one of them torch's own checkpointing, are compared while the plan is active: some steps by
one plan, some by the other, twice. If kernels are short, the CPU sets the time of a step, and other programs use the
CPU, too: one step of each would say little. A run takes as long as on the slowest rank, and each plan counts with the
faster of its two runs.

The first step of a run learns the order of tensors, and is not timed. A run begins and ends with a synchronisation, so
that the CPU's lead does not count. A run in which inputs have another size, or replays are compared, begins again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from spillway.attaching.ranks import RankGroup
    from spillway.planner.plan import Plan
    from spillway.planner.planner import Point

_FIRST = 1
"""Steps of a run that are not timed."""
_TIMED = 3
"""Steps that are."""
_RUNS = 4
_MOST = 64
"""Steps after which the comparison ends without a result."""


class PlanTimer:
    """Gives the plan of the next step. See NOTE [ Two plans in turn ].

    Each plan has what was measured of its step. The first is the active one, which also stays without a result.
    """

    def __init__(
        self, plans: tuple[tuple[Plan, Point], tuple[Plan, Point]], device: torch.device, ranks: RankGroup
    ) -> None:
        self.chosen = plans[0]
        """The plan of the next step."""
        self.is_done = False
        self.seconds: tuple[float, float] | None = None
        """Seconds of a step by each plan, if it is done."""
        self._plans = plans
        self._device = device
        self._ranks = ranks
        self._runs: list[float] = []
        self._steps = self._of_run = 0
        self._begin = 0.0
        self._inputs: list[int] | None = None

    def step_ended(self, inputs: int, *, learned: bool) -> None:
        """A step by the plan is over. ``inputs``: bytes of its inputs."""
        self._steps += 1
        if self._steps == _MOST:
            self.is_done, self.chosen = True, self._plans[0]
            return
        steps = self._ranks.share("timed step", lambda: (inputs, learned))
        of_all = [nbytes for nbytes, _ in steps]
        if any(each for _, each in steps) or self._inputs not in (None, of_all):
            self._of_run = 0
            return
        self._inputs = of_all
        self._of_run += 1
        if self._of_run == _FIRST:
            self._begin = self._now()
        elif self._of_run == _FIRST + _TIMED:
            seconds = (self._now() - self._begin) / _TIMED
            self._runs.append(max(self._ranks.share("seconds", lambda: seconds)))
            self._of_run = 0
            self.chosen = self._plans[len(self._runs) % 2]
            if len(self._runs) == _RUNS:
                self.seconds = min(self._runs[::2]), min(self._runs[1::2])
                self.chosen = self._plans[self.seconds[1] < self.seconds[0]]
                self.is_done = True

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
