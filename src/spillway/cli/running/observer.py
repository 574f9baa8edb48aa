"""Observes a script: the calls of its modules, and the steps of its optimizers.

NOTE [ Unobserved calls ]

Calls of modules are observed until all parameters of all optimizers belong to a managed or a rejected model. From then
on an optimizer's step costs two comparisons, and a call nothing. Observing starts again when an optimizer steps
parameters that belong to no model. If they are in no observed call for two more steps, their module is rejected (it is
compiled, say), or they are counted as parameters of no module. A parameter without a gradient is unknown until it has
one.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from spillway.attaching import Attached
from spillway.cli.running.models import ModelRegistry, alive

_PATIENCE = 8
"""Steps for which calls are observed because of parameters without a gradient."""
_TRIES = 2
"""Steps after which parameters with a gradient that are in no observed call are given up."""
_MOST_TIMES = 32


class StepClock:
    """Counts and times the steps of the optimizer that stepped first: of two that alternate, one defines a step.

    ``told`` is called after each step, with their number.
    """

    def __init__(self, told: Callable[[int], None] | None = None) -> None:
        self._told = told
        self._first: weakref.ref[Optimizer] | None = None
        self._times: deque[float] = deque(maxlen=_MOST_TIMES)
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self.count = 0

    @property
    def seconds(self) -> float | None:
        """Median of the time between the last steps; ``None`` before the second step."""
        times = list(self._times)
        return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else None

    def end(self) -> None:
        """Observe no more steps."""
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


class ScriptObserver(StepClock):
    """Observes from now on, in this process and not in forked children. See NOTE [ Unobserved calls ].

    ``attach`` attaches to a model, and names the way. ``told`` is called after each step, with their number.
    """

    def __init__(
        self, attach: Callable[[Module], tuple[Attached, str]], told: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(told)
        self.models = ModelRegistry(attach)
        self._lock = threading.RLock()
        self._settled: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[Tensor]]] = weakref.WeakKeyDictionary()
        """For each optimizer whose models are known: its number of parameters, and those without a gradient so far."""
        self._looks: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._starts = 0
        self._unseen: list[weakref.ref[Tensor]] = []
        """Parameters of the last step that were in no observed call."""
        self._in_no_module: dict[int, weakref.ref[Tensor]] = {}
        os.register_at_fork(after_in_child=self._stop)
        self.models.calls.start()

    @property
    def parameters_in_no_module(self) -> int:
        """How many parameters were stepped that are in no module."""
        return len(self._in_no_module)

    def end(self) -> None:
        """Observe no more. Attached models stay attached, and modules that were not seen are rejected."""
        if self.models.calls.on:
            unowned = self._unowned([each for reference in self._unseen if (each := reference()) is not None])
            self._give_up(unowned)
        self._stop()

    def _stop(self) -> None:
        super().end()
        self.models.calls.stop()

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._stepped(optimizer, args, kwargs)
        self.models.check()
        count, sleeping = self._settled.get(optimizer, (-1, []))
        is_settled = count == sum(len(group["params"]) for group in optimizer.param_groups)
        if self.models.calls.on or not is_settled or any(each.grad is not None for each in sleeping):
            with self._lock:
                self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        """Decide whether calls have to be observed because of this optimizer's parameters."""
        calls = self.models.calls
        if self._starts != calls.starts:
            self._starts = calls.starts
            self._looks.clear()
        looks = self._looks[optimizer] = self._looks.get(optimizer, 0) + 1
        parameters = _parameters(optimizer)
        left = self._unowned(parameters)
        stepped = [each for each in left if each.grad is not None]
        self._unseen = [weakref.ref(each) for each in stepped]
        if stepped and not calls.on:
            calls.start()
        elif stepped and looks >= _TRIES:
            self._give_up(stepped)
            left = [each for each in left if each.grad is None]
            stepped = []
        if stepped or (left and looks <= _PATIENCE):
            self.models.judge_again()
            return
        self._settled[optimizer] = (len(parameters), left)
        # An optimizer that has not stepped yet may belong to a model that was not called yet.
        if looks > _PATIENCE or not any(self._unowned(_parameters(other)) for other in alive(Optimizer)):
            calls.stop()

    def _give_up(self, parameters: list[Tensor]) -> None:
        self._in_no_module.update({id(each): weakref.ref(each) for each in self.models.reject_unseen(parameters)})

    def _unowned(self, parameters: list[Tensor]) -> list[Tensor]:
        """Those that belong to no model, and are not known for that."""
        owned = self.models.parameters()
        return [each for each in parameters if id(each) not in owned and not self._is_in_no_module(each)]

    def _is_in_no_module(self, parameter: Tensor) -> bool:
        known = self._in_no_module.get(id(parameter))
        return known is not None and known() is parameter


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
