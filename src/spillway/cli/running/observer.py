"""Observes a script: the calls of its modules, and the steps of its optimizers.

NOTE [ Unobserved calls ]

Calls of modules are observed until all parameters of all optimizers belong to a managed or a rejected model. From then
on an optimizer's step costs a comparison, and a call nothing. Observing starts again when a new optimizer steps, or one
with more parameters. If parameters with a gradient are in no observed call for two steps, their module is rejected (it
is compiled, say), or they are counted as parameters of no module.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from spillway.attaching import Attached
from spillway.cli.running.models import ModelRegistry, alive

_PATIENCE = 8
"""Steps of an optimizer for which calls are observed because of parameters without a gradient."""
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
        self._lock = threading.RLock()
        self._looks: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Steps of each optimizer for which calls were observed."""
        self._settled: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers for which no calls need be observed, each with its number of parameters."""
        self._in_no_module = WeakIdKeyDictionary()
        self.models = ModelRegistry(attach, self._observe)
        os.register_at_fork(after_in_child=self._stop)
        self._observe()

    @property
    def parameters_in_no_module(self) -> int:
        """How many parameters were stepped that are in no module."""
        return len(self._in_no_module)

    def end(self) -> None:
        """Observe no more. Attached models stay attached, and modules that were not seen are rejected."""
        self._give_up(self._unowned(each for each in self._looks if each not in self._settled))
        self._stop()

    def _observe(self) -> None:
        """Observe calls, whatever was known of the optimizers."""
        with self._lock:
            self._looks.clear()
            self._settled.clear()
            self.models.start()

    def _stop(self) -> None:
        super().end()
        self.models.stop()

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._stepped(optimizer, args, kwargs)
        self.models.check()
        if self._settled.get(optimizer) != sum(len(group["params"]) for group in optimizer.param_groups):
            with self._lock:
                self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        """Decide whether calls have to be observed because of this optimizer's parameters."""
        looks = self._looks[optimizer] = self._looks.get(optimizer, 0) + 1
        self._settled.pop(optimizer, None)
        self.models.start()
        if looks >= _TRIES:
            self._give_up(each for each in self._unowned([optimizer]) if each.grad is not None)
        # An optimizer that has not stepped yet may belong to a model that was not called yet.
        if looks < _PATIENCE and self._unowned(alive(Optimizer)):
            self.models.judge_again()
            return
        self._settled[optimizer] = len(_parameters(optimizer))
        self.models.stop()

    def _give_up(self, parameters: Iterable[Tensor]) -> None:
        if unseen := list(parameters):
            for each in self.models.reject_unseen(unseen):
                self._in_no_module[each] = None

    def _unowned(self, optimizers: Iterable[Optimizer]) -> list[Tensor]:
        """Parameters that belong to no model, and are not known for that."""
        owned = self.models.parameters()
        parameters = itertools.chain.from_iterable(map(_parameters, optimizers))
        return [each for each in parameters if id(each) not in owned and each not in self._in_no_module]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
