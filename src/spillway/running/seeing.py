"""All that sees what a script does: its calls of modules, its optimizers, its steps."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch.nn import Module

from spillway.running.asked import Treated
from spillway.running.clock import Clock
from spillway.running.outcome import RunOutcome, outcome_of
from spillway.running.roots import Roots
from spillway.running.steps import Steps


class Seeing:
    """Sees from now on, in this process and not in children that are forked.

    Args:
        treat: attaches to a model.
        told: called after each step, with how many there were.
    """

    def __init__(self, treat: Callable[[Module], Treated], told: Callable[[int], None] | None = None) -> None:
        self.roots = Roots(treat)
        self.clock = Clock(told)
        self._steps = Steps(self.roots)
        self._process = os.getpid()
        os.register_at_fork(after_in_child=self._forked)
        self.roots.calls.start()

    def end(self, rank: int) -> RunOutcome:
        """See no more, and say what came of it. What was attached still is."""
        self.clock.close()
        self._steps.close()
        self.roots.calls.stop()
        return outcome_of(self.roots, self._steps, self.clock, rank=rank)

    def close(self) -> None:
        """Take off what was attached, too."""
        self.roots.close()

    def _forked(self) -> None:
        """The child trains as it would without all this."""
        self.clock.close()
        self._steps.forsake()
        self.roots.calls.stop()
