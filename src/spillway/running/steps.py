"""Sees whose parameters each optimizer steps, and says when nobody need look at calls any more.

NOTE [ When nobody looks ]

Calls of modules are looked at until all parameters of all optimizers belong to somebody: to a root, or to a module that
was given up. From then on an optimizer's step costs two comparisons, and a call nothing. They are looked at again when
an optimizer steps parameters that belong to nobody. Those that no module was seen with, though somebody looked, are
given up with the module that has them (one that is compiled, say), or are nobody's. Of parameters without a gradient
nothing is known yet: their first step tells.
"""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from spillway.running.roots import Roots

_PATIENCE = 8
"""Steps for which somebody looks for a call with parameters that have no gradient yet."""
_TRIES = 2
"""Steps after which parameters that have one, and were not seen with a call, are given up."""


@dataclass(slots=True)
class _Settled:
    """An optimizer of which all is known."""

    count: int
    sleeping: list[Tensor]
    """Those of nobody's that had no gradient so far."""


class Steps:
    """Sees the steps of optimizers. See NOTE [ When nobody looks ].

    Args:
        roots: whom parameters belong to, and who looks.
    """

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._lock = threading.RLock()
        self._settled: weakref.WeakKeyDictionary[Optimizer, _Settled] = weakref.WeakKeyDictionary()
        self._looks: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._starts = 0
        self._unseen: list[weakref.ref[Tensor]] = []
        """What the last step that was looked at stepped, and nobody was seen with."""
        self._nobodys: dict[int, weakref.ref[Tensor]] = {}
        self._hook = register_optimizer_step_post_hook(self._stepped)

    @property
    def nobodys(self) -> int:
        """How many parameters were stepped that are in no module."""
        return len(self._nobodys)

    def forsake(self) -> None:
        """See no more steps."""
        self._hook.remove()

    def close(self) -> None:
        """The same in the end. Of a script with few steps, this is the last moment to say who was not seen."""
        self.forsake()
        if self._roots.calls.on:
            owned = self._roots.parameters()
            alive = [parameter for each in self._unseen if (parameter := each()) is not None]
            self._give_up([each for each in alive if id(each) not in owned and not self._is_nobodys(each)])

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._roots.check()
        settled = self._settled.get(optimizer)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        is_known = settled is not None and settled.count == count
        wakes = settled is not None and any(each.grad is not None for each in settled.sleeping)
        if not is_known or wakes or self._roots.calls.on:
            with self._lock:
                self._look(optimizer, count)

    def _look(self, optimizer: Optimizer, count: int) -> None:
        """Whether all that is stepped belongs to somebody. See NOTE [ When nobody looks ]."""
        calls, owned = self._roots.calls, self._roots.parameters()
        left = self._left(optimizer, owned)
        stepped = [each for each in left if each.grad is not None]
        if self._starts != calls.starts:
            self._starts = calls.starts
            self._looks.clear()
        looks = self._looks[optimizer] = self._looks.get(optimizer, 0) + 1
        self._unseen = [weakref.ref(each) for each in stepped]
        if stepped and not calls.on:
            calls.start()
        elif stepped and looks >= _TRIES:
            self._give_up(stepped)
            left = [each for each in left if each.grad is None]
            stepped = []
        if stepped or (left and looks <= _PATIENCE):
            self._roots.look_again()
            return
        self._settled[optimizer] = _Settled(count, left)
        owned = self._roots.parameters()
        if looks > _PATIENCE or not any(self._left(other, owned) for other in _optimizers()):
            calls.stop()

    def _give_up(self, parameters: list[Tensor]) -> None:
        bare = self._roots.give_up_unseen(parameters)
        self._nobodys.update({id(each): weakref.ref(each) for each in bare})

    def _left(self, optimizer: Optimizer, owned: set[int]) -> list[Tensor]:
        """Parameters that belong to nobody, and are not known for that."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return [each for each in parameters if id(each) not in owned and not self._is_nobodys(each)]

    def _is_nobodys(self, parameter: Tensor) -> bool:
        known = self._nobodys.get(id(parameter))
        return known is not None and known() is parameter


def _optimizers() -> list[Optimizer]:
    """All that there are: one that has not stepped yet may belong to a model that was not called yet."""
    return [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
