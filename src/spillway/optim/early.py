"""Parameters that are stepped in backward, as their gradients come.

Then the host's work is hidden behind the rest of backward, whatever the thread that calls ``step`` is busy with. The
user has promised that each parameter gets one gradient before each step, and that nobody writes to it or to the
settings. What was stepped cannot be taken back, so a promise that is not kept is an error, when it is noticed first.

A parameter may be written as soon as its gradient is accumulated, since whatever reads it in backward was given to the
compute lane before; what reads it by another way, detached say, is told by autograd, by the parameter's version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spillway.errors import UsageError
from spillway.optim.away import AwayGradient
from spillway.optim.held import Held
from spillway.optim.sharding import local_of

_TOGETHER = 1 << 20
"""Elements that are stepped at once, at least: small parameters wait for each other, or for ``step``."""

Groups = Sequence[dict[str, Any]]


class EarlySteps:
    """What was stepped since the last step.

    Args:
        step: steps some parameters whose gradients are on their way to the host.
    """

    def __init__(self, step: Callable[[Sequence[Held], EarlySteps], None]) -> None:
        self._step = step
        self._came: set[Held] = set()
        self._waiting: list[Held] = []
        self.stepped: set[Held] = set()
        """Those that were."""
        self._settings: dict[int, dict[str, object]] = {}
        # Backward runs in a thread for each device.
        self._lock = threading.Lock()

    @property
    def begun(self) -> bool:
        """Whether a parameter was stepped."""
        return bool(self.stepped)

    def check(self, held: Held) -> None:
        """Raise if a parameter's gradient has come before."""
        if held in self._came:
            raise UsageError(
                "got a second gradient of a parameter before step(), expected one: step_in_backward=True has stepped "
                "the parameter by the first; call step() after each backward, or leave it out to accumulate gradients"
            )

    def came(self, held: Held, groups: Groups) -> None:
        """A parameter's gradient has come, and is on its way."""
        with self._lock:
            self._came.add(held)
            self._waiting.append(held)
            held.gradient.sealed = True
            if sum(one.numel for one in self._waiting) >= _TOGETHER:
                for one in self._waiting:
                    self._settings.setdefault(one.group, _values(groups[one.group]))
                waiting, self._waiting = self._waiting, []
                self.stepped.update(waiting)
                self._step(waiting, self)

    def end(self, groups: Groups) -> set[Held]:
        """This step's gradients have come; those that were stepped. The next one's may come.

        Raises:
            UsageError: if a gradient or a setting is not what it was.
        """
        for held in self._came:
            gradient = held.parameter.grad
            local = None if gradient is None else local_of(gradient)
            if held in self.stepped and not (isinstance(local, AwayGradient) and local.stands_for(held.gradient)):
                raise UsageError(
                    "got a step() for which a gradient was dropped or replaced, expected it as backward left it: "
                    "step_in_backward=True has stepped the parameter; call step() after each backward, and "
                    "zero_grad() after step()"
                )
        for index, before in self._settings.items():
            now = _values(groups[index])
            changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            if changed:
                raise UsageError(
                    f"got other settings of group {index} in step() than in backward ({', '.join(changed)}), expected "
                    f"the same: step_in_backward=True has stepped parameters with these; change them after step()"
                )
        stepped = self.stepped
        for held in self._came:
            held.gradient.sealed = False
        self._came, self._waiting, self.stepped, self._settings = set(), [], set(), {}
        return stepped


def _values(group: dict[str, Any]) -> dict[str, object]:
    """A group's settings, as they can be compared later."""
    return {
        # A scheduler notes what it began with when it is made.
        name: (id(value), value._version) if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names", "initial_lr")
    }
