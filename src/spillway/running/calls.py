"""Sees the calls of modules that belong to nobody yet, for as long as somebody looks.

NOTE [ How calls are seen ]

``Module.__call__`` asks for ``_compiled_call_impl`` before it does anything, and an attached module has its own there
(``attaching/call.py``). The class has one, too, which is ``None``, and that is where this puts a function. So a call is
seen from outside of all hooks, with its keyword arguments, and can be made anew once the module is attached: its first
forward in training is the first that is managed. (A global forward hook is called too late for that, and while there is
one, every module goes through the slow half of torch's ``_call_impl``.) Modules that are attached or compiled have
their own and never come here. Torch's compiler does not look at it. When nobody looks the class has ``None`` again, and
a call costs what it always did.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from spillway.attaching.call import PLACE


class Seen(enum.Enum):
    """What a call of a module is to whoever looks."""

    PASSED = "passed"
    """Nothing: but what it calls may be something."""
    OWNED = "owned"
    """Known, and so is all that it calls."""
    ATTACHED = "attached"
    """A call of what was attached just now: it has to be made anew."""


class Calls:
    """Sees calls of modules in training. See NOTE [ How calls are seen ].

    Args:
        judge: what a module is.
    """

    def __init__(self, judge: Callable[[Module], Seen]) -> None:
        self._judge = judge
        self._here = _Here()
        self._lock = threading.Lock()
        self.on = False
        """Whether somebody looks."""
        self.starts = 0
        """How often somebody began to."""

    def start(self) -> None:
        """See calls from now on."""
        with self._lock:
            self.starts += 1
            if not self.on:
                setattr(Module, PLACE, self._function())
                self.on = True

    def stop(self) -> None:
        """See none any more."""
        with self._lock:
            if self.on:
                setattr(Module, PLACE, None)
                self.on = False

    def _function(self) -> Callable[..., Any]:
        here, judge = self._here, self._judge

        def seen_call(module: Module, /, *args: Any, **kwargs: Any) -> Any:
            call: Callable[..., Any] = module._call_impl
            if here.inside or not (module.training and torch.is_grad_enabled()):
                return call(*args, **kwargs)
            seen = judge(module)
            if seen is Seen.PASSED:
                return call(*args, **kwargs)
            if seen is Seen.ATTACHED:
                return Module.__call__(module, *args, **kwargs)
            here.inside = True
            try:
                return call(*args, **kwargs)
            finally:
                here.inside = False

        return seen_call


class _Here(threading.local):
    inside = False
