"""Parameters that are stepped in backward, as their gradients come.

Then the host's work is hidden behind the rest of backward, whatever the thread that calls ``step`` is busy with. The
user has promised that each parameter gets one gradient before each step, and that nobody writes to it, to the parameter
or to the settings until then. What was stepped cannot be taken back, so a promise that is not kept is an error, when it
is noticed first.

A parameter may be written as soon as its gradient is accumulated, since what reads it in backward was given to the
compute lane before. A later reader that autograd knows of is told by the parameter's version. One that it does not know
of finds the stepped value: ``.data``, or a detached parameter in code that is recomputed.
"""

from __future__ import annotations

import copy
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
        step: steps some parameters whose gradients are on their way to the host, and adds those to a set that it has
            queued, also where it fails.
    """

    def __init__(self, step: Callable[[Sequence[Held], set[Held]], None]) -> None:
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

    def check_none(self, what: str) -> None:
        """Raise if a parameter was stepped."""
        if self.begun:
            raise UsageError(
                f"got {what} between a backward and its step(), expected it after step(): step_in_backward=True has "
                f"stepped some parameters and not the others"
            )

    def came(self, held: Held, groups: Groups) -> None:
        """A parameter's gradient has come, and is on its way."""
        with self._lock:
            self._came.add(held)
            self._waiting.append(held)
            held.gradient.sealed = True
            if sum(one.numel for one in self._waiting) < _TOGETHER:
                return
            for index in {one.group for one in self._waiting}:
                self._note(index, groups[index])
            try:
                self._step(self._waiting, self.stepped)
            finally:
                self._waiting = [one for one in self._waiting if one not in self.stepped]

    def end(self, groups: Groups) -> set[Held]:
        """This step's gradients have come; those that were stepped. The next one's may come.

        Raises:
            UsageError: if a gradient, a parameter or a setting is not what it was.
        """
        for held in self.stepped:
            gradient = held.parameter.grad
            local = None if gradient is None else local_of(gradient)
            if not (isinstance(local, AwayGradient) and local.stands_for(held.gradient)):
                raise UsageError(
                    "got a step() for which a gradient was dropped or replaced, expected it as backward left it: "
                    "step_in_backward=True has stepped the parameter; call step() after each backward, and "
                    "zero_grad() after step(). A batch that was to be skipped has been stepped by: load_state_dict() "
                    "of what was saved before begins anew"
                )
            if not held.is_as_written():
                raise UsageError(
                    "got a parameter that was written between backward and step(), expected it to stay: "
                    "step_in_backward=True has stepped it; write to parameters after step()"
                )
        for index in self._settings:
            self._note(index, groups[index])
        stepped = self.stepped
        self.begin_anew()
        return stepped

    def check_dropped(self, coming: set[Held]) -> None:
        """Raise if a step is to come, since gradients are there, or if what is on its way was written over."""
        if any(held.parameter.grad is not None for held in self.stepped):
            self.check_none("load_state_dict()")
        if any(held in coming and not held.is_as_written() for held in self.stepped):
            raise UsageError(
                "got parameters that were written while step_in_backward=True had others on their way to them, "
                "expected the optimizer's state to be loaded first; call synchronize(), and load both again"
            )

    def begin_anew(self) -> None:
        """Whatever came and was stepped is no more."""
        for held in self._came:
            held.gradient.sealed = False
        self._came, self._waiting, self.stepped, self._settings = set(), [], set(), {}

    def _note(self, index: int, group: dict[str, Any]) -> None:
        """Raise if a group's settings are not what they were."""
        now, before = _values(group), self._settings.get(index)
        if before is None:
            self._settings[index] = copy.deepcopy(now)
            return
        names = before.keys() | now.keys()
        changed = sorted(name for name in names if not _same(before.get(name), now.get(name)))
        if changed:
            raise UsageError(
                f"got other settings of group {index} before step() ({', '.join(changed)}) than when the first of its "
                f"gradients came, expected the same: step_in_backward=True has stepped parameters with these; change "
                f"them after step()"
            )


def _values(group: dict[str, Any]) -> dict[str, object]:
    """A group's settings, as they can be compared later."""
    return {
        # A scheduler notes what it began with when it is made.
        name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names", "initial_lr")
    }


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return one == other
